"""mpizero: ZeRO-sharded PyTorch training under plain mpirun, on collectives of its own over MPI.

Importing this module starts no MPI and loads neither torch nor cupy; names are loaded when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_WHERE = {
    "mpizero.checkpoint": ("CheckpointError", "SaveHandle", "load", "save", "save_async"),
    "mpizero.collectives": (
        "all_gather",
        "all_reduce",
        "all_to_all",
        "barrier",
        "broadcast",
        "empty",
        "gather",
        "prepare",
        "reduce",
        "reduce_scatter",
        "scatter",
        "stop_requested",
    ),
    "mpizero.comm": ("Communicator", "Work", "world"),
    "mpizero.comm.gpus": ("choose_gpu",),
    "mpizero.errors": (
        "ArgumentError",
        "ArgumentTypeError",
        "CollectiveError",
        "CollectiveTimeoutError",
        "DeviceError",
        "DeviceMemoryError",
        "DiskError",
        "LaunchError",
        "MpiNotFoundError",
        "MpiZeroError",
        "NonFiniteError",
        "ShardError",
    ),
    "mpizero.optim": ("EMA", "GradScaler", "clip_grad_norm_", "clip_grad_value_", "grad_norm", "offloaded"),
    "mpizero.shard": (
        "FULL_SHARD",
        "HYBRID_SHARD",
        "MemoryReport",
        "NO_SHARD",
        "NonFiniteWatch",
        "Offload",
        "Precision",
        "Profile",
        "ReplicaWatch",
        "SHARD_GRAD_OP",
        "SyncBatchNorm",
        "check_replicas",
        "convert_sync_batchnorm",
        "elementwise",
        "full_gradient",
        "full_optimizer_state",
        "full_parameter",
        "full_parameters",
        "global_mean",
        "join",
        "memory_report",
        "micro_batches",
        "no_sync",
        "profile",
        "set_full_gradient",
        "set_full_optimizer_state",
        "set_full_parameter",
        "shard",
        "stats",
        "unsharded",
        "watch_nonfinite",
        "watch_replicas",
    ),
}
_HOME = {name: module for module, names in _WHERE.items() for name in names}

__all__ = ["__version__", *_HOME]  # noqa: PLE0604  (strings all of them)


def __getattr__(name: str) -> Any:
    """Load a public name from its module."""
    if name not in _HOME:
        raise AttributeError(f"module 'mpizero' has no attribute {name!r}")
    home = import_module(_HOME[name])
    value = home if name == "shard" else getattr(home, name)  # a package that is its own verb
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """List the public names."""
    return sorted(__all__)
