"""What killed jobs leave in /dev/shm is removed, and nothing else."""

import mmap
import os
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

from mpizero.comm import sweep
from mpizero.comm.launch import command, environment, find_launcher
from mpizero.testing.leftovers import in_use, remove_left, segments

ROOT = Path(__file__).parent.parent.parent
WAITS = """
import time
from mpi4py import MPI
MPI.COMM_WORLD.Barrier()
MPI.COMM_WORLD.rank or print("up", flush=True)
time.sleep(60)
"""


def made(folder, name, age=100):
    path = folder / name
    path.write_bytes(bytes(4096))
    os.utime(path, (time.time() - age,) * 2)
    return path


def test_only_what_nobody_uses_is_removed(tmp_path):
    made(tmp_path, "mpich_shm_before_0")
    before = segments(tmp_path)
    assert before == {"mpich_shm_before_0"}
    made(tmp_path, "mpich_shm_left_0")
    made(tmp_path, "sm_segment.host.0.1.0")
    made(tmp_path, "mpich_shm_young_0", age=-100)  # however long this test takes
    made(tmp_path, "somebody's data")
    with made(tmp_path, "mpich_shm_mapped_0").open("r+b") as file:
        mapped = mmap.mmap(file.fileno(), 4096)
    with made(tmp_path, "mpich_shm_open_0").open("rb"):
        assert in_use(tmp_path) == {str(tmp_path / name) for name in ("mpich_shm_mapped_0", "mpich_shm_open_0")}
        assert remove_left(before, tmp_path) == ["mpich_shm_left_0", "sm_segment.host.0.1.0"]
    mapped.close()
    assert remove_left(before, tmp_path) == ["mpich_shm_mapped_0", "mpich_shm_open_0"]
    assert {path.name for path in tmp_path.iterdir()} == {
        "mpich_shm_before_0",
        "mpich_shm_young_0",
        "somebody's data",
    }


def test_no_folder_is_nothing_left(tmp_path):
    assert remove_left((), tmp_path / "none") == []


def pythons():
    """This environment's and, where it has been set up, the one with MPICH."""
    return [path for path in (ROOT / ".venv-mpich" / "bin" / "python", Path(sys.executable)) if path.exists()]


def test_a_killed_mpich_job_leaves_nothing():
    launchers = [(python, find_launcher(str(python))) for python in pythons()]
    python, launcher = next(((p, found) for p, found in launchers if found.vendor == "mpich"), (None, None))
    if python is None:
        pytest.skip("no MPICH in .venv-mpich or in this environment")
    before, name = segments(), uuid.uuid4().hex
    line = command(launcher, 2, [str(python), "-c", WAITS])
    variables = environment(launcher, 2) | {sweep.MARK: name}
    with subprocess.Popen(line, env=variables, stdout=subprocess.PIPE, start_new_session=True) as job:
        try:
            assert job.stdout.readline().strip() == b"up"
            made_by_job = segments() - before
            assert made_by_job, "MPICH shares no file any more: nothing to test"
            assert not made_by_job & set(remove_left(before, young=0))
        finally:
            sweep.end(sweep.members(name))
    assert not sweep.members(name)
    assert made_by_job & segments(), "MPICH cleans up after a kill: nothing to test"
    remove_left(before, young=0)
    assert not made_by_job & segments()
