"""Folders that the other packages themselves have written, imported."""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers import checkpoint_deepspeed, checkpoint_fsdp

from mpizero.checkpoint.folder import find, read_manifest
from mpizero.checkpoint.reader import Reader
from mpizero.cli import main

ROOT = Path(__file__).parents[2]
RANKS = 2


def written_by(script, folder, timeout):
    """Run a script in RANKS processes that meet in a folder."""
    lines = [[sys.executable, script.__file__, str(folder), str(rank), str(RANKS)] for rank in range(RANKS)]
    jobs = [subprocess.Popen(line, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) for line in lines]
    try:
        said = [job.communicate(timeout=timeout)[0].decode() for job in jobs]
    finally:
        for job in jobs:
            job.kill()
    assert [job.returncode for job in jobs] == [0] * RANKS, said


def imported(source, folder, *words):
    """Import a folder with a command; return the tensors by name, those that are tied too."""
    assert main(["checkpoint", "import", str(source), str(folder / "one"), "--trust", *words]) == 0
    manifest = read_manifest(find(folder))
    with Reader(find(folder), manifest) as reader:
        found = {
            key.removeprefix("model/"): reader.ask(stored, 0, stored.numel, stored.shape)
            for key, stored in manifest.tensors.items()
        }
        reader.fetch()
    return found | {alias: found[name] for alias, name in manifest.ties.items()}


def check_same(found, truth):
    assert found.keys() == truth.keys()
    # Frozen ones are in the precision of forward, which has the master's values.
    assert [name for name in truth if not torch.equal(found[name].to(truth[name].dtype), truth[name])] == []


@pytest.mark.slow
def test_from_fsdp2(tmp_path):
    """A folder that ranks of torch's fully_shard have saved, moments and all: the model out of it, to the bit."""
    written_by(checkpoint_fsdp, tmp_path, 100)
    check_same(imported(tmp_path / "dcp", tmp_path / "new", "--key", "model"), torch.load(tmp_path / "truth.pt"))


@pytest.mark.slow
@pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is not installed")
@pytest.mark.filterwarnings("default")
def test_from_deepspeed(tmp_path):
    """The true masters at ZeRO 1, 2 and 3: a tie, a frozen layer, a buffer; a folder, and one of its tags."""
    written_by(checkpoint_deepspeed, tmp_path, 400)
    for stage in (1, 2, 3):
        for precision in ("fp32", "bf16"):
            source = tmp_path / f"{stage}-{precision}"
            truth = torch.load(source / "truth.pt")
            check_same(imported(source, tmp_path / f"new-{source.name}"), truth)
    check_same(
        imported(tmp_path / "1-fp32" / "global_step3", tmp_path / "tag"), torch.load(tmp_path / "1-fp32/truth.pt")
    )


@pytest.mark.parametrize("place", ["ds", "ds/step"])
def test_what_its_reader_leaves_out(tmp_path, monkeypatch, capsys, place):
    """Frozen parameters come from the model's file, masters from the reader, here one that only plays DeepSpeed's."""
    step = tmp_path / "ds" / "step"
    step.mkdir(parents=True)
    (tmp_path / "ds" / "latest").write_text("step\n")
    module = {"a": torch.ones(2).bfloat16(), "b": torch.ones(2).bfloat16(), "frozen": torch.full((3,), 2.0)}
    torch.save({"module": module}, step / "mp_rank_00_model_states.pt")
    master = torch.tensor([1.0, 1.001])

    def read(folder, tag):
        assert Path(folder, tag).resolve() == step
        print("its progress")
        return {"a": master, "b": master}

    stand_in = SimpleNamespace(get_fp32_state_dict_from_zero_checkpoint=read)
    monkeypatch.setitem(sys.modules, "deepspeed.utils.zero_to_fp32", stand_in)
    check_same(imported(tmp_path / place, tmp_path / "new"), {"a": master, "b": master, "frozen": module["frozen"]})
    assert "its progress" not in capsys.readouterr().out


@pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is not installed")
@pytest.mark.filterwarnings("default")
def test_from_what_is_no_deepspeed(tmp_path, capsys):
    (tmp_path / "ds" / "step").mkdir(parents=True)
    (tmp_path / "ds" / "latest").write_text("step")
    (tmp_path / "ds" / "step" / "mp_rank_00_model_states.pt").write_bytes(b"x")
    assert main(["checkpoint", "import", str(tmp_path / "ds"), str(tmp_path / "new"), "--trust"]) == 1
    assert "ds must be readable (got " in capsys.readouterr().err
