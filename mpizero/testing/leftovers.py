"""What a job that was killed leaves in memory: the files in /dev/shm that its MPI could not remove.

[Note: whose file] A file is removed only if it has a name as MPI libraries give, belongs to this user, was not there
before, has been there for a while, and no process has it mapped or open. All but the last keep the files of jobs that
start at this moment, and of programs that use /dev/shm as a disk, safe; the last keeps those of jobs that run.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    import pytest

__all__ = ["in_use", "pytest_sessionfinish", "pytest_sessionstart", "remove_left", "segments"]

FOLDER = Path("/dev/shm")  # noqa: S108  (it is memory, and nothing is written there)
PREFIXES = (
    "mpich_shm_",  # MPICH
    "Intel_MPI_",
    "shm-col-space",  # Intel MPI
    "vader_segment.",  # Open MPI 3 to 4
    "sm_segment.",  # Open MPI 5
    "osc_",  # Open MPI's windows
    "ucx_shm_",
    "psm2_shm",
    "psm3_shm",
    "mpizero-",
)
YOUNG = 2.0
"""Seconds for which a file is left alone: the process that makes one maps it at once, but not in one step."""

_before: set[str] = set()


def segments(folder: Path = FOLDER) -> set[str]:
    """Return the names of this user's files that an MPI has made in a folder; none where there is no such folder."""
    found = set()
    with contextlib.suppress(OSError):
        for path in folder.iterdir():
            with contextlib.suppress(OSError):
                if path.name.startswith(PREFIXES) and path.lstat().st_uid == os.getuid():
                    found.add(path.name)
    return found


def remove_left(before: Collection[str], folder: Path = FOLDER, *, young: float = YOUNG) -> list[str]:
    """Remove what jobs that are over have left; return the names. See [Note: whose file].

    Args:
        before: the names that stay, those of `segments()` before the jobs.
        folder: where to look.
        young: seconds for which a file is left alone.
    """
    left = segments(folder) - set(before)
    if not left:
        return []
    used = in_use(folder)
    removed = []
    for name in sorted(left):
        path = folder / name
        with contextlib.suppress(OSError):
            if str(path) not in used and time.time() - path.stat().st_mtime >= young:
                path.unlink()
                removed.append(name)
    return removed


def in_use(folder: Path = FOLDER) -> set[str]:
    """Return the paths in a folder that a process has mapped or open, as far as this user may see processes."""
    start = f"{folder}/"
    return {path for process in Path("/proc").glob("[0-9]*") for path in _used_by(process) if path.startswith(start)}


def _used_by(process: Path) -> Iterator[str]:
    """Yield the paths that a process has mapped or open; fewer where it ends meanwhile."""
    with contextlib.suppress(OSError):
        for line in (process / "maps").read_text(errors="replace").splitlines():
            yield line.partition("/")[1] + line.partition("/")[2]
    with contextlib.suppress(OSError):
        for number in (process / "fd").iterdir():
            with contextlib.suppress(OSError):
                yield str(number.readlink())


def pytest_sessionstart() -> None:
    """Note, as a plugin of pytest, what is there before the tests."""
    _before.update(segments())


def pytest_sessionfinish(session: pytest.Session) -> None:  # noqa: ARG001  (pytest goes by the name)
    """Remove what the jobs of the tests have left."""
    remove_left(_before)
