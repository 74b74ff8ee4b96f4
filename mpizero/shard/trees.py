"""Tensors inside the nested arguments and results of a module."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

__all__ = ["cast_floating", "tensors_in"]


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors in nested tuples, lists, mappings and dataclasses."""
    found: list[Tensor] = []
    _walk(value, found.append)
    return found


def cast_floating(value: Any, dtype: torch.dtype) -> Any:
    """Return `value` with every floating tensor in it cast to `dtype`; other objects are passed on as they are."""
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(cast_floating(item, dtype) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(cast_floating(item, dtype) for item in value)
    if type(value) is dict:
        return {key: cast_floating(item, dtype) for key, item in value.items()}
    return value


def _walk(value: Any, visit: Callable[[Tensor], None]) -> None:
    if isinstance(value, Tensor):
        visit(value)
    elif isinstance(value, list | tuple):
        for item in value:
            _walk(item, visit)
    elif isinstance(value, Mapping):
        for item in value.values():
            _walk(item, visit)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for spec in dataclasses.fields(value):
            _walk(getattr(value, spec.name), visit)
