"""What users tell mpizero by environment variables.

What launchers and MPI libraries put into the environment is theirs: `comm/launch.py` and `comm/describe.py` read that.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from mpizero.errors import ArgumentError, must_be

__all__ = ["DEVICE_WIRES", "Settings", "settings"]

DEVICE_WIRES = ("auto", "loads", "messages", "staged")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Hold what the environment says."""

    timeout: float = 600.0
    """`MPIZERO_TIMEOUT`: seconds that a collective waits for its peers before it raises."""
    on_timeout: str = "raise"
    """`MPIZERO_ON_TIMEOUT`: `raise` ends a wait that takes longer than that with an error, which ends the job unless it
    is caught; `wait` says where the other ranks are and goes on waiting."""
    strict: bool = False
    """`MPIZERO_STRICT`: whether every collective is compared over its ranks before it begins."""
    strict_timeout: float = 60.0
    """`MPIZERO_STRICT_TIMEOUT`: seconds that a rank waits there for the others."""
    abort: bool = True
    """`MPIZERO_ABORT`: whether an uncaught exception on one rank ends the whole job."""
    tuning: Path | None = None
    """`MPIZERO_TUNING`: where `mpizero tune` writes what `auto` follows; 0 for none. By default a file in the user's
    cache folder (`XDG_CACHE_HOME`, or `~/.cache`)."""
    loads: bool = True
    """`MPIZERO_LOADS`: whether ranks of one host load each other's memory; 0 leaves it to messages."""
    device_wire: str = "auto"
    """`MPIZERO_DEVICE_WIRE`: how device memory gets from rank to rank: loads, messages or staged, where the choice is
    not to be left to mpizero."""
    cuda_aware: bool | None = None
    """`MPIZERO_CUDA_AWARE`: 1 or 0 says that the MPI library takes GPU memory in messages, or does not, whatever is
    found out; None leaves it to `comm/describe.py`."""
    canary: bool = False
    """`MPIZERO_CANARY`: whether messages of GPU memory are first tried in child processes."""
    record: Path | None = None
    """`MPIZERO_RECORD`: the folder of the flight records; 0, which is an empty path here, for none. By default
    `mpizero-USER` in the host's folder for temporary files."""
    threads: int | None = None
    """`OMP_NUM_THREADS`: the user's own choice of threads per rank; None leaves it to mpizero."""
    restart: int = 0
    """`MPIZERO_RESTART`: how often this job was started again; set by `bin/mzrun --restarts`."""
    terminal: bool = False
    """`MPIZERO_TTY`: set by `bin/mzrun` when the job's output is shown on a terminal."""


def settings() -> Settings:
    """Read the environment.

    Raises:
        ArgumentError: for a value that is not a number, or not 0 or 1, where one is needed.
    """
    env = os.environ
    threads = env.get("OMP_NUM_THREADS", env.get("MKL_NUM_THREADS"))
    return Settings(
        timeout=_positive("MPIZERO_TIMEOUT", env.get("MPIZERO_TIMEOUT", "600")),
        on_timeout=_one_of("MPIZERO_ON_TIMEOUT", env.get("MPIZERO_ON_TIMEOUT", "raise"), ("raise", "wait")),
        strict=bool(_switch("MPIZERO_STRICT", env.get("MPIZERO_STRICT", ""))),
        strict_timeout=_positive("MPIZERO_STRICT_TIMEOUT", env.get("MPIZERO_STRICT_TIMEOUT", "60")),
        abort=env.get("MPIZERO_ABORT", "1") != "0",
        tuning=_tuning(env.get("MPIZERO_TUNING", ""), env.get("XDG_CACHE_HOME", "")),
        loads=env.get("MPIZERO_LOADS", "1") != "0",
        device_wire=_one_of("MPIZERO_DEVICE_WIRE", env.get("MPIZERO_DEVICE_WIRE", "auto"), DEVICE_WIRES),
        cuda_aware=_switch("MPIZERO_CUDA_AWARE", env.get("MPIZERO_CUDA_AWARE", "")),
        canary=bool(_switch("MPIZERO_CANARY", env.get("MPIZERO_CANARY", ""))),
        record=_record(env.get("MPIZERO_RECORD", "")),
        threads=int(threads) if threads is not None and threads.isdecimal() else None,
        restart=_count("MPIZERO_RESTART", env.get("MPIZERO_RESTART", "")),
        terminal=env.get("MPIZERO_TTY", "0") == "1",
    )


def _tuning(text: str, cache: str) -> Path | None:
    if text == "0":
        return None
    if text:
        return Path(text)
    return (Path(cache) if cache else Path("~/.cache").expanduser()) / "mpizero" / "tuning.json"


def _record(text: str) -> Path | None:
    return Path() if text == "0" else Path(text) if text else None


def _one_of(name: str, text: str, words: tuple[str, ...]) -> str:
    if text not in words:
        raise ArgumentError(must_be(name, f"one of {', '.join(words)}", text))
    return text


def _switch(name: str, text: str) -> bool | None:
    if text not in {"", "0", "1"}:
        raise ArgumentError(must_be(name, "0 or 1", text, "unset it to leave the choice to mpizero"))
    return text == "1" if text else None


def _count(name: str, text: str) -> int:
    if text and not text.isdecimal():
        raise ArgumentError(must_be(name, "a whole number, 0 or more", text, "unset it for a first start"))
    return int(text or 0)


def _positive(name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not value > 0:  # nan too
        raise ArgumentError(must_be(name, "a positive number of seconds", text))
    return value
