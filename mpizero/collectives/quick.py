"""The short way of a collective on plain arrays, where a few microseconds are all there are.

What a call decides depends on dtype, sizes and words alone, so the plan is made once and remembered with the
communicator. Anything unusual leaves the short way, and is checked and decided in full each time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from mpizero.arrays import flat_memory
from mpizero.collectives.bind import BINDERS
from mpizero.collectives.on_host import plan_on_host
from mpizero.collectives.registry import LOADS
from mpizero.comm import world

if TYPE_CHECKING:
    from mpizero.collectives.route import Plan
    from mpizero.comm import About
    from mpizero.typing import Bytes

__all__ = ["quick"]

MOST = 1024
"""Remembered plans per communicator; beyond that they are made each time."""
_WORDS = {
    "all_reduce": ("op", "order"),
    "reduce_scatter": ("op", "order"),
    "all_gather": (),
    "all_to_all": (),
    "broadcast": ("root",),
}


def quick(operation: str, x: Any, comm: Any, out: Any, words: tuple[Any, ...]) -> bool:
    """Run a collective by loads and return True, or do nothing and return False.

    Args:
        operation: the collective's name.
        x: a contiguous numpy array or torch tensor; in place where `out` is None.
        comm: a communicator with a board; None means `mpizero.world()`.
        out: the result, apart from `x`, or None.
        words: the algorithm, and then the arguments that `_WORDS` names.
    """
    if comm is None:
        comm = world()
    if getattr(comm, "board", None) is None or comm.under_way:
        return False
    source = flat_memory(x)
    output = source if out is None else _apart(x, source, out)
    if source is None or output is None or not output.flags.writeable:
        return False
    key = (operation, x.dtype, x.shape, words, None if out is None else out.shape)
    plans: dict[Any, Any] | None = comm.notes.get("plans")
    if plans is None:
        plans = comm.notes["plans"] = {}
    try:
        found: Any = plans.get(key)
    except TypeError:  # a list for a word: the long way says what is wrong with it
        return False
    if found is None:
        found = _decide(operation, (x, out), comm, words)
        if len(plans) < MOST:
            plans[key] = found
    if found is False:
        return False
    plan, about = found
    comm.enter(about)
    try:
        plan.run(source, output)
    except BaseException as error:
        comm.give_up(error)
        raise
    comm.leave()
    return True


def _apart(x: Any, source: Bytes | None, out: Any) -> Bytes | None:
    """Return the memory of a result that is of the operand's dtype and shares nothing with it; None for another."""
    output = flat_memory(out)
    if source is None or output is None or out.dtype != x.dtype or np.may_share_memory(source, output):
        return None
    return output


def _decide(operation: str, arrays: tuple[Any, Any], comm: Any, words: tuple[Any, ...]) -> tuple[Plan, About] | bool:
    """Check as the verb does; return the plan for arrays like these and what there is to say of it, or False.

    False says that the short way is not for them.
    """
    x, out = arrays
    algorithm, *values = words
    named = dict(zip(_WORDS[operation], values, strict=True))
    if out is not None:
        named["out"] = out
    call, _ = BINDERS[operation](x, comm, **named)
    route = call.route()
    if not route.total or route.choose(algorithm) != LOADS:
        return False
    return plan_on_host(route, LOADS), route.about(LOADS)
