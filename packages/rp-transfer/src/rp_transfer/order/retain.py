"""Keeping tensors alive until the device work that uses them has finished."""

from __future__ import annotations

from collections import deque

from rp_transfer.api import Event


class Retainer:
    """Things that one thread keeps until an event has happened.

    Used where memory is touched by another stream than the one whose order would free it. Torch's own answer,
    ``Tensor.record_stream``, delays every free by an unknown time; here the owner asks.

    >>> import torch
    >>> from rp_transfer import CpuBackend
    >>> device, retainer = CpuBackend(1).devices[0], Retainer()
    >>> there = device.empty((3,), torch.float32, stream=device.weights_in)
    >>> device.weights_in.copy(there, source := torch.ones(3))
    >>> retainer.keep(device.weights_in.record(), source)
    >>> retainer.drain()
    >>> len(retainer)
    0
    """

    def __init__(self) -> None:
        self._kept: deque[tuple[Event, object]] = deque()

    def keep(self, event: Event, *things: object) -> None:
        """Hold `things` until `event`."""
        self._kept.append((event, things))

    def flush(self) -> None:
        """Let go of what is over. Never blocks."""
        self._kept = deque(kept for kept in self._kept if not kept[0].query())

    def drain(self) -> None:
        """Wait for everything and let go of it."""
        while self._kept:
            self._kept[0][0].synchronize()
            self._kept.popleft()

    def __len__(self) -> int:
        return len(self._kept)
