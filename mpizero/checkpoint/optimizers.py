"""An optimizer's state by the names of its parameters: what is cut as they are, and what is one number.

[Note: numbers or elements] An element-wise optimizer keeps, for each parameter, tensors of its shape (moments) and
single numbers (steps). A shard of a scalar parameter has the shape of a number, so the two are told apart by a key as a
whole: a key of which some parameter has a value of another shape than its shard's is one of numbers. Of a model of
scalars alone, torch's own names of numbers tell.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from mpizero.checkpoint.failure import CheckpointError, listed
from mpizero.checkpoint.values import decode, encode
from mpizero.errors import ArgumentError, must_be
from mpizero.optim.offloaded import NUMBERS, Offloaded

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import torch

__all__ = ["Optimized", "check_states", "group_options"]

HOW = {"foreach", "fused", "capturable", "differentiable"}
"""Options that say how a step is made, not what it does: a checkpoint does not bring them along."""


class Optimized:
    """Know an optimizer's state by the names of its parameters."""

    def __init__(self, optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> None:
        """Look at the optimizer.

        Args:
            optimizer: one that was built from the parameters of a sharded model.
            names: by the ids of these, their names.

        Raises:
            ArgumentError: if it holds other parameters.
        """
        self.optimizer = optimizer
        self.params: list[Tensor] = [param for group in optimizer.param_groups for param in group["params"]]
        others = sum(id(param) not in names for param in self.params)
        if others:
            remedy = "build it after mpizero.shard, from model.parameters()"
            raise ArgumentError(
                must_be("optimizer", "one of this model's parameters alone", f"{others} others", remedy)
            )
        self.names = {id(param): names[id(param)] for param in self.params}
        self._elements = self._sort_keys()

    def _sort_keys(self) -> set[str]:
        """Return the keys of states that have an element for each of the parameter's."""
        keys: dict[str, bool] = {}
        shaped: set[str] = set()
        for param in self.params:
            for key, value in self.optimizer.state.get(param, {}).items():
                fits = isinstance(value, Tensor) and value.shape == param.shape
                keys[key] = keys.get(key, True) and fits
                if param.dim():
                    shaped.add(key)
        return {key for key, fits in keys.items() if fits and (key in shaped or key not in NUMBERS)}

    def elementwise(self) -> Iterator[tuple[Tensor, str, str, Tensor]]:
        """Yield (parameter, its name, key, state) of the states that are cut as their parameters are."""
        for param in self.params:
            for key, value in self.optimizer.state.get(param, {}).items():
                if key in self._elements:
                    yield param, self.names[id(param)], key, value

    def to_json(self) -> dict[str, Any]:
        """Return all but the elements: options of the groups, and states that are numbers, by name.

        Raises:
            ArgumentTypeError: for options, or states of an odd shape, that cannot be written; names them.
        """
        groups = []
        for group in self.optimizer.param_groups:
            options = {key: value for key, value in group.items() if key != "params"}
            names = [self.names[id(param)] for param in group["params"]]
            groups.append({"names": names, "options": encode(options, None, "param_groups")})
        state: dict[str, dict[str, Any]] = {}
        for param in self.params:
            name = self.names[id(param)]
            for key, value in self.optimizer.state.get(param, {}).items():
                entry = state.setdefault(name, {})
                if key not in self._elements:
                    entry[key] = encode(value, None, f"optimizer state {key!r} of {name!r}")
        return {"class": _class_of(self.optimizer), "groups": groups, "state": state}

    def load(self, groups: list[dict[str, Any]], states: list[dict[str, Any]]) -> None:
        """Take over the options of groups and the states of parameters, in the optimizer's own order."""
        index = 0
        described: list[dict[str, Any]] = []
        for group, options in zip(self.optimizer.param_groups, groups, strict=True):
            count = len(group["params"])
            kept = {key: group[key] for key in HOW & group.keys()}
            described.append({**options, **kept, "params": list(range(index, index + count))})
            index += count
        filled = {number: dict(state) for number, state in enumerate(states) if state}
        self.optimizer.load_state_dict({"state": filled, "param_groups": described})
        for param, state in zip(self.params, states, strict=True):
            for key, value in state.items():  # torch casts states to the parameter's dtype
                if isinstance(value, Tensor) and value.dtype != self.optimizer.state[param][key].dtype:
                    self.optimizer.state[param][key] = value.to(param.device)


def _class_of(optimizer: torch.optim.Optimizer) -> str:
    """Return the name of an optimizer's class; of the one that does the arithmetic where the state is on a disk."""
    return (optimizer.of if isinstance(optimizer, Offloaded) else type(optimizer)).__name__


def group_options(optimized: Optimized, saved: dict[str, Any], resolve: Any) -> list[dict[str, Any]]:
    """Return the options that each of an optimizer's groups has to take over.

    Args:
        optimized: the optimizer.
        saved: what `to_json` gave.
        resolve: returns the name under which a parameter was saved.

    Raises:
        CheckpointError: for another class of optimizer, parameters that were not in it, or a group whose parameters
            were in groups with different options.
    """
    got = _class_of(optimized.optimizer)
    if saved["class"] != got:
        raise CheckpointError(f"optimizer must be of the class that was saved, {saved['class']} (got {got})")
    home = {name: number for number, group in enumerate(saved["groups"]) for name in group["names"]}
    found = []
    for number, group in enumerate(optimized.optimizer.param_groups):
        names = [optimized.names[id(param)] for param in group["params"]]
        missing = [name for name in names if resolve(name) not in home]
        if missing:
            raise CheckpointError(f"the optimizer that was saved must have held {listed(missing)} (it did not)")
        options = [saved["groups"][index]["options"] for index in dict.fromkeys(home[resolve(name)] for name in names)]
        if any(other != options[0] for other in options):
            remedy = "group the parameters as they were"
            raise CheckpointError(f"group {number} must hold parameters with the same options (got several): {remedy}")
        found.append(decode(options[0]) if options else {key: group[key] for key in group if key != "params"})
    return found


def check_states(optimized: Optimized, saved: dict[str, Any], stored: list[str], resolve: Any) -> None:
    """Raise CheckpointError for states of parameters that the optimizer does not hold; lists them."""
    known = {resolve(optimized.names[id(param)]) for param in optimized.params}
    others = [name for name in dict.fromkeys([*saved["state"], *stored]) if name not in known]
    if others:
        raise CheckpointError(f"optimizer must hold the parameters that were saved (got one without {listed(others)})")
