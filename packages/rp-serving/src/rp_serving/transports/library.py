"""The few functions of NCCL that broadcasts need, from the library that torch has loaded."""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from rp_serving.errors import TransferFailed

ID_BYTES = 128
_SUM = 0
_FLOAT32 = 7
_UINT8 = 1


class UniqueId(ctypes.Structure):
    """What all ranks of a communicator are told by the first."""

    _fields_ = (("internal", ctypes.c_byte * ID_BYTES),)


class Nccl:
    """NCCL's functions, each of which raises `TransferFailed` with NCCL's own words.

    By hand and not as a process group of torch, since vLLM's receivers meet in their own way
    (``StatelessProcessGroup``, ``PyNcclCommunicator``), and since a communicator that hangs can be aborted.
    """

    def __init__(self) -> None:
        try:
            # The loader finds the library that torch has loaded by this name.
            self._library: Any = ctypes.CDLL("libnccl.so.2")
        except OSError as error:
            raise TransferFailed("libnccl.so.2 cannot be loaded; install torch for CUDA") from error
        self._library.ncclGetErrorString.restype = ctypes.c_char_p
        self._library.ncclCommInitRank.argtypes = [
            ctypes.POINTER(ctypes.c_void_p),
            ctypes.c_int,
            UniqueId,
            ctypes.c_int,
        ]

    def unique_id(self) -> bytes:
        """Return what the other ranks must be told."""
        made = UniqueId()
        self._check(self._library.ncclGetUniqueId(ctypes.byref(made)))
        return bytes(made)

    def communicator(self, unique_id: bytes, rank: int, size: int) -> ctypes.c_void_p:
        """Wait for all ranks; the current device is this one's."""
        made = ctypes.c_void_p()
        known = UniqueId.from_buffer_copy(unique_id)
        self._check(self._library.ncclCommInitRank(ctypes.byref(made), size, known, rank))
        return made

    def broadcast(self, of: ctypes.c_void_p, data: torch.Tensor, stream: torch.cuda.Stream) -> None:
        """Queue a broadcast of bytes by rank 0."""
        place = ctypes.c_void_p(data.data_ptr())
        self._check(
            self._library.ncclBroadcast(
                place, place, ctypes.c_size_t(data.numel()), _UINT8, 0, of, ctypes.c_void_p(stream.cuda_stream)
            )
        )

    def add_up(self, of: ctypes.c_void_p, data: torch.Tensor, stream: torch.cuda.Stream) -> None:
        """Queue a sum of fp32 over all ranks."""
        place, count = ctypes.c_void_p(data.data_ptr()), ctypes.c_size_t(data.numel())
        queue = ctypes.c_void_p(stream.cuda_stream)
        self._check(self._library.ncclAllReduce(place, place, count, _FLOAT32, _SUM, of, queue))

    def abort(self, of: ctypes.c_void_p) -> None:
        """End a communicator, also one whose work hangs."""
        self._library.ncclCommAbort(of)

    def _check(self, code: int) -> None:
        if code:
            words = self._library.ncclGetErrorString(code)
            raise TransferFailed(f"NCCL failed: {words.decode()} ({code}); NCCL_DEBUG=WARN tells more")
