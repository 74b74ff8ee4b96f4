"""Updates of flat buffers while backward goes on.

[Note: early updates] A buffer is updated in a thread as soon as its reduced gradients are there, if this rank has had
one of every parameter in it, so that all have been used; what else there is waits for `step`. An update is that of
`step`, and its bits: no element asks for another. So there can be one backward per step that is reduced, and nobody can
look at all gradients ahead of the update, or change them.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

from mpizero.errors import ArgumentError, ShardError, must_be

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Early"]


class Early:
    """Update one model's flat buffers one after the other in a thread; see [Note: early updates]."""

    def __init__(self, runtime: Any, update: Callable[[Any], None], options: Callable[[], Any]) -> None:
        """Ask to be told of gradients.

        Args:
            runtime: of the model.
            update: steps over a flat buffer.
            options: returns what an update goes by, as learning rates, in a form that can be compared.

        Raises:
            ArgumentError: where gradients or parameters are still needed after they were reduced.
        """
        if runtime.exact is not None:
            rule, remedy = "False for a model with exact=True", "a step's micro-batches are summed up at its end"
            raise ArgumentError(must_be("during_backward", rule, "True", remedy))
        if runtime.backward.watch is not None:
            remedy = "what it finds would be in the parameters already"
            raise ArgumentError(must_be("during_backward", "False with watch_nonfinite", "True", remedy))
        if runtime.lifetime.shared:
            rule, remedy = "False where ranks of a node share parameters", "pass node_shared=False to mpizero.shard"
            raise ArgumentError(must_be("during_backward", rule, "True", remedy))
        self._runtime, self._update, self._options = runtime, update, options
        self._seen: Any = None
        """The options that the first update of the step has gone by."""
        self._thread = ThreadPoolExecutor(1, "mpizero update")
        self._begun: dict[int, tuple[Any, Future[None], list[int]]] = {}
        self.open = False
        """Whether gradients have been reduced in this step: on all ranks alike, other than what has begun."""
        runtime.updates = self
        for flat in runtime.flats:
            flat.early = partial(self._arrived, flat)

    def end(self) -> None:
        """Leave all updates to `step` from now on."""
        self.forget()
        self._runtime.updates = None
        for flat in self._runtime.flats:
            flat.early = None

    def _arrived(self, flat: Any, whole: bool) -> None:  # noqa: FBT001  (a callback's)
        self.open = True
        if id(flat) in self._begun:
            raise ShardError(
                f"gradients of {flat.label} must come from one backward per step with during_backward=True (got more "
                "after its update): for a graph that is kept, and parameters that several units use, build the "
                "optimizer without"
            )
        if whole:
            if not self._begun:
                self._seen = self._options()
            flat.gradients.attach([True] * len(flat.shards))
            self._begun[id(flat)] = flat, self._thread.submit(self._update, flat), _versions(flat)

    def check_over(self, what: str) -> None:
        """Raise ShardError for what comes between backward and step, and would see half of an update; on all ranks."""
        if self.open:
            raise ShardError(
                f"{what} must come after the optimizer's step with during_backward=True (got one between backward and "
                "step): a unit is updated as soon as its gradients are there; wrap the other backwards of a step in "
                "mpizero.no_sync; after a backward without step, call zero_grad, which does not take its update back"
            )

    def is_done(self, flat: Any) -> bool:
        """Return whether a buffer is updated, or about to be."""
        return id(flat) in self._begun

    def settle(self) -> None:
        """Wait for the updates that have begun.

        Raises:
            MpiZeroError: that one of them has failed with.
            ShardError: if gradients, or options, were changed after it.
        """
        failures = [failure for _, update, _ in self._begun.values() if (failure := update.exception()) is not None]
        if failures:
            raise failures[0]
        changed = [flat.label for flat, _, versions in self._begun.values() if _versions(flat) != versions]
        if changed:
            raise ShardError(
                "gradients must be left alone between backward and step with during_backward=True (got changes of "
                f"{', '.join(changed)}): the update has used them already"
            )
        if self._begun and self._options() != self._seen:
            raise ShardError(
                "options of parameter groups, as lr, must be left alone between backward and step with "
                "during_backward=True (got other ones): the update has used them already; set them ahead of backward"
            )

    def wait(self) -> None:
        """Wait until nothing is being updated; what failed is for `settle` to tell."""
        for _, update, _ in list(self._begun.values()):
            update.exception()

    def forget(self, *, given_up: bool = True) -> None:
        """Begin a new step, the updates of the last one being over.

        Args:
            given_up: whether no optimizer's step has told of them: full parameters are filled anew then.
        """
        self.wait()
        for flat, _, _ in self._begun.values() if given_up else ():
            flat.source.stepped()
            flat.seen = -1  # torch's fused updates are no change in place
        self._begun.clear()
        self.open = False


def _versions(flat: Any) -> list[int]:
    """Return numbers that grow with changes in place of a buffer's gradients, -1 where there is none."""
    return [-1 if shard.grad is None else shard.grad._version for shard in flat.shards]  # noqa: SLF001
