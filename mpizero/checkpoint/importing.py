"""What other tools have saved, as a checkpoint of one file. One process, no MPI.

Safetensors are mapped and torch's files are loaded with `weights_only=True` and mapped, so that nothing runs code and
a model larger than memory passes. The formats of torch.distributed.checkpoint and DeepSpeed have pickles inside, which
can run code: they are read only where the caller says that they are to be trusted, by these packages' own readers.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from contextlib import redirect_stdout
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from mpizero.checkpoint.exporting import INDEX, SINGLE
from mpizero.checkpoint.failure import CheckpointError, listed
from mpizero.checkpoint.files import Range, read_header
from mpizero.checkpoint.folder import Saving
from mpizero.checkpoint.job import Job
from mpizero.checkpoint.manifest import ITEMSIZE
from mpizero.checkpoint.spaces import Piece, Stored, range_key
from mpizero.checkpoint.tensors import DTYPES, bytes_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["import_checkpoint"]

LATEST = "latest"
"""Which of a folder's checkpoints is the newest, in DeepSpeed's layout."""
USUAL = ("model", "module", "state_dict", "model_state_dict")

Found = tuple[dict[str, tuple[str, tuple[int, ...], Any]], dict[str, str]]
"""Tensors by name, each with dtype, shape and bytes; and ties."""


def import_checkpoint(source: Path, path: Path, *, key: str | None = None, trust: bool = False) -> int:
    """Make a checkpoint of what another tool has saved of a model; return the number of tensors.

    Args:
        source: a safetensors file, a folder in Hugging Face's layout, a file that `torch.save` wrote of a state dict,
            or a folder of torch.distributed.checkpoint or DeepSpeed ZeRO.
        path: the checkpoint's folder, to be made.
        key: where in the source the model's state dict is, if it is not the whole of it, as "model".
        trust: whether to read formats with pickles inside, which can run code.

    Raises:
        CheckpointError: for what cannot be read, or without `trust` is not; `path` is as before.
    """
    tensors, ties = _read(source, key, trust=trust)
    saving = Saving(Path(os.path.abspath(path)), os.urandom(8).hex())  # noqa: PTH100  (links stay what they are)
    try:
        stored = [Stored(key=f"model/{name}", dtype=one[0], shape=one[1]) for name, one in tensors.items()]
        whole = [(one, Piece(file=0, start=0, stop=one.numel)) for one in stored]
        ranges = [
            Range(key=range_key(one.key, piece), dtype=one.dtype, data=data)
            for (one, piece), (_, _, data) in zip(whole, tensors.values(), strict=True)
            if one.numel
        ]
        job = Job(file=0, ranges=ranges, spaces=(), tensors=stored, ties=ties, optimizer=None, extra=None,
                  extra_seen=[], saved=time.time(), saving=saving, hidden=saving.hidden)  # fmt: skip
        text = job.write() or job.commit([[0, 0, *job.written]])
        if text:
            raise CheckpointError(text)
    finally:
        saving.end()
    return len(stored)


def _read(source: Path, key: str | None, *, trust: bool) -> Found:
    if not source.exists():
        raise CheckpointError(f"{source} must be a file or a folder that exists (got nothing there)")
    try:
        if source.is_file():
            return _safetensors([source]) if source.suffix == ".safetensors" else _torch(source, key)
        if (source / INDEX).is_file():
            where = json.loads((source / INDEX).read_text())["weight_map"]
            return _safetensors([source / name for name in dict.fromkeys(where.values())])
        if (source / SINGLE).is_file():
            return _safetensors([source / SINGLE])
        if (source / ".metadata").is_file():
            _check_trust(source, "torch.distributed.checkpoint", trust=trust)
            return _trusted(_distributed, source, key)
        if (source / LATEST).is_file() or list(source.glob("*_model_states.pt")):
            _check_trust(source, "DeepSpeed", trust=trust)
            return _trusted(_deepspeed, source)
    except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{source} must be readable (got {type(error).__name__}: {error})") from None
    known = f"{SINGLE}, {INDEX}, .metadata or {LATEST}"
    raise CheckpointError(f"{source} must be a folder with one of {known} (got none of them)")


def _check_trust(source: Path, kind: str, *, trust: bool) -> None:
    if not trust:
        raise CheckpointError(
            f"{source} must be trusted to be read (got a folder of {kind}, whose pickles can run code): pass --trust "
            "if it is your own"
        )


def _trusted(reader: Callable[..., Found], source: Path, *words: str | None) -> Found:
    """Call another package's reader, whose errors may be any."""
    try:
        return reader(source, *words)
    except CheckpointError:
        raise
    except Exception as error:  # noqa: BLE001
        raise CheckpointError(f"{source} must be readable (got {type(error).__name__}: {error})") from None


def _safetensors(paths: list[Path]) -> Found:
    tensors: dict[str, tuple[str, tuple[int, ...], Any]] = {}
    ties: dict[str, str] = {}
    for path in paths:
        size = path.stat().st_size
        file = os.open(path, os.O_RDONLY)
        try:
            content, text = read_header(file, size)
        finally:
            os.close(file)
        metadata = content.pop("__metadata__", {})
        data = np.memmap(path, np.uint8, mode="r")
        for name, one in content.items():
            low, high = (8 + len(text) + offset for offset in one["data_offsets"])
            shape = tuple(one["shape"])
            if (
                one["dtype"] not in ITEMSIZE
                or high - low != int(np.prod(shape)) * ITEMSIZE[one["dtype"]]
                or high > size
            ):
                raise ValueError(f"tensor {name!r} of dtype {one['dtype']} and shape {shape} in {high - low} bytes")
            tensors[name] = (one["dtype"], shape, data[low:high])
        ties |= {alias: name for alias, name in metadata.items() if name in content and alias not in content}
    return tensors, ties


def _torch(path: Path, key: str | None) -> Found:
    try:
        loaded = torch.load(path, weights_only=True, mmap=True, map_location="cpu")
    except Exception as error:  # noqa: BLE001  (torch documents none; all mean that it cannot be read so)
        raise CheckpointError(
            f"{path} must be a file of torch.save that weights_only=True reads (got {error})"
        ) from None
    return _state_dict(loaded, key, path)


def _state_dict(loaded: Any, key: str | None, path: Path) -> Found:
    for word in key.split(".") if key else ():
        if not isinstance(loaded, dict) or word not in loaded:
            known = listed(loaded) if isinstance(loaded, dict) else type(loaded).__name__
            raise CheckpointError(f"--key must lead to a state dict in {path} (got {key!r}; there is {known})")
        loaded = loaded[word]
    if not isinstance(loaded, dict) or not all(isinstance(value, torch.Tensor) for value in loaded.values()):
        known = listed(loaded) if isinstance(loaded, dict) else type(loaded).__name__
        raise CheckpointError(
            f"{path} must hold a dict of tensors (got {known}): say where the model is by --key, as --key "
            f"{next((word for word in USUAL if isinstance(loaded, dict) and word in loaded), USUAL[0])}"
        )
    return _named(loaded)


def _named(state: Mapping[str, torch.Tensor]) -> Found:
    tensors: dict[str, tuple[str, tuple[int, ...], Any]] = {}
    ties: dict[str, str] = {}
    seen: dict[Any, str] = {}
    for name, tensor in state.items():
        where = (tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype)
        if tensor.numel() and where in seen:
            ties[name] = seen[where]
            continue
        seen[where] = name
        if tensor.dtype not in DTYPES:
            raise ValueError(f"tensor {name!r} of dtype {tensor.dtype}")
        tensors[name] = (DTYPES[tensor.dtype], tuple(tensor.shape), bytes_of(tensor))
    return tensors, ties


def _distributed(source: Path, key: str | None) -> Found:
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "whole.pt")
        dcp_to_torch_save(source, file)
        return _torch(file, key)


def _deepspeed(source: Path) -> Found:
    try:
        module = import_module("deepspeed.utils.zero_to_fp32")
    except ImportError as error:
        remedy = "python -m pip install deepspeed"
        raise CheckpointError(f"deepspeed must be installed to read {source} (got {error}): {remedy}") from None
    tag = (source / LATEST).read_text().strip() if (source / LATEST).is_file() else "."
    with redirect_stdout(sys.stderr):  # it tells of its progress
        found = module.get_fp32_state_dict_from_zero_checkpoint(str(source), tag=tag)
    tensors, ties = _named(found)
    for name, one in _named(_whole_in_deepspeed(source / tag))[0].items():
        if name not in ties:
            tensors.setdefault(name, one)
    return tensors, ties


def _whole_in_deepspeed(folder: Path) -> dict[str, torch.Tensor]:
    """Return the model's tensors as forward has them: at stage 1 the reader leaves frozen parameters out."""
    path = folder / "mp_rank_00_model_states.pt"
    if not path.is_file():  # at stage 3, whose reader leaves nothing out
        return {}
    loaded = torch.load(path, weights_only=False, map_location="cpu")["module"]
    return dict(loaded)
