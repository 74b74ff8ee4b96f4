"""Say of a communicator that was dropped without being closed where it was made.

Closing is collective, and the garbage collector comes at another time on every rank: so nothing is freed by it, and MPI
keeps such a communicator to the end of the job. At exit nothing is freed and nothing said: MPI_Finalize sees to it.
"""

from __future__ import annotations

import sys
import warnings
from typing import Any

__all__ = ["user_line", "warn_of_leak"]


def user_line() -> str:
    """Return file and line of the nearest caller outside mpizero; a microsecond."""
    frame: Any = sys._getframe(1)  # noqa: SLF001  (the whole stack, as `inspect` gives it, takes milliseconds)
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "mpizero":
        frame = frame.f_back
    return "an unknown line" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"


def warn_of_leak(made_at: str, source: object) -> None:
    """Give the ResourceWarning of a dropped communicator; `tracemalloc` adds the whole stack of its making."""
    if sys.is_finalizing():
        return
    warnings.warn(
        f"a communicator, made at {made_at}, was dropped without close(): MPI keeps it until the job ends, and has "
        "some 2,000 to give; hold it, and close it on all ranks together",
        ResourceWarning,
        stacklevel=3,
        source=source,
    )
