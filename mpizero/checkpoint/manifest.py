"""What a checkpoint says of itself: `manifest.json`, and the dtypes that may lie in its files."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from mpizero.checkpoint.failure import CheckpointError
from mpizero.checkpoint.spaces import Space, Stored

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["BLOCK", "ITEMSIZE", "MANIFEST", "SCHEMA", "FileFacts", "Manifest", "shard_name"]

MANIFEST = "manifest.json"
FORMAT = "mpizero checkpoint"
SCHEMA = 1
BLOCK = 8192
"""Bytes that have a checksum of their own. A rank that reads a part of a range reads up to two blocks more, so they are
small; for less than 5 KiB zlib does not let go of the GIL, and a save in the background would hold up the training."""

ITEMSIZE = {"F64": 8, "I64": 8, "U64": 8, "C64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2,
            "U16": 2, "I8": 1, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1}  # fmt: skip
"""Bytes of an element, by the names that safetensors has for dtypes."""


@dataclass(frozen=True, kw_only=True)
class FileFacts:
    """Say what a file must look like to be the one that was saved."""

    rank: int
    """The rank that wrote it."""
    nbytes: int
    header: int
    """The CRC-32 of its header; the header tells where its checksums lie."""


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Hold what a checkpoint says of itself."""

    spaces: tuple[Space, ...]
    tensors: dict[str, Stored]
    """By key, in the model's order."""
    files: tuple[FileFacts, ...]
    ties: dict[str, str] = field(default_factory=dict)
    """The other names of parameters that modules share, with the one that each is stored under."""
    optimizer: dict[str, Any] | None = None
    """The class's name, the groups' options with the names of their parameters, and states that are numbers."""
    extra: Any = None
    """As `values.encode` writes it."""
    saved: float = 0.0
    """Seconds since 1970."""
    block: int = BLOCK
    version: str = ""
    """Of mpizero."""

    def dumps(self) -> str:
        """Return it as JSON."""
        tensors = {
            key: {"dtype": one.dtype, "shape": list(one.shape)}
            | ({"file": one.offset} if one.space is None else {"space": one.space, "offset": one.offset})
            for key, one in self.tensors.items()
        }
        content = {
            "format": FORMAT,
            "schema_version": SCHEMA,
            "mpizero": self.version,
            "saved": self.saved,
            "block": self.block,
            "ties": self.ties,
            "extra": self.extra,
            "optimizer": self.optimizer,
            "spaces": [asdict(space) for space in self.spaces],
            "files": [asdict(one) for one in self.files],
            "tensors": tensors,
        }
        return "{\n" + ",\n".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in content.items()) + "\n}\n"

    @classmethod
    def loads(cls, text: str, where: Path) -> Manifest:
        """Read what `dumps` wrote.

        Args:
            text: the JSON.
            where: the checkpoint's folder, for errors.

        Raises:
            CheckpointError: for another format, a newer schema, or what is no manifest at all.
        """
        try:
            content = json.loads(text)
            if content["format"] != FORMAT:
                raise CheckpointError(f"{where} must be an mpizero checkpoint (got the format {content['format']!r})")
            if content["schema_version"] > SCHEMA:
                raise CheckpointError(
                    f"schema_version of {where} must be at most {SCHEMA} (got {content['schema_version']}): it was "
                    f"saved by mpizero {content['mpizero']}; load it with that version or a newer one"
                )
            tensors = {
                key: Stored(
                    key=key,
                    dtype=one["dtype"],
                    shape=tuple(one["shape"]),
                    space=one.get("space"),
                    offset=one["offset"] if "space" in one else one["file"],
                )
                for key, one in content["tensors"].items()
            }
            return cls(
                spaces=tuple(Space(**space) for space in content["spaces"]),
                tensors=tensors,
                files=tuple(FileFacts(**one) for one in content["files"]),
                ties=content["ties"],
                optimizer=content["optimizer"],
                extra=content["extra"],
                saved=content["saved"],
                block=content["block"],
                version=content["mpizero"],
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(
                f"{where / MANIFEST} must be the manifest of a checkpoint (got one that cannot be read: {error!r}): "
                "load an older checkpoint"
            ) from None


def shard_name(file: int, files: int) -> str:
    """Return the name of a checkpoint's file number `file`."""
    return f"shard-{file + 1:05}-of-{files:05}.safetensors"
