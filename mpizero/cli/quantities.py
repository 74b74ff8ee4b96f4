"""Times, rates and counts as people write them on a command line, and as they read them."""

from __future__ import annotations

import re

from mpizero.errors import ArgumentError, must_be

__all__ = ["count_of", "per_byte_of", "seconds_of", "show_bytes", "show_seconds"]

TIMES = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
RATES = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
"""Prefixes of rates are powers of 1000, as on network cards; those of sizes are powers of 1024."""
NUMBER = r"(\d+(?:\.\d+)?(?:e-?\d+)?) ?"


def seconds_of(flag: str, text: str) -> float:
    """Return the seconds that a text such as 2us, 0.5ms or 0s stands for; raise ArgumentError for another."""
    found = re.fullmatch(NUMBER + "(s|ms|us|ns)", text)
    if not found:
        raise ArgumentError(must_be(flag, "a number with s, ms, us or ns behind it", text))
    return float(found[1]) * TIMES[found[2]]


def per_byte_of(flag: str, text: str) -> float:
    """Return the seconds per byte that a rate such as 12.5GB/s, 800MB/s or 100Gbit/s means; `inf` means 0.

    Raises:
        ArgumentError: for another text, and for a rate of 0.
    """
    if text == "inf":
        return 0.0
    found = re.fullmatch(NUMBER + "([KMGT]?)(B|bit)/s", text)
    if not found or float(found[1]) == 0:
        raise ArgumentError(must_be(flag, "a rate above 0 as 12.5GB/s, 800MB/s or 100Gbit/s, or inf", text))
    return (1 if found[3] == "B" else 8) / (float(found[1]) * RATES[found[2]])


def count_of(flag: str, text: str, least: int = 1) -> int:
    """Return a whole number that is not below `least`; raise ArgumentError for another text."""
    if not (text.isascii() and text.isdecimal()) or int(text) < least:
        raise ArgumentError(must_be(flag, f"a whole number, {least} or more", text))
    return int(text)


def show_seconds(seconds: float) -> str:
    """Return a time in the unit that suits it, with four digits."""
    unit = next((name for name, scale in TIMES.items() if seconds >= scale), "ns")
    return f"{seconds / TIMES[unit]:.4g} {unit}" if seconds else "0 s"


def show_bytes(nbytes: float) -> str:
    """Return a number of bytes in the power of 1024 that suits it, with four digits."""
    size, unit = nbytes, "B"
    for larger in ("KiB", "MiB", "GiB", "TiB", "PiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{size:.4g} {unit}"
