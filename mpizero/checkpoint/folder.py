"""Folders that are there whole or not at all.

[Note: one rename] A checkpoint is written into a hidden folder beside the place where it is to be. Once every file of
it is on the disk, one rename makes it visible; then `latest`, a small file beside it, is replaced by another rename. So
whatever happens at whatever moment, a visible checkpoint is a whole one, and `latest` names one. A checkpoint of the
same name is swapped with the new one, where the system can (renameat2 of Linux), and put aside for an instant where it
cannot; `find` knows that place. Hidden folders begin with PREFIX. While a save goes on its folder's `owner` file is
locked by rank 0, and a lock does not outlive its process; so what is not locked was left by a job that was killed, and
the next save beside it removes it.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import shutil
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from mpizero.checkpoint.failure import CheckpointError
from mpizero.checkpoint.manifest import MANIFEST, Manifest, shard_name

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["LATEST", "PREFIX", "Saving", "find", "read_manifest", "thin_out"]

LATEST = "latest"
PREFIX = ".mpizero-"
SAVING, REPLACED, REMOVED = f"{PREFIX}saving-", f"{PREFIX}replaced-", f"{PREFIX}removed-"
OWNER = "owner"
DAY = 86400.0
AT_FDCWD, RENAME_EXCHANGE = -100, 2


class Saving:
    """Be the hidden folder of one save, on rank 0. See [Note: one rename]."""

    def __init__(self, path: Path, token: str) -> None:
        """Clean up after jobs that were killed, and make the folder.

        Args:
            path: where the checkpoint is to be.
            token: makes the hidden name another one than any before.

        Raises:
            CheckpointError: if something else than a checkpoint is there, or the folder cannot be made.
        """
        self.path = path
        self.hidden = hidden_path(path, token)
        if path.name == LATEST or path.name.startswith(PREFIX):
            raise CheckpointError(f"path must not be called {path.name!r} (got {path}): that name is taken")
        if (path.exists() or path.is_symlink()) and not _replaceable(path):
            remedy = "choose another name"
            raise CheckpointError(f"path must be free, or a checkpoint to be replaced (got {path}): {remedy}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            clean(path.parent)
            self.hidden.mkdir()
            self._lock = os.open(self.hidden / OWNER, os.O_CREAT | os.O_RDWR, 0o644)
        except OSError as error:
            raise CheckpointError(f"{path.parent} must be a folder to write in (got: {error.strerror})") from None
        with suppress(OSError):  # a file system without locks
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def commit(self, manifest: Manifest) -> None:
        """Make the checkpoint visible; raises OSError. All files must be on the disk."""
        _write(self.hidden / MANIFEST, manifest.dumps())
        sync_folder(self.hidden)
        if not self.path.exists():
            self.hidden.rename(self.path)
        elif not any(self.path.iterdir()) or not _exchange(self.hidden, self.path):
            aside = self.path.with_name(f"{REPLACED}{self.path.name}-{self.hidden.name.rpartition('-')[2]}")
            self.path.rename(aside)
            self.hidden.rename(self.path)
            _remove(aside)
        (self.path / OWNER).unlink()  # held until it is visible, or another save would take it for a dead one's
        sync_folder(self.path.parent)
        other = self.path.with_name(f"{SAVING}{LATEST}")
        _write(other, f"{self.path.name}\n")
        other.rename(self.path.with_name(LATEST))
        sync_folder(self.path.parent)
        self.end()

    def end(self) -> None:
        """Remove what is left: everything after a failure, else the checkpoint that was replaced."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1
        with suppress(OSError):
            _remove(self.hidden)


def hidden_path(path: Path, token: str) -> Path:
    """Return where a checkpoint is written before it is at `path`."""
    return path.with_name(f"{SAVING}{path.name}-{token}")


def find(path: Path) -> Path:
    """Return the folder of a checkpoint: `path`, or what `latest` in it names.

    Raises:
        CheckpointError: if there is none.
    """
    if (path / MANIFEST).is_file():
        return path
    latest = path / LATEST
    if latest.is_file():
        named = path / latest.read_text().strip()
        if (named / MANIFEST).is_file():
            return named
        path = named
    aside = sorted(path.parent.glob(f"{REPLACED}{path.name}-*")) if not path.exists() else []
    if aside and (aside[-1] / MANIFEST).is_file():
        return aside[-1]
    got = "no such folder" if not path.exists() else f"a folder without {MANIFEST}"
    got = got if not path.is_file() else "a file"
    raise CheckpointError(f"{path} must be a checkpoint, or a folder with one that {LATEST!r} names (got {got})")


def read_manifest(folder: Path) -> Manifest:
    """Return a checkpoint's manifest; raises CheckpointError."""
    try:
        text = (folder / MANIFEST).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{folder / MANIFEST} must be readable (got: {error})") from None
    return Manifest.loads(text, folder)


def thin_out(path: Path, keep: int) -> None:
    """Remove the oldest checkpoints beside the one at `path`, which was just saved, until `keep` whole ones are left.

    What is not whole does not count, and is left alone.
    """
    good = []
    for folder in path.parent.iterdir():
        if folder == path or folder.name.startswith(PREFIX) or not (folder / MANIFEST).is_file():
            continue
        with suppress(CheckpointError, OSError):
            manifest = read_manifest(folder)
            count = len(manifest.files)
            sizes = [(folder / shard_name(file, count)).stat().st_size for file in range(count)]
            if sizes == [one.nbytes for one in manifest.files]:
                good.append((manifest.saved, folder.name, folder))
    for _, _, folder in sorted(good, reverse=True)[keep - 1 :]:
        with suppress(OSError):
            _remove(folder)


def clean(parent: Path) -> None:
    """Remove what saves that were killed have left in a folder; see [Note: one rename]."""
    for left in parent.glob(f"{PREFIX}*"):
        with suppress(OSError):
            if left.name.startswith(REPLACED) and _put_back(left):
                continue
            if not (left.name.startswith(SAVING) and _is_owned(left)):
                _remove(left)


def _put_back(aside: Path) -> bool:
    """Return whether a checkpoint that was put aside had no successor, and is where it was again."""
    path = aside.with_name(aside.name.removeprefix(REPLACED).rpartition("-")[0])
    if path.exists():
        return False
    aside.rename(path)
    return True


def _is_owned(hidden: Path) -> bool:
    """Return whether some process is still writing a hidden folder."""
    try:
        file = os.open(hidden / OWNER, os.O_RDWR)
    except OSError:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # no locks here: what is old enough is taken for left
        return time.time() - hidden.stat().st_mtime < DAY
    finally:
        os.close(file)
    return False


def _replaceable(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink() and ((path / MANIFEST).is_file() or not any(path.iterdir()))


def _remove(folder: Path) -> None:
    """Remove a folder, under a name that nobody takes for a checkpoint."""
    if not folder.is_dir():
        folder.unlink(missing_ok=True)
        return
    if not folder.name.startswith(PREFIX):
        away = folder.with_name(f"{REMOVED}{folder.name}-{time.time_ns():x}")
        folder.rename(away)
        sync_folder(away.parent)
        folder = away
    shutil.rmtree(folder)


def _exchange(one: Path, other: Path) -> bool:
    """Swap two folders at once; return whether the system can."""
    function = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if function is None:
        return False
    flags = ctypes.c_uint(RENAME_EXCHANGE)
    return bool(function(AT_FDCWD, os.fsencode(one), AT_FDCWD, os.fsencode(other), flags) == 0)


def _write(path: Path, text: str) -> None:
    with path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Have a folder's names on the disk."""
    file = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
