"""The parts of `bin/gpucheck`, each a job of its own with a time that it may take, and how one is run."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpizero.bench.gpu_setup import has
from mpizero.comm.launch import find_launcher

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["FAILED", "Outcome", "Part", "parts_of", "run_part"]

ROOT = Path(__file__).resolve().parents[2]
SHARDING = ROOT / "tests" / "gpu" / "test_shard.py"
"""The tests of sharding: a part of their own."""
PASSED, FAILED, CUT, LEFT_OUT = "passed", "failed", "cut", "left out"
TIMED_OUT = 124
"""mzrun's exit code where it ended a job that took too long."""
END = 4.0
"""Seconds of a part's time that are kept for ending it."""
SHOWN = 4000
"""Characters of the output of a part that failed that are shown and kept."""
PERF_SIZES = {True: ("4K", "256K", "64"), False: ("64K", "64M", "32")}
"""-b, -e and -f of the microbenchmarks on the stand-in and on a GPU."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """Name one job."""

    name: str
    ranks: int
    program: tuple[str, ...]
    """Module or script, and arguments."""
    seconds: float
    """That it may take at least; what earlier parts leave is added."""
    one_gpu: bool = False
    """Whether all ranks share the first GPU even where there are more."""
    aware: bool = False
    """Whether Open MPI runs on the UCX of the wheel libucx, which takes GPU memory. Such jobs are apart from the
    others, which are to run even where that does not."""
    writes: bool = False
    """Whether it takes `--json FILE` and leaves what it found there."""


@dataclass(kw_only=True)
class Outcome:
    """Hold what became of a part."""

    name: str
    ranks: int
    state: str
    """passed, failed, cut or left out."""
    seconds: float
    limit: float
    said: str
    """The line that sums it up."""
    output: str = ""
    """The end of what it printed, where it did not pass."""
    found: dict[str, Any] = field(default_factory=dict)
    """What it wrote as JSON."""


def parts_of(*, stand_in: bool) -> list[Part]:
    """Return the parts in their order: contracts, microbenchmarks, figures, training.

    Args:
        stand_in: whether the host plays the GPU. Then they run in 2 ranks alone: others would be more of the same.
    """
    mark = ("--stand-in",) if stand_in else ()
    figures, training = ("-m", "mpizero.bench.gpu_figures", *mark), ("-m", "mpizero.bench.gpu_training", *mark)
    tests, perf = _contracts(stand_in=stand_in), _perf("all", stand_in=stand_in)
    found = [
        Part(name="contracts", ranks=ranks, program=tests, seconds=seconds)
        for ranks, seconds in ((1, 64), (2, 46), (4, 46))
    ]
    if SHARDING.exists():
        found.append(Part(name="sharding", ranks=2, program=(*_pytest(), str(SHARDING)), seconds=40))
    found += [Part(name="microbenchmarks", ranks=ranks, program=perf, seconds=22, writes=True) for ranks in (2, 4)]
    found += [
        Part(name="figures", ranks=2, program=figures, seconds=45, one_gpu=True, writes=True),
        Part(name="figures", ranks=4, program=figures, seconds=30, one_gpu=True, writes=True),
        Part(name="training", ranks=2, program=training, seconds=30, writes=True),
    ]
    if stand_in:
        return [part for part in found if part.ranks == 2 and part.name != "sharding"]
    if has("libucx") and find_launcher().vendor == "openmpi":
        messages = _perf("messages", stand_in=False)
        found += [
            Part(name="contracts", ranks=2, program=(*tests, "-k", "messages"), seconds=25, aware=True),
            Part(name="microbenchmarks", ranks=2, program=messages, seconds=15, aware=True, writes=True),
        ]
    return found


def _contracts(*, stand_in: bool) -> tuple[str, ...]:
    if stand_in:
        return (*_pytest(), str(ROOT / "tests" / "mpi" / "test_device.py"), "-k", "test_all_reduce or test_nothing")
    return (*_pytest(), str(SHARDING.parent), f"--ignore={SHARDING}")


def _pytest() -> tuple[str, ...]:
    """Return pytest in ranks, with each test's name: the output of a job that was cut tells how far it was."""
    plugins = () if has("pytest_mpi") else ("-p", "mpizero.testing.with_mpi")
    # A warning of a version that nobody here has seen is shown, and hides no result.
    options = ("-v", "--color=no", "-W", "default", "-c", str(ROOT / "setup.cfg"), f"--rootdir={ROOT}")
    ranked = ("--with-mpi", "-p", "mpizero.testing.mpi_pytest", "--mpi-timeout", "30", "-p", "no:cacheprovider")
    return ("-m", "pytest", *plugins, *ranked, *options)


def _perf(wire: str, *, stand_in: bool) -> tuple[str, ...]:
    low, high, factor = PERF_SIZES[stand_in]
    where = ("-D", "stand-in" if stand_in else "cuda", "--wire", wire, "--buffer", "private,symmetric")
    ways = ("--algorithm", "auto,native", "--versus", "mpi4py") if wire == "all" else ("--algorithm", "auto,ring")
    often = ("-n", "3" if stand_in else "10", "-w", "2", "--budget", "0.4")
    return (str(ROOT / "bin" / "all_reduce_perf"), *where, *ways, "-b", low, "-e", high, "-f", factor, *often)


def run_part(part: Part, limit: float, folder: Path, *, stand_in: bool) -> Outcome:
    """Run one part and return what became of it; never raises for what the part does.

    Args:
        part: what to run.
        limit: seconds that it may take.
        folder: for files.
        stand_in: whether the host plays the GPU.
    """
    if limit < 3 * END:
        return Outcome(name=part.name, ranks=part.ranks, state=LEFT_OUT, seconds=0, limit=limit, said="no time left")
    file = folder / f"{part.name}-{part.ranks}{'-aware' * part.aware}.json"
    aware = ("--cuda-aware",) if part.aware else ()
    line = [sys.executable, "-m", "mpizero.cli.mzrun", "-n", str(part.ranks), "--timeout", f"{limit - END:.1f}", *aware]
    line += [*part.program, *(["--json", str(file)] if part.writes else [])]
    start = time.monotonic()
    code, output = _run(line, _variables(part, stand_in=stand_in), limit)
    state = PASSED if code == 0 else CUT if code == TIMED_OUT else FAILED
    found = {}
    with suppress(OSError, ValueError):
        found = json.loads(file.read_text(encoding="utf-8"))
    seconds = time.monotonic() - start
    said = _sum_up(part, output, found) if state != CUT else f"took more than its {limit:.0f} s"
    end = "" if state == PASSED else output[-SHOWN:]
    return Outcome(name=part.name, ranks=part.ranks, state=state, seconds=seconds, limit=limit, said=said,
                   output=end, found=found)  # fmt: skip


def _run(line: list[str], variables: dict[str, str], limit: float) -> tuple[int, str]:
    """Return the exit code and the output; the job is ended after `limit` seconds if it has not ended itself."""
    with subprocess.Popen(
        line, cwd=ROOT, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
        start_new_session=True,
    ) as job:  # fmt: skip
        try:
            output, _ = job.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError):
                os.killpg(job.pid, signal.SIGKILL)
            output, _ = job.communicate()
            return TIMED_OUT, output
    return job.returncode, output


def _variables(part: Part, *, stand_in: bool) -> dict[str, str]:
    paths = [str(ROOT), *(path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path)]
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    variables.setdefault("OMP_NUM_THREADS", "1" if stand_in else "4")
    variables["MPIZERO_TUNING"] = "0"
    if part.one_gpu and not stand_in:
        variables["CUDA_VISIBLE_DEVICES"] = variables.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
    return variables


def _sum_up(part: Part, output: str, found: dict[str, Any]) -> str:
    """Return what a part came to, in a line."""
    told = {"contracts": _of_tests, "sharding": _of_tests, "microbenchmarks": _of_rows}
    tell: Callable[[str, dict[str, Any]], str] = told.get(part.name, _of_figures)
    return tell(output, found)


def _of_tests(output: str, found: dict[str, Any]) -> str:
    _ = found
    lines = re.findall(r"^(?:=+ )?((?:\d+ \w+,? ?)+)in [\d.]+s", output, re.MULTILINE)
    skipped = re.findall(r"^SKIPPED \[(\d+)\] \S+ (.*)$", output, re.MULTILINE)
    counts: Counter[str] = Counter()
    for number, reason in skipped:
        counts[reason] += int(number)
    reasons = "; ".join(f"{number} x {reason}" for reason, number in counts.items())
    if not lines:
        return "no tests were run"
    return lines[-1].strip() + (f"; skipped: {reasons}" if reasons else "")


def _of_rows(output: str, found: dict[str, Any]) -> str:
    _ = output
    rows = found.get("rows", [])
    ways = dict.fromkeys(f"{row['algorithm']}@{row['wire']}" for row in rows)
    left_out = "".join(f"; without {name.partition(' ')[0]}: {why}" for name, why in found.get("left_out", {}).items())
    return f"{len(rows)} rows, #wrong {sum(row['wrong'] or 0 for row in rows)}: {', '.join(ways)}{left_out}"


def _of_figures(output: str, found: dict[str, Any]) -> str:
    _ = output
    return f"{len(found.get('figures', []))} figures"
