"""`mpizero checkpoint`, and jobs under mpirun that are killed and resumed."""

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from helpers import checkpoint_job
from safetensors import safe_open
from safetensors.torch import load_file, load_model, save_file, save_model

import mpizero as mz
from mpizero.checkpoint.folder import LATEST, read_manifest
from mpizero.checkpoint.importing import import_checkpoint
from mpizero.checkpoint.manifest import shard_name
from mpizero.cli import main
from mpizero.comm import run_loopback
from mpizero.testing.models import Block, awkward_model, token_loss, tokens

ROOT = Path(__file__).parents[2]
MIB = 1 << 20
pytestmark = pytest.mark.filterwarnings("ignore:stage 3 with one unit")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder with a checkpoint of three ranks, and the model's values."""
    folder = tmp_path_factory.mktemp("checkpoints")
    plain = awkward_model(0)  # once: threads that seed torch's one generator would draw from each other's numbers

    def body(comm):
        model = mz.shard(deepcopy(plain), comm, stage=3, units={Block})
        optimizer = torch.optim.AdamW(model.parameters())
        token_loss(model, tokens(0, comm.rank, 2)).backward()
        optimizer.step()
        mz.save(folder / "one", model, optimizer, extra={"step": 1})
        return mz.full_parameters(model)

    return folder, run_loopback(3, body)[0]


def said(capsys, *words, code=0):
    assert main(["checkpoint", *map(str, words)]) == code
    return capsys.readouterr()


def test_show(saved, capsys):
    folder, _ = saved
    text = said(capsys, "show", folder, "--verify").out
    assert re.search(r"ranks +3\n +model +[\d.]+ KiB in 41 tensors, 1 ties\n", text)
    assert re.search(r"optimizer +[\d.]+ KiB in 70 tensors, AdamW\n +extra +step\n", text)
    assert re.search(r"model/embedding.weight +F32 +61x24 +head.weight", text)
    assert "and 91 more: --all" in text
    assert "all checksums match" in text
    assert "optimizer/exp_avg_sq/head.bias" in said(capsys, "show", folder / "one", "--all").out


def test_show_finds_damage(saved, capsys, tmp_path):
    copied = tmp_path / "two"
    subprocess.run(["cp", "-r", saved[0] / "one", copied], check=True)  # noqa: S607
    path = copied / shard_name(1, 3)
    content = bytearray(path.read_bytes())
    content[-1] ^= 4
    path.write_bytes(content)
    (copied / shard_name(2, 3)).unlink()
    text = said(capsys, "show", copied, "--verify", code=1).out
    assert re.search(r"in .*shard-00002-of-00003.safetensors must be those that were saved", text)
    assert "shard-00003-of-00003.safetensors must be there" in text
    assert "must be a checkpoint" in said(capsys, "show", tmp_path, code=1).err


def test_merged_and_read_by_safetensors_alone(saved, capsys, tmp_path):
    """Case C7: frozen and tied weights are there, exact, with the tie recorded; safetensors' own loader takes them."""
    folder, full = saved
    out = tmp_path / "whole.safetensors"
    assert "wrote 41 tensors" in said(capsys, "merge", folder, out).out
    found = load_file(out)
    with safe_open(out, "pt") as file:
        assert file.metadata() == {"format": "pt", "head.weight": "embedding.weight"}
    assert found.keys() | {"head.weight"} == awkward_model(1).state_dict().keys()
    for name, value in found.items():
        assert torch.equal(value, full[name] if name in full else awkward_model(0).get_buffer(name))
    other = awkward_model(3)
    load_model(other, out)
    assert torch.equal(other.head.weight, full["head.weight"])


def test_merged_in_several_files(saved, capsys, tmp_path):
    """The layout that transformers reads: an index, and files of at most the size."""
    folder, full = saved
    said(capsys, "merge", folder, tmp_path / "hf", "--max-shard-size", "16K")
    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert files == [f"model-{n + 1:05}-of-{len(files):05}.safetensors" for n in range(len(files))]
    found = {}
    for name in files:
        part = load_file(tmp_path / "hf" / name)
        assert {key for key, file in index["weight_map"].items() if file == name} == part.keys()
        assert sum(value.nbytes for value in part.values()) <= 16384
        found |= part
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in found.values())
    assert all(torch.equal(value, full.get(name, value)) for name, value in found.items())
    said(capsys, "merge", folder, tmp_path / "small", "--max-shard-size", "1G")
    assert [path.name for path in (tmp_path / "small").iterdir()] == ["model.safetensors"]
    assert "must be a place to write at" in said(capsys, "merge", folder, "/sys/mpizero/x", code=1).err


PEAK = """
import resource, sys
from pathlib import Path
from mpizero.checkpoint.exporting import merge
merge(Path(sys.argv[1]) / "warm", Path(sys.argv[2]))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
merge(Path(sys.argv[1]) / "large", Path(sys.argv[2]))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.parametrize("mib", [200, pytest.param(1024, marks=pytest.mark.slow)])
def test_merge_streams(tmp_path, mib):
    """Case C3: at its peak it holds less than a parameter and 64 MiB more, in fact a few MiB."""
    each = mib // 4 * MIB

    def state(nbytes):
        return {f"{n}.weight": torch.zeros(nbytes // 4096, 1024) for n in range(4)}

    for name, nbytes in (("large", each), ("warm", 4096)):
        save_file(state(nbytes), tmp_path / "source.safetensors")
        import_checkpoint(tmp_path / "source.safetensors", tmp_path / name)
    line = [sys.executable, "-c", PEAK, tmp_path, tmp_path / "out.safetensors"]
    done = subprocess.run(line, capture_output=True, text=True, check=True, cwd=ROOT, timeout=100)
    assert (tmp_path / "out.safetensors").stat().st_size > 4 * each
    assert int(done.stdout) * 1024 < 32 * MIB


def loaded(folder):
    def body(comm):
        model = mz.shard(awkward_model(8), comm, stage=2, units={Block})
        mz.load(folder, model)
        return mz.full_parameters(model)

    return run_loopback(2, body)[0]


@pytest.mark.parametrize("kind", ["safetensors", "huggingface", "torch", "nested"])
def test_import(saved, capsys, tmp_path, kind):
    """What other tools have saved loads into sharded models, ties and all."""
    model = awkward_model(5)
    source, more = tmp_path / "source.pt", []
    if kind == "safetensors":
        source = tmp_path / "source.safetensors"
        save_model(model, source)
    elif kind == "huggingface":
        source = tmp_path / "hf"
        said(capsys, "merge", saved[0], source, "--max-shard-size", "16K")
        with torch.no_grad():
            for name, param in model.named_parameters(remove_duplicate=False):
                param.copy_(saved[1][name])
    elif kind == "torch":
        torch.save(model.state_dict(), source)
    else:
        torch.save({"a": {"model": model.state_dict()}, "step": 3}, source)
        assert "there is a, step" in said(capsys, "import", source, tmp_path / "new", "--key", "b", code=1).err
        assert "(got a, step): say where" in said(capsys, "import", source, tmp_path / "new", code=1).err
        more = ["--key", "a.model"]
    assert "imported 41 tensors" in said(capsys, "import", source, tmp_path / "new", *more).out
    found = loaded(tmp_path)
    for name, param in model.named_parameters(remove_duplicate=False):
        assert torch.equal(found[name], param), name


def test_import_from_torch_distributed(capsys, tmp_path):
    """Only where it is to be trusted: its metadata are a pickle."""
    from torch.distributed import checkpoint

    model = awkward_model(5)
    with pytest.warns(UserWarning, match="uninitialized"):
        checkpoint.save({"model": model.state_dict()}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert "pass --trust" in said(capsys, "import", tmp_path / "dcp", tmp_path / "new", "--key", "model", code=1).err
    said(capsys, "import", tmp_path / "dcp", tmp_path / "new", "--key", "model", "--trust")
    found = loaded(tmp_path)
    assert all(torch.equal(found[name], param) for name, param in model.named_parameters())


class Evil:
    def __reduce__(self):
        return os.system, ("touch /tmp/mpizero-evil",)


def test_import_refuses(capsys, tmp_path):
    """Code is not run, and what is no file of weights is said to be none."""
    torch.save({"x": Evil()}, tmp_path / "evil.pt")
    assert "weights_only=True" in said(capsys, "import", tmp_path / "evil.pt", tmp_path / "new", code=1).err
    (tmp_path / "bad.safetensors").write_bytes(b"\xff" * 40)
    assert "must be readable" in said(capsys, "import", tmp_path / "bad.safetensors", tmp_path / "new", code=1).err
    (tmp_path / "empty").mkdir()
    assert "one of model.safetensors" in said(capsys, "import", tmp_path / "empty", tmp_path / "new", code=1).err
    assert "that exists" in said(capsys, "import", tmp_path / "none", tmp_path / "new", code=1).err
    (tmp_path / "ds").mkdir()
    (tmp_path / "ds" / "latest").write_text("step1")
    assert "pass --trust" in said(capsys, "import", tmp_path / "ds", tmp_path / "new", code=1).err
    assert (
        "deepspeed must be installed" in said(capsys, "import", tmp_path / "ds", tmp_path / "x", "--trust", code=1).err
    )
    assert not (tmp_path / "new").exists()


def job(ranks, *words):
    line = [sys.executable, ROOT / "bin" / "mzrun", "-n", ranks, *words]
    return subprocess.Popen(list(map(str, line)), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def ranks_of(word):
    """The processes of the ranks of a job that has `word` on its command line."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            line, environment = (path / "cmdline").read_bytes(), (path / "environ").read_bytes()
        except OSError:
            continue
        if str(word).encode() in line and b"OMPI_COMM_WORLD_RANK=" in environment and b"mzrun" not in line:
            found.append(int(path.name))
    return sorted(found)


def kill_one(process, word, draw):
    ranks = ranks_of(word)
    assert ranks
    os.kill(draw.choice(ranks), signal.SIGKILL)
    output, _ = process.communicate(timeout=60)
    assert process.returncode != 0
    return output


def kills(folder, ranks, count):
    draw = random.Random(7)
    for _ in range(count):
        process = job(ranks, checkpoint_job.__file__, folder)
        first = process.stdout.readline()
        assert first.strip().isdecimal(), first + process.stdout.read()
        time.sleep(draw.uniform(0, 0.3))
        lines = re.findall(r"^\d+$", first + kill_one(process, folder, draw), re.MULTILINE)
        step = checkpoint_job.check(folder)
        assert int(lines[-1]) <= step <= int(lines[-1]) + 2


def test_ranks_killed_under_mpirun(tmp_path):
    """Case C9."""
    kills(tmp_path / "kills", 2, 1)


@pytest.mark.slow
def test_a_hundred_ranks_killed_under_mpirun(tmp_path):
    """Case C9."""
    kills(tmp_path / "kills", 3, 100)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    for number in range(3):
        (folder / f"{number}.txt").write_text("the quick brown fox jumps over the lazy dog. " * 40)
    return folder


def example(ranks, text, folder, steps, *words):
    line = ["examples/train_gpt.py", "--data", text, "--save", folder, "--steps", steps, "--every", 1, *words]
    return job(ranks, *line, "--batch", 4 // ranks, "--exact", 4)


@pytest.mark.slow
@pytest.mark.parametrize(("first", "second"), [(2, 4), (4, 1)])
def test_the_example_resumes_on_other_ranks(tmp_path, text, first, second):
    """With exact=True bit for bit as the run that was never killed, moments and all."""
    with example(1, text, tmp_path / "whole", 4) as process:
        output, _ = process.communicate(timeout=100)
        assert process.returncode == 0, output
    with example(first, text, tmp_path / "parts", 1000) as process:
        while not (tmp_path / "parts" / LATEST).exists():
            assert process.poll() is None, process.stdout.read()
            time.sleep(0.05)
        kill_one(process, tmp_path / "parts", random.Random(1))
    begun = read_manifest(tmp_path / "parts" / (tmp_path / "parts" / LATEST).read_text().strip()).extra["step"]
    assert begun < 4, "killed too late"
    with example(second, text, tmp_path / "parts", 4, "--resume") as process:
        output, _ = process.communicate(timeout=100)
        assert process.returncode == 0, output
    assert f"{second} ranks, {4 - begun} steps" in output
    values = []
    for name in ("whole", "parts"):
        path = tmp_path / name / "step-4"
        manifest = read_manifest(path)
        assert manifest.extra == {"step": 4, "batch": 4}
        with checkpoint_job.Reader(path, manifest) as reader:
            found = {key: reader.ask(stored, 0, stored.numel) for key, stored in manifest.tensors.items()}
            reader.fetch()
        values.append(found)
    one, other = values
    assert one.keys() == other.keys()
    assert [key for key in one if not torch.equal(one[key], other[key])] == []
    assert len(one) == 3 * 53
