"""Data that layers save in their first forward: kept on the host, uploaded when they are recomputed."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import rp_batch
import torch
from torch import nn

from rp_engine.context import ForwardCtx, LayerCtx, RecomputeCtx
from rp_engine.device.activations import Origins, PacketCopier
from rp_engine.device.packet import Packet, Slot

Data = tuple[Any, ...]


class SavedDataStore(Protocol):
    """Stores the data that a run's layers save for their recomputation."""

    def will_recompute(self, layer: int, microbatch: int) -> bool:
        """Return whether the layer will be recomputed for this microbatch."""
        ...

    def keep(self, slot: Slot, packet: Packet) -> None:
        """Store a packet in a slot."""
        ...

    def fetch(self, slot: Slot) -> Packet | None:
        """Return the slot's packet; None if it has none."""
        ...

    def drop(self, slot: Slot) -> None:
        """Remove the slot's packet, if it has one."""
        ...


def prepares(layer: nn.Module) -> bool:
    """Return whether a layer has a method ``prepare(x)`` whose result its ``forward(x, prepared=...)`` takes.

    ``prepare`` computes what must not be recomputed, such as a router's choices. Its result is detached, kept, and
    passed to `forward` again by the recomputation, which does not call ``prepare``. It must not write buffers.
    """
    has_prepare = callable(getattr(layer, "prepare", None))
    return has_prepare and "prepared" in inspect.signature(layer.forward).parameters


@dataclass(frozen=True, slots=True)
class _Elsewhere:
    """A saved tensor that was not on the layer's device, so recomputation must not move it there."""

    tensor: torch.Tensor


class SavedData:
    """Moves the data that the layers of one task save between its device and the run's store."""

    def __init__(self, device: torch.device, copier: PacketCopier, store: SavedDataStore) -> None:
        self._device = device
        self._copier = copier
        self._store = store

    def first(self, layer: int, microbatch: int, also: Callable[[Data], None] | None = None) -> LayerCtx:
        """Return the context of a layer's first forward; if it is retried, the earlier try's data is dropped.

        `also`: called with what the layer saves, which it may write afterwards.
        """
        told = also or _nobody
        if not self._store.will_recompute(layer, microbatch):
            return ForwardCtx(told)
        saved = Slot("saved", layer, microbatch)
        self._store.drop(saved)

        def keep(data: Data) -> None:
            self._keep(saved, data)
            told(data)

        return ForwardCtx(keep)

    def recompute(self, layer: int, microbatch: int) -> LayerCtx:
        """Return the context of a layer's recomputation, with the saved data uploaded."""
        packet = self._store.fetch(Slot("saved", layer, microbatch))
        return RecomputeCtx(() if packet is None else self._fetch(packet))

    def keep_prepared(self, layer: int, microbatch: int, prepared: Any) -> Any:
        """Detach the result of `prepare` and return it; keep it if the layer will be recomputed."""
        detached = rp_batch.map_leaves(_detached, prepared)
        if self._store.will_recompute(layer, microbatch):
            self._keep(Slot("prepared", layer, microbatch), (detached,))
        return detached

    def prepared(self, layer: int, microbatch: int) -> Any:
        """Fetch the result that `prepare` returned before the layer's first forward."""
        packet = self._store.fetch(Slot("prepared", layer, microbatch))
        assert packet is not None
        return self._fetch(packet)[0]

    def _keep(self, slot: Slot, data: tuple[Any, ...]) -> None:
        leaves, treedef = rp_batch.flatten(data)
        held = list(map(self._marked, leaves))
        # `in_use`: the layer may write these tensors in place after saving them.
        packet = self._copier.send(treedef, held, [False] * len(held), Origins(), in_use=True)
        self._store.keep(slot, packet)

    def _marked(self, leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor) and leaf.device != self._device:
            return _Elsewhere(leaf.detach().clone())
        return leaf

    def _fetch(self, packet: Packet) -> tuple[Any, ...]:
        return rp_batch.unflatten(packet.treedef, _unmarked(self._copier.bring(packet)))


def _nobody(data: Data) -> None:
    """Wants to know what a layer saves."""


def _unmarked(leaves: Sequence[Any]) -> list[Any]:
    return [leaf.tensor if isinstance(leaf, _Elsewhere) else leaf for leaf in leaves]


def _detached(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, torch.Tensor) else leaf
