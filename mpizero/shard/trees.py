"""Tensors inside the nested arguments and results of a module."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["cast_floating", "mapped", "own_attributes", "tensors_in"]

_LEAVES = (str, bytes, int, float, complex, bool, type(None), torch.dtype, torch.device, type, ModuleType, nn.Module)
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
DEPTH = 8
"""How far to look into nested containers, which may hold each other; an object counts as three."""


def own_attributes(module: nn.Module) -> list[tuple[str, Any]]:
    """Return what a module keeps beside what every module has, by name."""
    return [(name, value) for name, value in vars(module).items() if name not in _OF_EVERY_MODULE]


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors in nested tuples, lists, mappings and the attributes of objects, but not of modules."""
    found: list[Tensor] = []
    _walk(value, found.append, DEPTH)
    return found


def cast_floating(value: Any, dtype: torch.dtype) -> Any:
    """Return `value` with every floating tensor in it cast to `dtype`; see `mapped`."""
    return mapped(value, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor)


def mapped(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Return `value` with `function` of every tensor in nested tuples, lists and dicts.

    Containers in which nothing changes, and other objects, are passed on as they are: the callee may add to them.
    """
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, list | tuple):
        items = [mapped(item, function) for item in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if type(value) is dict:
        cast = {key: mapped(item, function) for key, item in value.items()}
        return value if all(cast[key] is item for key, item in value.items()) else cast
    return value


def _walk(value: Any, visit: Callable[[Tensor], None], depth: int) -> None:
    if isinstance(value, Tensor):
        visit(value)
    elif depth <= 0 or isinstance(value, _LEAVES):
        return
    elif isinstance(value, Mapping):
        for item in value.values():
            _walk(item, visit, depth - 1)
    elif isinstance(value, list | tuple):
        for item in value:
            _walk(item, visit, depth - 1)
    else:
        names = [*getattr(value, "__dict__", ()), *getattr(type(value), "__slots__", ())]
        for name in names:
            _walk(getattr(value, name, None), visit, depth - 3)
