"""`NcclTransport`: tensors from the host's memory over a GPU of this machine to the GPUs of a vLLM server."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from rp_serving.errors import TransferFailed
from rp_serving.transports.library import ID_BYTES, Nccl
from rp_serving.transports.transport import MeetingPlace, as_bytes, told

_PAUSE_S = 0.001
# Where vLLM's receivers look for the first object that rank 0 hands out.
_KEY = "broadcast_from/0/0"


class NcclTransport:
    """Broadcasts by NCCL, as vLLM's NCCL engine receives them: one tensor after another.

    Args:
        device: the GPU that sends; it may be one that trains. It must not be one of the server's.
        address: this machine's, as the server reaches it; None: that of the route to the server.
        port: where the server's processes meet the trainer; 0: any that is free.

    Device memory: one layer's weights, while they are sent. NCCL must be of the same version as the server's.
    """

    def __init__(self, device: torch.device, address: str | None = None, port: int = 0) -> None:
        self._device = device
        self._place = MeetingPlace(address, port)
        self._nccl = Nccl()
        self._store: Any = None
        self._id = b""
        self._size, self._limit_s = 1, 0.0
        self._communicator: ctypes.c_void_p | None = None

    def prepare(self, server_host: str, receivers: int, limit_s: float) -> Mapping[str, Any]:
        """Open the store at which vLLM's processes find NCCL's identifier."""
        self.abort()
        self._store, address = self._place.opened(server_host, limit_s)
        self._size, self._limit_s, self._id = receivers + 1, limit_s, self._nccl.unique_id()
        self._store.set(_KEY, pickled(self._id))
        return told(self._store, address, receivers)

    def open(self) -> None:
        """Wait for all receivers. Where one never comes, NCCL blocks this thread for good."""
        with torch.cuda.device(self._device):
            made = self._communicator = self._nccl.communicator(self._id, 0, self._size)
            # vLLM's receivers begin with a sum of one number.
            number, stream = torch.zeros(1, device=self._device), torch.cuda.current_stream()
            self._nccl.add_up(made, number, stream)
            self._wait(stream)

    def announce(self, tensors: Sequence[torch.Tensor]) -> Mapping[str, Any]:
        """Return nothing: the outlines say all."""
        del tensors
        return {}

    def send(self, tensors: Sequence[torch.Tensor]) -> None:
        """Send tensors, in this order. Raises `TransferFailed`."""
        made = self._communicator
        if made is None:
            raise TransferFailed("the connection for weights was given up")
        with torch.cuda.device(self._device), torch.cuda.stream(torch.cuda.Stream()):
            stream = torch.cuda.current_stream()
            # Kept until they are sent.
            sent = [as_bytes(tensor).to(self._device, non_blocking=True) for tensor in tensors]
            for data in sent:
                self._nccl.broadcast(made, data, stream)
            self._wait(stream)

    def abort(self) -> None:
        """Give up the connection."""
        made, self._communicator, self._store = self._communicator, None, None
        if made is not None:
            self._nccl.abort(made)

    def _wait(self, stream: torch.cuda.Stream) -> None:
        """Wait for a stream; `torch.cuda.synchronize` would wait for a lost receiver for ever."""
        queued = torch.cuda.Event()
        queued.record(stream)
        deadline = time.monotonic() + self._limit_s
        while not queued.query():
            if time.monotonic() > deadline or self._communicator is None:
                raise TransferFailed(f"NCCL did not end within {self._limit_s:.3g} s")
            time.sleep(_PAUSE_S)


def pickled(unique_id: bytes) -> bytes:
    """Return NCCL's identifier as vLLM's receivers unpickle it: an object of a class that only they have.

    It is what ``pickle.dumps`` makes of a ctypes structure ``ncclUniqueId`` of
    ``vllm.distributed.device_communicators.pynccl_wrapper``, which ``StatelessProcessGroup.broadcast_obj`` stores.

    Raises `ValueError` for anything but 128 bytes.
    """
    if len(unique_id) != ID_BYTES:
        raise ValueError(f"unique_id must have {ID_BYTES} bytes, but has {len(unique_id)}")
    # Protocol 3; two functions by name; a pair of an empty dict and the bytes, in a pair with the class; the call.
    function = b"c_ctypes\n_unpickle\n"
    kind = b"cvllm.distributed.device_communicators.pynccl_wrapper\nncclUniqueId\n"
    return b"\x80\x03" + function + kind + b"}C\x80" + unique_id + b"\x86\x86R."
