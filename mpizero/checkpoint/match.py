"""Match what a checkpoint has with what a model holds, by name."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mpizero.checkpoint.failure import CheckpointError, listed
from mpizero.checkpoint.tensors import DTYPES

if TYPE_CHECKING:
    import torch

    from mpizero.checkpoint.manifest import Manifest
    from mpizero.checkpoint.spaces import Stored
    from mpizero.checkpoint.state import State

__all__ = ["Fitting", "Names", "fitting"]

MODEL, OPTIMIZER = "model/", "optimizer/"
INTEGERS = {"I64", "I32", "I16", "I8", "U8", "U16", "U32", "U64", "BOOL"}


class Names:
    """Find a checkpoint's tensors by the names of parameters."""

    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest
        self.model: dict[str, Stored] = {}
        """Parameters and buffers, by the name that each is stored under."""
        self.states: dict[str, dict[str, Stored]] = {}
        """By a parameter's name and a state's key."""
        for key, stored in manifest.tensors.items():
            if key.startswith(MODEL):
                self.model[key.removeprefix(MODEL)] = stored
            elif key.startswith(OPTIMIZER):
                state, _, name = key.removeprefix(OPTIMIZER).partition("/")
                self.states.setdefault(name, {})[state] = stored

    def resolve(self, name: str) -> str:
        """Return the name that a parameter is stored under."""
        return self.manifest.ties.get(name, name)


@dataclass(kw_only=True)
class Fitting:
    """Say where what a model holds is stored."""

    stored: list[Stored] = field(default_factory=list)
    """For each of the cut parameters, then each of the whole ones and the buffers."""
    twins: list[tuple[int, Stored]] = field(default_factory=list)
    """Where a parameter with several names was saved as several tensors: its place in `stored`, and another of them."""


def fitting(state: State, names: Names) -> Fitting:
    """Return where each parameter and buffer of a model is stored.

    Raises:
        CheckpointError: with all that does not fit: names that are missing, and unexpected ones, shapes, dtypes.
    """
    faults: list[str] = []
    used: set[str] = set()
    missing: list[str] = []
    cut = [(one.names, one.shape, one.shard.dtype) for one in state.held]
    whole = [(known, tuple(tensor.shape), tensor.dtype) for known, tensor in state.whole]
    found = Fitting()
    for known, shape, dtype in [*cut, *whole]:
        candidates = {name for name in map(names.resolve, known) if name in names.model}
        used |= candidates
        if not candidates:
            missing.append(known[0])
            continue
        stored, *others = [names.model[name] for name in sorted(candidates)]
        faults += [fault for one in (stored, *others) if (fault := _misfit(known[0], one, shape, dtype))]
        found.twins += [(len(found.stored), other) for other in others]
        found.stored.append(stored)
    unused = [name for name in names.model if name not in used]
    lists = [(missing, "missing in the checkpoint"), (unused, "unexpected in the checkpoint")]
    faults[:0] = [f"{len(items)} {what}: {listed(items)}" for items, what in lists if items]
    if faults:
        raise CheckpointError(f"the model must be the one that was saved (got {listed(faults, '; ')})")
    return found


def _misfit(name: str, stored: Stored, shape: tuple[int, ...], dtype: torch.dtype) -> str:
    if stored.shape != shape:
        return f"{name} of shape {shape}, saved as {stored.shape}"
    if stored.dtype != DTYPES[dtype] and INTEGERS & {stored.dtype, DTYPES[dtype]}:
        return f"{name} of dtype {DTYPES[dtype]}, saved as {stored.dtype}"
    return ""
