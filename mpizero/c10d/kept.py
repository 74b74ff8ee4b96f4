"""Works that torch's C++ side holds while Python has let go of them.

Functional collectives and DDP get a group's `Work` in C++. Newer versions of torch keep its Python half alive as long;
2.6 does not, and what is left has C++'s own `wait`, which never ends. There the works are kept here until they have
been waited for, once for each result, or asked for a future, which is all that C++ does with one.
"""

from __future__ import annotations

from datetime import timedelta
from functools import cache
from typing import Any

from torch import distributed as dist

__all__ = ["keep", "release", "waited"]

MOST = 256
"""Works that are kept though they are over; of more, the oldest are taken to be forgotten by everybody."""


def keep(work: Any) -> None:
    """Keep a group's `Work` where torch does not."""
    if not torch_forgets():
        return
    works = _works()
    works[id(work)] = (work, max(1, len(work.result())))
    if len(works) > MOST:
        over = [at for at, (one, _) in works.items() if one.is_completed()]
        for at in over[: len(works) - MOST]:
            del works[at]


def waited(work: Any) -> None:
    """Let a work go that has been waited for once for each result."""
    works = _works()
    if id(work) in works:
        _, left = works.pop(id(work))
        if left > 1:
            works[id(work)] = (work, left - 1)


def release(work: Any) -> None:
    """Let a work go."""
    _works().pop(id(work), None)


@cache
def _works() -> dict[int, tuple[Any, int]]:
    return {}


@cache
def torch_forgets() -> bool:
    """Return whether this torch's C++ side lets the Python half of a `Work` go; tried once."""
    torch_work: Any = dist.Work
    torch_group: Any = dist.ProcessGroup

    class Trial(torch_work):
        def wait(self, timeout: Any = None) -> bool:  # noqa: ARG002
            return True

    class Group(torch_group):
        def barrier(self, opts: Any = None) -> Trial:  # noqa: ARG002
            return Trial()

    through_cpp = torch_group.barrier(Group(0, 1), dist.distributed_c10d.BarrierOptions())
    try:
        return not through_cpp.wait(timedelta(milliseconds=1))
    except RuntimeError:
        return True
