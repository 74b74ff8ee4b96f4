"""Rows of benchmarks/training about step times: every kind over compute, and the peers over mpizero."""

from __future__ import annotations

import statistics
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from _training_figures import Figure, Want
from _training_jobs import MissingError, NotMeasuredError

if TYPE_CHECKING:
    from collections.abc import Callable

    from _training_jobs import Jobs

RANKS = 2
FLOOR = "compute"
ROUND = (
    FLOOR, "mpizero-0", "mpizero-1", "mpizero-2", FLOOR, "mpizero-3", "mpizero-3-private", "ddp", "fsdp2", FLOOR,
    "deepspeed-1", "deepspeed-2", "deepspeed-3",
)  # fmt: skip
"""The kinds of a round in turn. The floor comes several times, since all are held against it."""
QUICK = (FLOOR, "mpizero-3", "ddp")
DEEPSPEED_ROUNDS = 2
"""Its launches take the longest, and its figures are far from their bars."""
LABELS = {
    FLOOR: "compute alone",
    "mpizero-3-private": "mpizero stage 3, node_shared=False",
    "ddp": "torch DDP, gloo",
    "fsdp2": "torch FSDP2, gloo",
    **{f"mpizero-{stage}": f"mpizero stage {stage}" for stage in range(4)},
    **{f"deepspeed-{stage}": f"DeepSpeed ZeRO-{stage}, gloo" for stage in (1, 2, 3)},
}
STEP_BARS = {("4", 0): (1.05, 1.02), ("4", 1): (1.05, 0.97), ("1", 0): (1.10, 1.03), ("1", 1): (1.05, 0.92)}
"""To reach and aim, by batch and whether the stage shards."""
PEERS = (
    ("fsdp2", "mpizero-3", "1", 1.5, 1.75),
    ("ddp", "mpizero-0", "1", 1.12, 1.20),
    ("deepspeed-1", "mpizero-1", "4", 1.3, None),
    ("deepspeed-2", "mpizero-2", "4", 1.3, None),
    ("deepspeed-3", "mpizero-3", "4", 2.0, None),
)
"""Peer, kind of mpizero, batch, to reach, aim."""


@dataclass(kw_only=True)
class Times:
    """Hold milliseconds by round, kind and batch."""

    rounds: list[dict[str, dict[str, list[float]]]] = field(default_factory=list)
    """For each round: kind to batch to the step times of its launches, each the mean over ranks of their medians."""
    optimizer_ms: list[float] = field(default_factory=list)
    losses: dict[str, float] = field(default_factory=dict)
    why_not: dict[str, str] = field(default_factory=dict)
    """Kinds that could not be measured, with the reason."""

    def of(self, kind: str, batch: str) -> list[float]:
        """Return a kind's milliseconds, one for each round that has it."""
        found = (r[kind][batch] for r in self.rounds if batch in r.get(kind, {}))
        return [statistics.median(times) for times in found]

    def ratios(self, above: str, below: str, batch: str) -> list[float]:
        """Return the ratios of two kinds within rounds."""
        both = [r for r in self.rounds if batch in r.get(above, {}) and batch in r.get(below, {})]
        return [statistics.median(r[above][batch]) / statistics.median(r[below][batch]) for r in both]

    def reason(self, *kinds: str) -> str:
        """Return why one of the kinds has no figures."""
        return next((self.why_not[kind] for kind in kinds if kind in self.why_not), "not part of this run")

    def limit(self, batch: str, stage: int) -> float | None:
        """Return the least step over compute: a stage that shards leaves each rank a part of the optimizer's work."""
        floor = self.of(FLOOR, batch)
        if not floor:
            return None
        saved = statistics.median(self.optimizer_ms) / statistics.median(floor) * (1 - 1 / RANKS)
        return 1 - saved if stage else 1.0


def measure(jobs: Jobs, rounds: int, steps: int, tell: Callable[[str], None]) -> Times:
    """Run the kinds in turn, every other round backwards, so that a drift of the machine meets all alike."""
    times = Times()
    kinds = QUICK if jobs.quick else ROUND
    for number in range(rounds):
        found: dict[str, dict[str, list[float]]] = {}
        times.rounds.append(found)
        for kind in kinds[:: -1 if number % 2 else 1]:
            if kind in times.why_not or (kind.startswith("deepspeed") and number >= DEEPSPEED_ROUNDS):
                continue
            try:
                launched(kind, jobs, steps, times)
            except NotMeasuredError as error:
                times.why_not[kind] = str(error)
                missing = isinstance(error, MissingError)
                tell(
                    f"round {number + 1}, {kind}: {error}" if missing else f"round {number + 1}, {kind} failed: {error}"
                )
            else:
                said = ", ".join(f"batch {batch} {ms[-1]:.0f} ms" for batch, ms in found[kind].items())
                tell(f"round {number + 1}, {kind}: {said}")
    return times


def launched(kind: str, jobs: Jobs, steps: int, times: Times) -> None:
    """Run one launch of a kind and add its figures to the last round's."""
    deepspeed = kind.startswith("deepspeed")
    words = ["--shape", "tiny" if jobs.quick else "gpt", "--batches", "4" if deepspeed else "4,1"]
    ranks = jobs.steps(kind, RANKS, *words, "--steps", str(steps))
    for batch in ranks[0]["ms"]:
        mean = statistics.mean(statistics.median(rank["ms"][batch]) for rank in ranks)
        times.rounds[-1].setdefault(kind, {}).setdefault(batch, []).append(mean)
    times.losses[kind] = ranks[0]["loss"]
    if kind == FLOOR:
        times.optimizer_ms.append(statistics.mean(rank["optimizer_ms"] for rank in ranks))


def figures(times: Times) -> list[Figure]:
    """Return the rows that have bars."""
    found = []
    for batch in ("4", "1"):
        for stage in range(4):
            bar, aim = STEP_BARS[batch, min(stage, 1)]
            kind = f"mpizero-{stage}"
            want = Want(name=f"step over compute, batch {batch}, stage {stage}", bar=bar, aim=aim)
            found.append(figure(want, times, (kind, FLOOR, batch), times.limit(batch, stage)))
    for peer, ours, batch, bar, aim in PEERS:
        name = f"{LABELS[peer]} step over ours at stage {ours[-1]}, batch {batch}"
        want = Want(name=name, bar=bar, aim=aim, at_most=False)
        found.append(figure(want, times, (peer, ours, batch), None))
    return found


def figure(want: Want, times: Times, which: tuple[str, str, str], limit: float | None) -> Figure:
    """Return the figure of a ratio: kind above, kind below, batch."""
    above, below, batch = which
    ratios = times.ratios(above, below, batch)
    if not ratios:
        return want.missing(times.reason(above, below))
    middle = [statistics.median(times.of(kind, batch)) for kind in (above, below)]
    return want.got(ratios, limit, detail=f"{middle[0]:.0f} over {middle[1]:.0f} ms")


def table(times: Times) -> list[dict]:
    """Return every kind at every batch, with bars or without."""
    rows = []
    for batch in ("4", "1"):
        for kind in dict.fromkeys(ROUND):
            if batch == "1" and kind.startswith("deepspeed"):
                continue
            ms, ratios = times.of(kind, batch), times.ratios(kind, FLOOR, batch)
            row = {"kind": kind, "label": LABELS[kind], "batch": int(batch), "ms": ms, "over_compute": ratios}
            row["loss"] = times.losses.get(kind) if ms else None
            row["why_not"] = "" if ms else times.reason(kind)
            rows.append(row)
    return rows


def say(text: str) -> None:
    """Tell how far the run is."""
    print(text, file=sys.stderr, flush=True)
