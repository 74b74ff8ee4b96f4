"""What collectives keep of a real GPU's memory, a GPU without room, and two GPUs in one process."""

import gc

import pytest

import mpizero
from mpizero.arrays import parse_device

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.mpi, pytest.mark.gpu]

SLACK = 8 << 20
"""Bytes that the ranks sharing a GPU may come to hold beside what they give back, such as a module of kernels."""


def used(world, gpu):
    """Bytes in use on the GPU, as all ranks see it at one time, and torch's own."""
    torch.cuda.synchronize()
    parse_device(gpu).let_go()
    gc.collect()
    torch.cuda.empty_cache()
    world.mpi.Barrier()
    free, total = torch.cuda.mem_get_info(gpu)
    world.mpi.Barrier()
    return total - free, torch.cuda.memory_allocated(gpu)


@pytest.mark.parametrize("wire", ["loads", "staged"])
def test_memory_is_flat_over_fifty_collectives(world, gpu, monkeypatch, wire):
    monkeypatch.setenv("MPIZERO_DEVICE_WIRE", wire)
    comm = mpizero.Communicator(world.mpi)

    def turn(number):
        x = torch.full((1 << 20,), float(number), device=f"cuda:{gpu}")
        mpizero.all_reduce(x, comm)
        again = mpizero.all_reduce(x, comm, out=torch.empty_like(x), async_op=True)
        buffer = mpizero.empty(1 << 20, torch.float32, comm, device="cuda")
        buffer.copy_(x)
        mpizero.all_reduce(buffer, comm)
        assert again.wait()[0] == buffer[-1] == number * world.size**2

    for number in range(5):
        turn(number)
    before = used(world, gpu)
    for number in range(50):
        turn(number % 7)
    after = used(world, gpu)
    assert after[0] <= before[0] + SLACK
    assert after[1] <= before[1]
    comm.close()


def test_a_gpu_without_room_is_an_error_on_all_ranks(world, gpu):
    comm = mpizero.Communicator(world.mpi)
    _, total = torch.cuda.mem_get_info(gpu)
    with pytest.raises(mpizero.DeviceMemoryError, match="bytes free for collectives"):
        mpizero.empty(2 * total, torch.uint8, comm, device="cuda")
    x = torch.ones(1000, device=f"cuda:{gpu}")
    assert mpizero.all_reduce(x, comm).tolist() == [world.size] * 1000
    comm.close()


def test_two_gpus_in_one_process(world, gpu):
    if torch.cuda.device_count() < 2:
        pytest.skip("there is one GPU")
    comm = mpizero.Communicator(world.mpi)
    there, beyond = (torch.ones(1000, device=f"cuda:{number}") for number in (0, 1))
    with pytest.raises(mpizero.ArgumentTypeError, match="in GPU 0"):
        mpizero.all_reduce(there, comm, out=torch.empty_like(beyond))
    for _ in range(2):
        for x in (there, beyond):
            x.fill_(1)
            assert mpizero.all_reduce(x, comm).tolist() == [world.size] * 1000
    torch.cuda.set_device(gpu)
    comm.close()


def test_a_tensor_in_host_memory_on_one_rank(world, gpu):
    if world.size < 2:
        pytest.skip("needs two ranks")
    comm = mpizero.Communicator(world.mpi)
    x = torch.ones(4, device="cpu" if world.rank == 0 else f"cuda:{gpu}")
    with pytest.raises(mpizero.CollectiveError, match="on a GPU"):
        mpizero.all_reduce(x, comm)
