"""The one door to mpi4py: loads its MPI module at first use and says what to do where there is no MPI library."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpizero.comm.forks import check_may_start
from mpizero.comm.launch import HOW_TO_GET_MPI
from mpizero.errors import MpiNotFoundError

if TYPE_CHECKING:
    from types import ModuleType

__all__ = ["mpi"]


def mpi() -> ModuleType:
    """Return mpi4py's `MPI` module, which starts MPI at the first call unless the caller's process already has.

    The thread level asked for is `MPI_THREAD_MULTIPLE`, mpi4py's default, unless the user set `mpi4py.rc` or
    `MPI4PY_RC_*`; `MPI.Query_thread()` tells what was granted.

    Raises:
        MpiNotFoundError: where mpi4py, or the MPI library that it loads, is not to be found.
        CollectiveError, LaunchError: in a child of a rank; see `forks`.
    """
    check_may_start()
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        reason = str(error).strip().partition("\n")[0]
        text = f"no MPI library could be loaded ({reason}): {HOW_TO_GET_MPI}"
        raise MpiNotFoundError(text) from error
    return MPI
