"""Device memory between ranks, each of its own stand-in device: every wire, mixed wires, and schedules over them.

Devices here run copies late and out of order, so that a wire which does not wait for an event moves other bytes.
"""

import ctypes
import itertools
import random
from functools import partial

import numpy as np
import pytest

import mpizero
from mpizero.arrays import View, dtype_named
from mpizero.collectives.buffers import Arithmetic, Buffers, Line, Square
from mpizero.collectives.execute import IN_FLIGHT, _together, execute
from mpizero.collectives.machine import DeviceMachine
from mpizero.collectives.registry import OPERATIONS, algorithms_of
from mpizero.collectives.schedule import even_offsets
from mpizero.comm.reached import Reached
from mpizero.comm.waiting import drive
from mpizero.comm.ways import Slots
from mpizero.comm.wires import KINDS, kinds_of_pairs, make_wires
from mpizero.errors import ArgumentError, CollectiveError, CollectiveTimeoutError, DeviceError, DeviceMemoryError
from mpizero.testing.host_runtime import HostRuntime, device_on

pytestmark = pytest.mark.mpi
FLOAT = dtype_named("float32")
SLOT = 16 << 10
"""Bytes of a slot: beyond what MPI libraries copy aside when a message is sent, so that a reused slot shows."""
MOST = 4
each_kind = pytest.mark.parametrize("kind", [*KINDS, "mixed"])


@pytest.fixture(scope="module")
def comm(world):
    if world.size > MOST:
        pytest.skip(f"{MOST} ranks are enough for what pairs and triples of ranks do")
    made = mpizero.Communicator(world.mpi, timeout=20)
    yield made
    made.close()


def kinds_for(kind, comm):
    """One kind for all pairs, or a mixture on which both ends agree."""
    return [KINDS[(comm.rank + peer) % 3] if kind == "mixed" else kind for peer in range(comm.size)]


def device_of(comm, seed=0, **options):
    runtime = HostRuntime(100 * seed + comm.rank, **options)
    return device_on(runtime)


def wires_for(comm, kind, number=3, nbytes=SLOT, seed=0):
    slots = Slots(nbytes=nbytes, number=number)
    return make_wires(comm, device_of(comm, seed), kinds_for(kind, comm), host=slots, peer=slots)


def seen(array):
    """The bytes of device memory as they are at this moment."""
    return np.frombuffer((ctypes.c_uint8 * array.nbytes).from_address(array.address), np.uint8)


def message(*key, nbytes):
    return np.random.default_rng(key).integers(0, 256, nbytes, np.uint8)


class Traffic:
    """Random messages in rounds: per strand and round, (from, to, bytes) of each, the same on all ranks."""

    def __init__(self, size, seed, rounds=3):
        draw = random.Random(seed)
        pairs = list(itertools.permutations(range(size), 2))
        self.strands = [
            [
                [(*pair, self.length(draw)) for pair in pairs for _ in range(draw.choice([0, 1, 1, 2]))]
                for _ in range(rounds)
            ]
            for _ in range(IN_FLIGHT)
        ]

    @staticmethod
    def length(draw):
        return draw.choice([1, draw.randrange(1, 200), SLOT, draw.randrange(SLOT, 5 * SLOT), 2 * SLOT + 1])

    def steps(self, transport, device, strand):
        """One strand's rounds: data is produced late, and memory is overwritten as soon as it is the caller's."""
        me, stream = transport.rank, device.stream()
        for number, round_ in enumerate(self.strands[strand]):
            sent, received = [], []
            for index, (source, target, nbytes) in enumerate(round_):
                data = message(strand, number, index, nbytes=nbytes)
                if me in {source, target}:
                    memory = device.allocate(nbytes)
                    (sent if me == source else received).append((source, target, memory, data))
                if me == source:
                    device.copy(memory, data, stream)
            yield Reached(stream.record(), transport, "making")
            transport.strand = strand
            for source, _, memory, _ in received:
                transport.receive(source, memory)
            for _, target, memory, _ in sent:
                transport.send(target, memory)
            wait = transport.pending(f"traffic {strand}")
            if wait is None:
                continue
            yield wait
            for source, _, memory, data in received:
                assert np.array_equal(seen(memory), data), f"from {source} in round {number} of strand {strand}"
            for _, _, memory, _ in sent:
                seen(memory)[:] = 0xEE


def run_traffic(comm, transport, device, seed):
    traffic = Traffic(comm.size, seed)
    drive(_together([traffic.steps(transport, device, strand) for strand in range(IN_FLIGHT)]))


@each_kind
@pytest.mark.parametrize("number", [1, 3])
def test_random_traffic(comm, kind, number):
    transport = wires_for(comm, kind, number)
    device = transport.tools.device
    for seed in range(3):
        run_traffic(comm, transport, device, seed)
    transport.close()


@each_kind
def test_small_messages_of_slots(comm, kind):
    """Over slow links a slot goes as several messages, and a device's memory too."""
    transport = wires_for(comm, kind, nbytes=80 << 10)
    transport.cut_small(list(range(comm.size)))
    run_traffic(comm, transport, transport.tools.device, 7)
    transport.close()


@pytest.mark.parametrize("kind", ["peer", "staged"])
def test_slots_are_for_those_who_wait(comm, kind):
    """Rank 0's first message goes to a rank that takes it only after rank 2 has had the second one."""
    if comm.size < 3:
        pytest.skip("three ranks wait for each other")
    transport = wires_for(comm, kind, number=2)
    device = transport.tools.device
    long, short = device.allocate(10 * SLOT), device.allocate(100)

    def step(verb, peer, memory):
        getattr(transport, verb)(peer, memory)
        drive(iter((transport.pending("chain"),)))

    if comm.rank == 0:
        seen(long)[:], seen(short)[:] = message(0, nbytes=long.nbytes), message(1, nbytes=short.nbytes)
        transport.send(1, long)
        step("send", 2, short)
    elif comm.rank == 1:
        step("receive", 2, short)
        step("receive", 0, long)
        assert np.array_equal(seen(long), message(0, nbytes=long.nbytes))
        assert np.array_equal(seen(short), message(1, nbytes=short.nbytes))
    elif comm.rank == 2:
        step("receive", 0, short)
        step("send", 1, short)
    transport.close()


@pytest.mark.parametrize("kind", ["peer", "staged"])
def test_slots_are_for_what_has_come(comm, kind):
    """Rank 1 waits for two messages at once, and the one asked for first is sent after the other has come."""
    if comm.size < 3:
        pytest.skip("three ranks wait for each other")
    transport = wires_for(comm, kind, number=1)
    device = transport.tools.device
    late, soon, answer = (device.allocate(SLOT) for _ in range(3))

    def post(verb, peer, memory, strand=0):
        transport.strand = strand
        getattr(transport, verb)(peer, memory)
        return transport.pending("cross")

    seen({0: late, 2: soon}.get(comm.rank, answer))[:] = message(comm.rank, nbytes=SLOT)
    if comm.rank == 0:
        drive(iter((post("receive", 1, answer),)))
        assert np.array_equal(seen(answer), message(1, nbytes=SLOT))
        drive(iter((post("send", 1, late),)))
    elif comm.rank == 1:
        last = post("receive", 0, late)
        drive(iter((post("receive", 2, soon, 1),)))
        drive(iter((post("send", 0, answer), last)))
        assert np.array_equal(seen(late), message(0, nbytes=SLOT))
        assert np.array_equal(seen(soon), message(2, nbytes=SLOT))
    elif comm.rank == 2:
        drive(iter((post("send", 1, soon, 1),)))
    transport.close()


def place(operation, rank, size, count, root):
    """Input and output of a rank: where they begin in the whole buffer and how long they are."""
    low, high = even_offsets(count, size)[rank : rank + 2]
    forms = {
        "whole": (0, count),
        "chunk": (low, high),
        "row": (0, count),
        "column": (0, count),
        "root": (0, count if rank == root else 0),
        "source": (0, count if rank == root else 0),
    }
    source = forms["whole"] if operation.output == "root" and operation.reduces else forms[operation.input]
    return source, forms[operation.output]


def expected(operation, rank, size, count, root):
    """What the rank's output must hold, or None where it gets nothing."""
    values = [numbers(each, count) for each in range(size)]
    offsets = even_offsets(count, size)
    cut = [slice(*offsets[each : each + 2]) for each in range(size)]
    if operation.name == "all_to_all":
        return np.concatenate([values[each][cut[rank]] for each in range(size)])
    if operation.reduces:
        whole = sum(values)
    elif operation.input in {"root", "source"}:
        whole = values[root]
    else:
        whole = np.concatenate([values[each][cut[each]] for each in range(size)])
    if operation.output == "root":
        return whole if rank == root else None
    return whole[cut[rank]] if operation.output == "chunk" else whole


def numbers(rank, count):
    return np.random.default_rng(rank).integers(-9, 9, count).astype(np.float32)


class Workshop:
    def __init__(self, transport):
        self.transport, self.device = transport, transport.tools.device
        self.packing = [self.device.allocate(1 << 16) for _ in range(IN_FLIGHT)]
        self.memory = self.device.allocate(1 << 16)

    def scratch(self, nbytes):
        return self.memory[:nbytes]

    def machines(self):
        wait = partial(Reached, transport=self.transport, what="working")
        return [DeviceMachine(self.device, self.device.stream(), room, wait) for room in self.packing]


def run_schedule(shop, entry, count, root):
    """Run an algorithm on device memory, and return what the rank's output holds."""
    transport, device = shop.transport, shop.device
    rank, size = transport.rank, transport.size
    operation = OPERATIONS[entry.operation]
    schedule = entry.schedule(size, rank, root, nodes=tuple(each // 2 for each in range(size)), pieces=2)
    source, target = place(operation, rank, size, count, root)
    given, memory = device.allocate(4 * count), device.allocate(4 * count)
    seen(given)[:] = numbers(rank, count).view(np.uint8)
    if operation.name == "broadcast":  # in place
        memory = given
    views = [View(data.view(np.float32)[low:high], FLOAT) for data, (low, high) in ((given, source), (memory, target))]
    row = even_offsets(count, size)
    line = Line(
        even_offsets(count, schedule.chunks),
        source[0] if operation.input == "chunk" else 0,
        target[0] if operation.output == "chunk" else 0,
    )
    square = operation.input == "row"
    layout = Square(rank, size, row, row, alike=True) if square else line
    buffers = Buffers(input=views[0], output=views[1], layout=layout, arithmetic=Arithmetic(FLOAT))
    segment = -(-layout.longest // 4)
    machines = shop.machines()
    drive(execute(schedule, buffers, shop, segment=segment, what=entry.name, machines=machines))
    device.runtime.finish()
    return seen(views[1].data).view(np.float32).copy()


@each_kind
def test_every_schedule(comm, kind):
    transport = wires_for(comm, kind, number=4, nbytes=256)
    shop = Workshop(transport)
    count, root = 40 * comm.size, comm.size - 1
    for entry in itertools.chain(*map(algorithms_of, OPERATIONS)):
        if entry.operation == "barrier":
            continue
        found = run_schedule(shop, entry, count, root)
        wanted = expected(OPERATIONS[entry.operation], comm.rank, comm.size, count, root)
        if wanted is not None:
            assert np.array_equal(found, wanted), f"{entry.operation} by {entry.name}"
    transport.close()


@each_kind
def test_what_is_counted(comm, kind):
    """Payload alone, however it is cut: announcements and tokens are not counted."""
    transport = wires_for(comm, kind, nbytes=100)
    device, before = transport.tools.device, comm.stats.copy()
    peers = [rank for rank in range(comm.size) if rank != comm.rank]
    for peer in peers:
        transport.receive(peer, device.allocate(1234))
        transport.send(peer, device.allocate(1234))
        transport.send(peer, device.allocate(0))
        transport.receive(peer, device.allocate(0))
    drive(iter(filter(None, [transport.pending("counted")])))
    counted = comm.stats.since(before)
    assert counted.messages_sent == 2 * len(peers)
    assert counted.bytes_sent == counted.bytes_received == 1234 * len(peers)
    assert (counted.wait_seconds > 0) == bool(peers)
    assert transport.pending("nothing") is None
    transport.close()


@each_kind
def test_channels_do_not_meet(comm, kind):
    """Messages of two channels and three strands, received in another order than they are sent."""
    transport = wires_for(comm, kind)
    device = transport.tools.device
    keys = [(channel, strand) for channel in (0, 1, 2, 2700) for strand in range(IN_FLIGHT)]
    after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    if comm.size == 1:
        keys = []
    waits, places = [], {}
    for key in keys:
        memory = device.allocate(300)
        seen(memory)[:] = message(*key, comm.rank, nbytes=300)
        with transport.voice.speak(key[0], ""):
            transport.strand = key[1]
            transport.send(after, memory)
            waits.append(transport.pending("send"))
    for key in keys[::-1]:
        places[key] = device.allocate(300)
        with transport.voice.speak(key[0], ""):
            transport.strand = key[1]
            transport.receive(before, places[key])
            waits.append(transport.pending("receive"))
    drive(iter(waits))
    for key, memory in places.items():
        assert np.array_equal(seen(memory), message(*key, before, nbytes=300))
    transport.close()


@pytest.mark.parametrize("kind", KINDS)
def test_a_peer_that_does_not_come(world, kind):
    """The time-out names it; so it is for a rank that passes host memory where another passes device memory."""
    if world.size not in range(2, MOST + 1):
        pytest.skip("one rank waits for nobody, and four are enough")
    comm = mpizero.Communicator(world.mpi, timeout=0.3)
    transport = wires_for(comm, kind)
    last = comm.size - 1
    if comm.rank == 0:
        transport.receive(last, transport.tools.device.allocate(10))
        wait = transport.pending("all_gather")
    elif comm.rank == last:
        comm.transport.receive(0, np.zeros(10, np.uint8))
        wait = comm.transport.pending("all_gather")
    if comm.rank in {0, last}:
        peer = last if comm.rank == 0 else 0
        name = f"all_gather: rank {comm.rank} of {comm.size} waited 0.3 s for: receive from rank {peer}"
        with pytest.raises(CollectiveTimeoutError, match=name):
            drive(iter((wait,)))
        assert not comm.health.sound
    world.mpi.Barrier()
    # not closed: its messages are still under way


@pytest.mark.parametrize("kind", ["peer", "staged"])
def test_ends_that_disagree(world, kind):
    if world.size not in range(2, MOST + 1):
        pytest.skip("one rank agrees with itself, and four are enough")
    comm = mpizero.Communicator(world.mpi, timeout=0.3)
    transport = wires_for(comm, kind)
    if comm.rank < 2:
        verb = transport.send if comm.rank == 0 else transport.receive
        verb(1 - comm.rank, transport.tools.device.allocate(10 + comm.rank))
        error, text = (
            (CollectiveError, "send to rank 1 must have one length on both (got 10 bytes, and 11 bytes there)")
            if comm.rank == 0
            else (CollectiveTimeoutError, "receive from rank 0")
        )
        with pytest.raises(error) as caught:
            drive(iter((transport.pending("broadcast"),)))
        assert text in str(caught.value)
        assert not comm.health.sound
    world.mpi.Barrier()
    # not closed: its messages are still under way


def test_making_fails_on_all(comm):
    """Where one rank has no room, cannot open memory, or asks for what is no kind, all raise, and may try again."""
    last = comm.rank == comm.size - 1
    if comm.size > 1:
        slots = Slots(nbytes=SLOT, number=2)
        poor = device_of(comm, capacity=SLOT if last else 1 << 20)
        with pytest.raises(DeviceMemoryError, match=rf"rank {comm.size - 1}: GPU 0 must have 32,768 bytes free"):
            make_wires(comm, poor, ["peer"] * comm.size, peer=slots)
        closed = device_of(comm, ipc=not last)
        with pytest.raises(DeviceError, match=rf"rank {comm.size - 1}: memory of GPU 0 must be open"):
            make_wires(comm, closed, ["peer"] * comm.size, peer=slots)
    with pytest.raises(ArgumentError, match=f"kinds of rank {comm.size - 1} must be {comm.size} of peer, direct, stag"):
        make_wires(comm, device_of(comm), ["carrier pigeon" if last else "staged"] * comm.size)
    wires_for(comm, "staged").close()


def test_both_ends_take_the_same_way(comm):
    """Where two ranks want different ways to each other they take the one that always works."""
    slots = Slots(nbytes=SLOT, number=2)
    mine = kinds_of_pairs([0] * comm.size, comm.rank, aware=True, ipc=comm.rank > 0)
    transport = make_wires(comm, device_of(comm), mine, host=slots, peer=slots)
    wanted = ["staged" if 0 in {comm.rank, peer} else "peer" for peer in range(comm.size)]
    found = list(transport.kinds)
    del wanted[comm.rank], found[comm.rank]
    assert found == wanted
    run_traffic(comm, transport, transport.tools.device, 11)
    transport.close()


def test_memory_is_allocated_once(comm):
    """However much is sent, and for the kinds that are used alone."""
    device = device_of(comm)
    slots = Slots(nbytes=SLOT, number=3)
    transport = make_wires(comm, device, kinds_for("peer", comm), host=slots, peer=slots)
    assert device.runtime.allocated == (slots.whole if comm.size > 1 else 0)
    run_traffic(comm, transport, device, 5)
    transport.close()
    assert repr(transport).startswith(f"DeviceTransport(rank={comm.rank}")


@pytest.mark.parametrize(
    ("aware", "ipc", "wanted"),
    [
        (False, False, ["staged"] * 4),
        (True, False, ["direct"] * 4),
        (False, True, ["staged", "staged", "peer", "peer"]),
        (True, True, ["direct", "direct", "peer", "peer"]),
    ],
)
def test_kinds_of_pairs(world, aware, ipc, wanted):
    assert kinds_of_pairs([0, 0, 1, 1], 2, aware=aware, ipc=ipc) == wanted
