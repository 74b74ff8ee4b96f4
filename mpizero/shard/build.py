"""From a model to units: which modules, which parameters, in which order."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from itertools import count
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from mpizero.errors import ArgumentError, ArgumentTypeError, must_be
from mpizero.plan import layout_of
from mpizero.shard.flat import FlatParams, dtypes_of
from mpizero.shard.member import Member
from mpizero.shard.policy import ModuleRule
from mpizero.shard.trees import own_attributes
from mpizero.shard.unit import Unit

if TYPE_CHECKING:
    from mpizero.shard.home import Home
    from mpizero.shard.meta import MetaModel
    from mpizero.shard.offload import Spill
    from mpizero.shard.policy import Lifetime, Precision, Ranks
    from mpizero.shard.window import Window

__all__ = ["SMALLEST", "Plan", "describe", "find_units", "group_parameters", "make_units", "plan_units", "window_sizes"]

SMALLEST = 1 << 16
"""Elements of the smallest module that becomes a unit by size: a smaller gather costs more in latency than in bytes."""
LARGEST_SHARE = 4
"""By size, a module becomes a unit when it holds at most this part (one over it) of the model."""

UnitRule = ModuleRule


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
    found.update({name: inner for name, inner in model.named_modules() if inner is not model and matches(inner)})
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
    if isinstance(units, Iterable) and not isinstance(units, str):
        classes = tuple(units)
        wrong = [item for item in classes if not (isinstance(item, type) and issubclass(item, nn.Module))]
        if wrong or not classes:
            raise _unknown_units(model, wrong or units)
        return lambda module: isinstance(module, classes)
    if not callable(units):
        raise _unknown_units(model, units)
    return units


def _unknown_units(model: nn.Module, got: Any) -> ArgumentTypeError:
    known = ", ".join(sorted({type(module).__name__ for module in model.modules()}))
    return ArgumentTypeError(must_be("units", f"module classes, a predicate or None (the model has {known})", got))


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


def group_parameters(
    model: nn.Module, units: dict[str, nn.Module], ignored: Collection[int] = (), precision: Precision | None = None
) -> dict[str, list[Member]]:
    """Return each unit's parameters, those that several modules share once, under the lowest unit with all of them.

    Args:
        model: the root.
        units: the unit modules by name.
        ignored: the ids of parameters to leave as they are.
        precision: tells which modules keep their parameters' dtype.

    Raises:
        ArgumentError: for parameters that are sharded already; lists them.
    """
    members: dict[int, Member] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        keeps = precision is not None and precision.keeps(module)
        for attribute, param in module._parameters.items():  # noqa: SLF001
            if param is None or id(param) in ignored:
                continue
            name = f"{path}.{attribute}" if path else attribute
            member = members.setdefault(id(param), Member(names=[], places=[], original=param))
            member.names.append(name)
            member.keeps |= keeps
            if not any(place[0] is module and place[1] == attribute for place in member.places):
                member.places.append((module, attribute))
    _check_not_sharded(members.values())
    _find_caches(model, members)
    grouped: dict[str, list[Member]] = {name: [] for name in units}
    for member in members.values():
        grouped[_lowest_common(member.names, list(units))].append(member)
    return grouped


def _find_caches(model: nn.Module, members: dict[int, Member]) -> None:
    """Find the lists and dicts in which modules keep their parameters a second time.

    Raises:
        ArgumentError: for a tuple that holds one, which could not follow.
    """
    for module in model.modules():
        for name, value in own_attributes(module):
            if not isinstance(value, list | tuple | dict):
                continue
            for key, item in value.items() if isinstance(value, dict) else enumerate(value):
                member = members.get(id(item)) if isinstance(item, nn.Parameter) else None
                if member is None:
                    continue
                if isinstance(value, tuple):
                    rule = "a list, which can follow when parameters are sharded"
                    raise ArgumentError(must_be(f"attribute {name!r} of {type(module).__name__}", rule, "a tuple"))
                member.caches.append((value, key))


def _lowest_common(names: list[str], units: list[str]) -> str:
    """Return the innermost unit whose name is a prefix of all the parameter's names."""
    holding = [unit for unit in units if not unit or all(name.startswith(f"{unit}.") for name in names)]
    return max(holding, key=len)


def _check_not_sharded(members: Iterable[Member]) -> None:
    shards = [member.names[0] for member in members if hasattr(member.original, "_mpizero_owner")]
    if shards:
        raise ArgumentError(must_be("model", "one that is not sharded yet", ", ".join(shards)))


Plan = dict[str, tuple[nn.Module, list[list[Member]]]]
"""By a unit's name, its module and its parameters, in groups that have a flat buffer each."""


def plan_units(model: nn.Module, units: UnitRule, precision: Precision, ignored: Collection[int] = ()) -> Plan:
    """Find a model's units and give them their parameters, but for the ignored ones; changes nothing yet."""
    modules = find_units(model, units)
    grouped = group_parameters(model, modules, ignored, precision)
    return {name: (modules[name], _alike(members)) for name, members in grouped.items() if members or not name}


def describe(plan: Plan, model: nn.Module, choices: list[str]) -> list[str]:
    """Return, a line for each, what has to be the same on all ranks, the user's choices first."""
    lines = list(choices)
    for unit, (_, groups) in plan.items():
        lines.append(f"unit {unit!r}")
        for member in (member for group in groups for member in group):
            param = member.original
            trained = ("trained" if param.requires_grad else "frozen") + (", kept" if member.keeps else "")
            lines.append(f"parameter {member.names} {tuple(param.shape)} {param.dtype} {trained}")
    for name, buffer in model.named_buffers():
        where = "" if buffer.device.type in {"cpu", "meta"} else f" on {buffer.device.type}"
        lines.append(f"buffer {name!r} {tuple(buffer.shape)} {buffer.dtype}{where}")
    return lines


def window_sizes(plan: Plan, ranks: int, precision: Precision) -> list[int]:
    """Return the bytes of each flat buffer's full parameters, in the order in which `make_units` makes them."""
    sizes = []
    for _, groups in plan.values():
        for members in groups:
            layout = layout_of([(member.names[0], tuple(member.original.shape)) for member in members], ranks)
            sizes.append(layout.length * dtypes_of(members, precision)[0].itemsize)
    return sizes


def make_units(
    plan: Plan,
    ranks: Ranks,
    lifetime: Lifetime,
    precision: Precision,
    *,
    home: Home,
    window: Window | None = None,
    meta: MetaModel | None = None,
    spill: Spill | None = None,
) -> list[Unit]:
    """Build the units: cut their parameters into shards and put these into the modules. Collective."""
    made = []
    numbers = count()
    for name, (module, groups) in plan.items():
        flats = [
            FlatParams(
                group, ranks, (lifetime, precision), home, number=next(numbers), window=window, meta=meta, spill=spill
            )
            for group in groups
        ]
        made.append(Unit(name, module, flats))
    return made


def _alike(members: list[Member]) -> list[list[Member]]:
    """Split parameters by dtype, by whether it is kept and by whether they are trained, keeping their order."""
    groups: dict[tuple[torch.dtype, bool, bool], list[Member]] = {}
    for member in members:
        groups.setdefault((member.original.dtype, member.keeps, member.original.requires_grad), []).append(member)
    return list(groups.values())
