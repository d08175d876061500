"""A call's arguments and labels in microbatches, and the gradients of its inputs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import rp_batch
import torch

from rp_engine.device.memory.call_size import CallSize
from rp_engine.device.packet import FlatTree, Packet
from rp_engine.execution.call import Autocast, Streams
from rp_engine.execution.packed_data import Arrivals


@dataclass(frozen=True, slots=True)
class Batch:
    """The arguments and labels of each microbatch, with the autocast settings and streams of the caller's thread.

    `sizes`: of the microbatches along the batch; None if unknown. `inputs`: the tensors among the arguments that
    require grad.
    """

    arguments: tuple[FlatTree, ...]
    labels: tuple[FlatTree, ...]
    sizes: tuple[int, ...] | None
    arrivals: Arrivals
    inputs: tuple[torch.Tensor, ...]
    autocast: tuple[Autocast, ...]
    streams: Streams
    size: CallSize

    @classmethod
    def of(
        cls, parts: rp_batch.Parts[Any], arrivals: Arrivals, labels: Sequence[Any] = (), *, wants_grad: bool = True
    ) -> Batch:
        """Make a batch; call it on the caller's thread. `wants_grad`: whether inputs may receive gradients."""
        arguments = tuple(FlatTree.of(tuple(part)) for part in parts)
        told = tuple(map(FlatTree.of, labels))
        return cls(
            arguments,
            told,
            parts.sizes,
            arrivals,
            inputs=tuple(filter(_wants_grad, _leaves(arguments))) if wants_grad else (),
            autocast=Autocast.current(arrivals.device_types),
            streams=Streams.current(_leaves((*arguments, *told))),
            size=CallSize.of([part.leaves for part in arguments]),
        )

    def share(self, microbatches: range) -> Batch:
        """The batch of these microbatches alone."""
        arguments = self.arguments[microbatches.start : microbatches.stop]
        return replace(
            self,
            arguments=arguments,
            labels=self.labels[microbatches.start : microbatches.stop],
            sizes=self.sizes and self.sizes[microbatches.start : microbatches.stop],
            inputs=tuple(filter(_wants_grad, _leaves(arguments))) if self.inputs else (),
            size=CallSize.of([part.leaves for part in arguments]),
        )

    @property
    def num_microbatches(self) -> int:
        """The number of microbatches."""
        return self.size.microbatches

    def settings(self) -> dict[str, Any]:
        """Return what machines that share the call must have alike beside the tensors, as JSON, by name."""
        return {
            "batch sizes": self.sizes and list(self.sizes),
            "autocast": [f"{each.device_type} {each.enabled} {each.dtype}" for each in self.autocast],
        }

    def leaves(self) -> Iterator[Any]:
        """The leaves of all arguments, then those of all labels."""
        return _leaves((*self.arguments, *self.labels))

    def grads(self, packets: Sequence[Packet]) -> list[torch.Tensor | None]:
        """Select the gradients of `inputs`, in their order, from those of all leaves of each microbatch."""
        return [
            grad
            for part, packet in zip(self.arguments, packets, strict=True)
            for leaf, grad in zip(part.leaves, packet.leaves, strict=True)
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


def _leaves(trees: Iterable[FlatTree]) -> Iterator[Any]:
    return chain.from_iterable(tree.leaves for tree in trees)


def _wants_grad(leaf: object) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.requires_grad
