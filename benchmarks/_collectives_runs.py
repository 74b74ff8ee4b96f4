"""Start the jobs that benchmarks/collectives measures with, one at a time, each of them once."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from mpizero.bench.results import read_results
from mpizero.comm.launch import find_launcher

ROOT = Path(__file__).resolve().parent.parent
RANKS = Path(__file__).resolve().with_name("_collectives_ranks.py")
CLUSTER = ROOT / "bin" / "cluster"
CLUSTER_NAME = "mzperf"
"""Apart from a cluster that a user may have."""
LIMIT = 280
"""Seconds for one job."""
RATE = 1e9 / 8
"""Bytes per second of a shaped link."""
FORCED = tuple(f"--mca coll_tuned_use_dynamic_rules 1 --mca coll_tuned_allreduce_algorithm {n}" for n in (3, 4, 5, 6))
HAN = "--mca coll_han_priority 100"


class NotMeasuredError(Exception):
    """Say why a figure is not there."""


@dataclass(kw_only=True)
class Runs:
    """Remember what has been measured, so that rows that need the same job share it."""

    quick: bool
    jobs: list[dict] = field(default_factory=list)
    """What each job wrote, with its command line."""
    done: dict[tuple, dict] = field(default_factory=dict)
    hosts: int = 0
    """Hosts of the cluster that is up; 0 without one."""

    @property
    def large(self) -> str:
        """Return the flags of 1 to 256 MiB."""
        return "-b 1M -e 16M -f 16" if self.quick else "-b 1M -e 256M -f 4"

    @property
    def loop(self) -> str:
        """Return the flags of how often a large case is run."""
        return "-n 3 -w 1 --budget 0.2" if self.quick else "-n 9 -w 2 --budget 1"

    @property
    def close_loop(self) -> str:
        """Return the flags of how often a case is run whose time is compared with one much like it."""
        return "-n 20 -w 5 --budget 0.1" if self.quick else "-n 100 -w 10 --budget 0.3"

    @property
    def small_loop(self) -> str:
        """Return the flags of how often a small case is run."""
        return "-n 50 -w 10" if self.quick else "-n 400 -w 50"

    def perf(self, operation: str, ranks: int, words: str, *, mpi_args: str = "") -> list[dict]:
        """Return the rows of bin/*_perf on this host."""
        line = ["bin/mzrun", "-n", str(ranks), "--timeout", str(LIMIT)]
        line += ["--mpi-args", mpi_args] if mpi_args else []
        return self._rows([*line, f"bin/{operation}_perf", *words.split()])

    def perf_on_hosts(self, operation: str, per_host: int, words: str) -> list[dict]:
        """Return the rows of bin/*_perf on the cluster that is up."""
        return self._rows([*self._on_hosts(per_host), f"bin/{operation}_perf", *words.split()])

    def probe(self, ranks: int, *words: str) -> dict:
        """Return what `_collectives_ranks.py` prints on this host."""
        return self._printed(["bin/mzrun", "-n", str(ranks), "--timeout", str(LIMIT), str(RANKS), *words])

    def probe_on_hosts(self, per_host: int, *words: str) -> dict:
        """Return what `_collectives_ranks.py` prints on the cluster that is up."""
        return self._printed([*self._on_hosts(per_host), str(RANKS), *words])

    @contextlib.contextmanager
    def cluster(self, hosts: int):
        """Have so many hosts, joined by links of RATE, while inside."""
        if not CLUSTER.exists() or os.geteuid() != 0:
            raise NotMeasuredError("bin/cluster needs root")
        call(["bin/cluster", "up", "--name", CLUSTER_NAME, "--hosts", str(hosts), "--rate", "1gbit"])
        self.hosts = hosts
        try:
            yield
        finally:
            self.hosts = 0
            call(["bin/cluster", "down", "--name", CLUSTER_NAME])

    def _on_hosts(self, per_host: int) -> list[str]:
        line = ["bin/cluster", "run", "--name", CLUSTER_NAME, "-n", str(per_host * self.hosts)]
        return [*line, "--per-host", str(per_host), "--timeout", str(LIMIT), "--", sys.executable]

    def _rows(self, line: list[str]) -> list[dict]:
        key = (self.hosts, *line)
        if key not in self.done:
            with tempfile.TemporaryDirectory(prefix="mpizero-collectives-") as folder:
                path = Path(folder) / "results.json"
                call([*line, "--json", str(path)])
                self.done[key] = read_results(path)
            self.jobs.append({"command": typed(line), **self.done[key]})
        return self.done[key]["rows"]

    def _printed(self, line: list[str]) -> dict:
        key = (self.hosts, *line)
        if key not in self.done:
            output = call(line)
            self.done[key] = json.loads(next(text for text in output.splitlines() if text.startswith("{")))
        return self.done[key]

    def compared(self, operation: str, ranks: int) -> dict | None:
        """Return the results in which mpizero is measured beside mpi4py on this host; None where there are none."""
        for job in self._on_this_host(operation, ranks):
            if {"auto", "mpi4py"} <= {row["algorithm"] for row in job["rows"]} and max_bytes(job) > 1 << 20:
                return job
        return None

    def best_of_library(self, operation: str, ranks: int) -> dict[int, float]:
        """Return the least microseconds that mpi4py's call took in any job on this host, by size."""
        least: dict[int, float] = {}
        for job in self._on_this_host(operation, ranks):
            for row in job["rows"]:
                if row["algorithm"] == "mpi4py":
                    least[row["nbytes"]] = min(row["t_median_us"], least.get(row["nbytes"], row["t_median_us"]))
        return least

    def _on_this_host(self, operation: str, ranks: int) -> list[dict]:
        return [job for job in self.jobs if (job["operation"], job["ranks"], job["nodes"]) == (operation, ranks, 1)]


def max_bytes(job: dict) -> int:
    """Return the size of a job's largest case."""
    return max(row["nbytes"] for row in job["rows"])


def call(line: list[str]) -> str:
    """Run a program of the checkout with this Python and return what it prints."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    words = [sys.executable, str(ROOT / line[0]), *(str(ROOT / w) if w.startswith("bin/") else w for w in line[1:])]
    try:
        done = subprocess.run(
            words, capture_output=True, text=True, timeout=LIMIT + 30, env=environment, check=False, cwd=ROOT
        )
    except subprocess.TimeoutExpired:
        raise NotMeasuredError(f"{typed(line)} took too long") from None
    if done.returncode:
        raise NotMeasuredError(f"{typed(line)} ended with {done.returncode}: {_reason(done.stderr or done.stdout)}")
    return done.stdout


def typed(line: list[str]) -> str:
    """Return a command as one would type it."""
    words = ["python" if word == sys.executable else word for word in line]
    return " ".join(words).partition(" --json ")[0].replace(str(ROOT), ".")


def variants(operation: str, *, quick: bool) -> list[str]:
    """Return the launcher's flags under which the MPI library is measured, beside its default."""
    if find_launcher(sys.executable).vendor != "openmpi":
        return []
    forced = FORCED if operation == "all_reduce" else ()
    return [*(forced[:1] if quick else forced), HAN]


def _reason(text: str) -> str:
    """Return the line of a failed job's output that says most."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    telling = [line for line in lines if "Error" in line or "must be" in line]
    return (telling or lines or ["no output"])[0][:300]
