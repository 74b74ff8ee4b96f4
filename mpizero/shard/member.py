"""A parameter as a unit takes it over: its names, the modules that hold it, and its values until then."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

__all__ = ["Member"]


@dataclass(kw_only=True)
class Member:
    """Hold one parameter of a unit, by all the names that it has."""

    names: list[str]
    """Fully qualified; more than one where modules share the parameter."""
    places: list[tuple[nn.Module, str]] = field(repr=False)
    """The modules, and the attribute of each, that hold it."""
    original: nn.Parameter = field(repr=False)
    """The parameter as it was before; without its memory once its values are taken over."""
    keeps: bool = False
    """Whether it is computed with in its own dtype, whatever `Precision.param` says."""
    caches: list[tuple[Any, Any]] = field(default_factory=list, repr=False)
    """Lists and dicts of the modules' own that hold it too, with its index or key."""

    def let_go(self) -> None:
        """Mark the original as replaced, for optimizers that hold it, and drop it: it is as large as the model."""
        self.original._mpizero_replaced = self.names[0]  # type: ignore[attr-defined]  # noqa: SLF001
        self.original = nn.Parameter(torch.empty(0, device="cpu"), requires_grad=False)
