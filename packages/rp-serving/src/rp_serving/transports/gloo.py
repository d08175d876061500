"""`GlooTransport`: tensors over TCP, from the host's memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist

from rp_serving.errors import TransferFailed
from rp_serving.transports.transport import MeetingPlace, as_bytes, told

# torch describes its options under other names than they have.
_GLOO = cast(Any, dist.ProcessGroupGloo)


class GlooTransport:
    """Broadcasts in a group of torch's gloo, which is apart from the process's own groups.

    For servers of the user's own, whose processes open the same group by `group`; vLLM takes weights by
    `NcclTransport`. `address`, `port`: see `MeetingPlace`.
    """

    def __init__(self, address: str | None = None, port: int = 0) -> None:
        self._place = MeetingPlace(address, port)
        self._store: Any = None
        self._group: Any = None
        self._address, self._size, self._limit_s = "", 1, 0.0

    def prepare(self, server_host: str, receivers: int, limit_s: float) -> Mapping[str, Any]:
        """Open the store at which all meet."""
        self.abort()
        self._store, self._address = self._place.opened(server_host, limit_s)
        self._size, self._limit_s = receivers + 1, limit_s
        return told(self._store, self._address, receivers)

    def open(self) -> None:
        """Wait for all receivers."""
        self._group = group(self._store, self._address, 0, self._size, self._limit_s)

    def announce(self, tensors: Sequence[torch.Tensor]) -> Mapping[str, Any]:
        """Return nothing: the outlines say all."""
        del tensors
        return {}

    def send(self, tensors: Sequence[torch.Tensor]) -> None:
        """Send tensors as their bytes, in this order. Raises `TransferFailed`."""
        opened, limit = self._group, timedelta(seconds=self._limit_s)
        try:
            for tensor in tensors:
                broadcast(opened, as_bytes(tensor)).wait(limit)
        except RuntimeError as error:
            raise TransferFailed(f"gloo could not send weights: {str(error).splitlines()[0]}") from error

    def abort(self) -> None:
        """Give up the connection."""
        opened, self._group, self._store = self._group, None, None
        if opened is not None:
            opened.abort()


def group(store: Any, address: str, rank: int, size: int, limit_s: float) -> Any:
    """Open a process group at a store, as the trainer (rank 0) or as a receiver.

    `address`: this machine's, at which the others connect.
    """
    options = _GLOO._Options()
    options._devices = [_GLOO.create_device(hostname=address)]
    options._timeout = timedelta(seconds=limit_s)
    return _GLOO(store, rank, size, options)


def broadcast(opened: Any, tensor: torch.Tensor) -> Any:
    """Begin to send a tensor, or to receive it; `wait` of the result ends it."""
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor = 0, 0
    return opened.broadcast([tensor], options)
