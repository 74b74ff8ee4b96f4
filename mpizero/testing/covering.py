"""Products of options, whole and as coverings: few cases in which every pair of values still meets.

Most faults that depend on options depend on two of them (Kuhn et al., "Software Fault Interactions and Implications for
Software Testing", 2004), so a covering of the pairs finds nearly what the product finds, in a small part of its time.
"""

from __future__ import annotations

from itertools import combinations, product
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["covering", "one_at_a_time", "whole_product"]

Case = dict[str, Any]
"""A value for each axis."""


def covering(axes: Mapping[str, Sequence[Any]], strength: int = 2) -> list[Case]:
    """Return cases in which any values of any `strength` axes occur together at least once.

    Greedy: each case begins with the first combination that is still missing and takes, axis by axis, the value that
    adds most of the others, the axis's earlier values where it makes no difference.

    Args:
        axes: by name, the values of each; the plain one first, so that the first case is plain throughout.
        strength: 2 covers pairs, 3 triples, up to the number of axes, which is the whole product.

    Returns:
        The same cases in the same order in every process. Where the longest axes have n values, somewhat more than
        n**strength of them.
    """
    names, values = list(axes), [range(len(axis)) for axis in axes.values()]
    strength = min(strength, len(names))
    missing = dict.fromkeys(
        tuple(zip(chosen, picked, strict=True))
        for chosen in combinations(range(len(names)), strength)
        for picked in product(*(values[axis] for axis in chosen))
    )
    cases = []
    while missing:
        case = dict(next(iter(missing)))
        for axis in range(len(names)):
            if axis not in case:
                gains = [len(missing.keys() & _added(case, axis, value, strength)) for value in values[axis]]
                case[axis] = gains.index(max(gains))
        for found in combinations(sorted(case.items()), strength):
            missing.pop(found, None)
        cases.append({name: axes[name][case[axis]] for axis, name in enumerate(names)})
    return cases


def whole_product(axes: Mapping[str, Sequence[Any]]) -> list[Case]:
    """Return a case for every combination of values, the last axis changing fastest."""
    return [dict(zip(axes, chosen, strict=True)) for chosen in product(*axes.values())]


def one_at_a_time(axes: Mapping[str, Sequence[Any]]) -> list[Case]:
    """Return the case of all first values, then, for every other value of every axis, that case with this value."""
    plain = {name: values[0] for name, values in axes.items()}
    return [plain, *({**plain, name: value} for name, values in axes.items() for value in values[1:])]


def _added(case: dict[int, int], axis: int, value: int, strength: int) -> set[tuple[tuple[int, int], ...]]:
    """Return the combinations that a case would have more if `axis` took `value`."""
    return {tuple(sorted([*others, (axis, value)])) for others in combinations(case.items(), strength - 1)}
