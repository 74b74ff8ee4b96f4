"""Times, rates and counts as people write them on a command line, and as they read them."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from mpizero.collectives.links import Link
from mpizero.errors import ArgumentError, must_be

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = [
    "RATES",
    "count_of",
    "links_of",
    "one_of",
    "per_byte_of",
    "seconds_of",
    "show_bytes",
    "show_rate",
    "show_seconds",
]

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


def show_rate(per_byte: float, free: str = "at no cost") -> str:
    """Return seconds per byte as a rate, with four digits; `free` for none."""
    return f"{1e-9 / per_byte:.4g} GB/s" if per_byte else free


def one_of(what: str, word: str, known: tuple[str, ...]) -> str:
    """Return the word if it is a known one; raise ArgumentError else."""
    if word not in known:
        raise ArgumentError(must_be(what, f"one of {', '.join(known)}", word))
    return word


def pair_of(flag: str, text: str, parse: Callable[[str, str], float]) -> tuple[float, float]:
    """Return a value for the node and one for the network, of one that serves both or two with a comma between."""
    words = text.split(",")
    if len(words) > 2:
        raise ArgumentError(must_be(flag, "one value, or two with a comma between", text))
    values = [parse(flag, word) for word in words]
    return values[0], values[-1]


def links_of(alpha: str, beta: str) -> tuple[Link, Link]:
    """Return the links within a node and between nodes that `--alpha` and `--beta` describe; raise ArgumentError."""
    latency, rate = pair_of("--alpha", alpha, seconds_of), pair_of("--beta", beta, per_byte_of)
    return Link(alpha=latency[0], beta=rate[0]), Link(alpha=latency[1], beta=rate[1])
