"""Pipelines over neighbours: what is long is cut in pieces, and a piece moves while another is worked on.

[Note: overlap] The local steps of a round touch nothing that the round's messages touch, wherever pieces are two or
more: they may run while the messages are under way.
Sources: the ring of Patarasuk and Yuan 2009, section 3; the chain of Pjesivac-Grbovic, Angskun, Bosilca, Fagg, Gabriel,
Dongarra, "Performance Analysis of MPI Collective Operations", 2007 ("pipeline"); the grouping of pieces is ours.
"""

from __future__ import annotations

from mpizero.collectives import order
from mpizero.collectives.registry import register
from mpizero.collectives.schedule import Copy, Recv, Reduce, Ref, Round, Schedule, Send, Space

__all__: list[str] = []

SLOTS = 4
"""Accumulators of the segmented ring: one is received into, up to two are waiting, one is sent."""


def _ring_of_pieces(size: int, chunk: int, root: int, pieces: int) -> order.Expr:
    return order.ring(size, chunk // pieces, root)


@register("all_reduce", "segmented_ring", _ring_of_pieces, takes="pieces")
def all_reduce(size: int, rank: int, root: int, pieces: int) -> Schedule:  # noqa: ARG001
    """Build all-reduce: 2 S (p-1)/p elements sent in pieces of S / (p * pieces), pieces (p - 1) + p - 1 rounds.

    Piece k of ring chunk c is chunk c * pieces + k. Pieces go round the ring two by two, by turns, so that one is
    summed while the other moves, and scratch is a few pieces however many there are; of an odd number the last three
    go together. Then finished chunks go round, all pieces of one in a round.
    """
    if size == 1:
        copies = tuple(Copy(Ref(Space.OUT, piece), Ref(Space.IN, piece)) for piece in range(pieces))
        return Schedule(chunks=pieces, rounds=(Round((), copies),), raw_slots=2, acc_slots=SLOTS)
    rounds = [*_reduce_rounds(size, rank, pieces), *_gather_rounds(size, rank, pieces)]
    return Schedule(chunks=size * pieces, rounds=tuple(rounds), raw_slots=2, acc_slots=SLOTS)


@register("broadcast", "chain", takes="pieces")
def broadcast(size: int, rank: int, root: int, pieces: int) -> Schedule:
    """Build broadcast: pieces + p - 2 rounds; every rank but the last sends S bytes, a piece a round."""
    position = (rank - root) % size
    rounds = []
    for piece in range(pieces + 1):  # a rank receives a piece while it sends the one before
        messages: list[Send | Recv] = []
        if position > 0 and piece < pieces:
            messages.append(Recv((rank - 1) % size, (Ref(Space.OUT, piece),)))
        if position < size - 1 and piece > 0:
            messages.append(Send((rank + 1) % size, (Ref(Space.OUT, piece - 1),)))
        if messages:
            rounds.append(Round(tuple(messages)))
    return Schedule(chunks=pieces, rounds=tuple(rounds))


def _turns(size: int, pieces: int) -> list[tuple[int, int]]:
    """Return (piece, step round the ring) of every round of the reduce-scatter, and after them nothing.

    A piece's next step is two or three rounds after its last, time enough to sum it in the round between; of a single
    piece it is the next round.
    """
    groups = [list(range(start, min(start + 2, pieces))) for start in range(0, pieces, 2)]
    if len(groups) > 1 and len(groups[-1]) == 1:
        groups[-2:] = [groups[-2] + groups[-1]]
    return [(piece, step) for group in groups for step in range(size - 1) for piece in group]


def _reduce_rounds(size: int, rank: int, pieces: int) -> list[Round]:
    """Return the rounds that leave the sum of every piece of ring chunk `rank` in OUT; see `ring` for the steps."""
    after, before = (rank + 1) % size, (rank - 1) % size
    held: dict[int, Ref] = {}
    rounds = []
    late: tuple[Reduce, ...] = ()
    for turn, (piece, step) in enumerate(_turns(size, pieces)):
        chunk = (rank - step - 2) % size * pieces + piece
        slot = Ref(Space.ACC, chunk, turn % SLOTS)
        arriving = Ref(Space.RAW, chunk, turn % 2) if step == 0 else slot
        target = Ref(Space.OUT, chunk) if step == size - 2 else slot
        leaving = held.get(piece, Ref(Space.IN, (rank - 1) % size * pieces + piece))
        add = (Reduce(target, arriving, Ref(Space.IN, chunk)),)
        local, late = (add, ()) if pieces == 1 else (late, add)
        rounds.append(Round((Recv(before, (arriving,)), Send(after, (leaving,))), local))
        held[piece] = slot
    return [*rounds, Round((), late)] if late else rounds


def _gather_rounds(size: int, rank: int, pieces: int) -> list[Round]:
    """Return the rounds that pass every rank's ring chunk of OUT once round the ring."""
    after, before = (rank + 1) % size, (rank - 1) % size
    rounds = []
    for step in range(size - 1):
        messages: list[Send | Recv] = []
        for piece in range(pieces):
            messages.append(Recv(before, (Ref(Space.OUT, (rank - step - 1) % size * pieces + piece),)))
            messages.append(Send(after, (Ref(Space.OUT, (rank - step) % size * pieces + piece),)))
        rounds.append(Round(tuple(messages)))
    return rounds
