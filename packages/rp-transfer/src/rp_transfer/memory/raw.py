"""The bytes of a tensor on the host as a buffer, without NumPy, which need not be installed."""

from __future__ import annotations

import ctypes
from typing import Any

import torch


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous tensor on the host, (nbytes,), without a copy.

    >>> bytes(bytes_of(torch.tensor([1, 256], dtype=torch.int16)))
    b'\\x01\\x00\\x00\\x01'
    """
    buffer: Any = (ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())
    # The view keeps the buffer, and so the tensor, in memory.
    buffer.tensor = tensor
    return memoryview(buffer).cast("B")
