"""What fits, and what to do where nothing does."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from mpizero.plan.moved import DISK, HOST, Moved
from mpizero.plan.step import step_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from mpizero.plan.model import ModelShape
    from mpizero.plan.setup import Setup
    from mpizero.plan.step import Step
    from mpizero.plan.times import Times

__all__ = ["Limits", "advice", "enough_ranks", "smallest_stage"]

MOST_RANKS = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Hold what a rank has, and what else it needs."""

    memory: float = 0.0
    """Bytes that a rank has; 0 where it is not known."""
    activations: float = 0.0
    """Bytes of activations, and of whatever else the plan does not count, at the peak of a step."""
    batch: int = 0
    """Sequences of a step over all ranks; 0 where it is not known."""

    def fits(self, peak: float) -> bool:
        """Return whether so many bytes of model state and buffers fit; all do where the memory is not known."""
        return not self.memory or peak + self.activations <= self.memory


def smallest_stage(peaks: Iterable[tuple[int, float]], limits: Limits) -> int | None:
    """Return the smallest stage whose peak fits; None if there is none.

    Args:
        peaks: (stage, bytes of its peak).
        limits: what a rank has.
    """
    return min((stage for stage, peak in peaks if limits.fits(peak)), default=None)


def enough_ranks(model: ModelShape, setup: Setup, limits: Limits) -> int | None:
    """Return the number of ranks, doubled from the given one, from which stage 3 fits; None if no number does."""
    ranks = setup.ranks
    while ranks <= MOST_RANKS:
        if limits.fits(step_of(model, replace(setup, stage=3, ranks=ranks, group=0, node_shared=None)).peak):
            return ranks
        ranks *= 2
    return None


def advice(model: ModelShape, steps: dict[int, Step], limits: Limits, times: Times | None = None) -> list[str]:
    """Return sentences on what to change; empty where nothing speaks for it.

    Args:
        model: the model.
        steps: what was planned, by stage.
        limits: what a rank has.
        times: those of the stage that was chosen, with its computation; None where they are not known.
    """
    setup = steps[max(steps)].setup  # with all that is moved out of memory
    said = []
    if limits.memory and not any(limits.fits(step.peak) for step in steps.values()):
        said.append(_where_nothing_fits(model, setup, limits))
        said += _with_offload(model, setup, limits)
    if 0 < limits.batch < setup.ranks:
        said.append(
            f"{limits.batch} sequences are fewer than {setup.ranks} ranks, so that some would have none: data "
            "parallelism ends at one sequence per rank. Cut layers over ranks (tensor parallelism), or the model into "
            "stages (pipeline parallelism), so that several ranks work on one sequence; or take fewer ranks."
        )
    if times is not None and times.compute and times.exposed is not None and times.exposed > 0.5 * times.compute:
        said.append(_where_much_waits(setup, times))
    return said


def _where_much_waits(setup: Setup, times: Times) -> str:
    """Return what to do where more than a third of the step is not computation."""
    if setup.offload is not None and times.streaming > 0.5 * (times.exposed or 0.0):
        link = "disk" if setup.offload.place == DISK else "link to host memory"
        return (
            f"More than a third of the step would be waiting, most of it for the {link}. Raise the tokens of a step, "
            "by larger micro-batches or several in no_sync, take more ranks, or move less (--offload)."
        )
    return (
        "More than a third of the step would be waiting. Raise the tokens per rank, collect several micro-batches "
        "in no_sync, or cut parameters within a node only (--group); pipeline parallelism sends activations "
        "between nodes in place of parameters."
    )


def _where_nothing_fits(model: ModelShape, setup: Setup, limits: Limits) -> str:
    enough = enough_ranks(model, setup, limits)
    if enough == setup.ranks:
        return "Stage 3 over all ranks fits: leave --stage and --group out."
    if enough is not None:
        return f"Stage 3 fits from {enough} ranks on (found by doubling)."
    held = step_of(model, replace(setup, stage=3, ranks=MOST_RANKS, group=0, node_shared=None)).peak
    if limits.activations >= limits.memory:
        return (
            "Activations alone take more than a rank has, however many ranks there are: recompute them (activation "
            "checkpointing), take shorter sequences, or cut layers over ranks (tensor parallelism)."
        )
    return (
        f"No number of ranks is enough: the gathered units and the gradients on their way take {held / 1e9:.3g} GB "
        "at stage 3, and more ranks do not make them smaller. Take smaller units, prefetch 0, or cut each layer over "
        "ranks (tensor parallelism)."
    )


def _with_offload(model: ModelShape, setup: Setup, limits: Limits) -> list[str]:
    """Return the least offload with which stage 3 fits on as many ranks, in a sentence; none where nothing helps."""
    place = HOST if setup.on_gpu else DISK
    for moved in (Moved(optimizer=place), Moved(optimizer=place, params=place)):
        moving = replace(setup, stage=3, group=0, node_shared=None, offload=moved)
        if setup.offload is None and limits.fits(step_of(model, moving).peak):
            words = ",".join(f"{name}={place}" for name in ("optimizer", "params") if getattr(moved, name))
            return [f"On {setup.ranks} ranks stage 3 fits with --offload {words}."]
    return []
