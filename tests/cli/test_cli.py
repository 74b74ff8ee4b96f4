"""The command `mpizero` itself: its subcommands, its help, its exit codes; and the tables that commands print."""

import subprocess
import sys
from pathlib import Path

import pytest

from mpizero.cli import COMMANDS, main
from mpizero.tables import aligned, ranges

ROOT = Path(__file__).parents[2]


def mpizero(*args):
    line = [sys.executable, "-m", "mpizero", *args]
    return subprocess.run(line, capture_output=True, text=True, timeout=100, check=False, cwd=ROOT)


def test_without_a_command_shows_help_and_exits_2():
    done = mpizero()
    assert done.returncode == 2
    assert all(name in done.stderr for name in COMMANDS)


def test_unknown_command_lists_the_known_ones():
    done = mpizero("doktor")
    assert done.returncode == 2
    assert "invalid choice: 'doktor'" in done.stderr
    assert all(name in done.stderr for name in COMMANDS)
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("words", [["--nothing"], ["--", "doctors"], ["doctor", "--nothing"], ["verify", "3"]])
def test_unknown_arguments_exit_2(words, capsys):
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    assert "usage: mpizero" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--help"], *([name, "--help"] for name in COMMANDS)])
def test_help(words, capsys):
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 0
    assert "usage: mpizero" in capsys.readouterr().out


def test_help_loads_no_mpi_and_no_torch():
    code = "import sys, mpizero.cli\ntry: mpizero.cli.main(['verify', '--help'])\nexcept SystemExit: pass\n"
    code += "print([name for name in ('mpi4py', 'torch') if name in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT, timeout=100
    )
    assert done.stdout.splitlines()[-1] == "[]"


def test_ranges():
    assert ranges([]) == ""
    assert ranges([3]) == "3"
    assert ranges([0, 1, 2, 5, 7, 8]) == "0-2,5,7-8"


def test_aligned():
    assert aligned([("a", "bb"), ("ccc", 1)], right=(1,)) == "a    bb\nccc   1"
    assert aligned([("a", "")]) == "a"
