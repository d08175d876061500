"""What layers find out in their first forward: on the host until they are recomputed, then on that device."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import rp_batch
import torch
from torch import nn

from roundpipe.context import ForwardCtx, LayerCtx, RecomputeCtx
from roundpipe.device.activations import Courier, Origins
from roundpipe.device.packet import Packet, Slot


class Shelf(Protocol):
    """Where a run keeps what its layers save."""

    def will_recompute(self, layer: int, microbatch: int) -> bool:
        """Whether the layer will be run again."""
        ...

    def keep(self, slot: Slot, packet: Packet) -> None:
        """Keep what the layer saved."""
        ...

    def fetch(self, slot: Slot) -> Packet | None:
        """What it saved, once."""
        ...


def prepares(layer: nn.Module) -> bool:
    """Whether a layer has a second method, ``prepare(x)``, whose result its ``forward(x, prepared=...)`` takes.

    Such a layer finds out there what is not to be found out again, such as the choices of a router: the result is
    kept, detached, and handed to the recomputation, which calls `forward` alone. It writes no buffers.
    """
    found = callable(getattr(layer, "prepare", None))
    return found and "prepared" in inspect.signature(layer.forward).parameters


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
        saved = Slot("saved", layer, microbatch)
        self._shelf.fetch(saved)
        return ForwardCtx(partial(self._keep, saved))

    def again(self, layer: int, microbatch: int) -> LayerCtx:
        """For a layer's recomputation."""
        packet = self._shelf.fetch(Slot("saved", layer, microbatch))
        return RecomputeCtx(() if packet is None else self._fetch(packet))

    def keep_prepared(self, layer: int, microbatch: int, prepared: Any) -> Any:
        """What `prepare` returned, detached, for the layer's first run; and for its recomputation."""
        found = rp_batch.map_leaves(_detached, prepared)
        if self._shelf.will_recompute(layer, microbatch):
            self._keep(Slot("prepared", layer, microbatch), (found,))
        return found

    def prepared(self, layer: int, microbatch: int) -> Any:
        """What `prepare` returned in the first run."""
        packet = self._shelf.fetch(Slot("prepared", layer, microbatch))
        assert packet is not None
        return self._fetch(packet)[0]

    def _keep(self, slot: Slot, data: tuple[Any, ...]) -> None:
        leaves, treedef = rp_batch.flatten(data)
        held = list(map(self._parted, leaves))
        # What is written in place after it was saved must not reach what was saved.
        packet = self._courier.send(treedef, held, [False] * len(held), Origins(), in_use=True)
        self._shelf.keep(slot, packet)

    def _parted(self, leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor) and leaf.device != self._device:
            return _Elsewhere(leaf.detach().clone())
        return leaf

    def _fetch(self, packet: Packet) -> tuple[Any, ...]:
        return rp_batch.unflatten(packet.treedef, _joined(self._courier.bring(packet)))


def _joined(leaves: Sequence[Any]) -> list[Any]:
    return [leaf.tensor if isinstance(leaf, _Elsewhere) else leaf for leaf in leaves]


def _detached(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, torch.Tensor) else leaf
