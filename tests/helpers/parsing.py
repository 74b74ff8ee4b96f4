"""Whether the parsers of the programs in a command line take its arguments; nothing is started.

A program is begun in this process and ended as soon as its parser has taken the words, so that the parser is the real
one. `python -m helpers.parsing pip ...` stands for pip where a page's commands are run that would install something.
"""

import argparse
import io
import re
import shlex
import sys
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path

from helpers import commands

from mpizero.cli import main

ROOT = Path(__file__).parents[2]
PLAIN = {"cd", "source"}
"""Commands of the shell that take what comes."""
LAUNCHED = re.compile(r"(mpirun|srun) -n \d+ (python )?$")
"""What of a launcher may stand ahead of a program of ours: more would be taken on trust."""


class _Taken(BaseException):
    """Ends a program whose parser has taken its words; no `except Exception` may take it for an error."""


def refused(text):
    """Return what is wrong with the commands of a text, a line each: words that a parser refuses, or nobody parses."""
    return [problem for words in commands.lines(text) if (problem := _refused(words))]


def _refused(words):
    if words[0] in PLAIN:
        return ""
    if words[0] == "pip":
        return pip_refuses(words[1:])
    found = list(commands.programs(words))
    if not found:
        return f"nobody parses {shlex.join(words)}"
    program, rest = found[0]
    before = shlex.join(words[: len(words) - len(rest) - 1])
    if program != "bin/mzrun" and before and not LAUNCHED.fullmatch(f"{before} "):
        return f"nobody parses {before}"
    return next(filter(None, (_refuses(name, rest) for name, rest in found)), "")


def _refuses(program, words):
    """Return what a program's parser says to the words, "" where it takes them."""
    said = io.StringIO()
    with _ended_when_taken(), redirect_stdout(said), redirect_stderr(said):
        try:
            if program == "mpizero":
                main(words)
            elif program in commands.PASSES_ON or program.startswith("hpc/"):
                return commands.unknown(program, words)
            else:
                commands.run_here(program, words)
        except _Taken:
            return ""
        except SystemExit:
            pass
    return said.getvalue().strip() or f"{program} parses nothing"


@contextmanager
def _ended_when_taken():
    before = argparse.ArgumentParser.parse_args

    def parse_args(self, *args, **kwargs):
        before(self, *args, **kwargs)
        raise _Taken

    argparse.ArgumentParser.parse_args = parse_args
    try:
        yield
    finally:
        argparse.ArgumentParser.parse_args = before


def pip_refuses(words):
    """Return what pip says to its arguments, "" where it takes them and mpizero has the extras that they name."""
    from pip._internal.commands import commands_dict, create_command

    if not words or words[0] not in commands_dict:
        return f"pip has no {' '.join(words[:1])}"
    said = io.StringIO()
    with redirect_stderr(said):
        try:
            options, wanted = create_command(words[0]).parse_args(list(words[1:]))
        except SystemExit:
            return said.getvalue().strip()
    wanted = [*wanted, *getattr(options, "editables", ())]
    lost = [extra for name in wanted for extra in _extras(name) if extra not in known_extras()]
    return f"mpizero has no extra {', '.join(lost)}" if lost else ""


def _extras(wanted):
    found = re.fullmatch(r"(?:mpizero|.*[./])\[([\w,-]+)\]", wanted)
    return found.group(1).split(",") if found else []


def known_extras():
    """Return the names of mpizero's extras, from setup.cfg."""
    import configparser

    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    return set(config["options.extras_require"])


if __name__ == "__main__":
    problem = pip_refuses(sys.argv[2:])
    print(problem or f"taken: {shlex.join(sys.argv[1:])}", file=sys.stderr)
    sys.exit(1 if problem else 0)
