"""`mpizero checkpoint`: looks into a checkpoint, writes it for other tools, and makes one of theirs; needs no MPI."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpizero.bench.flags import size_of
from mpizero.cli.quantities import show_bytes
from mpizero.tables import aligned

if TYPE_CHECKING:
    import argparse

__all__ = ["configure", "run"]

SHOWN = 20
"""Tensors that are listed without --all."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the actions and their arguments."""
    actions = parser.add_subparsers(title="actions", metavar="ACTION", dest="action", required=True)
    show = actions.add_parser("show", help="say what is inside", allow_abbrev=False)
    show.add_argument("folder", metavar="DIR", type=Path, help="a checkpoint, or a folder with one that latest names")
    show.add_argument("--verify", action="store_true", help="read everything and compare it with its checksums")
    show.add_argument("--all", action="store_true", help="list every tensor")
    merge = actions.add_parser("merge", help="write whole parameters as safetensors", allow_abbrev=False)
    merge.add_argument("folder", metavar="DIR", type=Path, help="as for show")
    merge.add_argument("out", metavar="OUT", type=Path, help="a file; with --max-shard-size a folder")
    merge.add_argument("--max-shard-size", metavar="SIZE", help="write files of at most so much, as 5G, and an index")
    source = actions.add_parser("import", help="make a checkpoint of what another tool has saved", allow_abbrev=False)
    text = "a safetensors or torch file, or a folder of Hugging Face's, torch.distributed.checkpoint's or DeepSpeed's"
    source.add_argument("source", metavar="SOURCE", type=Path, help=text)
    source.add_argument("folder", metavar="DIR", type=Path, help="the checkpoint to make")
    source.add_argument("--key", help="where in a torch file the model is, as model or state.model")
    source.add_argument("--trust", action="store_true", help="read formats with pickles, which can run code")


def run(options: argparse.Namespace) -> int:
    """Do the action; return 1 where --verify finds damage.

    Raises:
        CheckpointError: for what cannot be read or written.
    """
    if options.action == "show":
        return _show(options)
    if options.action == "merge":
        from mpizero.checkpoint.exporting import merge

        limit = None if options.max_shard_size is None else size_of("--max-shard-size", options.max_shard_size)
        done = merge(options.folder, options.out, limit)
        files = f"{len(done.files)} file{'s' * (len(done.files) > 1)}"
        print(f"wrote {done.tensors} tensors, {show_bytes(done.nbytes)}, in {files}: {done.files[0]}")
        return 0
    from mpizero.checkpoint.importing import import_checkpoint

    count = import_checkpoint(options.source, options.folder, key=options.key, trust=options.trust)
    print(f"imported {count} tensors: {options.folder}")
    return 0


def _show(options: argparse.Namespace) -> int:
    from mpizero.checkpoint.folder import find, read_manifest
    from mpizero.checkpoint.manifest import ITEMSIZE

    folder = find(options.folder)
    manifest = read_manifest(folder)
    sizes: Counter[str] = Counter()
    for one in manifest.tensors.values():
        sizes[one.key.partition("/")[0]] += one.numel * ITEMSIZE[one.dtype]
    params, states = _count(manifest, "model"), _count(manifest, "optimizer")
    when = time.strftime("%Y-%m-%d %H:%M", time.localtime(manifest.saved))
    kind = f", {manifest.optimizer['class']}" if manifest.optimizer else ", no optimizer"
    lines = [
        str(folder),
        f"  saved by     mpizero {manifest.version}, {when}",
        f"  ranks        {len(manifest.files)}",
        f"  model        {show_bytes(sizes['model'])} in {params} tensors, {len(manifest.ties)} ties",
        f"  optimizer    {show_bytes(sizes['optimizer'])} in {states} tensors{kind}",
        f"  extra        {_extra(manifest.extra)}",
        f"  on the disk  {show_bytes(sum(one.nbytes for one in manifest.files))}",
        "",
        _tensors(manifest, every=options.all),
    ]
    print("\n".join(lines), flush=True)
    return _verify(folder, manifest) if options.verify else 0


def _count(manifest: Any, kind: str) -> int:
    return sum(key.startswith(f"{kind}/") for key in manifest.tensors)


def _extra(extra: Any) -> str:
    if isinstance(extra, dict):
        return ", ".join(extra)
    return "none" if extra is None else type(extra).__name__


def _tensors(manifest: Any, *, every: bool) -> str:
    stored = list(manifest.tensors.values())
    shown = stored if every else stored[:SHOWN]
    aliases: dict[str, list[str]] = {}
    for alias, name in manifest.ties.items():
        aliases.setdefault(f"model/{name}", []).append(alias)
    rows: list[tuple[object, ...]] = [("tensor", "dtype", "shape", "tied to")]
    rows += [(one.key, one.dtype, "x".join(map(str, one.shape)) or "scalar", " ".join(aliases.get(one.key, ["-"])))
             for one in shown]  # fmt: skip
    more = f"\nand {len(stored) - len(shown)} more: --all lists them" if len(stored) > len(shown) else ""
    return aligned(rows) + more


def _verify(folder: Path, manifest: Any) -> int:
    from mpizero.checkpoint.reader import Reader

    with Reader(folder, manifest) as reader:
        faults = [fault for number in range(len(manifest.files)) if (fault := _fault(reader, number))]
    print("\n".join(["", *faults]) if faults else "\nall checksums match")
    return 1 if faults else 0


def _fault(reader: Any, number: int) -> str:
    from mpizero.checkpoint.failure import CheckpointError

    try:
        reader.file(number).verify()
    except CheckpointError as error:
        return str(error)
    return ""
