"""What README, docs and hpc say exists: names, arguments, flags, variables, files; commands that are cheap are run."""

import importlib
import inspect
import os
import re
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from helpers import commands, dumps
from helpers.pages import MARK, ROOT, SHELL, SHOWN, blocks, calls, inline, marks, pages, shell_blocks
from torch import nn

import mpizero as mz
from mpizero.cli import main

CODE = ("mpizero", "bin", "benchmarks", "hpc")
NAMED_FILE = re.compile(r"^(?:mpizero|tests|docs|examples|benchmarks|hpc|bin)/[\w./-]+\w$")
# Everything is read and resolved, and no pages are written: bin/docs does that, in half as long again.
SITE = ("-W", "--keep-going", "-q", "-c", str(ROOT / "docs"), "-b", "dummy")
AS_ROOT = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
}
"""What a plain mpirun of Open MPI needs on a machine for tests: root may start jobs, of more ranks than cores."""
LIMIT = 60


def text_of(page):
    return (ROOT / page).read_text()


def code_of(page):
    """All code of a page: blocks, and what stands within lines."""
    return [(block.line, block.text) for block in blocks(page)] + inline(page)


@pytest.mark.parametrize("page", pages())
def test_every_block_says_what_it_is(page):
    """What has no language would be run by nobody, and a mark that does not parse would hide nothing."""
    odd = [str(block) for block in blocks(page) if block.language not in {"python", *SHELL, *SHOWN}]
    assert odd == []
    assert [mark for mark in marks(page) if not MARK.search(mark)] == []
    assert len([block for block in blocks(page) if block.reason]) == len(marks(page))


@pytest.mark.parametrize("page", pages())
def test_reasons_name_tests_that_exist(page):
    for block in blocks(page):
        for name in re.findall(r"tests/[\w/.]+", block.reason):
            assert (ROOT / name.rstrip(".")).exists(), f"{block}: {name}"


@pytest.mark.parametrize("page", pages())
def test_python_that_is_not_run_compiles(page):
    for block in blocks(page):
        if block.language == "python":
            compile(block.text, str(block), "exec", dont_inherit=True)


@pytest.mark.parametrize("page", pages())
def test_names_exist(page):
    lost = [
        f"{page}:{line}: {name}"
        for line, text in code_of(page)
        for name in re.findall(r"(?<![\w.])(?:mz|mpizero)(?:\.[A-Za-z_]\w*)+", text)
        if not exists(name)
    ]
    assert lost == []


def exists(name):
    """Whether a dotted name that begins with mz or mpizero can be had; files of the package are no names."""
    words = name.replace("mz", "mpizero", 1).split(".") if name.startswith("mz.") else name.split(".")
    value = mz
    for at, word in enumerate(words[1:], 2):
        if not hasattr(value, word):
            try:
                importlib.import_module(".".join(words[:at]))
            except ImportError:
                return False
        value = sys.modules.get(".".join(words[:at])) or getattr(value, word)
    return True


@pytest.mark.parametrize("page", pages())
def test_arguments_exist(page):
    lost = [
        f"{page}:{line}: {name}({keyword}=)"
        for line, text in code_of(page)
        for name, keywords in calls(text)
        for keyword in keywords
        if not takes(name, keyword)
    ]
    assert lost == []


def takes(name, keyword):
    value = mz
    for word in name.split("."):
        value = getattr(value, word, None)
    if value is None:
        return False
    parameters = inspect.signature(value).parameters
    return keyword in parameters or any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values())


@pytest.mark.parametrize("page", pages())
def test_commands_and_flags_exist(page):
    texts = [(block.line, block.text) for block in blocks(page) if block.language in SHELL]
    texts += [(block.line, typed(block.text)) for block in blocks(page) if block.language == "text"]
    wrong = [
        f"{page}:{line}: {problem}"
        for line, text in [*texts, *inline(page)]
        for words in commands.lines(text)
        for program, rest in commands.programs(words)
        if (problem := commands.unknown(program, rest))
    ]
    assert wrong == []


@pytest.mark.parametrize("page", pages())
def test_variables_are_read_by_the_code(page):
    names = set(re.findall(r"\bMPIZERO_[A-Z][A-Z_]*[A-Z]\b", text_of(page)))
    assert names - known_variables() == set()


def typed(text):
    """The lines of a shown session that somebody typed."""
    return "\n".join(line for line in text.splitlines() if line.startswith("$ "))


@cache
def known_variables():
    files = [path for folder in CODE for path in (ROOT / folder).rglob("*") if path.is_file()]
    text = "".join(path.read_text() for path in files if path.suffix in {"", ".py", ".sh", ".sbatch"})
    return set(re.findall(r"MPIZERO_[A-Z_]+[A-Z]", text))


def test_every_setting_is_told():
    source = (ROOT / "mpizero" / "settings.py").read_text()
    told = " ".join(text_of(page) for page in pages())
    assert [name for name in set(re.findall(r"`(MPIZERO_\w+)`", source)) if name not in told] == ["MPIZERO_TTY"]


@pytest.mark.parametrize("page", pages())
def test_files_exist(page):
    lost = [f"{line}: {text}" for line, text in inline(page) if NAMED_FILE.match(text) and not there(text)]
    assert lost == []


def there(name):
    """Whether a file is in the checkout; a name with capitals, such as NNNN-title.md, stands for any."""
    return (ROOT / name).exists() or re.search(r"NNNN|NAME|/N\.", name) is not None


@pytest.fixture(scope="module")
def scratch(tmp_path_factory):
    """A folder with what commands on the pages read: a checkpoint, `run`, and the flight records of two ranks."""
    folder = tmp_path_factory.mktemp("pages")
    for place in (folder / "records", folder / "dumps", folder / "other"):
        for rank in range(2):
            dumps.dump(place, rank, [("all_reduce(4 elements of float32)", 1.0, 1.1)], size=2)
    (folder / "other" / "000000.record").rename(folder / "other" / "x.record")
    model = mz.shard(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), stage=0)
    mz.save(folder / "run" / "step-1", model)
    return folder


@pytest.mark.parametrize("block", shell_blocks(), ids=map(str, shell_blocks()))
def test_commands_run(block, scratch, monkeypatch):
    monkeypatch.chdir(scratch)
    monkeypatch.setenv("MPIZERO_RECORD", str(scratch / "records"))
    found = commands.lines(block.text)
    if all(words[0] == "mpizero" for words in found):  # without a process for each
        for words in found:
            assert main(words[1:]) == 0, shlex.join(words)
        return
    done = subprocess.run(["/bin/bash", "-euc", block.text], **at_the_root(scratch), timeout=LIMIT, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def at_the_root(scratch):
    """How a block is run as if it were typed in a checkout whose package is installed."""
    tools = scratch / "tools"
    tools.mkdir(exist_ok=True)
    for name, line in {"mpizero": "-m mpizero", "python": ""}.items():
        (tools / name).write_text(f'#!/bin/sh\nexec {sys.executable} {line} "$@"\n')
        (tools / name).chmod(0o755)
    for name in ("bin", "examples", "benchmarks", "hpc", "tests"):
        if (ROOT / name).exists() and not (scratch / name).exists():
            (scratch / name).symlink_to(ROOT / name)
    path = os.pathsep.join([str(tools), str(Path(sys.executable).parent), os.environ["PATH"]])
    env = {**os.environ, **AS_ROOT, "PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return {"cwd": scratch, "env": env, "capture_output": True, "text": True}


def test_the_site_has_no_loose_ends(tmp_path):
    """Sphinx takes every link and anchor that leads nowhere, and every page that is in no list, for an error."""
    if importlib.util.find_spec("sphinx") is None:
        pytest.skip("the site needs the extra docs")
    line = [sys.executable, "-m", "sphinx", *SITE, "-d", str(tmp_path / "doctrees"), str(ROOT), str(tmp_path / "site")]
    done = subprocess.run(line, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
