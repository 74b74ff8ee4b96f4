"""Small schedules of two ranks, written out by hand to be right, or wrong in one way."""

import pytest

from mpizero.collectives import Algorithm
from mpizero.collectives.order import canonical
from mpizero.collectives.schedule import Recv, Reduce, Ref, Round, Schedule, Send, Space
from mpizero.collectives.simulate import ScheduleError, simulate

IN, OUT = Ref(Space.IN, 0), Ref(Space.OUT, 0)
RAW, ACC = Ref(Space.RAW, 0), Ref(Space.ACC, 0)
RAW_1, ACC_1 = Ref(Space.RAW, 0, 1), Ref(Space.ACC, 0, 1)


def algorithm_of(rounds, operation="all_reduce", *, order=canonical, chunks=1, slots=(2, 2)):
    def build(size, rank, root):
        found = rounds(rank)
        return Schedule(
            chunks=chunks(rank) if callable(chunks) else chunks,
            rounds=tuple(found),
            raw_slots=slots[0],
            acc_slots=slots[1],
        )

    return Algorithm(operation=operation, name="hand-made", build=build, order=order)


def swap(rank, sent=IN, received=RAW):
    """The messages of two ranks that exchange their parts."""
    return (Recv(1 - rank, (received,)), Send(1 - rank, (sent,)))


def total(rank, target=OUT, other=RAW):
    """The sum of two ranks' parts, in canonical order."""
    return Reduce(target, IN, other) if rank == 0 else Reduce(target, other, IN)


def refuse(rounds, text, **options):
    in_place = options.pop("in_place", False)
    with pytest.raises(ScheduleError, match=text):
        simulate(algorithm_of(rounds, **options), 2, in_place=in_place)


def good(rank):
    return [Round(swap(rank), (total(rank),))]


def moving(rounds, operation, chunks=2, **more):
    """A hand-made algorithm that sums nothing."""
    return algorithm_of(rounds, operation, order=None, chunks=chunks, **more)


def refuse_moving(rounds, text, operation, **options):
    in_place = options.pop("in_place", False)
    with pytest.raises(ScheduleError, match=text):
        simulate(moving(rounds, operation, **options), 2, in_place=in_place)
