"""From a model to units: which modules, which parameters, in which order."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from mpizero.errors import ArgumentError, ArgumentTypeError, must_be
from mpizero.shard.flat import FlatParams, Member
from mpizero.shard.policy import Lifetime, Precision
from mpizero.shard.unit import Unit

__all__ = ["SMALLEST", "find_units", "group_parameters", "make_units"]

SMALLEST = 1 << 16
"""Elements of the smallest module that becomes a unit by size: a smaller gather costs more in latency than in bytes."""
LARGEST_SHARE = 4
"""By size, a module becomes a unit when it holds at most this part (one over it) of the model."""

UnitRule = Iterable[type[nn.Module]] | Callable[[nn.Module], bool] | None


def find_units(model: nn.Module, units: UnitRule) -> dict[str, nn.Module]:
    """Return the unit modules by name, the root first, in the model's order.

    Args:
        model: the root, which is always a unit.
        units: classes, a predicate on modules, or None: the outermost modules that hold between `SMALLEST` elements
            and a quarter of the model.

    Raises:
        ArgumentError: if no module matches, or one that matches has no forward of its own.
    """
    found: dict[str, nn.Module] = {"": model}
    if units is None:
        total = sum(param.numel() for param in model.parameters())
        _by_size("", model, max(total // LARGEST_SHARE, SMALLEST), found)
        return found
    matches = _predicate(model, units)
    for name, module in model.named_modules():
        if module is not model and matches(module):
            found[name] = module
    without = [name for name, module in found.items() if not _has_forward(module)]
    if without:
        rule = "modules with a forward of their own"
        raise ArgumentError(must_be("units", rule, without, "name the class of the modules inside"))
    if len(found) == 1:
        known = ", ".join(sorted({type(module).__name__ for module in model.modules() if module is not model}))
        raise ArgumentError(must_be("units", f"classes or a predicate that match some module ({known})", units))
    return found


def _predicate(model: nn.Module, units: Any) -> Callable[[nn.Module], bool]:
    if isinstance(units, type):
        units = {units}
    if isinstance(units, Iterable):
        classes = tuple(units)
        wrong = [item for item in classes if not (isinstance(item, type) and issubclass(item, nn.Module))]
        if wrong or not classes:
            known = ", ".join(sorted({type(module).__name__ for module in model.modules()}))
            rule = f"module classes, a predicate or None (the model has {known})"
            raise ArgumentTypeError(must_be("units", rule, wrong or units))
        return lambda module: isinstance(module, classes)
    if not callable(units):
        raise ArgumentTypeError(must_be("units", "module classes, a predicate or None", units))
    return units  # type: ignore[no-any-return]


def _by_size(prefix: str, module: nn.Module, largest: int, found: dict[str, nn.Module]) -> None:
    for name, child in module.named_children():
        path = f"{prefix}{name}"
        numel = sum(param.numel() for param in child.parameters())
        if SMALLEST <= numel <= largest and _has_forward(child):
            found.setdefault(path, child)
        elif numel >= SMALLEST:
            _by_size(f"{path}.", child, largest, found)


def _has_forward(module: nn.Module) -> bool:
    return not isinstance(module, nn.ModuleList | nn.ModuleDict | nn.ParameterList | nn.ParameterDict)


def group_parameters(model: nn.Module, units: dict[str, nn.Module]) -> dict[str, list[Member]]:
    """Return each unit's parameters, those that several modules share once, under the lowest unit with all of them.

    Raises:
        ArgumentTypeError: for parameters that are not dense tensors in host memory; lists them.
    """
    members: dict[int, Member] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for attribute, param in module._parameters.items():  # noqa: SLF001
            if param is None:
                continue
            name = f"{path}.{attribute}" if path else attribute
            member = members.setdefault(id(param), Member(names=[], places=[], original=param))
            member.names.append(name)
            if not any(place[0] is module and place[1] == attribute for place in member.places):
                member.places.append((module, attribute))
    _check_devices(members.values())
    grouped: dict[str, list[Member]] = {name: [] for name in units}
    for member in members.values():
        grouped[_lowest_common(member.names, list(units))].append(member)
    return grouped


def _lowest_common(names: list[str], units: list[str]) -> str:
    """Return the innermost unit whose name is a prefix of all the parameter's names."""
    holding = [unit for unit in units if not unit or all(name.startswith(f"{unit}.") for name in names)]
    return max(holding, key=len)


def _check_devices(members: Iterable[Member]) -> None:
    wrong = [member.names[0] for member in members if member.original.device.type != "cpu"]
    if wrong:
        rule = "in host memory, with values"
        got = ", ".join(wrong)
        raise ArgumentTypeError(must_be("parameters", rule, got, "build the model on the CPU, not on the meta device"))
    shards = [member.names[0] for member in members if hasattr(member.original, "_mpizero_owner")]
    if shards:
        raise ArgumentError(must_be("model", "one that is not sharded yet", ", ".join(shards)))


def make_units(model: nn.Module, units: UnitRule, comm: Any, lifetime: Lifetime, precision: Precision) -> list[Unit]:
    """Build the units of a model: find them, give them their parameters, and cut those into shards. Collective."""
    modules = find_units(model, units)
    grouped = group_parameters(model, modules)
    made = []
    for name, members in grouped.items():
        flats = [FlatParams(group, comm, lifetime, precision) for group in _alike(members)]
        if flats or not name:
            made.append(Unit(name, modules[name], flats))
    return made


def _alike(members: list[Member]) -> list[list[Member]]:
    """Split parameters by dtype and by whether they are trained, keeping their order."""
    groups: dict[tuple[torch.dtype, bool], list[Member]] = {}
    for member in members:
        groups.setdefault((member.original.dtype, member.original.requires_grad), []).append(member)
    return list(groups.values())
