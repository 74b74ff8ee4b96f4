"""The examples of torch.distributed: their losses are those of one process, at 4 ranks; a checkpoint loads at 2."""

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "distributed"
SAID = {
    "fsdp2": "FSDP2",
    "ddp": "DDP with bf16 gradients",
    "tp_fsdp2": "tensor parallelism x FSDP2",
    "pipeline": "pipeline of two stages, 1F1B",
    "experts": "an expert on each rank",
    "dcp": "saved with DCP",
}
TIMED_OUT = 124
LIMIT = 240
"""Seconds after which a job hangs for sure."""
SEVERAL = """
import runpy, sys
folder, names, sys.argv[1:] = sys.argv[1], sys.argv[2].split(","), sys.argv[3:]
sys.path[0] = folder
for name in names:
    runpy.run_path(f"{folder}/{name}.py", run_name="__main__")
"""
"""Runs examples one after the other in one job: torch's imports take longer than all of them."""

found = find_spec("torch")
pytestmark = pytest.mark.skipif(found is None, reason="no torch")
OLD = (
    found is not None and "record_event" not in Path(found.origin).with_name("cpu").joinpath("__init__.py").read_text()
)
DONE = [name for name in SAID if not OLD or "fully_shard" not in (FOLDER / f"{name}.py").read_text()]
"""All, but for those with FSDP2 where this torch's knows no CPU tensors, on any backend."""


def run(ranks, folder, names):
    script = folder / "several.py"
    script.write_text(SEVERAL)
    line = [sys.executable, ROOT / "bin" / "mzrun", "-n", ranks, "--timeout", LIMIT, script, FOLDER, ",".join(names)]
    line.append(folder / "checkpoint")
    return subprocess.run([*map(str, line)], capture_output=True, text=True, timeout=2 * LIMIT, check=False)


def loss(text, what, ranks):
    found = re.search(
        rf"^{re.escape(what)}, {ranks} ranks: loss ([\d.]+) -> ([\d.]+), one process within", text, re.MULTILINE
    )
    assert found, text
    return tuple(map(float, found.groups()))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("examples")


@pytest.fixture(scope="module")
def done(folder):
    return run(4, folder, DONE)


def test_all_examples_are_named_here_and_short():
    assert {path.stem for path in FOLDER.glob("*.py")} == {*SAID, "toy"}
    assert all(len(path.read_text().splitlines()) <= 100 for path in FOLDER.glob("*.py"))


@pytest.mark.parametrize("name", DONE)
def test_an_example_trains_as_one_process_does(done, name):
    try:
        first, last = loss(done.stdout, SAID[name], 4)
    except AssertionError:
        pytest.fail(f"{name} or one before it failed: {done.stderr}")
    assert last < first


def test_the_examples_end_with_nothing_to_say(done):
    assert (done.returncode, done.stderr) == (0, "")
    assert len(done.stdout.strip().splitlines()) == len(DONE)


@pytest.mark.skipif(OLD, reason="it uses FSDP2")
def test_a_checkpoint_of_4_ranks_loads_at_2(done, folder):
    _, before = loss(done.stdout, SAID["dcp"], 4)
    loaded = run(2, folder, ["dcp"])
    assert (loaded.returncode, loaded.stderr) == (0, "")
    _, after = loss(loaded.stdout, "loaded from DCP", 2)
    assert after < before


def test_losses_that_are_not_those_of_one_process_end_the_job(folder):
    """A rank that raises ends the job while another waits for it."""
    script = folder / "wrong.py"
    script.write_text(
        f"import sys; sys.path[0] = {str(FOLDER)!r}\n"
        "from torch import distributed as dist\n"
        "from toy import report\n"
        "import mpizero.c10d\n"
        "mpizero.c10d.init()\n"
        "if dist.get_rank() == 1:\n"
        "    report('wrong', [1.0, 0.5], [1.0, 0.501])\n"
        "dist.barrier()\n"
        "print('went on')\n"
    )
    line = [sys.executable, ROOT / "bin" / "mzrun", "-n", 2, "--timeout", LIMIT, script]
    wrong = subprocess.run(list(map(str, line)), capture_output=True, text=True, timeout=2 * LIMIT, check=False)
    assert wrong.returncode not in {0, TIMED_OUT}, wrong.stderr
    assert "AssertionError: wrong: losses [1.0, 0.5] are not those of one process, [1.0, 0.501]" in wrong.stderr
    assert "rank 1 of 2" in wrong.stderr
    assert "went on" not in wrong.stdout
