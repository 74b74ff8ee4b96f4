"""What a rank calls, in words: for the flight record, for the comparison of ranks and for errors."""

from __future__ import annotations

from functools import lru_cache
from hashlib import blake2b
from typing import TYPE_CHECKING

from mpizero.tables import ranks_in_words

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["About", "about", "unlike"]


class About:
    """Say what a rank calls; made once for calls that are alike, since its parts cost microseconds."""

    __slots__ = ("digest", "name", "nbytes", "number", "plain", "text")

    def __init__(self, name: str, text: str = "", *, nbytes: int = 0, algorithm: str = "") -> None:
        """Describe a call.

        Args:
            name: the collective's name, for errors.
            text: all that must be the same on all ranks; the name where nothing else must.
            nbytes: bytes of the whole buffer.
            algorithm: how it is done, for the record.
        """
        self.name = name
        self.nbytes = nbytes
        self.plain = text or name
        """What must be the same on all ranks."""
        self.digest = int.from_bytes(blake2b(self.plain.encode(), digest_size=8).digest(), "little")
        """A hash of that, the same in every process."""
        self.text = f"{self.plain} by {algorithm}" if algorithm else self.plain
        self.number = 0
        """Where the text stands in this process's record; 0 before it was written there."""


@lru_cache(maxsize=256)
def about(name: str) -> About:
    """Return what there is to say of a call of which nothing but the name is known."""
    return About(name)


def unlike(calls: Mapping[str, Sequence[int]], most: int | None = None) -> str:
    """Return the error of ranks that make different calls.

    Args:
        calls: each call, with the ranks that make it.
        most: ranks of a call that are named; the others are counted.
    """
    made = "; ".join(f"{ranks_in_words(ranks, most)}: {call}" for call, ranks in calls.items())
    return (
        f"a collective must be the same on all ranks (got {made}): every rank must make the same "
        "collective calls in the same order, with the same dtype, size and arguments"
    )
