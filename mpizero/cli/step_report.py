"""What `mpizero simulate train` prints of a step, as text and as JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from mpizero.cli.offload_words import WHERE
from mpizero.cli.quantities import show_bytes, show_rate, show_seconds
from mpizero.tables import aligned

if TYPE_CHECKING:
    from typing import Any

    from mpizero.collectives.links import Cluster
    from mpizero.plan.simulation import Step
    from mpizero.plan.training import Speeds, Training

__all__ = ["Asked", "record", "text"]

SCHEMA = 1
KINDS = {
    "gather": "gathers of parameters",
    "reduce": "reductions of gradients",
    "replicas": "sums over replicas",
    "meet": "meetings",
    "read": "parameters, by unit",
    "load": "parameters, by unit",
    "store": "reduced gradients",
    "stream": "optimizer's step",
}


@dataclass(frozen=True, kw_only=True)
class Asked:
    """Hold what the command line asks."""

    training: Training
    cluster: Cluster
    speeds: Speeds
    peak: float
    """Operations per second that a rank could reach."""
    precision: str

    @property
    def title(self) -> str:
        """Return the case in a line."""
        training, nodes = self.training, len(self.cluster.members())
        where = f"{self.cluster.size:,} ranks on {nodes:,} node{'s' * (nodes != 1)}"
        groups = f", groups of {training.group:,}" if training.group else ""
        return f"{training.model.name}, stage {training.stage}, {self.precision}, {where}{groups}"

    @property
    def network(self) -> str:
        """Return the links in a line."""
        local, remote = (
            f"{show_rate(link.beta, 'no limit')}, {show_seconds(link.alpha)}"
            for link in (self.cluster.local, self.cluster.remote)
        )
        ports = f"{self.cluster.wires} port{'s' * (self.cluster.wires != 1)} of a node"
        return f"links: {local} within a node; {remote} on each of {ports}"


def text(asked: Asked, step: Step) -> str:
    """Return the tables: where the time goes, what the collectives are, what a rank holds."""
    share = 1 / step.seconds if step.seconds else 0.0
    times = [("", "time", "of the step")]
    for name, seconds in (
        ("step", step.seconds),
        ("compute", step.compute),
        (
            "exposed communication" if asked.training.offload is None else "exposed communication and offload",
            step.exposed,
        ),
        ("idle: waits for other ranks", step.idle),
    ):
        times.append((name, show_seconds(seconds), f"{seconds * share:.1%}"))
    traffic = [("collectives", "count", "alone take", "sent by a rank", "over a node's ports", "link", "algorithm")]
    traffic += [
        (KINDS[one.kind], f"{one.count:,}", show_seconds(one.seconds), show_bytes(one.sent), show_bytes(one.wire),
         one.link, one.algorithm)
        for one in step.traffic
        if not one.carried
    ]  # fmt: skip
    carried = [("offload", "over", "count", "alone take", "bytes of a rank")]
    carried += [
        (KINDS[one.kind], one.link, f"{one.count:,}", show_seconds(one.seconds), show_bytes(one.sent))
        for one in step.traffic
        if one.carried
    ]
    numbers = (
        f"{asked.training.model.numel:,} parameters; {step.tokens_per_second:,.0f} tokens/s; model flops utilisation "
        f"{step.flops / asked.peak:.1%} of {asked.peak / 1e12:g} Tflop/s"
    )
    parts = [f"{asked.title}\n{asked.network}\n{numbers}", aligned(times, right=range(1, 3))]
    parts += [aligned(traffic, right=range(1, 5))] if len(traffic) > 1 else []
    parts += [aligned(carried, right=range(2, 5))] if len(carried) > 1 else []
    return "\n\n".join([*parts, _held(asked, step)])


def _held(asked: Asked, step: Step) -> str:
    """Return the table of what a rank holds, and of what it has moved."""
    moved, kinds = asked.training.offload, ("parameters", "gradients", "optimizer")
    rows = [("bytes of a rank", "in memory", *([] if moved is None else [WHERE[moved.place]]))]
    for kind in kinds:
        there = [] if moved is None else [show_bytes(getattr(step.outside, kind))]
        rows.append((kind, show_bytes(getattr(step.state, kind)), *there))
    rows.append(("unit buffers, at most", show_bytes(step.buffers), *([] if moved is None else ["-"])))
    return aligned(rows, right=range(1, len(rows[0])))


def record(asked: Asked, step: Step) -> dict[str, Any]:
    """Return what `--json` prints: seconds, bytes, operations and tokens per second."""
    names = ("seconds", "compute", "slowest", "exposed", "idle", "communication", "buffers", "tokens_per_second")
    training = {name: value for name, value in vars(asked.training).items() if name not in {"model", "offload"}}
    moved = asked.training.offload
    return {
        "schema_version": SCHEMA,
        "model": asked.training.model.name,
        "parameters": asked.training.model.numel,
        "ranks": asked.cluster.size,
        "nodes": len(asked.cluster.members()),
        "training": training,
        "offload": None if moved is None else asdict(moved),
        "speeds": asdict(asked.speeds),
        **{name: getattr(step, name) for name in names},
        "flops_per_rank": step.flops,
        "utilisation": step.flops / asked.peak,
        "state": asdict(step.state),
        "outside": asdict(step.outside),
        "traffic": [asdict(one) for one in step.traffic],
    }
