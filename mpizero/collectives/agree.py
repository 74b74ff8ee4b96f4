"""What all ranks must pass alike to a collective, in one word that a record can hold; and what to say if they do not.

Cases K1, K2 and K14, for ranks of one host: their records are compared before anything is moved, at the price of a few
loads. Between hosts nothing is compared yet.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from mpizero.arrays import DTYPES
from mpizero.collectives.registry import OPERATIONS
from mpizero.comm.about import unlike
from mpizero.errors import CollectiveError

if TYPE_CHECKING:
    from mpizero.comm.board import Board

__all__ = ["OPS", "Signature", "check_records", "pack", "unpack"]

OPS = ("sum", "mean", "max", "min", "prod")
_OPERATIONS = list(OPERATIONS)
_DTYPES = list(DTYPES)
_BITS = (("operation", 4), ("dtype", 5), ("op", 3), ("root", 12), ("count", 39), ("device", 1))


class Signature(NamedTuple):
    """Say what a rank calls."""

    operation: str
    dtype: str
    op: str
    root: int
    elements: int
    """Elements of the whole buffer; of a rank's own part where the parts may differ."""
    device: bool = False
    """Whether they lie on a GPU."""

    def __str__(self) -> str:
        """Return it as a user wrote it, about."""
        traits = OPERATIONS[self.operation]
        where = " on a GPU" if self.device else ""
        facts = [f"{self.elements} elements of {self.dtype}{where}"] if self.operation != "barrier" else []
        facts += [f"op {self.op}"] if traits.reduces else []
        facts += [f"root {self.root}"] if traits.rooted else []
        return f"{self.operation}({', '.join(facts)})"


def pack(call: Signature) -> int:
    """Return a call as one number of 64 bits."""
    parts = (
        _OPERATIONS.index(call.operation),
        _DTYPES.index(call.dtype),
        OPS.index(call.op),
        call.root & 0xFFF,
        call.elements & ((1 << 39) - 1),
        int(call.device),
    )
    word = 0
    for (_, bits), part in zip(_BITS, parts, strict=True):
        word = word << bits | part
    return word


def unpack(word: int) -> Signature:
    """Return the call that `pack` made a number of."""
    parts = []
    for _, bits in reversed(_BITS):
        parts.append(word & ((1 << bits) - 1))
        word >>= bits
    device, count, root, op, dtype, operation = parts
    return Signature(_OPERATIONS[operation], _DTYPES[dtype], OPS[op], root, count, bool(device))


def check_records(board: Board) -> None:
    """Compare all ranks' records of the current collective.

    Raises:
        CollectiveError: on every rank, where two differ; names each call and the ranks that made it.
    """
    words, records = board.words, board.records[board.number & 1]
    mine = records[board.rank]
    signature, extra = words[mine], words[mine + 1]
    for at in records:
        if words[at] != signature or words[at + 1] != extra:
            board.health.sound = False
            raise CollectiveError(_difference(board, records))


def _difference(board: Board, records: list[int]) -> str:
    calls: dict[tuple[int, int], list[int]] = {}
    for rank, at in enumerate(records):
        calls.setdefault((board.words[at], board.words[at + 1]), []).append(rank)
    several = len({word for word, _ in calls}) < len(calls)
    made = {}
    for (word, extra), ranks in calls.items():
        more = f" with counts or unit #{extra:x}" if several else ""
        made[f"{unpack(word)}{more}"] = ranks
    return unlike(made)
