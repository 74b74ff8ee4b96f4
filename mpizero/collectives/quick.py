"""The short way of a collective on plain arrays, where a few microseconds are all there are.

What a call decides depends on dtype, sizes and words alone, so the plan is made once and remembered with the
communicator. Anything unusual leaves the short way, and is checked and decided in full each time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from mpizero.arrays import flat_memory
from mpizero.collectives.bind import BINDERS
from mpizero.collectives.call import default_communicator
from mpizero.collectives.loads import LOADS

if TYPE_CHECKING:
    from mpizero.collectives.route import Plan

__all__ = ["quick"]

MOST = 1024
"""Remembered plans per communicator; beyond that they are made each time."""


def quick(operation: str, x: Any, comm: Any, out: Any, algorithm: str, **words: Any) -> bool:
    """Run a collective by loads and return True, or do nothing and return False.

    Args:
        operation: the collective's name.
        x: a contiguous numpy array or torch tensor; in place where `out` is None.
        comm: a communicator with a board.
        out: the result, apart from `x`, or None.
        algorithm: what the caller asked for.
        words: the verb's other arguments, hashable.
    """
    if comm is None:
        comm = default_communicator(None)
    if getattr(comm, "board", None) is None or comm.under_way:
        return False
    source = flat_memory(x)
    output = source if out is None else flat_memory(out)
    if source is None or output is None or not output.flags.writeable:
        return False
    if out is not None and (out.dtype != x.dtype or np.may_share_memory(source, output)):
        return False
    plans = comm.notes.setdefault("plans", {})
    # Shapes, since the result's must be the operand's; the type, since libraries may call their dtypes alike.
    key = (operation, type(x), x.dtype, x.shape, None if out is None else out.shape, algorithm, *words.values())
    plan = plans.get(key)
    if plan is None:
        plan = _decide(operation, (x, out), comm, algorithm, words)
        if len(plans) < MOST:
            plans[key] = plan
    if plan is False:
        return False
    comm.enter(operation)
    try:
        plan.run(source, output)
    finally:
        comm.leave()
    return True


def _decide(operation: str, arrays: tuple[Any, Any], comm: Any, algorithm: str, words: dict[str, Any]) -> Plan | bool:
    """Check as the verb does; return the plan for arrays like these, or False where the short way is not for them."""
    x, out = arrays
    given = {} if out is None else {"out": out}
    call, _ = BINDERS[operation](x, comm, **given, **words)
    route = call.route()
    if not route.total or route.choose(algorithm) != LOADS:
        return False
    return route.plan(LOADS)
