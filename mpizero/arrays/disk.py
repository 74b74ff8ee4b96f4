"""Memory on a disk: files without a name, read and written past the page cache where the file system allows it.

[Note: scratch files] A scratch file has no name in its folder (`O_TMPFILE`, or removed as soon as it is made): the
kernel gives its room back when the process ends, however it ends, no other job can touch or truncate it, and several
jobs may use one folder. `df` shows what it takes, `ls` and `du` do not. Its room is taken when it grows, so a disk that
fills up is an error there and not later.

What is in a region can be had in two ways, which see the same bytes: by `read` and `write`, unbuffered, in large
pieces, for what a step streams through; and as an array that is mapped, whose pages come when they are touched, for all
else. Linux keeps the two coherent, as long as they do not happen at once.
"""

from __future__ import annotations

import errno
import mmap
import os
import stat
import threading
import weakref
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np

from mpizero.errors import DiskError, must_be

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

__all__ = ["BLOCK", "Region", "Scratch", "page_aligned", "whole_blocks"]

BLOCK = 4096
"""Bytes of which addresses, places and lengths of unbuffered reads and writes have to be multiples."""


class Scratch:
    """Be a file of this process alone, which is gone with it; see [Note: scratch files]."""

    def __init__(self, folder: Path) -> None:
        """Make the file, empty.

        Args:
            folder: on a disk of this host, as `$TMPDIR`; several processes and jobs may use it.

        Raises:
            DiskError: if it is no folder, or cannot be written to.
        """
        self.folder = folder
        self.bytes_read = 0
        self.bytes_written = 0
        self._counting = threading.Lock()
        self._size = 0
        self._mapped: list[tuple[int, int]] = []
        """Addresses of what is mapped."""
        try:
            self._file = _nameless(folder)
        except OSError as error:
            remedy = "name a folder on a local disk, as os.environ['TMPDIR']"
            raise DiskError(must_be("offload path", "a folder that can be written to", f"{error}", remedy)) from error
        self._direct = _unbuffered(self._file)
        for file in {self._file, self._direct}:
            weakref.finalize(self, os.close, file)
        self.in_memory = _file_system_of(folder) in {"tmpfs", "ramfs"}
        """Whether the folder is no disk at all, as /dev/shm, and /tmp of diskless nodes."""
        self.unbuffered = self._direct != self._file
        """Whether reads and writes go past the page cache."""

    def grow(self, nbytes: int) -> Region:
        """Return a new region of zeros, its room taken.

        Raises:
            DiskError: if the disk has no room for it; says how much there is.
        """
        size = whole_blocks(nbytes)
        start, self._size = self._size, self._size + size
        if size:
            try:
                os.posix_fallocate(self._file, start, size)
            except OSError as error:
                self._size = start
                with suppress(OSError):
                    os.ftruncate(self._file, start)
                raise DiskError(f"{self.folder}: {self._no_room(size, error)}") from error
        return Region(self, start, nbytes)

    def _no_room(self, size: int, error: OSError) -> str:
        if error.errno not in {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}:
            return f"{size:,} bytes could not be taken ({error.strerror})"
        found = os.fstatvfs(self._file)
        return must_be("free bytes", f"at least {size:,}", found.f_bavail * found.f_frsize, "name another disk")

    def transfer(self, what: Callable[..., int], memory: memoryview, start: int, *, buffered: bool = False) -> None:
        """Read or write memory whole, at a place in the file; unbuffered where all is a multiple of `BLOCK`."""
        done = 0
        whole = not (
            buffered or start % BLOCK or len(memory) % BLOCK or np.frombuffer(memory, np.uint8).ctypes.data % BLOCK
        )
        file = self._direct if whole else self._file
        while done < len(memory):
            try:
                moved = what(file, [memory[done:]], start + done)
            except OSError as error:
                raise DiskError(f"{self.folder}: a scratch file failed at byte {start + done:,}: {error}") from error
            if moved <= 0:
                rule = f"{self._size:,} bytes long, as it was made"
                raise DiskError(must_be(f"{self.folder}: a scratch file", rule, f"its end at {start + done:,}"))
            done += moved
        with self._counting:
            if what is os.preadv:
                self.bytes_read += done
            else:
                self.bytes_written += done

    def map(self, start: int, nbytes: int) -> mmap.mmap:
        """Return memory that is a part of the file."""
        made = mmap.mmap(self._file, nbytes, offset=start)
        begin = np.frombuffer(made, np.uint8).ctypes.data
        self._mapped.append((begin, begin + nbytes))
        return made

    def holds(self, address: int) -> bool:
        """Return whether an address lies in memory that `map` has returned."""
        return any(start <= address < stop for start, stop in self._mapped)

    def expect(self, start: int, nbytes: int) -> None:
        """Have the kernel begin to read a part into the page cache."""
        os.posix_fadvise(self._file, start, nbytes, os.POSIX_FADV_WILLNEED)

    def forget(self, start: int, nbytes: int) -> None:
        """Let a part go from the page cache, as far as it is written."""
        os.posix_fadvise(self._file, start, nbytes, os.POSIX_FADV_DONTNEED)

    @property
    def nbytes(self) -> int:
        """Return the bytes of disk that it takes."""
        return self._size


class Region:
    """Be a part of a scratch file."""

    def __init__(self, scratch: Scratch, start: int, nbytes: int) -> None:
        self.scratch, self.nbytes = scratch, nbytes
        self._start = start
        self._map: mmap.mmap | None = None

    def read(self, into: memoryview, at: int = 0, *, buffered: bool = False) -> None:
        """Fill memory from byte `at` on, in any case through the page cache if `buffered`.

        Raises:
            DiskError: if the disk fails.
        """
        self.scratch.transfer(os.preadv, into, self._start + at, buffered=buffered)

    def write(self, data: memoryview, at: int = 0) -> None:
        """Write memory from byte `at` on.

        Raises:
            DiskError: if the disk fails.
        """
        self.scratch.transfer(os.pwritev, data, self._start + at)

    def array(self) -> np.ndarray[Any, Any]:
        """Return all bytes as an array whose memory is the file's."""
        if not self.nbytes:
            return np.empty(0, np.uint8)
        if self._map is None:
            self._map = self.scratch.map(self._start, whole_blocks(self.nbytes))
        return np.frombuffer(self._map, np.uint8, self.nbytes)

    def settle(self) -> None:
        """Take what has been touched of the array out of this process's memory; the file keeps it."""
        if self._map is not None:
            self._map.madvise(mmap.MADV_DONTNEED)

    def expect(self) -> None:
        """Say that it will be read soon, buffered."""
        self.scratch.expect(self._start, self.nbytes)

    def forget(self) -> None:
        """Say that it will not be read again soon."""
        self.scratch.forget(self._start, self.nbytes)


def whole_blocks(nbytes: int) -> int:
    """Return the bytes of the blocks that so many bytes lie in."""
    return -(-nbytes // BLOCK) * BLOCK


def page_aligned(nbytes: int) -> memoryview:
    """Return memory of this process that unbuffered reads and writes can use."""
    return memoryview(mmap.mmap(-1, max(whole_blocks(nbytes), BLOCK)))


def _nameless(folder: Path) -> int:
    """Open a new file for reading and writing that has no name.

    Raises:
        OSError: if it cannot be made.
    """
    if not stat.S_ISDIR(folder.stat().st_mode):
        raise NotADirectoryError(errno.ENOTDIR, "is no folder", str(folder))
    try:
        return os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:  # file systems over the network, and old ones
        if error.errno not in {errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT}:
            raise
    path = folder / f".mpizero-{os.getpid()}-{os.urandom(6).hex()}"
    file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
    path.unlink()
    return file


def _file_system_of(folder: Path) -> str:
    """Return the type of the file system that a folder is on, "" where the system does not tell."""
    best, found = "", ""
    path = os.path.realpath(folder)
    with suppress(OSError), open("/proc/self/mounts", encoding="utf-8", errors="replace") as mounts:  # noqa: PTH123
        for line in mounts:
            _, place, kind, *_ = line.split(" ")
            if len(place) >= len(best) and (path == place or path.startswith(place.rstrip("/") + "/")):
                best, found = place, kind
    return found


def _unbuffered(file: int) -> int:
    """Return another descriptor of the same file, past the page cache; the same one where there is no such thing."""
    with suppress(OSError):
        return os.open(f"/proc/self/fd/{file}", os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC)
    return file
