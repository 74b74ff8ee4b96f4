"""Prepared collectives: one collective on one buffer, decided once and run many times."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mpizero.collectives import verbs
from mpizero.collectives.bind import BINDERS
from mpizero.collectives.on_device import choose_on_device, plan_on_device
from mpizero.collectives.on_host import plan_on_host
from mpizero.errors import ArgumentTypeError, must_be

if TYPE_CHECKING:
    from collections.abc import Callable

    from mpizero.collectives.call import Call
    from mpizero.collectives.on_device import DevicePlan
    from mpizero.collectives.route import Plan

__all__ = ["Prepared", "prepare"]


class Prepared:
    """Be a collective that may be called any number of times; every rank must call it as often."""

    def __init__(self, call: Call, algorithm: str, result: Any, pieces: int = 0) -> None:
        """Hold a checked and bound call, and plan it.

        Args:
            call: the call.
            algorithm: what the caller asked for.
            result: what the call gives.
            pieces: in how many a pipelined algorithm works; 0 leaves it to us.
        """
        packed = (call.x is not None and call.x.packed) or (call.out is not None and call.out.packed)
        if packed:
            rule = "contiguous in C order for a prepared collective, which works on the memory itself"
            raise ArgumentTypeError(must_be("x", rule, "a strided array", "prepare a contiguous copy"))
        route = call.route()
        self.algorithm = route.choose(algorithm) if route.device is None else choose_on_device(route, algorithm)
        """The algorithm that was chosen."""
        self._about, self._result = route.about(self.algorithm), result
        self._comm: Any = call.comm
        self._call, self._route = call, route
        self._source, self._output = call.views()
        self._plan: Plan | None = None
        self._device_plan: DevicePlan | None = None
        self._run = None
        if not (route.total or route.uneven):
            return
        if route.device is not None:
            self._device_plan = plan_on_device(route, self.algorithm, pieces)
            return
        self._plan = plan_on_host(route, self.algorithm, pieces)
        self._run = self._plan.bind(self._source.data, self._output.data)

    def __call__(self) -> Any:
        """Run the collective on the buffers as they are now, and return its result."""
        comm, run = self._comm, self._run
        if self._device_plan is not None and self._route.device is not None:
            with self._route.device.current():
                ran = self._call.run_on_device
                return ran(self._device_plan, self._route, self.algorithm, result=self._result, async_op=False)
        if run is None or self._plan is None:
            with comm.exclusive(self._about):  # nothing to do, but to be compared with what the others call
                return self._result
        if comm.under_way:
            comm.perform(self._about, self._plan.steps(self._source, self._output))
            return self._result
        comm.enter(self._about)
        try:
            run()
        except BaseException as error:
            comm.give_up(error)
            raise
        comm.leave()
        return self._result


def prepare(verb: Callable[..., Any], x: Any = None, comm: Any = None, **arguments: Any) -> Prepared:
    """Return a callable that repeats `verb(x, comm, **arguments)`, with everything decided beforehand.

    It saves the microseconds in which arguments are checked and an algorithm is chosen: the way for small messages in a
    loop. Not collective by itself.

    Args:
        verb: `mpizero.all_reduce` or another of the verbs.
        x: as of the verb; must be contiguous, and so must `out`.
        comm: as of the verb.
        arguments: the verb's other arguments; `async_op` is none of them.

    Returns:
        A callable without arguments that gives what the verb gives.

    Raises:
        ArgumentError, ArgumentTypeError: as of the verb, and for what is no verb.
    """
    name = getattr(verb, "__name__", type(verb).__name__)
    if getattr(verbs, name, None) is not verb:
        rule = "one of mpizero's collectives, as mpizero.all_reduce"
        raise ArgumentTypeError(must_be("verb", rule, name))
    algorithm = arguments.pop("algorithm", "auto")
    if "async_op" in arguments:
        raise ArgumentTypeError(must_be("arguments", "those of the verb without async_op", "async_op"))
    operands = (comm,) if name == "barrier" else (x, comm)
    call, result = BINDERS[name](*operands, **arguments)
    return Prepared(call, algorithm, result)
