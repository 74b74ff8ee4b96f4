"""Forward calls of units, and where the tensors are by which backward will come back to them."""

from __future__ import annotations

import inspect
import time
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from mpizero.shard.trees import own_attributes, tensors_in

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mpizero.shard.unit import Unit

__all__ = ["Call", "hidden_tensors", "in_backward", "own_modules", "running"]

_MARK = "_mpizero_watched"
_ENTRY = nn.Module.__call__.__name__


class Call:
    """Remember one forward call of a unit, from its beginning to its backward."""

    def __init__(self, unit: Unit, error: BaseException | None) -> None:
        self.unit = unit
        self.error = error
        """The exception that was being handled when the call began: another one at its end is the call's own."""
        self.began = time.perf_counter()
        self.grad = torch.is_grad_enabled()
        self.seen_full = 0
        """The version of the full parameters at the beginning."""
        self.containers: list[Any] = []
        """The lists and dicts among the arguments, to which forward may add results."""
        self.given: set[int] = set()
        """The ids of the tensors that they held at the beginning."""
        self.backward = 0
        """The number of the backward that last came through."""
        self.passed = False
        """Whether that backward is through with the unit's inputs."""

    def remember(self, args: Any, kwargs: Any) -> None:
        """Note what the containers among the arguments hold."""
        self.containers = [value for value in (*args, *kwargs.values()) if isinstance(value, list | dict)]
        self.given = {id(tensor) for tensor in tensors_in(self.containers)}

    def added(self) -> list[Tensor]:
        """Return the tensors that forward has put into its arguments."""
        return [tensor for tensor in tensors_in(self.containers) if id(tensor) not in self.given]


def hidden_tensors(modules: list[nn.Module]) -> Iterator[Tensor]:
    """Yield results that modules keep as attributes, such as an auxiliary loss, each once in its life.

    Backward may reach a unit by them before it comes to the unit's output.
    """
    for module in modules:
        for _, value in own_attributes(module):
            if not isinstance(value, Tensor | list | tuple | dict):
                continue
            for tensor in tensors_in(value):
                if tensor.requires_grad and not tensor.is_leaf and not hasattr(tensor, _MARK):
                    setattr(tensor, _MARK, True)
                    yield tensor


def in_backward() -> bool:
    """Return whether autograd is running a backward in this thread."""
    return torch._C._current_graph_task_id() != -1  # noqa: SLF001


def running(module: nn.Module, *, besides: int = 0) -> bool:
    """Return whether this thread is inside more than `besides` calls of a module.

    Torch's forward hooks do not hear of a call that ends by KeyboardInterrupt and its like; the stack tells.
    """
    frame, found = inspect.currentframe(), 0
    while frame is not None and found <= besides:
        if frame.f_code.co_name == _ENTRY:
            found += frame.f_locals.get("self") is module
        frame = frame.f_back
    return found > besides


def own_modules(module: nn.Module, others: set[int]) -> Iterator[nn.Module]:
    """Yield a module and those inside it that do not belong to units of their own."""
    yield module
    for child in module.children():
        if id(child) not in others:
            yield from own_modules(child, others)
