"""Start what benchmarks/training measures with: one job at a time, each with a time-out, none left behind."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from mpizero.comm.launch import find_launcher

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
STEPS = str(HERE / "_training_steps.py")
PROBES = str(HERE / "_training_probes.py")
CLUSTER_NAME = "train"
"""Apart from a cluster that a user may have."""
GRACE = 15.0
"""Seconds that a job has to end after it was asked to: longer than bin/mzrun and bin/cluster need to end theirs."""
PATIENCE = 5.0
"""Seconds that a job's other processes have to end after one has failed."""


class NotMeasuredError(Exception):
    """Say why a figure is not there."""


class MissingError(NotMeasuredError):
    """Say why something cannot be had here: nothing is wrong with it."""


@dataclass(kw_only=True)
class Jobs:
    """Know how jobs are started, and remember them."""

    quick: bool
    deepspeed_python: str = sys.executable
    limit: float = 200.0
    """Seconds for one job."""
    done: list[dict] = field(default_factory=list)
    """Each job's command and seconds."""
    about: dict = field(default_factory=dict)
    """Machine and versions, as the jobs say."""

    def steps(self, kind: str, ranks: int, *words: str) -> list[dict]:
        """Return each rank's figures of `_training_steps.py` for a kind."""
        if kind.startswith("mpizero"):
            return self._mpi(ranks, STEPS, [kind], list(words))
        python = self.deepspeed_python if kind.startswith("deepspeed") else sys.executable
        with folder() as place:
            line = [python, STEPS, kind, str(place), *words]
            lines = [(line, {"RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(ranks)]
            # DeepSpeed wants an address even where the process group is there already.
            shared = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29531"}
            shared["DS_ACCELERATOR"] = "cpu"
            return self._finished(place, [(line, {**shared, **more}) for line, more in lines], ranks)

    def probe(self, name: str, ranks: int, *words: str, environment: dict[str, str] | None = None) -> list[dict]:
        """Return each rank's figures of `_training_probes.py` on this host."""
        return self._mpi(ranks, PROBES, [name], list(words), environment)

    def probe_on_hosts(self, name: str, hosts: int, *words: str) -> list[dict]:
        """Return each rank's figures on the cluster that is up, a rank on each host."""
        with folder() as place:
            line = [sys.executable, str(ROOT / "bin" / "cluster"), "run", "--name", CLUSTER_NAME, "-n", str(hosts)]
            line += ["--per-host", "1", "--timeout", f"{self.limit:g}", "--"]
            return self._finished(place, [([*line, sys.executable, PROBES, name, str(place), *words], {})], hosts)

    @contextlib.contextmanager
    def cluster(self, hosts: int, rate: str):
        """Have so many hosts, joined by links of a rate such as 800mbit, while inside."""
        if not hasattr(os, "geteuid") or os.geteuid() != 0:
            raise MissingError("bin/cluster needs root")
        self._cluster("down")  # what a killed run has left
        self._cluster("up", "--hosts", str(hosts), "--rate", rate)
        try:
            yield
        finally:
            self._cluster("down")

    def _cluster(self, command: str, *words: str) -> None:
        with folder() as place:
            line = [sys.executable, str(ROOT / "bin" / "cluster"), command, "--name", CLUSTER_NAME, *words]
            attend([(line, {})], place, self.limit)

    def _mpi(
        self, ranks: int, script: str, head: list[str], words: list[str], environment: dict[str, str] | None = None
    ) -> list[dict]:
        with folder() as place:
            line = [sys.executable, str(ROOT / "bin" / "mzrun"), "-n", str(ranks), "--timeout", f"{self.limit:g}"]
            if find_launcher(sys.executable).vendor == "openmpi":
                line += ["--mpi-args", "--bind-to none"]  # as all the other kinds run
            return self._finished(place, [([*line, script, *head, str(place), *words], environment or {})], ranks)

    def _finished(self, place: Path, lines: list[tuple[list[str], dict[str, str]]], ranks: int) -> list[dict]:
        """Run the processes of a job and return what its ranks wrote."""
        start, words = time.monotonic(), typed(lines[0][0], place)
        attend(lines, place, self.limit + GRACE)
        seconds = round(time.monotonic() - start, 1)
        self.done.append({"command": words, "processes": len(lines), "seconds": seconds})
        print(f"  {seconds:.0f} s: {words}", file=sys.stderr, flush=True)
        found = []
        for rank in range(ranks):
            path = place / f"rank-{rank}.json"
            if not path.exists():
                raise NotMeasuredError(f"rank {rank} of {words} wrote nothing: is it an MPI job of {ranks} ranks?")
            found.append(json.loads(path.read_text(encoding="utf-8")))
        if "skipped" in found[0]:
            raise MissingError(found[0]["skipped"])
        self._learn(found[0].pop("about", {}))
        return found

    def _learn(self, said: dict) -> None:
        for name, values in said.items():
            self.about.setdefault(name, {}).update(values)


@contextlib.contextmanager
def folder():
    """Have a new folder while inside."""
    with tempfile.TemporaryDirectory(prefix="mpizero-training-", ignore_cleanup_errors=True) as name:
        yield Path(name)


def attend(lines: list[tuple[list[str], dict[str, str]]], place: Path, limit: float) -> None:
    """Start processes at once, each with variables of its own, and wait for all; end those that are left at the end.

    Raises:
        NotMeasuredError: for the first that fails, or at the time-out, with what it said.
    """
    base = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    deadline = time.monotonic() + limit
    started: list[subprocess.Popen] = []
    try:
        for number, (line, variables) in enumerate(lines):
            with (place / f"log-{number}").open("wb") as log:
                started.append(
                    subprocess.Popen(line, env={**base, **variables}, cwd=ROOT, stdin=subprocess.DEVNULL,
                                     stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
                )  # fmt: skip
        _wait(started, lines, place, deadline)
    except OSError as error:
        raise NotMeasuredError(f"{lines[0][0][0]} could not be started: {error.strerror}") from None
    finally:
        _end(started)


def _wait(started: list, lines: list, place: Path, deadline: float) -> None:
    while True:
        codes = [process.poll() for process in started]
        failed = [number for number, code in enumerate(codes) if code]
        if failed:
            # What fails first may fail because of another: its own words are worth waiting for.
            deadline = min(deadline, time.monotonic() + PATIENCE)
            while None in [process.poll() for process in started] and time.monotonic() < deadline:
                time.sleep(0.05)
            said = reason("\n".join((place / f"log-{n}").read_text(errors="replace") for n in range(len(started))))
            raise NotMeasuredError(f"{typed(lines[failed[0]][0], place)} ended with {codes[failed[0]]}: {said}")
        if None not in codes:
            return
        if time.monotonic() > deadline:
            raise NotMeasuredError(f"{typed(lines[0][0], place)} took too long and was ended")
        time.sleep(0.05)


def _end(started: list[subprocess.Popen]) -> None:
    """End processes and what they started: politely, so that launchers end their ranks, then by force."""
    left = [process for process in started if process.poll() is None]
    for process in left:
        process.terminate()
    deadline = time.monotonic() + GRACE
    for process in left:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(deadline - time.monotonic(), 0.1))
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def typed(line: list[str], place: Path) -> str:
    """Return a command as one would type it."""
    words = ["python" if word == sys.executable else word for word in line]
    return shlex.join(words).replace(str(place), "FOLDER").replace(f"{ROOT}/", "")


def reason(text: str) -> str:
    """Return the line of a failed job's output that says most."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    telling = [line for line in lines if "Error" in line.partition(":")[0] or "must be" in line]
    return (telling or lines or ["no output"])[-1][:300]
