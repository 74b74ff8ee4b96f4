"""Values of Python as JSON, and back, without anything that could run code: what `extra` may hold.

JSON has no tuples, no dicts with keys other than strings, no infinities. These are written as an object with one key
that begins with "$": `{"$tuple": [1, 2]}`.
"""

from __future__ import annotations

import json
import math
from base64 import b64decode, b64encode
from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from mpizero.checkpoint.tensors import DTYPES
from mpizero.errors import ArgumentTypeError, must_be

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["decode", "encode"]

_PLAIN: dict[str, Callable[[Any], Any]] = {
    "$tuple": tuple,
    "$set": set,
    "$frozenset": frozenset,
    "$dict": dict,
    "$counter": lambda pairs: Counter(dict(pairs)),
}
"""What is made of a decoded list."""
_ATOMS: dict[str, Callable[[Any], Any]] = {"$float": float, "$bytes": b64decode}


def encode(value: Any, store: Callable[[torch.Tensor], str] | None = None, where: str = "extra") -> Any:
    """Return a value as what `json` can write.

    Args:
        value: None, numbers, strings, bytes, lists, tuples, sets, dicts, tensors and numpy arrays, nested.
        store: takes a tensor away and returns its key; None refuses tensors with more than one element.
        where: how the user gets at the value, for the error.

    Raises:
        ArgumentTypeError: for anything else; names where it is.
    """
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool | str | int | float | bytes):
        return _encode_atom(value)
    if isinstance(value, torch.Tensor | np.ndarray):
        return _encode_array(value, store, where)
    if isinstance(value, dict):
        return _encode_dict(value, store, where)
    if isinstance(value, list | tuple | set | frozenset):
        items = [encode(item, store, f"{where}[{index}]") for index, item in enumerate(value)]
        if isinstance(value, set | frozenset):  # each process has its own order of strings
            return {"$frozenset" if isinstance(value, frozenset) else "$set": sorted(items, key=json.dumps)}
        return items if isinstance(value, list) else {"$tuple": items}
    remedy = "save what it is made of, for example its state_dict()"
    raise ArgumentTypeError(must_be(where, "JSON values and tensors", type(value).__name__, remedy))


def _encode_atom(value: Any) -> Any:
    if isinstance(value, bytes):
        return {"$bytes": b64encode(value).decode()}
    return {"$float": str(value)} if isinstance(value, float) and not math.isfinite(value) else value


def _encode_dict(value: dict[Any, Any], store: Any, where: str) -> Any:
    plain = all(isinstance(key, str) and not key.startswith("$") for key in value)
    if plain and not isinstance(value, Counter):
        return {key: encode(item, store, f"{where}[{key!r}]") for key, item in value.items()}
    pairs = [[encode(key, None, where), encode(item, store, f"{where}[{key!r}]")] for key, item in value.items()]
    return {"$counter" if isinstance(value, Counter) else "$dict": pairs}


def _encode_array(value: Any, store: Any, where: str) -> Any:
    array = isinstance(value, np.ndarray)
    tensor = torch.from_numpy(np.ascontiguousarray(value)).reshape(value.shape) if array else value.detach()
    if store is not None:
        return {"$array" if array else "$tensor": store(tensor)}
    if tensor.numel() != 1:
        raise ArgumentTypeError(must_be(where, "numbers, or a tensor of one element", tuple(tensor.shape)))
    return {"$number": [encode(tensor.item()), str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]}


def decode(value: Any, fetch: Callable[[str], torch.Tensor] | None = None) -> Any:
    """Return the value that `encode` wrote; `fetch` gives a tensor by its key."""
    if isinstance(value, list):
        return [decode(item, fetch) for item in value]
    if not isinstance(value, dict):
        return value
    tag = next(iter(value), "")
    if len(value) != 1 or not tag.startswith("$"):
        return {key: decode(item, fetch) for key, item in value.items()}
    return _decode_tagged(tag, value[tag], fetch)


def _decode_tagged(tag: str, content: Any, fetch: Callable[[str], torch.Tensor] | None) -> Any:
    if tag in _ATOMS:
        return _ATOMS[tag](content)
    if tag in _PLAIN:
        return _PLAIN[tag](decode(content, fetch))
    if tag == "$number":
        number, dtype, shape = content
        known = {str(one).removeprefix("torch."): one for one in DTYPES}
        return torch.full(shape, decode(number), dtype=known[dtype])
    if fetch is None or tag not in {"$tensor", "$array"}:
        raise ArgumentTypeError(must_be("a saved value", "one of a known kind", tag))
    tensor = fetch(content)
    return tensor.numpy() if tag == "$array" else tensor
