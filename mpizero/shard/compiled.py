"""Hooks of units beside torch.compile: they run, and what they call is run, by Python alone.

[Note: hooks and graphs] `module.compile()` compiles a module's whole call, hooks included. Those of a unit
communicate, which no graph can hold, and would break the graph at both ends (with `fullgraph=True`, be refused). So a
compiled unit's hooks are taken out of its call: they run before and after the compiled one, in which the registered
hooks pass. Where a unit that is not compiled itself is called inside a compiled module, its hooks break the graph, and
what they call is not looked at. Either way the module's forward is compiled once: full parameters are the same objects
each time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

__all__ = ["add_hooks"]

REASON = "mpizero gathers and releases parameters here"


@dataclass(kw_only=True)
class _Place:
    """Say where a unit's hooks run; a compiled call is guarded by it."""

    outside: bool = False
    """Whether they run outside the call that is being made."""


def add_hooks(module: nn.Module, before: Callable[[Any, Any], Any], after: Callable[[Any], Any]) -> None:
    """Run `before` and `after` at each call of a module, and never in a graph; see [Note: hooks and graphs].

    Args:
        module: one that is compiled already, will be by its `compile`, or never.
        before: takes the arguments and keyword arguments, returns them.
        after: takes the result (None where forward raised), returns another one or None to leave it.
    """
    place = _Place()
    before = torch.compiler.disable(before, reason=REASON)
    after = torch.compiler.disable(after, reason=REASON)

    def enter(_: nn.Module, args: Any, kwargs: Any) -> Any:
        return None if place.outside else before(args, kwargs)

    def leave(_: nn.Module, __: Any, output: Any) -> Any:
        return None if place.outside else after(output)

    def compile(*args: Any, **kwargs: Any) -> None:  # noqa: A001  (a module's method)
        type(module).compile(module, *args, **kwargs)
        surround()

    def surround() -> None:
        compiled = module._compiled_call_impl  # noqa: SLF001
        if compiled is not None:
            module._compiled_call_impl = _surrounded(compiled, place, before, after)  # noqa: SLF001

    module.register_forward_pre_hook(enter, with_kwargs=True, prepend=True)
    module.register_forward_hook(leave, always_call=True)
    surround()
    module.compile = compile  # type: ignore[method-assign]


def _surrounded(
    compiled: Callable[..., Any], place: _Place, before: Callable[[Any, Any], Any], after: Callable[[Any], Any]
) -> Callable[..., Any]:
    """Return a compiled call with `before` and `after` around it."""

    def call(*args: Any, **kwargs: Any) -> Any:
        was = place.outside
        try:
            args, kwargs = before(args, kwargs)
            place.outside = True
            output = compiled(*args, **kwargs)
        except BaseException:
            after(None)
            raise
        finally:
            place.outside = was
        changed = after(output)
        return output if changed is None else changed

    outer: Callable[..., Any] = torch.compiler.disable(call, reason=REASON)
    return outer
