"""A call's arguments and labels in microbatches, and the gradients of its inputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import rp_batch
import torch

from roundpipe.device.packet import Packet
from roundpipe.execution.call import Autocast, Streams
from roundpipe.execution.packed_data import Arrivals


@dataclass(frozen=True, slots=True)
class Batch:
    """The arguments and labels of each microbatch, with the autocast settings and streams of the caller's thread.

    `inputs`: the tensors among the arguments that require grad.
    """

    parts: rp_batch.Parts[Any]
    arrivals: Arrivals
    labels: Sequence[Any]
    inputs: tuple[torch.Tensor, ...]
    autocast: tuple[Autocast, ...]
    streams: Streams

    @classmethod
    def of(
        cls, parts: rp_batch.Parts[Any], arrivals: Arrivals, labels: Sequence[Any] = (), *, wants_grad: bool = True
    ) -> Batch:
        """Make a batch; call it on the caller's thread. `wants_grad`: whether inputs may receive gradients."""
        inputs = tuple(leaf for part in parts for leaf in _leaves(part) if wants_grad and _wants_grad(leaf))
        return cls(parts, arrivals, labels, inputs, Autocast.current(), Streams.current((parts, labels)))

    def grads(self, packets: Sequence[Packet]) -> list[torch.Tensor | None]:
        """Select the gradients of `inputs`, in their order, from those of all leaves of each microbatch."""
        return [
            grad
            for part, packet in zip(self.parts, packets, strict=True)
            for leaf, grad in zip(_leaves(part), packet.leaves, strict=True)
            if _wants_grad(leaf)
        ]

    def backpropagate(self, packets: Sequence[Packet]) -> None:
        """Continue the backward pass into the graph that computed the inputs."""
        pairs = [
            (tensor, grad)
            for tensor, grad in zip(self.inputs, self.grads(packets), strict=True)
            if grad is not None
        ]
        if pairs:
            tensors, grads = zip(*pairs, strict=True)
            torch.autograd.backward(tensors, grads)


def _leaves(part: Any) -> list[Any]:
    return rp_batch.flatten(tuple(part))[0]


def _wants_grad(leaf: object) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.requires_grad
