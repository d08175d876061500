"""`Retainer`: keeps tensors alive until the device work that uses them has finished."""

from __future__ import annotations

from collections import deque

from rp_transfer.api import Event


class Retainer:
    """Keeps objects alive until an event has finished; one thread uses it.

    Needed for memory that one stream owns and another uses: the owning stream could reuse it too early. Torch's
    own ``Tensor.record_stream`` delays every free by an unknown time; here the owner decides when to release.

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
        """Keep `things` until `event` has finished."""
        self._kept.append((event, things))

    def flush(self) -> None:
        """Release the objects whose events have finished. Never blocks."""
        self._kept = deque(kept for kept in self._kept if not kept[0].query())

    def drain(self) -> None:
        """Wait for all events and release everything."""
        while self._kept:
            self._kept[0][0].synchronize()
            self._kept.popleft()

    def __len__(self) -> int:
        return len(self._kept)
