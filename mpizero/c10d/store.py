"""The store of a job: opened by rank 0, at an address that every host reaches, which is tried before it is told.

A host's own name may resolve to a loopback address on it, to an address behind a firewall, or to nothing elsewhere. So
rank 0 listens on all interfaces, and one rank of every host calls each of its names and addresses; a token tells that
it is rank 0 that answers there.
"""

from __future__ import annotations

import fcntl
import secrets
import socket
import struct
import threading
from contextlib import suppress
from functools import cache
from typing import TYPE_CHECKING, Any

from torch import distributed as dist

from mpizero.c10d.messages import Link
from mpizero.errors import CollectiveTimeoutError, LaunchError, must_be

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import timedelta

    from mpizero.comm import Communicator

__all__ = ["Answering", "addresses", "agreed", "calls", "open_store"]

_torch: Any = dist  # whose stores its type hints do not know
LOOPBACK = "127.0.0.1"
CALL_SECONDS = 3.0
"""For which a host waits for an address to answer: firewalls drop packets without a word."""
SIOCGIFADDR = 0x8915
"""Linux' request for an interface's IPv4 address."""


def open_store(comm: Communicator, timeout: timedelta) -> Any:
    """Return a `torch.distributed` store that all ranks of a communicator share. Collective.

    Args:
        comm: the ranks.
        timeout: of the store's waits, and how long to wait for a rank that does not come.

    Raises:
        CollectiveTimeoutError: where a rank does not come; rank 0 names it.
        LaunchError: on all ranks, where some host reaches no address of rank 0.
    """
    if comm.size == 1:
        return _torch.HashStore()
    _await_all(comm, timeout.total_seconds())
    several = len(set(comm.nodes)) > 1
    host = _reachable(comm) if several else LOOPBACK
    store: Any = None
    told: Any = None
    if comm.rank == 0:
        try:
            store = _torch.TCPStore(host, 0, None, is_master=True, timeout=timeout, wait_for_workers=False)
            told = store.port
        except RuntimeError as error:
            told = str(error)
    told = comm.mpi.bcast(told)
    if not isinstance(told, int):
        raise LaunchError(must_be("rank 0", "able to open a port for the store", told, "pass store="))
    if store is None:
        store = _torch.TCPStore(host, told, None, is_master=False, timeout=timeout, wait_for_workers=False)
    comm.mpi.Barrier()  # rank 0 may be through with its store before others have found it
    return store


def _await_all(comm: Communicator, seconds: float) -> None:
    """Return when all ranks have come here: what follows blocks in MPI, without a time-out."""
    link = Link(comm.mpi, seconds)
    try:
        link.monitored_barrier(seconds, wait_all_ranks=True)
    except CollectiveTimeoutError as error:
        _given_up().append(link)
        raise CollectiveTimeoutError(f"{error}; every rank of the MPI job must start torch.distributed") from error


@cache
def _given_up() -> list[Link]:
    """Return the links with messages into which MPI may still write."""
    return []


def _reachable(comm: Communicator) -> str:
    """Return the first address of rank 0 that a rank of every other host reaches. Collective."""
    listening = Answering() if comm.rank == 0 else None
    try:
        told = None if listening is None else (addresses(), listening.port, listening.token)
        candidates, port, token = comm.mpi.bcast(told)
        leads = comm.nodes.index(comm.nodes[comm.rank]) == comm.rank
        reached = [host for host in candidates if not leads or calls(host, port, token)]
        return agreed(candidates, comm.mpi.allgather(reached))
    finally:
        if listening is not None:
            listening.close()


def agreed(candidates: Sequence[str], reached: Sequence[Sequence[str]]) -> str:
    """Return the first candidate that is in every rank's list; raise LaunchError where there is none."""
    for host in candidates:
        if all(host in of_rank for of_rank in reached):
            return host
    rule = "one that all hosts can connect to"
    remedy = (
        "set MASTER_ADDR, MASTER_PORT, RANK and WORLD_SIZE and call dist.init_process_group('mpizero'), or pass "
        "store=, a FileStore on a shared file system for one"
    )
    raise LaunchError(must_be("an address of rank 0", rule, ", ".join(candidates), remedy))


def addresses() -> list[str]:
    """Return this host's names and IPv4 addresses but for loopback, those first that others are likely to know."""
    found = [socket.gethostname(), socket.getfqdn()]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # an interface without an address
                request = struct.pack("256s", name.encode()[:15])
                found.append(socket.inet_ntoa(fcntl.ioctl(probe.fileno(), SIOCGIFADDR, request)[20:24]))
    return list(dict.fromkeys(host for host in found if host and not host.startswith(("127.", "localhost"))))


def calls(host: str, port: int, token: bytes) -> bool:
    """Return whether the process that knows `token` answers at an address."""
    try:
        with socket.create_connection((host, port), timeout=CALL_SECONDS) as connection:
            return connection.recv(len(token), socket.MSG_WAITALL) == token
    except OSError:
        return False


class Answering:
    """Answer every call on a free port, of any interface, with a token."""

    def __init__(self) -> None:
        self.token = secrets.token_bytes(16)
        self._socket = socket.create_server(("", 0))
        self.port: int = self._socket.getsockname()[1]
        self._thread = threading.Thread(target=self._answer, name="mpizero store", daemon=True)
        self._thread.start()

    def _answer(self) -> None:
        with suppress(OSError):  # closed
            while True:
                connection, _ = self._socket.accept()
                with connection:
                    connection.sendall(self.token)

    def close(self) -> None:
        """End it."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join()
