"""Orders of summation as expression trees: a leaf is a rank, a pair is `left + right`.

Floating-point addition is not associative, so the tree is the result's bits. A builder declares its tree for every
(size, chunk, root); the simulator holds it to the declaration.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TypeVar

__all__ = [
    "Expr",
    "Order",
    "canonical",
    "canonical_over",
    "descending",
    "folded",
    "folded_over",
    "pairwise",
    "ring",
    "show",
]

Expr = int | tuple["Expr", "Expr"]
Order = Callable[..., Expr]
"""`(size, chunk, root) -> tree`; with a fourth argument where the algorithm takes nodes or pieces."""
Operand = TypeVar("Operand")


def pairwise(operands: Sequence[Operand], combine: Callable[[Operand, Operand], Operand]) -> Operand:
    """Combine neighbours, carry the odd one, repeat: of five, ((0+1)+(2+3))+4."""
    level = list(operands)
    while len(level) > 1:
        paired = [combine(level[i], level[i + 1]) for i in range(0, len(level) - 1, 2)]
        level = paired + level[len(level) - len(level) % 2 :]
    return level[0]


def _pair(left: Expr, right: Expr) -> Expr:
    return (left, right)


@lru_cache(maxsize=256)
def canonical(size: int, chunk: int = 0, root: int = 0) -> Expr:  # noqa: ARG001  (an order may depend on all three)
    """Return the canonical order over `size` ranks: the same for every chunk and root."""
    return canonical_over(range(size))


def canonical_over(operands: Sequence[Expr]) -> Expr:
    """Return the canonical order over some ranks, or over groups that are summed already."""
    return pairwise(operands, _pair)


def ring(size: int, chunk: int, root: int) -> Expr:  # noqa: ARG001
    """Return the ring's order: chunk c starts at rank c + 1, and each rank on its way adds its own part."""
    expr: Expr = (chunk + 1) % size
    for step in range(2, size + 1):
        expr = (expr, (chunk + step) % size)
    return expr


def descending(size: int, chunk: int, root: int) -> Expr:  # noqa: ARG001
    """Return the order of pairwise exchange: chunk c starts at rank c, and the ranks below add theirs one by one."""
    expr: Expr = chunk
    for step in range(1, size):
        expr = (expr, (chunk - step) % size)
    return expr


def folded(size: int, chunk: int, root: int) -> Expr:  # noqa: ARG001
    """Return the order of recursive halving: the first pairs are folded until a power of two is left, then pairwise."""
    return folded_over(range(size))


def folded_over(operands: Sequence[Expr]) -> Expr:
    """Return the order of recursive halving over some ranks, or over groups that are summed already."""
    extra = len(operands) - (1 << (len(operands).bit_length() - 1))
    pairs: list[Expr] = [(operands[2 * i], operands[2 * i + 1]) for i in range(extra)]
    return canonical_over([*pairs, *operands[2 * extra :]])


def show(expr: Expr) -> str:
    """Return the tree as text, as ((0+1)+(2+3))+4."""

    def inner(part: Expr) -> str:
        return f"({inner(part[0])}+{inner(part[1])})" if isinstance(part, tuple) else str(part)

    text = inner(expr)
    return text[1:-1] if isinstance(expr, tuple) else text
