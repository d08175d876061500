"""What layers save in their first forward: on the host until they are recomputed, then on that device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import rp_batch
import torch

from roundpipe.context import ForwardCtx, LayerCtx, RecomputeCtx
from roundpipe.saved import Courier, Origins, Packet


class Shelf(Protocol):
    """Where a run keeps what its layers save."""

    def will_recompute(self, layer: int, microbatch: int) -> bool:
        """Whether the layer will be run again."""
        ...

    def put_saved(self, layer: int, microbatch: int, packet: Packet) -> None:
        """Keep what the layer saved."""
        ...

    def take_saved(self, layer: int, microbatch: int) -> Packet | None:
        """What it saved, once."""
        ...


@dataclass(frozen=True, slots=True)
class _Elsewhere:
    """A tensor that was not on the layer's device, and does not come back there."""

    tensor: torch.Tensor


class Memory:
    """Carries what the layers of one task save between its device and the run's shelf."""

    def __init__(self, device: torch.device, courier: Courier, shelf: Shelf) -> None:
        self._device = device
        self._courier = courier
        self._shelf = shelf

    def first(self, layer: int, microbatch: int) -> LayerCtx:
        """For a layer's first run, which may be tried several times: the last one counts."""
        if not self._shelf.will_recompute(layer, microbatch):
            return ForwardCtx(None)
        self._shelf.take_saved(layer, microbatch)
        return ForwardCtx(partial(self._keep, layer, microbatch))

    def again(self, layer: int, microbatch: int) -> LayerCtx:
        """For a layer's recomputation."""
        packet = self._shelf.take_saved(layer, microbatch)
        return RecomputeCtx(() if packet is None else self._fetch(packet))

    def _keep(self, layer: int, microbatch: int, data: tuple[Any, ...]) -> None:
        leaves, treedef = rp_batch.flatten(data)
        held = list(map(self._parted, leaves))
        # What is written in place after it was saved must not reach what was saved.
        packet = self._courier.send(treedef, held, [False] * len(held), Origins(), in_use=True)
        self._shelf.put_saved(layer, microbatch, packet)

    def _parted(self, leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor) and leaf.device != self._device:
            return _Elsewhere(leaf.detach().clone())
        return leaf

    def _fetch(self, packet: Packet) -> tuple[Any, ...]:
        return rp_batch.unflatten(packet.treedef, _joined(self._courier.bring(packet)))


def _joined(leaves: Sequence[Any]) -> list[Any]:
    return [leaf.tensor if isinstance(leaf, _Elsewhere) else leaf for leaf in leaves]
