"""`WeightTransport`: carries tensors from the trainer to all processes of a server."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]


class WeightTransport(Protocol):
    """Carries tensors in order. `open` and `send` may block: another thread then calls `abort`.

    A transport is opened anew, after `abort`, for a server that was started again.
    """

    def prepare(self, server_host: str, receivers: int, limit_s: float) -> Mapping[str, Any]:
        """Choose where to meet so many receivers; return what the server is told of it."""
        ...

    def open(self) -> None:
        """Wait for all receivers."""
        ...

    def announce(self, tensors: Sequence[torch.Tensor]) -> Mapping[str, Any]:
        """Return what the server is told of tensors beside their outlines."""
        ...

    def send(self, tensors: Sequence[torch.Tensor]) -> None:
        """Send tensors, in this order."""
        ...

    def abort(self) -> None:
        """Give up the connection."""
        ...


class MeetingPlace:
    """A store of torch at an address of this machine, where the receivers look for the trainer.

    `address`: this machine's, as the server reaches it; None: that of the route to the server. `port`: 0 for any.
    """

    def __init__(self, address: str | None = None, port: int = 0) -> None:
        self._address, self._port = address, port

    def opened(self, server_host: str, limit_s: float) -> tuple[TCPStore, str]:
        """Return a store, without waiting for others, and its address."""
        address = self._address or own_address(server_host)
        # vLLM's receivers use the plain backend of the store, too.
        store = TCPStore(
            address,
            self._port,
            is_master=True,
            timeout=timedelta(seconds=limit_s),
            wait_for_workers=False,
            use_libuv=False,
        )
        return store, address


def told(store: TCPStore, address: str, receivers: int) -> dict[str, Any]:
    """Return the place in the words of vLLM; the trainer has rank 0."""
    return {
        "master_address": address,
        "master_port": store.port,
        "rank_offset": 1,
        "world_size": receivers + 1,
    }


def own_address(host: str) -> str:
    """Return this machine's address on the route to a host. Nothing is sent.

    >>> own_address("127.0.0.1")
    '127.0.0.1'
    """
    family, kind, protocol, _, place = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as route:
        route.connect(place)
        return str(route.getsockname()[0])


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's bytes in order of its elements, without a copy if they lie so.

    >>> as_bytes(torch.ones((), dtype=torch.bfloat16)).tolist()
    [128, 63]
    """
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)
