"""The transport over MPI point-to-point messages."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from mpizero.comm.raw import mpi
from mpizero.comm.stats import Stats
from mpizero.comm.waiting import poll
from mpizero.errors import CollectiveTimeoutError

if TYPE_CHECKING:
    from mpizero.typing import Bytes

__all__ = ["MessageTransport"]

TAG = 7
"""The tag of messages outside any channel: MPI keeps the order of messages between two ranks, so one is enough."""
CHANNELS = 32000
"""MPI grants tags up to 32767 at least."""
PIECE = 1 << 30
"""Bytes of the largest single message: a count beyond 2^31 fails on Open MPI 5.0 whatever the datatype."""


class MessageTransport:
    """Send and receive bytes with `Isend` and `Irecv` on a communicator that belongs to mpizero alone."""

    def __init__(self, mpi_comm: Any, timeout: float) -> None:
        """Use `mpi_comm`, an mpi4py intracommunicator; a wait ends with an error after `timeout` seconds."""
        self.rank: int = mpi_comm.rank
        self.size: int = mpi_comm.size
        self.stats = Stats()
        self.timeout = timeout
        self._comm = mpi_comm
        self._tag, self._label = TAG, ""
        self._requests: list[Any] = []
        self._abandoned: list[Any] = []
        self._peers: list[tuple[str, int]] = []
        module = mpi()
        self._byte = module.BYTE
        self._test_all = module.Request.Testall

    def speak_of(self, number: int | None, label: str) -> None:
        """Change to the channel `number`, or with None to the common one; see `Communicator.channel`."""
        self._tag = TAG if number is None else TAG + 1 + number % CHANNELS
        self._label = label

    def send(self, peer: int, data: Bytes) -> None:
        """Post a send of the bytes of `data`."""
        for piece in _pieces(data):
            self._requests.append(self._comm.Isend([piece, piece.nbytes, self._byte], peer, self._tag))
            self._peers.append(("send to", peer))
        self.stats.messages_sent += 1
        self.stats.bytes_sent += data.nbytes

    def receive(self, peer: int, data: Bytes) -> None:
        """Post a receive into the bytes of `data`."""
        for piece in _pieces(data):
            self._requests.append(self._comm.Irecv([piece, piece.nbytes, self._byte], peer, self._tag))
            self._peers.append(("receive from", peer))
        self.stats.bytes_received += data.nbytes

    def wait(self, what: str) -> None:
        """Wait for all that was posted.

        Raises:
            CollectiveTimeoutError: if it takes longer than the time-out; names `what`, this rank and the peers.
        """
        requests, self._requests = self._requests, []
        peers, self._peers = self._peers, []
        if not requests:
            return
        start = time.perf_counter()
        finished = False
        try:
            finished = poll(
                lambda: self._test_all(requests),
                self.timeout,
                lambda: self._missing(what, "waits for", requests, peers),
            )
        finally:
            self.stats.wait_seconds += time.perf_counter() - start
            if not finished:
                self._abandoned += requests
        if not finished:
            raise CollectiveTimeoutError(self._late(what, requests, peers))

    @property
    def broken(self) -> bool:
        """Return whether a wait was given up, by a time-out or a signal: the next messages would meet the wrong ones.

        The requests of that wait are kept, since MPI may still write into their buffers.
        """
        return bool(self._abandoned or self._requests)

    def _missing(self, what: str, verb: str, requests: list[Any], peers: list[tuple[str, int]]) -> str:
        """Say which messages are still missing, as `all_gather of x: rank 0 of 2 VERB: receive from rank 1`."""
        posted = zip(requests, peers, strict=True)
        waiting = [f"{kind} rank {peer}" for request, (kind, peer) in posted if not request.Get_status()]
        missing = ", ".join(sorted(set(waiting))) or "nothing any more"
        about = f"{what} of {self._label}" if self._label else what
        return f"{about}: rank {self.rank} of {self.size} {verb}: {missing}"

    def _late(self, what: str, requests: list[Any], peers: list[tuple[str, int]]) -> str:
        """Say what a time-out means."""
        missing = self._missing(what, f"waited {self.timeout:g} s for", requests, peers)
        return (
            f"{missing}. Either those ranks are slower than the time-out (MPIZERO_TIMEOUT, seconds) or they never made "
            "this call: every rank must make the same collective calls in the same order, a forward pass of a sharded "
            "model included (to evaluate on some ranks only, wrap that in `with mpizero.unsharded(model):` on all)"
        )


def _pieces(data: Bytes) -> list[Bytes]:
    """Return the array as byte arrays that one MPI message can carry."""
    if data.nbytes <= PIECE:
        return [data]
    raw = data.view("uint8")
    return [raw[start : start + PIECE] for start in range(0, raw.nbytes, PIECE)]
