"""Every operation of torch.distributed on the backend, by dtype and shape of group, with expected values by hand."""

import math
from functools import partial, reduce

import pytest
import torch
from helpers.c10d import EXACT, MOVED, job, old_names, same, value  # noqa: F401
from torch import distributed as dist
from torch.distributed import ReduceOp
from torch.distributed.distributed_c10d import _coalescing_manager

pytestmark = [pytest.mark.mpi, pytest.mark.sizes(2, 4)]

N = 5
MOVES, REDUCES = {}, {}
INTEGERS = [dtype for dtype in EXACT if not dtype.is_floating_point and not dtype.is_complex]
WHY = {
    "mean": "a mean or a multiple of integers is refused: it would have to be rounded",
    "order": "complex numbers have no order, and torch refuses them itself",
    "bits": "floats have no bitwise reductions",
    "bool": "True plus True is no bool: the verbs refuse it; MAX is any, MIN is all",
    "float8": "the verbs add no 8-bit floats, and torch has no sum of them either",
}


def moves(function):
    MOVES[function.__name__] = function
    return function


def reduces(function):
    REDUCES[function.__name__] = function
    return function


def wait(work, later):
    """Finish what was started with `async_op=later`."""
    assert (work is not None) == later
    if later:
        assert work.wait()
        assert work.is_completed()
        assert work.is_success()
        assert work.exception() is None


class Ranks:
    """Who takes part in an operation."""

    def __init__(self, group):
        self.group, self.rank, self.size = group, dist.get_rank(group), dist.get_world_size(group)
        self.whole = True

    def at(self, rank):
        return dist.get_global_rank(self.group, rank)

    def everybody(self, count, dtype, **named):
        return [value(rank, count, dtype, **named) for rank in range(self.size)]


# What moves data.


@moves
def broadcast(we, dtype, later):
    for root in range(we.size):
        x = value(we.rank, N, dtype)
        wait(dist.broadcast(x, we.at(root), we.group, async_op=later), later)
        assert same(x, value(root, N, dtype))


@moves
def all_gather(we, dtype, later):
    outs = [torch.empty(N, dtype=dtype) for _ in range(we.size)]
    wait(dist.all_gather(outs, value(we.rank, N, dtype), we.group, async_op=later), later)
    assert all(map(same, outs, we.everybody(N, dtype)))


@moves
def all_gather_into_parts_of_one_tensor(we, dtype, later):
    whole = torch.empty(we.size * N, dtype=dtype)
    wait(dist.all_gather(list(whole.split(N)), value(we.rank, N, dtype), we.group, async_op=later), later)
    assert same(whole, torch.cat(we.everybody(N, dtype)))


@moves
def all_gather_of_different_sizes(we, dtype, later):
    outs = [torch.empty(rank + 1, dtype=dtype) for rank in range(we.size)]
    wait(dist.all_gather(outs, value(we.rank, we.rank + 1, dtype), we.group, async_op=later), later)
    assert all(same(out, value(rank, rank + 1, dtype)) for rank, out in enumerate(outs))


@moves
def all_gather_into_tensor(we, dtype, later):
    out = torch.empty(we.size, N, dtype=dtype)
    with old_names():
        wait(dist.all_gather_into_tensor(out, value(we.rank, N, dtype), we.group, async_op=later), later)
    assert same(out, torch.stack(we.everybody(N, dtype)))


@moves
def all_gather_in_place(we, dtype, later):
    out = torch.zeros(we.size * N, dtype=dtype)
    part = out[we.rank * N : (we.rank + 1) * N]
    part.copy_(value(we.rank, N, dtype))
    with old_names():
        wait(dist.all_gather_into_tensor(out, part, we.group, async_op=later), later)
    assert same(out, torch.cat(we.everybody(N, dtype)))


@moves
def all_gather_coalesced(we, dtype, later):
    outs = [[torch.empty(count, dtype=dtype) for count in (2, N)] for _ in range(we.size)]
    work = we.group.allgather_coalesced(outs, [value(we.rank, count, dtype) for count in (2, N)])
    wait(work, later=True)
    for rank, of_rank in enumerate(outs):
        assert all(same(out, value(rank, out.numel(), dtype)) for out in of_rank)


@moves
def gather(we, dtype, later):
    root = we.size - 1
    outs = [torch.empty(N, dtype=dtype) for _ in range(we.size)] if we.rank == root else None
    wait(dist.gather(value(we.rank, N, dtype), outs, we.at(root), we.group, async_op=later), later)
    assert outs is None or all(map(same, outs, we.everybody(N, dtype)))


@moves
def scatter(we, dtype, later):
    root = we.size - 1
    out, parts = torch.empty(N, dtype=dtype), we.everybody(N, dtype) if we.rank == root else None
    wait(dist.scatter(out, parts, we.at(root), we.group, async_op=later), later)
    assert same(out, value(we.rank, N, dtype))


@moves
def all_to_all(we, dtype, later):
    outs = [torch.empty(source + 2 * we.rank, dtype=dtype) for source in range(we.size)]
    parts = [value(we.rank, we.rank + 2 * peer, dtype) for peer in range(we.size)]
    wait(dist.all_to_all(outs, parts, we.group, async_op=later), later)
    assert all(same(out, value(source, out.numel(), dtype)) for source, out in enumerate(outs))


@moves
def all_to_all_single(we, dtype, later):
    out = torch.empty(we.size, N, dtype=dtype)
    wait(
        dist.all_to_all_single(out, value(we.rank, we.size * N, dtype).view(we.size, N), None, None, we.group, later),
        later,
    )
    parts = [value(source, we.size * N, dtype)[we.rank * N : (we.rank + 1) * N] for source in range(we.size)]
    assert same(out, torch.stack(parts))


@moves
def all_to_all_single_with_splits(we, dtype, later):
    gives, gets = [peer + 1 for peer in range(we.size)], [we.rank + 1] * we.size
    x, out = value(we.rank, 2 * sum(gives), dtype).view(-1, 2), torch.empty(sum(gets), 2, dtype=dtype)
    wait(dist.all_to_all_single(out, x, gets, gives, we.group, later), later)
    start = sum(gives[: we.rank])
    parts = [value(source, 2 * sum(gives), dtype).view(-1, 2)[start : start + we.rank + 1] for source in range(we.size)]
    assert same(out, torch.cat(parts))


@moves
def send_and_recv(we, dtype, later):
    if we.size == 1:
        return  # torch refuses a message to oneself
    x, out = value(we.rank, N, dtype), torch.empty(N, dtype=dtype)
    following, before = we.at((we.rank + 1) % we.size), we.at((we.rank - 1) % we.size)
    if we.rank == 0:
        dist.send(x, following, we.group, tag=2)
    assert dist.recv(out, before, we.group, tag=2) == before
    if we.rank:
        dist.send(x, following, we.group, tag=2)
    assert same(out, value((we.rank - 1) % we.size, N, dtype))


@moves
def isend_and_irecv_by_tags(we, dtype, later):
    following, before = we.at((we.rank + 1) % we.size), we.at((we.rank - 1) % we.size)
    outs = [torch.empty(3, N, dtype=dtype).t()[:, 1] for _ in range(2)]  # strided
    works = [dist.irecv(outs[tag], before, we.group, tag) for tag in (1, 0)]
    works += [dist.isend(value(we.rank + tag, N, dtype), following, we.group, tag) for tag in (0, 1)]
    for work in works:
        work.wait()
    assert all(same(out, value((we.rank - 1) % we.size + tag, N, dtype)) for tag, out in enumerate(outs))


@moves
def recv_from_any(we, dtype, later):
    if we.size == 1:
        return
    if we.rank:
        dist.send(value(we.rank, N, dtype), we.at(0), we.group)
        dist.barrier(we.group)  # or the next dtype's messages would be taken for this one's
        return
    came = set()
    for _ in range(1, we.size):
        out = torch.empty(N, dtype=dtype)
        source = dist.recv(out, group=we.group)
        assert same(out, value(dist.get_group_rank(we.group, source), N, dtype))
        came.add(source)
    assert came == {we.at(rank) for rank in range(1, we.size)}
    dist.barrier(we.group)


@moves
def batch_isend_irecv(we, dtype, later):
    outs = [torch.empty(N, dtype=dtype) for _ in range(we.size)]
    ops = [dist.P2POp(dist.irecv, out, we.at(peer), we.group) for peer, out in enumerate(outs)]
    x = value(we.rank, N, dtype)
    ops += [dist.P2POp(dist.isend, x, we.at(peer), we.group) for peer in range(we.size)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    assert all(map(same, outs, we.everybody(N, dtype)))


@moves
def coalesced_gathers(we, dtype, later):
    outs = [torch.empty(we.size * count, dtype=dtype) for count in (2, N)]
    with old_names(), _coalescing_manager(we.group, async_ops=later) as manager:
        for out in outs:
            x = value(we.rank, out.numel() // we.size, dtype)
            dist.all_gather_into_tensor(out, x, we.group)
    if later:
        manager.wait()
    assert all(same(out, torch.cat(we.everybody(out.numel() // we.size, dtype))) for out in outs)


# What reduces.

BITWISE = {ReduceOp.BAND: int.__and__, ReduceOp.BOR: int.__or__, ReduceOp.BXOR: int.__xor__}
OPS = {
    ReduceOp.SUM: sum,
    ReduceOp.AVG: sum,
    ReduceOp.PRODUCT: math.prod,
    ReduceOp.MIN: min,
    ReduceOp.MAX: max,
    **{op: partial(reduce, fold) for op, fold in BITWISE.items()},
    "PREMUL_SUM": lambda column: 2 * sum(column),
}


def skipped(op, dtype):
    """Return why a reduction is not done for a dtype; its refusal is tested below."""
    if dtype in {torch.float8_e4m3fn, torch.float8_e5m2}:
        return WHY["float8"]
    if op in BITWISE and (dtype.is_floating_point or dtype.is_complex):
        return WHY["bits"]
    if dtype == torch.bool and op not in {*BITWISE, ReduceOp.MIN, ReduceOp.MAX}:
        return WHY["bool"]
    if op in {ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT} and dtype.is_complex:
        return WHY["order"]
    return WHY["mean"] if op in {ReduceOp.AVG, "PREMUL_SUM"} and dtype in INTEGERS else None


def operand(we, rank, count, dtype, op):
    x = value(rank, count, torch.int64, most=2 if op == ReduceOp.PRODUCT or dtype == torch.bool else 7)
    if dtype == torch.bool:
        x = x - 1
    return (x * we.size if op == ReduceOp.AVG else x).to(dtype)


def result(we, count, dtype, op):
    """Return the reduction of all ranks' operands, made of Python's integers."""
    plain = torch.int64 if dtype != torch.bool else torch.bool
    rows = [operand(we, rank, count, plain, op).tolist() for rank in range(we.size)]
    columns = [OPS[op]([int(item) for item in column]) for column in zip(*rows, strict=True)]
    total = torch.tensor(columns)
    return (total // we.size if op == ReduceOp.AVG else total).to(dtype)


def torchs(op):
    return dist._make_nccl_premul_sum(2.0) if op == "PREMUL_SUM" else op


@reduces
def all_reduce(we, dtype, op, later):
    x = operand(we, we.rank, N, dtype, op)
    wait(dist.all_reduce(x, torchs(op), we.group, async_op=later), later)
    assert same(x, result(we, N, dtype, op))


@reduces
def all_reduce_coalesced(we, dtype, op, later):
    xs = [operand(we, we.rank, count, dtype, op) for count in (2, N)]
    with _coalescing_manager(we.group, async_ops=later) as manager:
        for x in xs:
            dist.all_reduce(x, torchs(op), we.group)
    if later:
        manager.wait()
    assert all(same(x, result(we, x.numel(), dtype, op)) for x in xs)


@reduces
def reduce_to_each(we, dtype, op, later):
    for root in range(we.size):
        x = operand(we, we.rank, N, dtype, op)
        wait(dist.reduce(x, we.at(root), torchs(op), we.group, async_op=later), later)
        assert same(x, result(we, N, dtype, op) if we.rank == root else operand(we, we.rank, N, dtype, op))


@reduces
def reduce_scatter(we, dtype, op, later):
    counts = [rank + 1 for rank in range(we.size)]
    out, parts = torch.empty(we.rank + 1, dtype=dtype), operand(we, we.rank, sum(counts), dtype, op).split(counts)
    wait(dist.reduce_scatter(out, [part.clone() for part in parts], torchs(op), we.group, async_op=later), later)
    assert same(out, result(we, sum(counts), dtype, op).split(counts)[we.rank])


@reduces
def reduce_scatter_tensor(we, dtype, op, later):
    out, x = torch.empty(N, dtype=dtype), operand(we, we.rank, we.size * N, dtype, op)
    with old_names():
        wait(dist.reduce_scatter_tensor(out, x, torchs(op), we.group, async_op=later), later)
    assert same(out, result(we, we.size * N, dtype, op).split(N)[we.rank])
    assert same(x, operand(we, we.rank, we.size * N, dtype, op))


@reduces
def coalesced_reduce_scatters(we, dtype, op, later):
    outs = [torch.empty(count, dtype=dtype) for count in (2, N)]
    with old_names(), _coalescing_manager(we.group, async_ops=later) as manager:
        for out in outs:
            dist.reduce_scatter_tensor(
                out, operand(we, we.rank, we.size * out.numel(), dtype, op), torchs(op), we.group
            )
    if later:
        manager.wait()
    for out in outs:
        assert same(out, result(we, we.size * out.numel(), dtype, op).split(out.numel())[we.rank])


@pytest.fixture
def shapes(request, job):  # noqa: F811
    """The groups of this rank; all but a world of two go through a third of the dtypes unless `--all` is given."""
    found = [Ranks(group) for group in job.values() if group is not None]
    for we in found:
        we.whole = request.config.getoption("--all") or (we is found[0] and we.size == 2)
    return found


def some(we, dtypes, at):
    """Return the dtypes to go through; where it is a third, it is another for each operation."""
    return list(dtypes) if we.whole else list(dtypes)[at % 3 :: 3]


@pytest.mark.parametrize("name", MOVES)
def test_moves(name, shapes):
    """All dtypes, those that the verbs do not know by their bytes."""
    for we in shapes:
        for at, dtype in enumerate(some(we, MOVED, list(MOVES).index(name))):
            MOVES[name](we, dtype, later=at % 2 == 0)


@pytest.mark.parametrize("op", OPS, ids=str)
@pytest.mark.parametrize("name", REDUCES)
def test_reduces(name, op, shapes):
    done = [dtype for dtype in (*EXACT, torch.bool) if skipped(op, dtype) is None]
    for we in shapes:
        for at, dtype in enumerate(some(we, done, list(REDUCES).index(name) + list(OPS).index(op))):
            REDUCES[name](we, dtype, op, later=at % 2 == 0)


def test_barrier_and_objects(shapes):
    for we in shapes:
        for later in (False, True):
            wait(dist.barrier(we.group, async_op=later), later)
        objects(we)


def objects(we):
    everybody = [None] * we.size
    dist.all_gather_object(everybody, {"rank": we.rank}, we.group)
    assert everybody == [{"rank": rank} for rank in range(we.size)]
    told = ["here", 7] if we.rank == we.size - 1 else [None, None]
    dist.broadcast_object_list(told, we.at(we.size - 1), we.group)
    assert told == ["here", 7]
    mine, found = [None], [None] * we.size if we.rank == 0 else None
    dist.scatter_object_list(mine, everybody if we.rank == 0 else None, we.at(0), we.group)
    assert mine == [{"rank": we.rank}]
    dist.gather_object(we.rank, found, we.at(0), we.group)
    assert found == (list(range(we.size)) if we.rank == 0 else None)
    if we.rank == 0 and we.size > 1:
        dist.send_object_list(told, we.at(1), we.group)
    elif we.rank == 1:
        got = [None, None]
        dist.recv_object_list(got, we.at(0), we.group)
        assert got == told


def test_what_is_skipped_is_refused(job):  # noqa: F811
    """A reduction that has no result says so, and the group can go on."""
    cases = [(ReduceOp.AVG, torch.int32), (ReduceOp.SUM, torch.bool), (ReduceOp.SUM, torch.float8_e5m2)]
    for op, dtype in [*cases, ("PREMUL_SUM", torch.int8)]:
        assert skipped(op, dtype)
        with pytest.raises(TypeError, match="must be"):
            dist.all_reduce(torch.ones(2).to(dtype), torchs(op))
    with pytest.raises(TypeError, match="must be of integers or bool"):
        dist.all_reduce(torch.ones(2), ReduceOp.BOR)
    dist.barrier()
