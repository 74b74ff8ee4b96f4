"""A recipe's arrays on one communicator: makes them, makes the call, and counts what is wrong with its result.

The values are small whole numbers that every rank can work out for every other one, so that sums are exact in each type
and any order, and numpy says what the result has to be. What lies between the elements of a strided array, and inputs
that are not to be changed, are looked at too.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import reduce
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np

import mpizero
from mpizero.arrays import DTYPES
from mpizero.collectives import OPERATIONS, even_offsets
from mpizero.errors import ArgumentError
from mpizero.testing.recipes import IN_PLACE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mpizero.testing.recipes import Recipe

__all__ = ["Serving", "values"]

UFUNCS = {"sum": np.add, "mean": np.add, "prod": np.multiply, "max": np.maximum, "min": np.minimum}
PLAIN = np.array([0, 1, 2, 5])
FACTORS = np.array([1, 2, 1, 1])
"""Of which any eight have a product that a 16-bit float holds."""
GUARD = 77
"""What lies between the elements of a strided array."""
CLASH = "algorithm must be"
"""How the error begins that all ranks raise, before they send anything, for an algorithm that cannot do a call."""

Numbers = np.ndarray[Any, Any]


def values(recipe: Recipe, rank: int, count: int) -> Numbers:
    """Return a rank's part of an input, as numbers in the recipe's type; bfloat16 as float32."""
    at = np.arange(count)
    chosen = (FACTORS if recipe.op == "prod" else PLAIN)[(7 * at + (at >> 3) + 5 * rank + 11 * recipe.key) % 11 % 4]
    if DTYPES[recipe.dtype].kind == "c":
        return (chosen + 1j * chosen[::-1]).astype(recipe.dtype)
    return chosen.astype("float32" if recipe.dtype == "bfloat16" else recipe.dtype)


def reduced(recipe: Recipe, size: int, count: int) -> Numbers:
    """Return the reduction over all ranks, rounded once where the type is of 16 bits."""
    parts = [values(recipe, rank, count) for rank in range(size)]
    if DTYPES[recipe.dtype].is_half:
        parts = [part.astype(np.float32) for part in parts]
    total = reduce(UFUNCS[recipe.op], parts)
    if recipe.op == "mean":  # by parts, since numpy divides complex numbers by (size + 0j), which rounds twice
        plain = total.view(total.real.dtype)
        total = (plain / plain.dtype.type(size)).view(total.dtype)
    return _rounded(total, recipe.dtype)


def _rounded(numbers: Numbers, dtype: str) -> Numbers:
    if dtype != "bfloat16":
        return numbers.astype(dtype)
    rounded: Numbers = _torch().from_numpy(numbers).bfloat16().float().numpy()
    return rounded


@dataclass(kw_only=True)
class _Laid:
    """Be an array in the recipe's layout."""

    array: Any
    around: Any
    """The elements of its memory that are not its own."""


@dataclass(kw_only=True)
class Serving:
    """Be one call that a recipe makes on one communicator."""

    recipe: Recipe
    comm: Any
    asking: bool = True
    """Whether an uneven all-to-all may ask the other ranks for what comes, which is a collective that waits."""
    x: Any = None
    words: dict[str, Any] = field(default_factory=dict)
    wanted: Numbers | None = None
    """None where this rank gets nothing."""
    kept: Numbers | None = None
    """What the input has to be afterwards; None where the result lies in it."""
    algorithm: str = ""
    """The one that was taken, in the caller's words."""
    _laid: list[_Laid] = field(default_factory=list)
    _result: Any = None
    _work: Any = None

    def __post_init__(self) -> None:
        """Make the arrays. Collective where they are symmetric."""
        traits = OPERATIONS[self.recipe.operation]
        self.root = self.recipe.root % self.comm.size
        self.at_root = self.comm.rank == self.root
        self.algorithm = self.recipe.algorithm
        if traits.reduces:
            self.words.update(op=self.recipe.op, order=self.recipe.order)
        if traits.rooted:
            self.words["root"] = self.root
        if self.recipe.operation != "barrier":
            getattr(self, f"_{self.recipe.operation}")()

    def start(self, *, async_op: bool = False) -> None:
        """Make the call; one whose algorithm cannot do it is made with `auto`."""
        verb = getattr(mpizero, self.recipe.operation)
        operands = (self.comm,) if self.recipe.operation == "barrier" else (self.x, self.comm)
        try:
            found = verb(*operands, **self.words, algorithm=self.algorithm, async_op=async_op)
        except ArgumentError as error:
            if not str(error).startswith(CLASH):
                raise
            self.algorithm = "auto"
            found = verb(*operands, **self.words, algorithm="auto", async_op=async_op)
        self._work, self._result = (found, None) if async_op else (None, found)

    def finish(self) -> int:
        """Wait for the result; return how many of the values are wrong, in it and in what was not to be changed."""
        found = self._result if self._work is None else self._work.wait()
        self._work = None
        if self.wanted is None or found is None:
            wrong = int((self.wanted is None) != (found is None))
        else:
            wrong = _differing(found, self.wanted)
        if self.kept is not None and self.x is not None:
            wrong += _differing(self.x, self.kept)
        return wrong + sum(int((laid.around != _guard(laid.around)).sum()) for laid in self._laid)

    def _all_reduce(self) -> None:
        self._in_and_out(reduced(self.recipe, self.comm.size, self.recipe.count))

    def _reduce(self) -> None:
        if self.at_root:
            self._in_and_out(reduced(self.recipe, self.comm.size, self.recipe.count))
        else:
            self.kept = self._mine(self.recipe.count)
            self.x = self._lay(self.kept)

    def _in_and_out(self, wanted: Numbers) -> None:
        mine = self._mine(self.recipe.count)
        self.x, self.wanted = self._lay(mine), wanted
        if self.recipe.target == IN_PLACE:
            self.words["out"] = self.x
        elif self.recipe.target:
            self.words["out"], self.kept = self._lay(np.zeros_like(mine), private=True), mine

    def _broadcast(self) -> None:
        self.x = self._lay(self._mine(self.recipe.count))
        self.wanted = values(self.recipe, self.root, self.recipe.count)

    def _reduce_scatter(self) -> None:
        offsets = self._offsets(self.recipe.count)
        low, high = offsets[self.comm.rank : self.comm.rank + 2]
        mine = self._mine(offsets[-1])
        self.x, self.wanted = self._lay(mine), reduced(self.recipe, self.comm.size, offsets[-1])[low:high]
        if self.recipe.target == IN_PLACE:
            self.words["out"] = self.x[low:high]
            return
        self.kept = mine
        if self.recipe.target:
            self.words["out"] = self._lay(np.zeros_like(self.wanted), private=True)

    def _all_gather(self) -> None:
        whole = bool(self.recipe.target) and not self.recipe.lengths
        self._gathered(self._offsets(self.recipe.count) if whole else self._offsets_of_parts(), gets=True)

    def _gather(self) -> None:
        self._gathered(self._offsets_of_parts(), gets=self.at_root)

    def _gathered(self, offsets: list[int], *, gets: bool) -> None:
        """Bind parts that lie one after the other in the result, on a rank that gets it."""
        size, rank = self.comm.size, self.comm.rank
        lengths = np.diff(offsets).tolist()
        mine = self.kept = self._mine(lengths[rank])
        self.x = None
        if gets:
            self.wanted = np.concatenate([values(self.recipe, peer, lengths[peer]) for peer in range(size)])
            if self.recipe.target:
                out = self.words["out"] = self._lay(np.zeros_like(self.wanted), private=True)
            if self.recipe.target == IN_PLACE:
                self.x = out[offsets[rank] : offsets[rank + 1]]
                _fill(self.x, mine)
        if self.x is None:
            self.x = self._lay(mine)

    def _scatter(self) -> None:
        recipe = self.recipe
        offsets = self._offsets(recipe.count)
        low, high = offsets[self.comm.rank : self.comm.rank + 2]
        whole = values(recipe, self.root, offsets[-1])
        self.wanted = whole[low:high]
        known = bool(recipe.lengths) and bool(recipe.target)
        if self.at_root:
            self.x, self.kept = self._lay(whole), whole
        else:
            self.x = None if known else self._lay(np.zeros_like(whole))
        if recipe.target == IN_PLACE and self.at_root:
            self.words["out"] = self.x[low:high]
        elif recipe.target:
            self.words["out"] = self._lay(np.zeros_like(self.wanted), private=True)

    def _all_to_all(self) -> None:
        recipe, size, rank = self.recipe, self.comm.size, self.comm.rank

        def length(source: int, target: int) -> int:
            lengths = recipe.lengths or (recipe.count,)
            return lengths[(source + 3 * target) % len(lengths)]

        leaving = [length(rank, peer) for peer in range(size)]
        arriving = [length(peer, rank) for peer in range(size)]
        parts = []
        for source in range(size):
            sent = [length(source, peer) for peer in range(size)]
            start = sum(sent[:rank])
            parts.append(values(recipe, source, sum(sent))[start : start + sent[rank]])
        self.wanted, self.kept = np.concatenate(parts), self._mine(sum(leaving))
        self.x = self._lay(self.kept)
        if recipe.lengths:
            self.words["counts"] = leaving
            if not self.asking or recipe.key % 2:
                self.words["out_counts"] = arriving
        if recipe.target:
            self.words["out"] = self._lay(np.zeros_like(self.wanted), private=True)

    def _mine(self, count: int) -> Numbers:
        return values(self.recipe, self.comm.rank, count)

    def _offsets(self, total: int) -> list[int]:
        """Return where the chunks of a whole are cut."""
        return self._offsets_of_parts() if self.recipe.lengths else even_offsets(total, self.comm.size)

    def _offsets_of_parts(self) -> list[int]:
        """Return where parts of the recipe's lengths lie."""
        lengths: Sequence[int] = self.recipe.lengths[: self.comm.size]
        if lengths:
            self.words["counts"] = list(lengths)
        return [0, *np.cumsum(lengths or [self.recipe.count] * self.comm.size).tolist()]

    def _lay(self, numbers: Numbers, *, private: bool = False) -> Any:
        """Return an array with these numbers in the recipe's layout."""
        if self.recipe.symmetric and not private:
            array = mpizero.empty(numbers.size, _dtype(self.recipe), self.comm)
            _fill(array, numbers)
            return array
        laid = _laid(self.recipe, numbers)
        _fill(laid.array, numbers)
        self._laid.append(laid)
        return laid.array


def _laid(recipe: Recipe, numbers: Numbers) -> _Laid:
    """Return an array for so many numbers, and what lies around it."""
    count = numbers.size
    layout = "strided" if recipe.layout == "backwards" and recipe.library == "torch" else recipe.layout
    if layout == "strided":
        base = _full(recipe, 2 * count + 1)
        return _Laid(array=base[1 : 2 * count : 2], around=base[::2])
    if layout == "backwards":
        base = _full(recipe, count + 2)
        return _Laid(array=base[count:0:-1], around=base[:: count + 1])
    base = _full(recipe, count)
    if layout == "fortran":
        rows = next(rows for rows in (3, 2, 1) if count % rows == 0)
        return _Laid(array=base.reshape(count // rows, rows).T, around=base[:0])
    return _Laid(array=base, around=base[:0])


def _torch() -> Any:
    return import_module("torch")  # by those alone whose recipes name it


def _dtype(recipe: Recipe) -> Any:
    return recipe.dtype if recipe.library == "numpy" else getattr(_torch(), recipe.dtype)


def _full(recipe: Recipe, count: int) -> Any:
    """Return a flat array of guards."""
    library: Any = np if recipe.library == "numpy" else _torch()
    array = library.empty(count, dtype=_dtype(recipe))
    array[:] = GUARD if recipe.dtype != "bool" else True
    return array


def _guard(around: Any) -> Any:
    return True if str(around.dtype).endswith("bool") else GUARD


def _fill(array: Any, numbers: Numbers) -> None:
    shaped = numbers.reshape(tuple(array.shape))
    array[...] = shaped if isinstance(array, np.ndarray) else _torch().from_numpy(shaped.copy())


def _differing(found: Any, wanted: Numbers) -> int:
    """Return how many elements are not what was wanted; all of them where their number is wrong."""
    if not isinstance(found, np.ndarray):
        flat = found.detach().reshape(-1)
        found = (flat.float() if str(flat.dtype) == "torch.bfloat16" else flat).numpy()
    flat = found.reshape(-1)
    if flat.shape != wanted.shape or flat.dtype != wanted.dtype:
        return max(flat.size, wanted.size, 1)
    return int(np.count_nonzero(flat != wanted))
