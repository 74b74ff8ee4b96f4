"""The torch runtime: units, their lifetimes by stage, and the verb `shard`.

The floor and its verb share a name: `mpizero.shard` is this package, and calling it calls the verb.
"""

from __future__ import annotations

import sys
from inspect import signature
from types import ModuleType
from typing import Any

from mpizero.shard.batchnorm import SyncBatchNorm, convert_sync_batchnorm
from mpizero.shard.data import global_mean, join
from mpizero.shard.micro import micro_batches
from mpizero.shard.nonfinite import NonFiniteWatch, watch_nonfinite
from mpizero.shard.offload import Offload
from mpizero.shard.optimizers import elementwise
from mpizero.shard.policy import FULL_SHARD, HYBRID_SHARD, NO_SHARD, SHARD_GRAD_OP, Precision
from mpizero.shard.profile import Profile, profile
from mpizero.shard.replicas import ReplicaWatch, check_replicas, watch_replicas
from mpizero.shard.report import MemoryReport, memory_report
from mpizero.shard.runtime import runtime_of
from mpizero.shard.verb import full_parameters, no_sync, stats, unsharded
from mpizero.shard.verb import shard as _shard
from mpizero.shard.whole import (
    full_gradient,
    full_optimizer_state,
    full_parameter,
    set_full_gradient,
    set_full_optimizer_state,
    set_full_parameter,
)

__all__ = [
    "FULL_SHARD",
    "HYBRID_SHARD",
    "NO_SHARD",
    "SHARD_GRAD_OP",
    "MemoryReport",
    "NonFiniteWatch",
    "Offload",
    "Precision",
    "Profile",
    "ReplicaWatch",
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
    "runtime_of",
    "set_full_gradient",
    "set_full_optimizer_state",
    "set_full_parameter",
    "stats",
    "unsharded",
    "watch_nonfinite",
    "watch_replicas",
]


class _Verb(ModuleType):
    """Make the package callable."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call `mpizero.shard.verb.shard`."""
        return _shard(*args, **kwargs)


_Verb.__call__.__doc__ = _shard.__doc__
_here = sys.modules[__name__]
_here.__class__ = _Verb
_here.__signature__ = signature(_shard)  # type: ignore[attr-defined]
_here.__doc__ = f"mpizero.shard{signature(_shard)}\n\n{_shard.__doc__}\n\n{__doc__}"
