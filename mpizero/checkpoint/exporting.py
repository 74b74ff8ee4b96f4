"""A checkpoint's parameters as files that other tools read, and those of others as a checkpoint. One process, no MPI.

Both stream: what is held at a time is a header and a buffer of CHUNK, whatever the size of the model.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mpizero.checkpoint.failure import CheckpointError
from mpizero.checkpoint.files import CHUNK, header_of
from mpizero.checkpoint.folder import PREFIX, find, read_manifest, sync_folder
from mpizero.checkpoint.manifest import ITEMSIZE
from mpizero.checkpoint.match import Names
from mpizero.checkpoint.reader import Reader
from mpizero.checkpoint.tensors import bytes_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from mpizero.checkpoint.spaces import Stored

__all__ = ["Merged", "merge"]

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True, kw_only=True)
class Merged:
    """Say what `merge` has written."""

    files: tuple[Path, ...]
    tensors: int
    nbytes: int
    """Of the tensors."""


def merge(path: Path, out: Path, max_shard_bytes: int | None = None) -> Merged:
    """Write a checkpoint's whole parameters and buffers as safetensors, under their names; checks what it reads.

    Of a parameter that modules share the first name is stored; the file's metadata has the others, as
    `safetensors.torch.save_model` writes them, so that its `load_model` finds them.

    Args:
        path: a checkpoint, or a folder with one that `latest` names.
        out: the file to write; with `max_shard_bytes`, a folder for the Hugging Face layout: files of at most so many
            bytes, unless one tensor is larger, and `model.safetensors.index.json`.
        max_shard_bytes: None writes one file.

    Raises:
        CheckpointError: for a checkpoint that is damaged, or a place where nothing can be written. Each file appears
            whole or not at all.
    """
    folder = find(path)
    manifest = read_manifest(folder)
    names = Names(manifest)
    groups = [list(names.model.items())] if max_shard_bytes is None else list(_groups(names, max_shard_bytes))
    many = len(groups)
    try:
        if max_shard_bytes is None:
            files = [out]
        else:
            out.mkdir(parents=True, exist_ok=True)
            files = [out / (SINGLE if many == 1 else f"model-{n + 1:05}-of-{many:05}.safetensors") for n in range(many)]
        with Reader(folder, manifest) as reader:
            for file, group in zip(files, groups, strict=True):
                _write(file, group, names, reader)
        total = sum(one.numel * ITEMSIZE[one.dtype] for one in names.model.values())
        if max_shard_bytes is not None and many > 1:
            where = {name: file.name for file, group in zip(files, groups, strict=True) for name, _ in group}
            content = {"metadata": {"total_size": total}, "weight_map": where}
            _appear(out / INDEX, json.dumps(content, indent=2).encode())
    except OSError as error:
        raise CheckpointError(f"{out} must be a place to write at (got: {error})") from None
    return Merged(files=tuple(files), tensors=len(names.model), nbytes=total)


def _groups(names: Names, limit: int) -> Iterator[list[tuple[str, Stored]]]:
    """Yield what goes into each file."""
    group: list[tuple[str, Stored]] = []
    filled = 0
    for name, stored in names.model.items():
        nbytes = stored.numel * ITEMSIZE[stored.dtype]
        if group and filled + nbytes > limit:
            yield group
            group, filled = [], 0
        group.append((name, stored))
        filled += nbytes
    yield group


def _write(path: Path, group: list[tuple[str, Stored]], names: Names, reader: Reader) -> None:
    group = sorted(group, key=lambda one: -ITEMSIZE[one[1].dtype])
    table = [(name, one.dtype, one.shape, one.numel * ITEMSIZE[one.dtype]) for name, one in group]
    here = {name for name, _ in group}
    ties = {alias: name for alias, name in names.manifest.ties.items() if name in here}
    hidden = _hidden(path)
    try:
        with hidden.open("wb") as file:
            file.write(header_of(table, {"format": "pt", **ties}))
            for _, stored in group:
                step = CHUNK // ITEMSIZE[stored.dtype]
                for start in range(0, stored.numel, step):
                    part = reader.ask(stored, start, min(start + step, stored.numel))
                    reader.fetch()
                    file.write(bytes_of(part).data)
            file.flush()
            os.fsync(file.fileno())
        hidden.replace(path)
        sync_folder(path.parent)
    finally:
        hidden.unlink(missing_ok=True)


def _appear(path: Path, content: bytes) -> None:
    hidden = _hidden(path)
    hidden.write_bytes(content)
    hidden.replace(path)


def _hidden(path: Path) -> Any:
    return path.with_name(f"{PREFIX}merging-{path.name}")
