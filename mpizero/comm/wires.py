"""The transport for device memory, which moves bytes between each pair of ranks in the way that suits the pair.

| kind | way | where |
|---|---|---|
| `peer` | loads of the other process's device memory | ranks of one host, where CUDA IPC works |
| `direct` | messages on device pointers | a CUDA-aware MPI |
| `staged` | messages through page-locked host memory | everywhere |

Nothing runs in the background: whoever asks a wait of this transport whether it is `done` advances all its transfers,
as far as they go without blocking. See [Note: streams and MPI] in `arrays/device` for what may be posted, and
[Note: slots] in `slots` for why shared slots do not deadlock.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from mpizero.comm.messages import PIECE, SMALL_PIECE, STRANDS
from mpizero.comm.reached import together
from mpizero.comm.slots import Copies, Mail, Transfer
from mpizero.comm.waiting import ADVICE, poll, spins_for
from mpizero.comm.ways import Direct, Peer, Slots, Staged, Tools
from mpizero.errors import ArgumentError, CollectiveError, CollectiveTimeoutError, MpiZeroError, must_be

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mpizero.arrays import Device, DeviceArray
    from mpizero.comm.health import Health
    from mpizero.comm.stats import Stats
    from mpizero.comm.ways import Way

__all__ = ["HOST_SLOTS", "KINDS", "PEER_SLOTS", "DeviceTransport", "kinds_of_pairs", "make_wires"]

KINDS = ("peer", "direct", "staged")
HOST_SLOTS = Slots(nbytes=1 << 20, number=8)
"""Page-locked slots per direction. A copy of 1 MiB over PCIe takes some 20 to 80 us at 13 to 50 GB/s, which is long
beside what starting it and seeing its end take; two or three are under way per message, of three strands. 16 MiB in
all. The sizes follow from the links' rated speeds and are not measured."""
PEER_SLOTS = Slots(nbytes=4 << 20, number=8)
"""Slots in device memory: larger, since a copy within a device or over NVLink is ten times as fast and its two tokens
are not. 32 MiB. Not measured."""
DEVICE_CHANNELS = 2700
"""Channels whose messages never meet: MPI grants tags up to 32767, and each strand of a channel has four."""


class DeviceTransport:
    """Send and receive device memory; used by one thread at a time. Made by `make_wires`."""

    def __init__(self, comm: Any, device: Device, mpi_comm: Any) -> None:
        """Prepare a transport that reaches nobody yet.

        Args:
            comm: the communicator, whose time-out, health, counters and channels are this transport's too.
            device: the device whose memory is moved.
            mpi_comm: an mpi4py communicator over the same ranks, for this transport alone.
        """
        host = comm.transport
        self.rank: int = comm.rank
        self.size: int = comm.size
        self.timeout = host.timeout
        self.health: Health = comm.health
        self.stats: Stats = host.stats
        self.voice = host.voice
        self.strand = 0
        """The strand of what is posted next."""
        self.kinds: tuple[str, ...] = ()
        """Per peer, the way to it; the one of this rank itself says nothing."""
        self.spins = spins_for(self.size)
        self._device = device
        self._comm: Any = mpi_comm
        self.tools = Tools(
            device, Mail(mpi_comm), Copies(device), Copies(device), [PIECE] * self.size, self._disagreement
        )
        self._ways: dict[str, Way] = {}
        self._of_peer: list[Any] = []
        self._posted: list[Transfer] = []
        self._abandoned: list[Transfer] = []

    def connect(self, kinds: Sequence[str], ways: dict[str, Way]) -> None:
        """Reach each peer in the way of its kind."""
        self.kinds, self._ways = tuple(kinds), ways
        self._of_peer = [ways.get(kind) for kind in kinds]

    def cut_small(self, peers: list[int]) -> None:
        """Send messages of `SMALL_PIECE` to these peers, and receive such; all ranks must do so for the same pairs."""
        for peer in peers:
            self.tools.most[peer] = SMALL_PIECE

    def send(self, peer: int, data: DeviceArray) -> None:
        """Post a send of device memory that all work on the device is done with; see [Note: streams and MPI].

        It must stay as it is until the wait is over.
        """
        transfer = self._enter(f"send to rank {peer}", peer, data)
        self.stats.messages_sent += 1
        self.stats.bytes_sent += data.nbytes
        if data.nbytes:
            self._of_peer[peer].send(transfer)

    def receive(self, peer: int, data: DeviceArray) -> None:
        """Post a receive into device memory that all work on the device is done with.

        It holds the message once the wait is over, for the host and for work that is started then.
        """
        transfer = self._enter(f"receive from rank {peer}", peer, data)
        self.stats.bytes_received += data.nbytes
        if data.nbytes:
            self._of_peer[peer].receive(transfer)

    def _enter(self, name: str, peer: int, data: DeviceArray) -> Transfer:
        self._device.use()
        channel = self.voice.channel
        number = 1 + (channel - 1) % DEVICE_CHANNELS if channel else 0
        transfer = Transfer(name, (peer, self.strand + STRANDS * number), data)
        self._posted.append(transfer)
        return transfer

    def pending(self, what: str) -> _Transfers | None:
        """Return the wait for everything posted since the last one; None if nothing was."""
        if not self._posted:
            return None
        posted, self._posted = self._posted, []
        return _Transfers(self, self.voice.name(what), posted)

    def advance(self) -> None:
        """Advance all transfers as far as they go; never blocks.

        Raises:
            CollectiveError: where the two ends of a message disagree on its length.
            DeviceError: where the device has failed.
        """
        self._device.use()
        tools = self.tools
        tools.mail.advance()
        tools.leaving.advance()
        tools.coming.advance()
        for way in self._ways.values():
            way.advance()

    def abandon(self, transfers: list[Transfer]) -> None:
        """Keep the memory of transfers that nobody waits for any more: MPI and the device may still use it."""
        self.health.sound = False
        self._abandoned += transfers

    def _disagreement(self, text: str) -> CollectiveError:
        return CollectiveError(f"rank {self.rank} of {self.size}: {text}: every rank must pass arrays that match")

    def close(self) -> None:
        """Give the slots and the MPI communicator back; collective over the ranks.

        After a transfer was given up it does nothing: what is still under way may use them.

        Raises:
            CollectiveTimeoutError: where a peer never took what it was sent.
        """
        if not self.health.sound or self._comm is None:
            return
        peer = self._ways.get("peer")
        if isinstance(peer, Peer):
            self._await_slots(peer)
            peer.shut()
        self._comm.Barrier()
        self._ways, self._of_peer = {}, []
        self._comm.Free()
        self._comm = None

    @property
    def closed(self) -> bool:
        """Return whether `close` has given all back."""
        return self._comm is None

    def _await_slots(self, way: Peer) -> None:
        """Wait until receivers have given all slots back, which those have done that ended their waits."""

        def back() -> bool:
            self.advance()
            return not way.lent

        text = f"close: rank {self.rank} of {self.size} waits for the peers that were sent its last messages"
        if not poll(back, self.timeout, lambda: text, spins=self.spins):
            self.health.sound = False
            raise CollectiveTimeoutError(text)

    def __repr__(self) -> str:
        """Return the rank and the kinds."""
        return f"DeviceTransport(rank={self.rank}, kinds={self.kinds})"


class _Transfers:
    """Wait for the transfers that were posted together."""

    def __init__(self, transport: DeviceTransport, what: str, transfers: list[Transfer]) -> None:
        self.transport, self.what, self.transfers = transport, what, transfers
        self._left = list(transfers)

    def done(self) -> bool:
        """Return whether all are over; advances these and all others of the transport."""
        self.transport.advance()
        while self._left and not self._left[-1].left:
            self._left.pop()
        return not self._left

    def block(self, done: Callable[[], bool] | None = None) -> bool:
        """Return True once all are over, or what `done` asks instead, False after the time-out."""
        transport = self.transport
        return poll(done or self.done, transport.timeout, lambda: self._missing("waits for"), spins=transport.spins)

    def overdue(self, seconds: float) -> bool:
        """Return whether `seconds` is more than the time-out."""
        return bool(seconds > self.transport.timeout)

    def settle(self, seconds: float, *, finished: bool) -> None:
        """Count the wait, and give its transfers up if it was given up."""
        self.count(seconds)
        if not finished:
            self.transport.abandon(self.transfers)

    def count(self, seconds: float) -> None:
        """Count seconds of waiting."""
        self.transport.stats.wait_seconds += seconds

    def late(self) -> CollectiveTimeoutError:
        """Say what a time-out means."""
        return CollectiveTimeoutError(f"{self._missing(f'waited {self.transport.timeout:g} s for')}. {ADVICE}")

    def _missing(self, verb: str) -> str:
        """Say which transfers are not over, as `all_gather of x: rank 0 of 2 VERB: receive from rank 1`."""
        names = {transfer.name for transfer in self.transfers if transfer.left}
        missing = ", ".join(sorted(names)) or "nothing any more"
        return f"{self.what}: rank {self.transport.rank} of {self.transport.size} {verb}: {missing}"


def kinds_of_pairs(nodes: Sequence[int], rank: int, *, aware: bool, ipc: bool) -> list[str]:
    """Return the kind of the way from one rank to each peer, as far as this rank knows; see `make_wires`.

    Args:
        nodes: each rank's host.
        rank: whose ways.
        aware: whether its MPI takes device pointers.
        ipc: whether device memory of other processes of its host can be opened.
    """
    beyond = "direct" if aware else "staged"
    return ["peer" if ipc and node == nodes[rank] else beyond for node in nodes]


def agreed(table: Sequence[Sequence[str]], rank: int) -> list[str]:
    """Return one rank's kinds from what all ranks want: where two want different ones their pair is `staged`.

    Args:
        table: per rank, its kinds.
        rank: whose kinds.

    Raises:
        ArgumentError: where a rank wants what is no kind, or not one for every peer; on all ranks alike.
    """
    for number, kinds in enumerate(table):
        if len(kinds) != len(table) or not set(kinds) <= set(KINDS):
            rule = f"{len(table)} of {', '.join(KINDS)}"
            raise ArgumentError(must_be(f"kinds of rank {number}", rule, list(kinds)))
    return [kind if table[peer][rank] == kind else "staged" for peer, kind in enumerate(table[rank])]


def make_wires(
    comm: Any,
    device: Device,
    kinds: Sequence[str],
    *,
    host: Slots = HOST_SLOTS,
    peer: Slots = PEER_SLOTS,
) -> DeviceTransport:
    """Return the transport between the device memory of a communicator's ranks. Collective.

    It has a communicator of MPI's of its own, so that a rank that passes host memory where another passes device memory
    waits, and its time-out names the other, instead of exchanging bytes with it. All memory that it ever needs is
    allocated here: `2 * host.whole` bytes page-locked if some pair of this rank is staged, and `peer.whole` bytes of
    device memory if some pair is of the kind peer.

    Args:
        comm: the communicator.
        device: this rank's device.
        kinds: per rank, how to reach it; one's own says nothing. See `kinds_of_pairs`.
        host: the slots in host memory, equal on all ranks.
        peer: the slots in device memory, equal on all ranks.

    Raises:
        ArgumentError: where the kinds of some rank are none; on all ranks.
        DeviceMemoryError: where some rank has no room; on all ranks, and another try may be made.
        DeviceError: where some rank cannot open its peers' memory; on all ranks, and without `peer` it works.
    """
    control = comm.private.mpi
    mine = agreed(control.allgather(list(kinds)), comm.rank)
    mpi_comm = comm.mpi.Dup()
    try:
        return _connect(DeviceTransport(comm, device, mpi_comm), mine, control, (host, peer))
    except MpiZeroError:
        mpi_comm.Free()
        raise


def _connect(transport: DeviceTransport, kinds: list[str], control: Any, slots: tuple[Slots, Slots]) -> DeviceTransport:
    """Make the ways that a transport needs, and let it know its peers' memory. Collective."""
    host, peer = slots
    others = [(rank, kind) for rank, kind in enumerate(kinds) if rank != transport.rank]
    makers: dict[str, Callable[[], Way]] = {
        "peer": partial(Peer, transport.tools, peer),
        "direct": partial(Direct, transport.tools),
        "staged": partial(Staged, transport.tools, host),
    }
    wanted = dict.fromkeys(kind for _, kind in others)

    def made() -> tuple[dict[str, Way], bytes]:
        ways = {kind: makers[kind]() for kind in wanted}
        near = ways.get("peer")
        return ways, near.handle if isinstance(near, Peer) else b""

    def opened() -> None:
        near = ways.get("peer")
        if isinstance(near, Peer):
            near.open({rank: handles[rank] for rank, kind in others if kind == "peer"})

    ways, handle = together(control, made)
    handles = control.allgather(handle)
    together(control, opened)
    transport.connect(kinds, ways)
    return transport
