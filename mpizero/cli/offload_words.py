"""What is moved out of memory, and over what, as `mpizero plan` and `mpizero simulate train` are told of it."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from mpizero.bench.flags import size_of
from mpizero.cli.quantities import per_byte_of, show_rate
from mpizero.errors import ArgumentError, must_be
from mpizero.plan import DISK, Carriers, Moved
from mpizero.plan.groups import GROUP_BYTES

if TYPE_CHECKING:
    import argparse

    from mpizero.plan import Carried

__all__ = ["OFFLOAD_FLAGS", "WHERE", "carrier_in_words", "carriers_of", "offload_of", "offload_record"]

OFFLOAD_FLAGS = (
    ("--offload", None, ("what is moved out of memory: optimizer=disk or optimizer=disk,params=disk with --device cpu, "
     "optimizer=host or optimizer=host,params=host with --device gpu")),
    ("--group-bytes", f"{GROUP_BYTES >> 20}M", "state on a disk is read, updated and written so many bytes at a time"),
    ("--disk-rate", "2GB/s", ("with --offload: bytes per second that a node's disk carries each way at once, for all "
     "ranks of the node together; an assumption: mpizero doctor --disk PATH measures it")),
    ("--host-rate", "25GB/s", ("with --offload: the same of the link between a GPU and host memory, for each rank; an "
     "assumption")),
)  # fmt: skip
WHERE = {"disk": "on disk", "host": "in host memory"}
FIELDS = ("optimizer", "params")


def offload_of(options: argparse.Namespace) -> Moved | None:
    """Return what `--offload` asks to be moved, None for nothing; raise ArgumentError for another text."""
    group = size_of("--group-bytes", options.group_bytes)
    if options.offload is None:
        return None
    found: dict[str, str] = {}
    for word in options.offload.split(","):
        name, _, place = word.strip().partition("=")
        if name not in FIELDS or name in found or place not in WHERE:
            rule = "optimizer=disk, optimizer=host, or the same with ,params=disk or ,params=host behind it"
            remedy = 'the "cpu" of mpizero.Offload is host here, and a folder disk'
            raise ArgumentError(must_be("--offload", rule, options.offload, remedy))
        found[name] = place
    return Moved(**found, group_bytes=group)


def carriers_of(options: argparse.Namespace) -> Carriers:
    """Return what `--disk-rate` and `--host-rate` say; raise ArgumentError."""
    return Carriers(
        disk=per_byte_of("--disk-rate", options.disk_rate), host=per_byte_of("--host-rate", options.host_rate)
    )


def carrier_in_words(moved: Moved, carriers: Carriers, ranks: int) -> str:
    """Return what carries the bytes, and how fast.

    Args:
        moved: the choice.
        carriers: the rates.
        ranks: that a node's disk serves.
    """
    if moved.place == DISK:
        return (
            f"a disk of {show_rate(carriers.disk)} each way at once, for the {ranks} rank{'s' * (ranks > 1)} of a node"
        )
    return f"a link of {show_rate(carriers.host)} each way at once between a GPU and host memory"


def offload_record(moved: Moved | None, carried: Carried, outside: Any) -> dict[str, Any] | None:
    """Return the JSON of what is moved at one stage: bytes by kind, and of a step; None for nothing."""
    if moved is None:
        return None
    return {**asdict(moved), "outside": {**asdict(outside), "total": outside.total}, "carried": asdict(carried)}
