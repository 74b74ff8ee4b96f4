"""Files of a checkpoint: safetensors with checksums inside, written to the disk and read in parts.

A safetensors file is the length of a header (8 bytes), the header (JSON: each tensor's dtype, shape and place) and the
data. Its first tensor here, `checksums`, has the CRC-32 of every block of what follows it, so that a reader of a part
can check that part. The safetensors library reads these files; it is not used to write or read them here since it
neither syncs, nor checks, nor says how much it reads.

Source: the format as of https://github.com/huggingface/safetensors#format.
"""

from __future__ import annotations

import json
import os
import threading
import zlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from mpizero.checkpoint.failure import CheckpointError, listed
from mpizero.checkpoint.manifest import BLOCK, ITEMSIZE

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

    from typing_extensions import Self

    from mpizero.typing import Bytes

__all__ = ["CHECKSUMS", "Range", "ShardFile", "Want", "header_of", "read_header", "write_file"]

CHECKSUMS = "checksums"
CHUNK = 4 << 20
"""Bytes that are read at once, a multiple of BLOCK."""
LONGEST_HEADER = 100_000_000
"""As in the safetensors library."""


@dataclass(frozen=True, kw_only=True)
class Range:
    """Give a range of a tensor to be written."""

    key: str
    """With the elements, as `model/head.weight[0:640]`."""
    dtype: str
    data: Bytes = field(repr=False)
    """Its bytes."""


@dataclass(frozen=True, kw_only=True)
class Want:
    """Ask for some of the bytes of a stored range."""

    key: str
    begin: int
    """In bytes, within the stored range."""
    target: Bytes = field(repr=False)
    """Where they are to go; so many are read."""


def header_of(ranges: Sequence[tuple[str, str, tuple[int, ...], int]], metadata: dict[str, str]) -> bytes:
    """Return the beginning of a safetensors file: the header and its length.

    Args:
        ranges: the key, dtype, shape and bytes of each tensor, in the order in which their data follow.
        metadata: goes into the header's `__metadata__`.
    """
    content: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    position = 0
    for key, dtype, shape, nbytes in ranges:
        content[key] = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, position + nbytes]}
        position += nbytes
    text = json.dumps(content, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def read_header(file: Any, size: int) -> tuple[dict[str, Any], bytes]:
    """Return a safetensors file's header, parsed and as bytes; raise ValueError if there is none.

    Args:
        file: a descriptor.
        size: the file's bytes.
    """
    length = int.from_bytes(os.pread(file, 8, 0), "little")
    if not 2 <= length <= min(size - 8, LONGEST_HEADER):
        raise ValueError(f"a header of {length} bytes")
    text = os.pread(file, length, 8)
    content = json.loads(text)
    if not isinstance(content, dict):
        raise ValueError("a header that is no object")  # noqa: TRY004  (a fault of the file, not of an argument)
    return content, text


def write_file(path: Path, ranges: Sequence[Range]) -> tuple[int, int]:
    """Write ranges to a new file and have them on the disk; return the file's bytes and its header's CRC-32.

    Ranges of wide elements come first, so that all lie on multiples of their elements. Checksums are made meanwhile.

    Args:
        path: of the file, which must not exist.
        ranges: what to write.

    Raises:
        OSError: as the system gives it.
    """
    ordered = sorted(ranges, key=lambda one: -ITEMSIZE[one.dtype])
    payload = sum(one.data.nbytes for one in ordered)
    num_sums = -(-payload // BLOCK)
    num_sums += num_sums % 2  # elements of 8 bytes follow
    table = [(CHECKSUMS, "U32", (num_sums,), 4 * num_sums)]
    table += [(one.key, one.dtype, (one.data.nbytes // ITEMSIZE[one.dtype],), one.data.nbytes) for one in ordered]
    head = header_of(table, {"format": "pt", "block": str(BLOCK)})
    summing = _Summing([one.data for one in ordered], num_sums)
    with path.open("xb", buffering=1 << 20) as file:
        try:
            file.write(head)
            file.write(bytes(4 * num_sums))
            for one in ordered:
                file.write(one.data.data)
            file.flush()
            os.fdatasync(file.fileno())
        finally:
            sums = summing.wait()
        file.seek(len(head))
        file.write(sums.data)
        file.flush()
        os.fsync(file.fileno())
    return len(head) + 4 * num_sums + payload, zlib.crc32(head[8:])


class _Summing:
    """Make checksums in a thread: zlib and the system's calls both let go of the GIL, so that they go on together."""

    def __init__(self, parts: Sequence[Bytes], count: int) -> None:
        self._sums = np.zeros(count, np.uint32)
        self._thread = threading.Thread(target=self._run, args=(parts,), name="mpizero checksums")
        self._thread.start()

    def _run(self, parts: Sequence[Bytes]) -> None:
        self._sums = checksums(parts, self._sums.size)

    def wait(self) -> np.ndarray[Any, Any]:
        self._thread.join()
        return self._sums


def checksums(parts: Iterable[Bytes], count: int) -> np.ndarray[Any, Any]:
    """Return the CRC-32 of every BLOCK of the parts one behind the other, zeros after the last."""
    sums: list[int] = []
    running, filled = 0, 0
    crc32 = zlib.crc32
    for part in parts:
        data = part.data
        first = min(-filled % BLOCK, part.nbytes)  # what ends the block that earlier parts have begun
        running = crc32(data[:first], running)
        filled += first
        if first and filled % BLOCK == 0:
            sums.append(running)
        whole = first + (part.nbytes - first) // BLOCK * BLOCK
        sums += [crc32(data[at : at + BLOCK]) for at in range(first, whole, BLOCK)]
        if whole < part.nbytes:
            running = crc32(data[whole:])
        filled += part.nbytes - first
    if filled % BLOCK:
        sums.append(running)
    found = np.zeros(count, np.uint32)
    found[: len(sums)] = sums
    return found


class ShardFile:
    """Read parts of one file of a checkpoint, and check them."""

    def __init__(self, path: Path, nbytes: int, header: int, block: int = BLOCK) -> None:
        """Open the file and read its header.

        Args:
            path: of the file.
            nbytes: how large it must be.
            header: the CRC-32 that its header must have.
            block: bytes per checksum.

        Raises:
            CheckpointError: if it is missing, or not the file that was saved; names it.
        """
        self.path, self.block = path, block
        try:
            self._file = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise CheckpointError(f"{path} must be there to be read (got: {error.strerror})") from None
        try:
            self._read_header(nbytes, header)
        except BaseException:
            self.close()
            raise

    def _read_header(self, nbytes: int, header: int) -> None:
        size = os.fstat(self._file).st_size
        if size != nbytes:
            raise CheckpointError(f"{self.path} must have {nbytes} bytes (got {size}): it was cut off or replaced")
        try:
            content, text = read_header(self._file, size)
        except ValueError as error:
            raise CheckpointError(f"{self.path} must begin with its header (got {error}): it is damaged") from None
        if zlib.crc32(text) != header:
            raise CheckpointError(f"{self.path} must have the header that was saved (got another one): it is damaged")
        content.pop("__metadata__", None)
        self.places = {key: tuple(one["data_offsets"]) for key, one in content.items()}
        """Where each range lies, in bytes after the header."""
        self._sums_at = 8 + len(text)
        self._first = self.places[CHECKSUMS][1]
        self._stop = size - self._sums_at

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def verify(self) -> None:
        """Read and check everything; raises CheckpointError for the first block that is not what was saved."""
        for _ in self._blocks(self._first, self._stop):
            pass

    def read(self, wants: Iterable[Want]) -> None:
        """Read ranges into their targets, each byte once, whole blocks around them.

        Raises:
            CheckpointError: if a range is not in the file, or a block is not what was saved; names tensor and file.
        """
        placed: list[tuple[int, Bytes]] = []
        for want in wants:
            if want.key not in self.places:
                raise CheckpointError(f"{self.path} must hold {want.key} (got a file without): it is damaged")
            placed.append((self.places[want.key][0] + want.begin, want.target))
        placed.sort(key=lambda one: one[0])
        for run in self._runs(placed):
            waiting = iter(run)
            current = next(waiting, None)
            for low, data in self._blocks(run[0][0], run[-1][0] + run[-1][1].nbytes):
                while current is not None and current[0] < low + data.nbytes:
                    begin, target = current
                    start, stop = max(begin, low), min(begin + target.nbytes, low + data.nbytes)
                    target[start - begin : stop - begin] = data[start - low : stop - low]
                    if stop < begin + target.nbytes:
                        break
                    current = next(waiting, None)

    def _runs(self, placed: list[tuple[int, Bytes]]) -> Iterator[list[tuple[int, Bytes]]]:
        """Join wants whose blocks touch."""
        run: list[tuple[int, Bytes]] = []
        end = -1
        for begin, target in placed:
            if not target.nbytes:
                continue
            if run and (begin - self._first) // self.block > end:
                yield run
                run = []
            run.append((begin, target))
            end = (begin + target.nbytes - 1 - self._first) // self.block
        if run:
            yield run

    def _blocks(self, begin: int, stop: int) -> Iterator[tuple[int, Bytes]]:
        """Yield (place, bytes) of the whole blocks around a stretch of the data, checked, some at a time."""
        block, first = self.block, self._first
        low = first + (begin - first) // block * block
        stop = min(first + -(-(stop - first) // block) * block, self._stop)
        number = (low - first) // block
        count = -(-(stop - low) // block)
        sums = np.frombuffer(self._pread(4 * count, 4 * number), "<u4")
        done = 0
        while low < stop:
            data = np.frombuffer(self._pread(min(CHUNK, stop - low), low), np.uint8)
            for at in range(0, data.nbytes, block):
                if zlib.crc32(data.data[at : at + block]) != sums[done]:
                    raise CheckpointError(self._damage(low + at))
                done += 1
            yield low, data
            low += data.nbytes

    def _pread(self, nbytes: int, place: int) -> bytes:
        try:
            data = os.pread(self._file, nbytes, self._sums_at + place)
        except OSError as error:
            raise CheckpointError(f"{self.path} must be readable (got: {error.strerror})") from None
        if len(data) < nbytes:
            raise CheckpointError(f"{self.path} must be left alone while it is read (got fewer bytes than before)")
        return data

    def _damage(self, place: int) -> str:
        """Say which tensors have elements in the block that begins at `place`."""
        stop = place + self.block
        keys = [key for key, (low, high) in self.places.items() if low < stop and high > place and key != CHECKSUMS]
        return (
            f"the bytes of {listed(keys)} in {self.path} must be those that were saved (got others, by their "
            "checksum): the file is damaged, load an older checkpoint"
        )
