"""Transfers of activations and their gradients between the host and a task's device."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
from operator import not_
from typing import Any

import rp_batch
import torch
from rp_telemetry.tracing import Tracer
from rp_transfer import Backend, Event, Strides, gaps, in_order, laid_out, strided

from rp_engine.device.packet import Alias, Packet, is_dense
from rp_engine.runtime.lane import Lane


class _Entry(torch.autograd.Function):
    """Makes a stage's input a non-leaf, so that the stage's first layer may write it in place."""

    @staticmethod
    def forward(ctx: Any, leaf: torch.Tensor) -> torch.Tensor:
        del ctx
        # `.data` rather than `detach`: an in-place write must not bump the leaf's version counter.
        return leaf.data

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        del ctx
        return grads[0]


@dataclass(slots=True)
class Arrived:
    """A packet on a device.

    `inside`: the leaves that a layer receives. `grad_leaves`: for each, the leaf whose ``.grad`` collects the
    gradient of the input, or None.
    """

    treedef: Any
    inside: list[Any]
    grad_leaves: list[torch.Tensor | None]

    def tree(self) -> Any:
        """Return the tree that a layer receives."""
        return rp_batch.unflatten(self.treedef, self.inside)


class Origins:
    """Finds the host copy of a device tensor that a layer returned unchanged, to save its download.

    Holds the device tensors weakly.
    """

    def __init__(self) -> None:
        self._hosts: dict[int, tuple[weakref.ref[torch.Tensor], int, torch.Tensor]] = {}

    def add(self, tensor: torch.Tensor, host: torch.Tensor) -> None:
        """Record that `tensor` is a copy of `host`, for which the compute stream has waited."""
        self._hosts[id(tensor)] = (weakref.ref(tensor), tensor._version, host)

    def find(self, leaf: Any) -> torch.Tensor | None:
        """Return the host copy of exactly this tensor; None if unknown or if the tensor was written since."""
        host = self.host_of(leaf)
        return None if host is leaf else host

    def host_of(self, leaf: Any) -> Any:
        """Return the same, or the leaf itself in place of None."""
        if id(leaf) not in self._hosts:
            return leaf
        tensor, version, host = self._hosts[id(leaf)]
        return host if tensor() is leaf and leaf._version == version else leaf


def enter(leaves: Iterable[Any], grads: Sequence[bool]) -> tuple[list[Any], list[torch.Tensor | None]]:
    """Make grad leaves over the same device memory, as `Arrived.inside` and `Arrived.grad_leaves`.

    Leaves that require no grad stay as they are, with None as their grad leaf.
    """
    inside: list[Any] = []
    grad_leaves: list[torch.Tensor | None] = []
    for leaf, requires_grad in zip(leaves, grads, strict=True):
        grad_leaf = leaf.detach().requires_grad_() if requires_grad else None
        grad_leaves.append(grad_leaf)
        inside.append(_Entry.apply(grad_leaf) if requires_grad else leaf)
    return inside, grad_leaves


class PacketCopier:
    """Copies packets between the host and one device; used by that device's thread only.

    Packets overtake queued weight and gradient blocks (see `Conveyor.let_pass`). `is_weight(tensor)`: whether a
    tensor lies in a layer's weights.
    """

    def __init__(
        self, backend: Backend, lane: Lane, is_weight: Callable[[torch.Tensor], bool], tracer: Tracer
    ) -> None:
        self._backend = backend
        self._is_weight = is_weight
        self._tracer = tracer
        self._lane = lane
        self._device = lane.device
        self._retainer = lane.retainer
        self._visiting: list[torch.Tensor] = []
        # Both directions together, since the caller last reset it.
        self.carried_bytes = 0

    def bring(self, packet: Packet) -> list[Any]:
        """Upload a packet's leaves; the compute stream waits for them."""
        device, before = self._device, len(self._visiting)
        for event in packet.events:
            device.activations_in.wait(event)
        ready = device.activations_in.record() if len(packet.events) > 1 else next(iter(packet.events), None)
        try:
            with self._tracer.copying(device, device.activations_in, "upload", "activations", packet.leaves):
                leaves = [self._upload(leaf) for leaf in packet.leaves]
                arrivals = tuple(self._visiting[before:])
        finally:
            # If an allocation failed part-way, the copies queued before it still need their memory.
            arrived = device.activations_in.record()
            self._retainer.keep(arrived, packet.leaves, tuple(self._visiting))
        self._lane.inbox.conveyor.let_pass(ready, arrived)
        with self._tracer.waiting(device, "activations", "activations to arrive"):
            device.compute.wait(arrived)
        device.compute.touch(read=arrivals, what="activations")
        for index, strides in packet.strides.items():
            leaves[index] = self._spread(leaves[index], strides)
        return leaves

    def _upload(self, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        device, memory = self._device, in_order(leaf)
        there = device.empty(memory.shape, leaf.dtype, stream=device.activations_in)
        device.activations_in.copy(there, memory)
        self._visiting.append(there)
        self.carried_bytes += there.nbytes
        return laid_out(there, leaf)

    def _spread(self, leaf: Any, strides: Strides) -> Any:
        """Give a tensor on the device the gaps in memory with which it was sent, on the compute stream."""
        spread = strided(leaf, strides)
        self._visiting.append(spread)
        return spread

    def send(
        self,
        treedef: Any,
        leaves: Sequence[Any],
        grads: Sequence[bool],
        origins: Origins,
        *,
        in_use: bool = False,
        aliases: Mapping[int, Alias] | None = None,
    ) -> Packet:
        """Download leaves into a packet, readable after its events. Leaves found in `origins` are not copied.

        `in_use`: the next layer may write the leaves in place during the download, so they are cloned first.
        `aliases`: see `Packet`.
        """
        hosts = [origins.host_of(leaf) for leaf in leaves]
        # By the leaf's position, the memory of each that is copied.
        plain = {
            at: self._plain(leaf, in_use=in_use)
            for at, (leaf, host) in enumerate(zip(leaves, hosts, strict=True))
            if isinstance(leaf, torch.Tensor) and host is leaf
        }
        copied, device = list(plain.values()), self._device
        device.compute.touch(write=copied, what="results")
        made = device.compute.record()
        device.results_out.wait(made)
        held: list[Any] = []
        try:
            with self._tracer.copying(device, device.results_out, "download", "results", copied):
                for at, (leaf, host) in enumerate(zip(leaves, hosts, strict=True)):
                    held.append(self._download(plain[at], leaf) if at in plain else host)
        finally:
            event = device.results_out.record()
            self._retainer.keep(event, copied, held)
        self._lane.outbox.conveyor.let_pass(made, event)
        return Packet(treedef, tuple(held), tuple(grads), (event,), gaps(leaves, held), aliases or {})

    def stay(self, treedef: Any, leaves: Sequence[Any], origins: Origins) -> Packet:
        """Return a packet of leaves that stay on the device, readable after its event.

        Of those in `origins` it has the host's copies: this task's memory for them is freed. A layer's weights are
        copied.
        """
        held = [self._staying(leaf, origins.host_of(leaf)) for leaf in leaves]
        return Packet(treedef, tuple(held), (False,) * len(held), (self._device.compute.record(),))

    def _staying(self, leaf: Any, host: Any) -> Any:
        if host is not leaf or not isinstance(leaf, torch.Tensor):
            return host
        used = leaf.untyped_storage().data_ptr()
        is_freed = self._is_weight(leaf) or any(one.untyped_storage().data_ptr() == used for one in self._visiting)
        return leaf.detach().clone() if is_freed else leaf.detach()

    def _plain(self, tensor: torch.Tensor, *, in_use: bool) -> torch.Tensor:
        if not is_dense(tensor):
            found = "is nested" if tensor.is_nested else f"has layout {tensor.layout}"
            raise TypeError(
                f"tensors that layers return or save must be dense tensors, but one {found}; convert it in the "
                "layer that made it"
            )
        resolved = tensor.detach().resolve_conj().resolve_neg()
        # A layer may return its own weight or buffer for every microbatch: each downloads a clone.
        is_copied = in_use or self._is_weight(resolved)
        memory = in_order(resolved)
        return memory.clone(memory_format=torch.contiguous_format) if is_copied else memory.contiguous()

    def _download(self, memory: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        host = self._backend.host_empty(memory.shape, memory.dtype, short_lived=True)
        self._device.results_out.copy(host, memory)
        self.carried_bytes += memory.nbytes
        return laid_out(host, like)

    def let_go(self, done: Event, still: Iterable[Any] = ()) -> None:
        """Release uploaded memory after the event `done`, except memory that tensors in `still` use."""
        tensors = [leaf for leaf in still if isinstance(leaf, torch.Tensor)]
        if not all(map(is_dense, tensors)):
            # A sparse gradient's indices and values may lie in this memory: keep all until the next call.
            return
        used = {tensor.untyped_storage().data_ptr() for tensor in tensors}
        stays = [tensor.untyped_storage().data_ptr() in used for tensor in self._visiting]
        self._retainer.keep(done, list(compress(self._visiting, map(not_, stays))))
        self._visiting = list(compress(self._visiting, stays))
