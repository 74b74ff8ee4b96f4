"""The simulator can fail: schedules that are wrong in one way each are refused, for that reason."""

import pytest
from sim.handmade import ACC, IN, OUT, RAW, RAW_1, algorithm_of, good, refuse, swap, total

from mpizero.collectives.order import ring
from mpizero.collectives.schedule import Copy, Recv, Reduce, Ref, Round, Send, Space
from mpizero.collectives.simulate import ScheduleError, simulate


@pytest.mark.parametrize("in_place", [False, True])
def test_the_right_one_passes(in_place):
    found = simulate(algorithm_of(good), 2, in_place=in_place)
    assert found.results == [{0: (0, 1)}, {0: (0, 1)}]
    assert found.messages == [1, 1]


def test_deadlock():
    refuse(
        lambda rank: [Round((Recv(1 - rank, (RAW,)),)), Round((Send(1 - rank, (IN,)),), (total(rank),))],
        "deadlock: rank 0 in round 0, rank 1 in round 0",
    )


def test_deadlock_of_sends_that_wait_for_each_other():
    """Under rendezvous a send ends when it is taken, so that posting sends first is no way out."""
    refuse(
        lambda rank: [Round((Send(1 - rank, (IN,)),)), Round((Recv(1 - rank, (RAW,)),), (total(rank),))],
        "deadlock: .*0 sends to 1",
    )


def test_message_that_nobody_receives():
    refuse(lambda rank: [*good(rank), *([Round((Send(1, (IN,)),))] if rank == 0 else [])], "deadlock: .*0 sends to 1")


def test_message_that_nobody_sends():
    refuse(
        lambda rank: [*good(rank), *([Round((Recv(1, (RAW,)),))] if rank == 0 else [])], "deadlock: rank 0 in round 1"
    )


def test_partial_result_in_out():
    refuse(lambda rank: [Round((), (Copy(OUT, IN),)), *good(rank)], "gets the partial result")


def test_wrong_order():
    def wrong(rank):
        return [Round(swap(rank), (Reduce(OUT, RAW, IN) if rank == 0 else Reduce(OUT, IN, RAW),))]

    refuse(wrong, r"gets the partial result \(1, 0\)")


def test_order_other_than_declared():
    refuse(good, "gets the partial result", order=lambda *_: (1, 0))
    assert ring(2, 0, 0) == (1, 0)


def test_ranks_that_sum_in_different_orders():
    def wrong(rank):
        return [Round(swap(rank), (Reduce(OUT, IN, RAW),))]

    refuse(wrong, r"rank 1 .*gets the partial result \(1, 0\)")


def test_a_part_summed_twice():
    refuse(
        lambda rank: [Round(swap(rank), (total(rank, ACC), Reduce(OUT, ACC, RAW)))],
        "gets the partial result",
    )


def test_width_mix():
    refuse(lambda rank: [Round((), (Copy(ACC, IN),)), Round(swap(rank, ACC), (total(rank),))], "widths of .* differ")
    refuse(lambda rank: [Round(swap(rank, IN, ACC), (total(rank, other=ACC),))], "widths of .* differ")


def test_read_before_write():
    refuse(lambda rank: [Round(swap(rank, RAW_1), (total(rank),))], "RAW.* is read before it is written")
    refuse(lambda rank: [Round((), (total(rank),))], "RAW.* is read before it is written")


def test_slot_that_holds_another_chunk_by_now():
    def wrong(rank):
        parts = [Ref(Space.IN, chunk) for chunk in range(2)]
        held = [Ref(Space.ACC, chunk, 0) for chunk in range(2)]
        return [Round((), (Copy(held[0], parts[0]), Copy(held[1], parts[1]), Copy(Ref(Space.ACC, 0, 1), held[0])))]

    refuse(wrong, "ACC.* is read before it is written", chunks=2)


def test_overwritten_while_sent():
    refuse(lambda rank: [Round((), (Copy(RAW, IN),)), Round(swap(rank, RAW), (total(rank),))], "while it is in use")


def test_overwritten_while_sent_under_another_chunks_name():
    """A slot is one piece of memory, whichever chunk is in it."""

    def wrong(rank):
        mine, other = Ref(Space.RAW, rank), Ref(Space.RAW, 1 - rank)
        return [
            Round((), (Copy(mine, Ref(Space.IN, rank)),)),
            Round((Recv(1 - rank, (other,)), Send(1 - rank, (mine,)))),
        ]

    refuse(wrong, "while it is in use", chunks=2)


def test_two_receives_into_one_place():
    refuse(lambda rank: [Round((*swap(rank), *swap(rank)), (total(rank),))], "while it is in use")


def test_own_chunk_is_where_it_belongs_only_in_place():
    def gather(rank):
        return [Round((Recv(1 - rank, (Ref(Space.OUT, 1 - rank),)), Send(1 - rank, (Ref(Space.IN, rank),))))]

    def gather_and_keep(rank):
        return [Round((), (Copy(Ref(Space.OUT, rank), Ref(Space.IN, rank)),)), *gather(rank)]

    whole = algorithm_of(gather_and_keep, "all_gather", order=None, chunks=2)
    assert simulate(whole, 2).results == [{0: 0, 1: 1}] * 2
    refuse(gather, "ends with None", operation="all_gather", order=None, chunks=2)
    assert simulate(algorithm_of(gather, "all_gather", order=None, chunks=2), 2, in_place=True)


def test_input_overwritten():
    refuse(lambda rank: [Round(swap(rank), (total(rank, IN),))], "is input and was written")
    refuse(lambda rank: [Round(swap(rank, received=IN))], "while it is in use|is input and was written")


def test_input_read_after_its_result_in_place():
    def late(rank):
        return [*good(rank), Round((), (Copy(ACC, IN),))]

    simulate(algorithm_of(late), 2)
    refuse(late, "no longer holds the rank's own input", in_place=True)


def test_messages_of_other_chunks():
    def wrong(rank):
        return [Round((Recv(1 - rank, (Ref(Space.RAW, rank),)), Send(1 - rank, (Ref(Space.IN, rank),))))]

    refuse(wrong, "is met by", chunks=2)


def test_local_step_on_two_chunks():
    refuse(lambda _: [Round((), (Copy(Ref(Space.ACC, 0), Ref(Space.IN, 1)),))], "mixes chunks", chunks=2)
    refuse(
        lambda _: [Round((), (Reduce(Ref(Space.ACC, 0), Ref(Space.IN, 0), Ref(Space.IN, 1)),))],
        "mixes chunks",
        chunks=2,
    )


def test_rounded_too_early():
    refuse(lambda rank: [Round(swap(rank), (total(rank, RAW_1), Copy(OUT, RAW_1)))], "rounded before its time")
    refuse(
        lambda rank: [Round(swap(rank), (total(rank, ACC), Copy(RAW_1, ACC), Copy(OUT, RAW_1)))],
        "rounded before its time",
    )


def test_divided_twice():
    refuse(lambda rank: [*good(rank), Round((), (Copy(OUT, OUT),))], "divided twice")

    def round_about(rank):
        if rank == 0:
            return [*good(0), Round((Send(1, (OUT,)),))]
        return [Round(swap(1)), Round((Recv(0, (RAW_1,)),), (Copy(OUT, RAW_1),))]

    refuse(round_about, "divided twice")


def test_result_missing():
    refuse(lambda rank: good(rank) if rank == 0 else [Round(swap(rank))], "rank 1 ends with None")


def test_outside_of_memory():
    refuse(good, "outside the rank's memory", slots=(0, 0))
    refuse(lambda _: [Round((), (Copy(Ref(Space.ACC, 7), Ref(Space.IN, 7)),))], "outside the rank's memory")
    refuse(good, "outside the rank's memory", operation="reduce")  # rank 1 is not the root and has no OUT
    chunk = Ref(Space.OUT, 1)
    refuse(
        lambda _: [Round((), (Copy(chunk, Ref(Space.IN, 1)),))],
        "outside the rank's memory",
        operation="reduce_scatter",
        chunks=2,
    )


def test_chunks_cut_differently():
    refuse(good, "different numbers of chunks", chunks=lambda rank: 1 + rank)


def test_reduction_without_an_order():
    refuse(good, "declares no order", order=None)


def test_barrier_that_lets_go_too_early():
    def one_way(rank):
        return [Round((Send(1, (IN,)),))] if rank == 0 else [Round((Recv(0, (RAW,)),))]

    refuse(one_way, "rank 0 passes the barrier without having heard", operation="barrier", order=None)


def test_a_barriers_message_tells_only_what_its_sender_had_heard():
    """Rank 1 tells rank 2 in the round in which it hears of rank 0, so that rank 2 has not heard of rank 0."""

    def line(rank):
        steps = {
            0: [Round((Send(1, (IN,)),)), Round((Recv(1, (RAW,)),))],
            1: [
                Round((Recv(0, (RAW,)), Send(2, (IN,)))),
                Round((Recv(2, (RAW,)),)),
                Round((Send(0, (IN,)),)),
            ],
            2: [Round((Recv(1, (RAW,)),)), Round((Send(1, (IN,)),))],
        }
        return steps[rank]

    with pytest.raises(ScheduleError, match="rank 2 passes the barrier"):
        simulate(algorithm_of(line, "barrier", order=None), 3)
