"""Point-to-point messages of a group: `send`, `recv`, from any source too, and the monitored barrier.

They have an MPI communicator of their own, so that they cannot meet the collectives' messages. A message is posted when
it is called for; whoever waits for it polls it, and a long one is polled by the progress thread as well, since MPI
moves a long message only while somebody calls MPI.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from mpizero.arrays import Borrowed, borrow
from mpizero.c10d.tensors import movable
from mpizero.comm import Work as Job
from mpizero.comm.progress import Queue
from mpizero.comm.raw import mpi
from mpizero.comm.waiting import poll, spins_for
from mpizero.comm.watch import story
from mpizero.errors import ArgumentError, CollectiveError, CollectiveTimeoutError, must_be

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

__all__ = ["Link", "Message"]

PIECE = 1 << 30
"""Bytes of the largest single message: a count of 2^31 fails on Open MPI 5.0."""
LONG = 64 << 10
"""Bytes above which MPI libraries wait for the receiver before they send, and need to be called meanwhile."""


class Link:
    """Hold the wire on which a group's messages go."""

    def __init__(self, mpi_comm: Any, seconds: float, uid: int = 0) -> None:
        """Use an mpi4py communicator.

        Args:
            mpi_comm: it; belongs to the group.
            seconds: after which a wait ends.
            uid: of the group's `Communicator`, by which time-outs say where its ranks are.
        """
        module = mpi()
        self.mpi = mpi_comm
        self.uid = uid
        self.seconds = seconds
        self.rank: int = mpi_comm.rank
        self.size: int = mpi_comm.size
        self.last_tag: int = module.COMM_WORLD.Get_attr(module.TAG_UB) - 1  # Open MPI tells it of this one alone
        """Of the caller's; the one above is the monitored barrier's."""
        self.spins = spins_for(self.size)
        self.in_background: bool = module.Query_thread() == module.THREAD_MULTIPLE
        self.kept: list[Any] = []
        """Messages that were given up: MPI may still write into their buffers."""

    def send(self, tensor: Tensor, peer: int, tag: int) -> Message:
        """Post a send of a tensor of any dtype and strides."""
        return self._post("send to", tensor, peer, tag)

    def receive(self, tensor: Tensor, peer: int | None, tag: int) -> Message:
        """Post a receive into a tensor, from one rank or, with None, from any."""
        return self._post("recv from", tensor, peer, tag)

    def _post(self, kind: str, tensor: Tensor, peer: int | None, tag: int) -> Message:
        if not 0 <= tag <= self.last_tag:
            raise ArgumentError(must_be("tag", f"0 to {self.last_tag}, which is as far as this MPI counts", tag))
        if peer is not None and not 0 <= peer < self.size:
            raise ArgumentError(must_be(f"the rank to {kind}", f"a rank of the group, 0 to {self.size - 1}", peer))
        message = Message(self, kind, tensor, peer, tag)
        if self.in_background and message.nbytes > LONG and not message.done():
            Queue().add(Job(iter((message,)), None))
        return message

    def close(self) -> None:
        """Free the communicator."""
        self.mpi.Free()

    def monitored_barrier(self, seconds: float, *, wait_all_ranks: bool) -> None:
        """Return once every rank has come; rank 0 names those that do not within `seconds`.

        Args:
            seconds: how long to wait; 0 takes the group's time-out.
            wait_all_ranks: whether to wait for all and name all that are missing, rather than the first.

        Raises:
            CollectiveTimeoutError: on rank 0 with the missing ranks, elsewhere because rank 0 does not answer.
        """
        seconds = seconds or self.seconds
        tag, until = self.last_tag + 1, time.monotonic() + seconds
        token = torch.zeros(1, dtype=torch.uint8)
        if self.rank:
            answer = Message(self, "recv from", token, 0, tag)
            Message(self, "send to", token.clone(), 0, tag).wait(seconds)
            # Rank 0 answers late where others are late: it gives up at the same time as this rank, and says who.
            answer.wait(2 * seconds)
            return
        missing: list[int] = []
        messages = {peer: Message(self, "recv from", token.clone(), peer, tag) for peer in range(1, self.size)}
        for peer, message in messages.items():
            left = max(0.0, until - time.monotonic())
            if missing and not wait_all_ranks:
                break
            if not message.within(left):
                missing.append(peer)
        if missing:
            self.kept += messages.values()
            who = ", ".join(map(str, missing)) + ("" if wait_all_ranks or len(missing) > 1 else " and perhaps others")
            text = f"monitored_barrier: waited {seconds:g} s for rank {who}"
            raise CollectiveTimeoutError(f"{text}\n{story(self.uid)}".strip())
        for peer in messages:
            Message(self, "send to", token, peer, tag).wait(seconds)


class Message:
    """Be one message under way."""

    def __init__(self, link: Link, kind: str, tensor: Tensor, peer: int | None, tag: int) -> None:
        """Post a message of a tensor's bytes."""
        self.link, self.kind, self.peer, self.tag = link, kind, peer, tag
        self.source = peer
        """The rank it comes from, once that is known."""
        self.error: BaseException | None = None
        self._lock = threading.Lock()
        self._over = False
        self._tensor = tensor
        self._host: Tensor | None = None if tensor.device.type == "cpu" else tensor.detach().cpu()
        receives = kind != "send to"
        plain = movable(tensor if self._host is None else self._host)
        self._borrowed: Borrowed | None = borrow(plain, "tensor", writable=receives)
        raw = self._borrowed.view.data.view(np.uint8)
        self.nbytes: int = raw.nbytes
        pieces = [raw[start : start + PIECE] for start in range(0, raw.nbytes, PIECE)] or [raw]
        self._module = mpi()
        self._requests: list[Any] = []
        self._expected: list[int] = []
        self._later = pieces[1:] if peer is None else []
        """Pieces that follow when the first has told where it comes from."""
        for piece in pieces[: len(pieces) - len(self._later)]:
            self._post(piece)

    def _post(self, piece: Any) -> None:
        buffer = [piece, piece.nbytes, self._module.BYTE]
        if self.kind == "send to":
            request = self.link.mpi.Isend(buffer, self.peer, self.tag)
        else:
            source = self._module.ANY_SOURCE if self.source is None else self.source
            request = self.link.mpi.Irecv(buffer, source, self.tag)
        self._requests.append(request)
        self._expected.append(piece.nbytes)

    def done(self) -> bool:
        """Return whether it is over; never blocks. The caller's thread and the progress thread may both ask."""
        if self._over:
            return True
        if not self._lock.acquire(blocking=False):
            return False
        try:
            return self._look()
        finally:
            self._lock.release()

    def _look(self) -> bool:
        if self._over:  # since the lock was free
            return True
        statuses = [self._module.Status() for _ in self._requests]
        try:
            if not self._module.Request.Testall(self._requests, statuses):
                return False
        except self._module.Exception as error:
            self.error = CollectiveError(
                f"{self._name()}: both ranks must give tensors of as many bytes (got {self.nbytes} here and a longer "
                f"message, or a broken connection: {error})"
            )
        if self.error is None and self.kind != "send to":
            self._check(statuses)
        if self.error is None and self._later:
            pieces, self._later = self._later, []
            self._requests, self._expected = [], []
            for piece in pieces:
                self._post(piece)
            return False
        if self.error is None and self._borrowed is not None and self.kind != "send to":
            self._borrowed.give_back()
        self._over = True
        self._borrowed = None
        return True

    def _check(self, statuses: list[Any]) -> None:
        self.source = statuses[0].Get_source()
        came = sum(status.Get_count(self._module.BYTE) for status in statuses)
        if came != sum(self._expected):
            self.error = CollectiveError(
                f"{self._name()}: both ranks must give tensors of as many bytes (got {self.nbytes} here and {came} "
                f"from rank {self.source})"
            )

    def within(self, seconds: float) -> bool:
        """Return True as soon as it is over, False after `seconds`."""
        return poll(self.done, seconds, self._name, spins=self.link.spins, needs=(self.link.uid, self._needs))

    def wait(self, seconds: float = 0.0) -> None:
        """Return when it is over.

        Args:
            seconds: how long to wait; 0 takes the group's time-out.

        Raises:
            CollectiveTimeoutError: after that.
            CollectiveError: where the other rank's tensor has another number of bytes.
        """
        if not self.within(seconds or self.link.seconds):
            raise self.late(seconds)
        if self.error is not None:
            raise self.error
        host, self._host = self._host, None
        if host is not None and self.kind != "send to":  # once: the tensor is the caller's from then on
            self._tensor.detach().copy_(host)

    def follow(self, then: Callable[[], None]) -> None:
        """Call `then` when it is over, in the progress thread, or after waiting for it where there can be none."""
        if not self.link.in_background:
            self.within(self.link.seconds)
            then()
            return

        def steps() -> Iterator[Any]:
            yield self
            then()

        Queue().add(Job(steps(), None))

    def block(self, done: Callable[[], bool] | None = None) -> bool:
        """Wait as `comm.waiting.drive` does."""
        return poll(done or self.done, self.link.seconds, self._name, spins=self.link.spins)

    def count(self, seconds: float) -> None:
        """Count nothing: statistics are of collectives."""

    def overdue(self, seconds: float) -> bool:
        """Return whether `seconds` is more than the group's time-out."""
        return seconds > self.link.seconds

    def settle(self, seconds: float, *, finished: bool) -> None:  # noqa: ARG002  (of the protocol)
        """Keep the buffers of a message that was given up."""
        if not finished:
            self.link.kept.append(self)

    def late(self, seconds: float = 0.0) -> CollectiveTimeoutError:
        """Say what was waited for."""
        self.link.kept.append(self)
        text = f"{self._name()}: waited {seconds or self.link.seconds:g} s for the other rank's call"
        text += "; does it make one, with the same group and tag?"
        return CollectiveTimeoutError(f"{text}\n{story(self.link.uid)}".strip())

    def _needs(self) -> list[int]:
        return [] if self.peer is None else [self.peer]

    def _name(self) -> str:
        peer = "any rank" if self.peer is None else f"rank {self.peer}"
        return f"rank {self.link.rank} of {self.link.size}: {self.kind} {peer}, tag {self.tag}"
