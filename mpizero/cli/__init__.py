"""The command `mpizero`: one module of this package per subcommand, loaded when it is called.

A module gives `configure(parser)`, which adds its arguments, and `run(options)`, which returns the exit code.
"""

from __future__ import annotations

import argparse
import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING

from mpizero.errors import ArgumentError, ArgumentTypeError, MpiZeroError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["BAD_USAGE", "COMMANDS", "FAILED", "main"]

COMMANDS = {
    "checkpoint": "look into a checkpoint, write it for other tools, or import theirs",
    "doctor": "show what mpizero finds on this machine or in this job, and what is wrong with it",
    "explain": "say which algorithm a collective would take, and why",
    "plan": "reckon what a model takes and costs at each stage, and which stage fits",
    "plot": "draw results of bin/*_perf: time, bus bandwidth, speed-up over the MPI library",
    "report": "say from the ranks' flight records what a job died of, or what it does now",
    "simulate": "reckon what a collective or a training step costs on a cluster, without one",
    "tune": "measure which algorithm is the quickest at each size; auto follows the result",
    "verify": "train a small model at every stage and check that all give the same bits",
}
"""Each subcommand, which is also its module's name, with its line of help."""

SECOND = {"simulate train": "simulate_train"}
"""Words that make another command of a subcommand, with the module that it then is."""

FAILED = 1
BAD_USAGE = 2
INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code: 2 for a wrong command line, 1 for what else went wrong.

    Args:
        argv: the arguments, `sys.argv[1:]` by default.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    parser, subparsers = _parser()
    if not words:
        parser.print_help(sys.stderr)
        return BAD_USAGE
    name = next((word for word in words if word in COMMANDS), None)
    module = None
    if name is not None:
        after = " ".join(words[words.index(name) :][:2])
        module = import_module(f"mpizero.cli.{SECOND.get(after, name)}")
        module.configure(subparsers[name])
    options = parser.parse_args(words)
    if module is None:
        parser.error("a command is missing")
    try:
        code = int(module.run(options))
        sys.stdout.flush()
    except MpiZeroError as error:
        print(f"mpizero {name}: {error}", file=sys.stderr)
        return BAD_USAGE if isinstance(error, ArgumentError | ArgumentTypeError) else FAILED
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # of `mpizero ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more at its end
        return FAILED
    else:
        return code


def _parser() -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
    from mpizero import __version__

    about = "Train PyTorch models under mpirun, sharded by ZeRO stage."
    parser = argparse.ArgumentParser(prog="mpizero", description=about, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"mpizero {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", dest="command", required=True)
    return parser, {
        name: commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".", allow_abbrev=False)
        for name, text in COMMANDS.items()
    }
