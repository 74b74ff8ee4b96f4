"""Memory that the C library keeps for later after it was freed.

[Note: kept memory] glibc gives memory back that was taken in large pieces, and raises what it calls large, up to 32
MiB, each time such a piece is freed. So the buffers of a model's units, which come and go, end in its heap, and of that
it gives back the end alone: what is resident stays at the highest that ever was, and more.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

__all__ = ["give_back"]


def give_back() -> None:
    """Have the C library give all pages back that nobody uses; does nothing where it is not glibc.

    Takes the time in which the system takes these pages, about 0.1 s for a gigabyte, and as much when they are used
    again.
    """
    trim = _trim()
    if trim is not None:
        trim(0)


@cache
def _trim() -> Any:
    return getattr(ctypes.CDLL(None), "malloc_trim", None)
