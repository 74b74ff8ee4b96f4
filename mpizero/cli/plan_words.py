"""Amounts of things, bytes and speeds, as `mpizero plan` reads and prints them: all prefixes are powers of 1000."""

from __future__ import annotations

import re
from fractions import Fraction

from mpizero.cli.quantities import RATES
from mpizero.errors import ArgumentError, must_be

__all__ = ["amount_of", "bytes_of", "scale_of", "show_size", "speed_of"]

MOST = 10**18
"""Of what is counted: beyond this a table of bytes says nothing any more."""
LONGEST = 30
"""Characters of an amount."""
NUMBER = r"(\d+(?:\.\d+)?(?:[eE]\d{1,2})?) ?"
AMOUNTS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "G": 10**9, "T": 10**12}
SPEEDS = {"": 1, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15}


def amount_of(flag: str, text: str) -> int:
    """Return the whole number, 1 or more, that a text such as 7e9, 7B or 350M stands for; raise ArgumentError."""
    found = re.fullmatch(NUMBER + "([KMBGT]?)", text)
    value = Fraction(found[1]) * AMOUNTS[found[2]] if found and len(text) < LONGEST else Fraction(0)
    if value < 1 or value.denominator != 1 or value > MOST:
        raise ArgumentError(must_be(flag, "a whole number, 1 to 1e18, as 7e9, 7B or 350M", text))
    return int(value)


def bytes_of(flag: str, text: str) -> float:
    """Return the bytes that a text such as 80GB, 64GiB or 500MB stands for; raise ArgumentError for another one."""
    found = re.fullmatch(NUMBER + "([KMGT]?)(i?)B", text)
    if not found or (found[3] and not found[2]) or len(text) >= LONGEST:
        raise ArgumentError(must_be(flag, "a number of bytes as 80GB, 500MB or 64GiB", text))
    power = "KMGT".find(found[2]) + 1 if found[2] else 0
    return float(found[1]) * (1024**power if found[3] else RATES[found[2]])


def speed_of(flag: str, text: str) -> float:
    """Return the operations per second that a text such as 400T or 1.2P stands for; raise ArgumentError."""
    found = re.fullmatch(NUMBER + "([MGTP]?)", text)
    if not found or float(found[1]) == 0 or len(text) >= LONGEST:
        raise ArgumentError(must_be(flag, "operations per second above 0, as 400T or 1.2P", text))
    return float(found[1]) * SPEEDS[found[2]]


def scale_of(most: float) -> tuple[float, str]:
    """Return the bytes of a unit, and its name, in which the largest value of a table is below 1000."""
    for scale, name in ((1e3, "kB"), (1e6, "MB"), (1e9, "GB")):
        if most < 999.5 * scale:
            return scale, name
    return 1e12, "TB"


def show_size(nbytes: float) -> str:
    """Return bytes with three digits, in powers of 1000."""
    scale, name = scale_of(nbytes)
    return f"{nbytes / scale:.3g} {name}"
