"""Command lines as they stand on pages, and what the programs that they name understand."""

import io
import re
import runpy
import shlex
import sys
from contextlib import redirect_stderr, redirect_stdout, suppress
from functools import cache
from pathlib import Path

from mpizero.cli import main

ROOT = Path(__file__).parents[2]
PASSES_ON = {"bin/check": {"--all", "--ranks", "-k", "-n"}}
"""Flags that a program takes for another one, and so does not list."""
FLAG = re.compile(r"--[a-z][\w-]*|-[A-Za-z]\b")
ASSIGNMENT = re.compile(r"^[A-Za-z_]\w*=")
PROGRAM = re.compile(r"^(?:\./)?(bin/\w+|benchmarks/\w+|examples/[\w/]+\.py|hpc/[\w./-]+)$")


def lines(text):
    """Return the commands of a block or of code within a line, each as its words, comments left out."""
    joined = text.replace("\\\n", " ")
    found = []
    for line in joined.splitlines():
        words = _words(line.removeprefix("$ "))
        while words:
            ends = [at for at, word in enumerate(words) if word in {";", "&", "&&", "|", "||", "do", "done", "then"}]
            end = ends[0] if ends else len(words)
            if words[:end]:
                found.append(words[:end])
            words = words[end + 1 :]
    return found


def _words(line):
    spaced = re.sub(r"(?<=\S);(?=\s|$)", " ;", line)
    try:
        return shlex.split(spaced, comments=True)
    except ValueError:  # a quote that is closed in another line
        return spaced.split()


def programs(words):
    """Yield (program, arguments) of ours in a command: those that a launcher starts, too.

    Program is `mpizero`, `bin/NAME`, `benchmarks/NAME` or the like; mzrun is `bin/mzrun` wherever it lies.
    """
    if words[0] in {"import", "from", "pip"}:
        return
    for at, word in enumerate(words):
        rest = words[at + 1 :]
        if ASSIGNMENT.match(word):
            continue
        if word == "mpizero" or words[at - 1 : at + 1] == ["-m", "mpizero"]:
            yield "mpizero", rest
        elif word in {"mzrun", "bin/mzrun"} or words[at - 1 : at + 1] == ["-m", "mpizero.cli.mzrun"]:
            yield "bin/mzrun", _until_program(rest)
        elif match := PROGRAM.match(word):
            yield match.group(1), rest[: rest.index("--")] if "--" in rest else rest


def _until_program(words):
    """Return a launcher's own words: up to the program that it starts, which begins the rest."""
    for at, word in enumerate(words):
        if word.endswith(".py") or word in {"python", "mpizero", "--"} or PROGRAM.match(word):
            return words[:at]
    return words


def unknown(program, words):
    """Return what is wrong with a program's words, "" where nothing is: a subcommand or a flag that it has not."""
    if "NAME" in program:  # any of a folder
        return ""
    if program != "mpizero" and not (ROOT / program).exists():
        return f"there is no {program}"
    flags = [word.partition("=")[0] for word in words if FLAG.fullmatch(word.partition("=")[0])]
    flags = [flag for flag in flags if flag not in PASSES_ON.get(program, ())]
    if program.startswith("hpc/"):
        return ""  # shell scripts, without a help
    if program.startswith(("benchmarks/", "examples/")):
        source = "".join(path.read_text() for path in _sources(program))
        return _lost(program, [flag for flag in flags if f'"{flag}"' not in source])
    plain = [word for word in words if re.fullmatch(r"[a-z_]+(\|[a-z_]+)*", word)]
    return next(filter(None, (_unknown_to(program, path, flags) for path in _commands(program, plain))), "")


def _unknown_to(program, path, flags):
    shown = shown_by(program, path)
    if shown is None:
        return f"{program} has no {' '.join(path)}"
    lost = [flag for flag in flags if not re.search(rf"(?<![\w-]){re.escape(flag)}(?![\w-])", shown)]
    return _lost(" ".join((program, *path)), lost)


def _lost(name, flags):
    return f"{name} has no {', '.join(flags)}" if flags else ""


def _sources(program):
    path = ROOT / program
    return [path, *path.parent.glob("_*.py")] if program.startswith("benchmarks/") else [path]


def _commands(program, plain):
    """Return the paths of subcommands that the words name, `show|merge` being two; [()] where there are none."""
    if not plain or program not in {"mpizero", "bin/cluster"}:
        return [()]
    paths = [(word,) for word in plain[0].split("|")]
    if program == "mpizero" and len(plain) > 1:
        nested = [(*path, word) for path in paths for word in plain[1].split("|")]
        paths = [path if _deeper(path) else path[:1] for path in nested]
    return paths


def _deeper(path):
    """Return whether a second word is a subcommand or should be one, and not an argument such as a folder."""
    parent = shown_by("mpizero", path[:1]) or ""
    return shown_by("mpizero", path) not in {None, parent} or re.search(r"(\b[A-Z]+|\}) \.\.\.", parent) is not None


@cache
def shown_by(program, path):
    """Return what `program PATH --help` prints; None where it is refused."""
    out, code = io.StringIO(), 0
    with redirect_stdout(out), redirect_stderr(io.StringIO()):
        try:
            code = main([*path, "--help"]) if program == "mpizero" else run_here(program, [*path, "--help"])
        except SystemExit as ended:
            code = ended.code
    return None if code else out.getvalue()


def run_here(program, words):
    """Run a script of the checkout in this process, as its own command; return its exit code."""
    before = list(sys.argv), list(sys.path), sys.dont_write_bytecode
    sys.argv[:] = [str(ROOT / program), *words]
    sys.path.insert(0, str((ROOT / program).parent))
    try:
        with suppress(KeyError):
            runpy.run_path(str(ROOT / program), run_name="__main__")
    finally:
        sys.argv[:], sys.path[:], sys.dont_write_bytecode = before
    return 0
