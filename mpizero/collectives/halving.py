"""Recursive halving and doubling, low bit first.

In step k partners differ in bit k of their number and exchange half of what they hold: the chunks c = r mod 2^k. So
rank r ends with chunk r, and the order of summation is pairwise: canonical for powers of two. Other sizes fold: the
first 2 (p - 2^k) ranks pair up, the even one works for both. log2(p) rounds each way (two more when folded);
reduce-scatter and all-gather move S (p-1)/p elements, folding S more. Partial sums travel from the second step on.
Source: Thakur, Rabenseifner, Gropp 2005, sections 4.2 and 4.5; the chunk sets are chosen for the order.
"""

from __future__ import annotations

from dataclasses import dataclass

from mpizero.collectives import order
from mpizero.collectives.registry import register
from mpizero.collectives.schedule import Copy, Recv, Reduce, Ref, Round, Schedule, Send, Space

__all__ = ["Fold"]


@dataclass(frozen=True)
class Fold:
    """Hold how `size` ranks are folded into a power of two of groups."""

    size: int
    rank: int

    @property
    def groups(self) -> int:
        """Return the largest power of two that is not above the size."""
        return 1 << (self.size.bit_length() - 1)

    @property
    def pairs(self) -> int:
        """Return how many groups have two ranks."""
        return self.size - self.groups

    @property
    def works(self) -> bool:
        """Return whether this rank works for its group."""
        return self.rank >= 2 * self.pairs or self.rank % 2 == 0

    def group_of(self, rank: int) -> int:
        """Return the group of a rank."""
        return rank // 2 if rank < 2 * self.pairs else rank - self.pairs

    def worker(self, group: int) -> int:
        """Return the rank that works for a group."""
        return 2 * group if group < self.pairs else group + self.pairs

    @property
    def partner(self) -> int | None:
        """Return the other rank of this rank's group."""
        return self.rank ^ 1 if self.rank < 2 * self.pairs else None

    def chunks_of(self, group: int, bits: int) -> tuple[int, ...]:
        """Return the chunks whose group agrees with `group` in the lowest `bits` bits."""
        mask = (1 << bits) - 1
        return tuple(c for c in range(self.size) if self.group_of(c) & mask == group & mask)

    @property
    def steps(self) -> int:
        """Return log2 of the number of groups."""
        return self.groups.bit_length() - 1


@register("reduce_scatter", "halving", order.folded)
def reduce_scatter(size: int, rank: int, root: int = 0) -> Schedule:  # noqa: ARG001
    """Build reduce-scatter by recursive halving."""
    fold = Fold(size, rank)
    rounds = [*_fold_in(fold), *_halve(fold, finish_partner=False)]
    if fold.partner is not None:
        mine = Ref(Space.ACC, max(rank, fold.partner), max(rank, fold.partner))
        if fold.works:
            rounds.append(Round((Send(fold.partner, (mine,)),)))
        else:
            rounds.append(Round((Recv(fold.partner, (mine,)),), (Copy(Ref(Space.OUT, rank), mine),)))
    return Schedule(chunks=size, rounds=tuple(rounds), raw_slots=size, acc_slots=2 * size)


@register("all_gather", "doubling")
def all_gather(size: int, rank: int, root: int = 0) -> Schedule:  # noqa: ARG001
    """Build all-gather by recursive doubling."""
    fold = Fold(size, rank)
    rounds = [Round((), (Copy(Ref(Space.OUT, rank), Ref(Space.IN, rank)),))]
    if fold.partner is not None:
        kind = Recv if fold.works else Send
        rounds.append(Round((kind(fold.partner, (Ref(Space.OUT, max(rank, fold.partner)),)),)))
    rounds += _double(fold)
    rounds += _fold_out(fold, skip=rank if not fold.works else fold.partner)
    return Schedule(chunks=size, rounds=tuple(rounds))


@register("all_reduce", "halving_doubling", order.folded)
def all_reduce(size: int, rank: int, root: int = 0) -> Schedule:  # noqa: ARG001
    """Build all-reduce as recursive halving, then doubling: 2 log2(p) rounds, 2 S (p-1)/p elements sent."""
    fold = Fold(size, rank)
    rounds = [*_fold_in(fold), *_halve(fold, finish_partner=True), *_double(fold), *_fold_out(fold, skip=None)]
    return Schedule(chunks=size, rounds=tuple(rounds), raw_slots=size, acc_slots=2 * size)


def _fold_in(fold: Fold) -> list[Round]:
    """Sum the whole buffers of a folded pair on its worker: slot c of ACC then holds chunk c."""
    if fold.partner is None:
        return []
    everything = range(fold.size)
    if not fold.works:
        return [Round((Send(fold.partner, tuple(Ref(Space.IN, c) for c in everything)),))]
    raw = tuple(Ref(Space.RAW, c, c) for c in everything)
    adds = tuple(Reduce(Ref(Space.ACC, c, c), Ref(Space.IN, c), raw[c]) for c in everything)
    return [Round((Recv(fold.partner, raw),), adds)]


def _halve(fold: Fold, *, finish_partner: bool) -> list[Round]:
    """Halve until the worker holds the sums of its group's chunks; its own ends in OUT.

    Args:
        fold: who works for whom.
        finish_partner: whether the chunk of a folded partner ends in OUT too, or stays in ACC to be sent on.
    """
    if not fold.works:
        return []
    group = fold.group_of(fold.rank)
    held_raw = fold.partner is None
    rounds = []
    for step in range(fold.steps):
        other = group ^ (1 << step)
        peer = fold.worker(other)
        last = step == fold.steps - 1
        peer_raw = step == 0 and other >= fold.pairs
        kept, given = fold.chunks_of(group, step + 1), fold.chunks_of(other, step + 1)
        arriving = {c: Ref(Space.RAW, c, c) if peer_raw else Ref(Space.ACC, c, fold.size + c) for c in kept}
        adds = []
        for c in kept:
            pair = (_held(c, raw=held_raw), arriving[c])
            final = last and (finish_partner or c == fold.rank)
            adds.append(
                Reduce(Ref(Space.OUT, c) if final else Ref(Space.ACC, c, c), *(pair if group < other else pair[::-1]))
            )
        sent = tuple(_held(c, raw=held_raw) for c in given)
        rounds.append(Round((Recv(peer, tuple(arriving[c] for c in kept)), Send(peer, sent)), tuple(adds)))
        held_raw = False
    if not rounds:  # one group: what is held is final
        finals = fold.chunks_of(group, 0) if finish_partner else (fold.rank,)
        rounds.append(Round((), tuple(Copy(Ref(Space.OUT, c), _held(c, raw=held_raw)) for c in finals)))
    return rounds


def _held(chunk: int, *, raw: bool) -> Ref:
    """Return where a worker holds a chunk: in its input before the first sum, then in the chunk's accumulator."""
    return Ref(Space.IN, chunk) if raw else Ref(Space.ACC, chunk, chunk)


def _double(fold: Fold) -> list[Round]:
    """Exchange what is held with partners of ever lower bits until every worker has every chunk in OUT."""
    if not fold.works:
        return []
    group = fold.group_of(fold.rank)
    rounds = []
    for step in reversed(range(fold.steps)):
        other = group ^ (1 << step)
        peer = fold.worker(other)
        here, there = (tuple(Ref(Space.OUT, c) for c in fold.chunks_of(g, step + 1)) for g in (group, other))
        rounds.append(Round((Recv(peer, there), Send(peer, here))))
    return rounds


def _fold_out(fold: Fold, *, skip: int | None) -> list[Round]:
    """Give a folded partner the whole result, but for the chunk `skip` that it has."""
    if fold.partner is None:
        return []
    refs = tuple(Ref(Space.OUT, c) for c in range(fold.size) if c != skip)
    if not refs:
        return []
    kind = Send if fold.works else Recv
    return [Round((kind(fold.partner, refs),))]
