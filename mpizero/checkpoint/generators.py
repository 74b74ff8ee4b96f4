"""The random generators of a rank: torch's, CUDA's, Python's and numpy's."""

from __future__ import annotations

import json
import random
import zlib
from typing import Any

import numpy as np
import torch

from mpizero.checkpoint.values import decode, encode

__all__ = ["derive", "dump_generators", "set_generators"]


def dump_generators() -> np.ndarray[Any, Any]:
    """Return where all generators of this process stand, as bytes: some 20 KB."""
    numbers: Any = np.random.get_state(legacy=True)  # noqa: NPY002  (the global one is what programs share)
    state = {
        "torch": torch.get_rng_state().numpy().tobytes(),
        "cuda": [one.numpy().tobytes() for one in _cuda_states()],
        "python": random.getstate(),
        "numpy": [value.tolist() if isinstance(value, np.ndarray) else value for value in numbers],
    }
    return np.frombuffer(json.dumps(encode(state)).encode(), np.uint8)


def set_generators(data: np.ndarray[Any, Any]) -> None:
    """Put all generators where they stood when `dump_generators` gave these bytes."""
    state = decode(json.loads(data.tobytes()))
    torch.set_rng_state(_as_tensor(state["torch"]))
    if state["cuda"] and len(_cuda_states()) == len(state["cuda"]):
        torch.cuda.set_rng_state_all([_as_tensor(one) for one in state["cuda"]])
    random.setstate(state["python"])
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, np.array(keys, np.uint32), *rest))  # noqa: NPY002  (as above)


def derive(data: np.ndarray[Any, Any], rank: int, ranks: int) -> None:
    """Seed all generators of one of `ranks` ranks from what another number of ranks has saved: the same each time."""
    words = np.random.SeedSequence([zlib.crc32(data.data), rank, ranks]).generate_state(3, np.uint32).tolist()
    torch.manual_seed(words[0])
    random.seed(words[1])
    np.random.seed(words[2])  # noqa: NPY002  (as above)


def _cuda_states() -> list[torch.Tensor]:
    cuda: Any = torch.cuda  # typed in part
    found: list[torch.Tensor] = cuda.get_rng_state_all() if cuda.is_available() and cuda.is_initialized() else []
    return found


def _as_tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
