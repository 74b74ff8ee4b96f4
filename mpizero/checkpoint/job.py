"""One save, from what is to be written to the folder that becomes visible; knows no communicator."""

from __future__ import annotations

import socket
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import mpizero
from mpizero.checkpoint.failure import CheckpointError
from mpizero.checkpoint.files import Range, write_file
from mpizero.checkpoint.folder import Saving, thin_out
from mpizero.checkpoint.manifest import FileFacts, Manifest, shard_name
from mpizero.checkpoint.spaces import Space, Stored

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

__all__ = ["Job"]


@dataclass(kw_only=True)
class Job:
    """Hold what one rank does for one save."""

    file: int
    """The number of this rank's file."""
    ranges: list[Range] = field(repr=False)
    spaces: tuple[Space, ...]
    tensors: list[Stored] = field(repr=False)
    ties: dict[str, str]
    optimizer: Any
    extra: Any
    extra_seen: list[str]
    """What of `extra` has to be the same on all ranks."""
    saved: float
    keep_last: int | None = None
    saving: Saving | None = None
    """The hidden folder, on rank 0."""
    hidden: Path | None = None
    written: tuple[int, int] = (0, 0)
    """The bytes of this rank's file and its header's checksum."""

    @property
    def files(self) -> int:
        """Return the number of files."""
        return self.spaces[0].shards * self.spaces[0].copies if self.spaces else 1

    @property
    def plan(self) -> list[Any]:
        """Return what of the plan has to be the same on all ranks."""
        return [repr(self.spaces), *((one.key, one.dtype, one.shape, one.space) for one in self.tensors)]

    def write(self) -> str:
        """Write this rank's file; return what went wrong, "" for nothing."""
        assert self.hidden is not None  # noqa: S101  (set before anything is written)
        path = self.hidden / shard_name(self.file, self.files)
        try:
            self.written = write_file(path, self.ranges)
        except OSError as error:
            path.unlink(missing_ok=True)
            remedy = "the file system must be one that all hosts share" if not self.hidden.exists() else ""
            got = f"{error.strerror} on {socket.gethostname()}"
            return f"{self.hidden.parent} must take {path.name} (got: {got})" + (f": {remedy}" if remedy else "")
        return ""

    def commit(self, table: Iterable[list[int]]) -> str:
        """Make the checkpoint visible, on rank 0; return what went wrong, "" for nothing.

        Args:
            table: for every rank the number of its file, the rank, the file's bytes and its header's checksum.
        """
        if self.saving is None:
            return ""
        facts = {file: FileFacts(rank=rank, nbytes=nbytes, header=header) for file, rank, nbytes, header in table}
        tensors = [
            one if one.space is not None else Stored(key=one.key, dtype=one.dtype, shape=one.shape, offset=self.file)
            for one in self.tensors
        ]
        manifest = Manifest(
            spaces=self.spaces,
            tensors={one.key: one for one in tensors},
            files=tuple(facts[file] for file in sorted(facts)),
            ties=self.ties,
            optimizer=self.optimizer,
            extra=self.extra,
            saved=self.saved,
            version=mpizero.__version__,
        )
        try:
            self.saving.commit(manifest)
            if self.keep_last is not None:
                thin_out(self.saving.path, self.keep_last)
        except (OSError, CheckpointError) as error:
            return f"{self.saving.path} must be a place to save at (got: {error})"
        return ""

    def end(self) -> None:
        """Remove what is left of the hidden folder."""
        if self.saving is not None:
            self.saving.end()
