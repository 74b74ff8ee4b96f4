"""Torch's dtypes by the names that safetensors has for them, and a tensor's bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["DTYPES", "bytes_of", "dtype_named"]

DTYPES: dict[torch.dtype, str] = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
    torch.uint16: "U16", torch.uint32: "U32", torch.uint64: "U64", torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip
"""The names that safetensors has for torch's dtypes."""


def dtype_named(name: str) -> torch.dtype:
    """Return torch's dtype of a name that safetensors has."""
    return next(dtype for dtype, known in DTYPES.items() if known == name)


def bytes_of(tensor: Tensor) -> np.ndarray[Any, Any]:
    """Return the bytes of a tensor as one row: its memory where it is contiguous and on the host, else a copy."""
    row = tensor.detach().cpu().contiguous().reshape(-1)
    if not row.numel():  # torch gives no view of it in other elements
        return np.empty(0, np.uint8)
    found: np.ndarray[Any, Any] = row.view(torch.uint8).numpy()
    return found
