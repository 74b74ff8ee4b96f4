"""The simulator can fail, where data move and nothing is summed, and for orders that depend on nodes or pieces."""

import pytest
from sim.handmade import OUT, RAW, good, moving, refuse, refuse_moving

from mpizero.collectives import Algorithm
from mpizero.collectives.schedule import Copy, Recv, Ref, Round, Schedule, Send, Space
from mpizero.collectives.simulate import ScheduleError, simulate


def exchange(rank):
    """All-to-all of two ranks, but for what a rank keeps."""
    here, there = Ref(Space.IN, rank * 2 + 1 - rank), Ref(Space.OUT, (1 - rank) * 2 + rank)
    return [Round((Recv(1 - rank, (there,)), Send(1 - rank, (here,))))]


def keep(chunk):
    return Round((), (Copy(Ref(Space.OUT, chunk), Ref(Space.IN, chunk)),))


@pytest.mark.parametrize("in_place", [False, True])
def test_all_to_all_has_its_input_and_output_apart(in_place):
    whole = moving(lambda rank: [*exchange(rank), keep(3 * rank)], "all_to_all", 4)
    assert simulate(whole, 2, in_place=in_place).results == [{0: 0, 2: 1}, {1: 0, 3: 1}]
    refuse_moving(exchange, "rank 0 ends with None in chunk 0", "all_to_all", chunks=4, in_place=in_place)


def test_all_to_all_of_a_foreign_row_or_column():
    def foreign(space, chunk):
        return lambda _: [Round((), (Copy(Ref(Space.RAW, chunk), Ref(space, chunk)),))]

    refuse_moving(foreign(Space.IN, 2), "rank 0 .*outside the rank's memory", "all_to_all", chunks=4)
    refuse_moving(foreign(Space.OUT, 1), "rank 0 .*outside the rank's memory", "all_to_all", chunks=4)
    refuse_moving(foreign(Space.OUT, 0), "is read before it is written", "all_to_all", chunks=4)


def test_number_of_chunks_other_than_the_operations():
    refuse_moving(exchange, "all_to_all on 2 ranks is cut into 2 chunks", "all_to_all")
    for operation in ("gather", "scatter", "all_gather"):
        refuse_moving(exchange, f"{operation} on 2 ranks is cut into 4 chunks", operation, chunks=4)
    refuse(good, "reduce_scatter on 2 ranks is cut into 3 chunks", operation="reduce_scatter", chunks=3)


def gather(rank):
    part = (Ref(Space.OUT if rank == 0 else Space.IN, 1),)
    return [Round((Recv(1, part),) if rank == 0 else (Send(0, part),))]


def test_gather():
    whole = moving(lambda rank: [*gather(rank), *([keep(0)] if rank == 0 else [])], "gather")
    assert simulate(whole, 2).results == [{0: 0, 1: 1}, {}]
    refuse_moving(gather, "rank 0 ends with None in chunk 0", "gather")
    assert simulate(moving(gather, "gather"), 2, in_place=True)
    refuse_moving(lambda rank: [keep(rank)], "rank 1 .*outside the rank's memory", "gather")
    refuse_moving(lambda _: [keep(0)], "rank 1 .*outside the rank's memory", "gather")


def scatter(rank):
    part = (Ref(Space.IN if rank == 0 else Space.OUT, 1),)
    return [Round((Send(1, part),) if rank == 0 else (Recv(0, part),))]


def test_scatter():
    whole = moving(lambda rank: [*scatter(rank), *([keep(0)] if rank == 0 else [])], "scatter")
    assert simulate(whole, 2).results == [{0: 0}, {1: 0}]
    refuse_moving(scatter, "rank 0 ends with None in chunk 0", "scatter")
    assert simulate(moving(scatter, "scatter"), 2, in_place=True)
    refuse_moving(lambda rank: [keep(rank)], "rank 1 .*outside the rank's memory", "scatter")
    refuse_moving(lambda _: [keep(1)], "rank 0 .*outside the rank's memory", "scatter")


def test_part_of_another_rank_than_promised():
    """A chunk has one source: what lies under its number elsewhere is not it."""

    def wrong(rank):
        return [Round((), (Copy(RAW, Ref(Space.IN, 0)), Copy(OUT, RAW)))] if rank == 0 else []

    refuse_moving(wrong, "rank 0 .*IN.* is read before it is written", "broadcast")
    refuse_moving(lambda _: [], "rank 1 ends with None in chunk 0, not 0", "broadcast")


def test_order_other_than_declared_for_these_nodes_or_pieces():
    def build(size, rank, root, extra):
        return Schedule(chunks=1, rounds=tuple(good(rank)), raw_slots=2, acc_slots=2)

    def order(size, chunk, root, extra):
        return (1, 0) if extra in {(0, 1), 3} else (0, 1)

    placed, cut = (
        Algorithm(operation="all_reduce", name="hand-made", build=build, order=order, takes=takes)
        for takes in ("nodes", "pieces")
    )
    assert simulate(placed, 2, nodes=(1, 1)).results == simulate(cut, 2).results == [{0: (0, 1)}] * 2
    for entry, option in ((placed, {"nodes": (0, 1)}), (cut, {"pieces": 3})):
        with pytest.raises(ScheduleError, match="gets the partial result"):
            simulate(entry, 2, **option)
