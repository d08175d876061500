"""What is known of a model as a row: the operations and bytes of each layer, for any number of sequences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Growth:
    """An amount that all sequences of a microbatch share, and as much again for each of them.

    >>> Growth(each=3, shared=10).of(2)
    16.0
    """

    each: int = 0
    shared: int = 0

    @classmethod
    def through(cls, one: int, two: int) -> Growth:
        """Return the growth of an amount for one sequence, and for two."""
        return cls(two - one, 2 * one - two)

    def of(self, sequences: int, part: float = 1.0) -> float:
        """Return the amount for so many sequences. `part`: how much of what is for each counts."""
        return self.shared + sequences * self.each * part


@dataclass(frozen=True, slots=True)
class LayerAmounts:
    """The operations and bytes of a layer.

    `forward_flops`, `backward_flops`: floating-point operations. `boundary_bytes`: of its output for one sequence.
    `kept_bytes`: of the tensors that autograd keeps for backward, without weights. `held_bytes`: what is in memory
    beyond that at some moments, the most of which counts. What layers compute of their weights alone, as adapters
    on stacked experts do, is shared by the sequences of a microbatch.
    """

    forward_flops: Growth = Growth()
    backward_flops: Growth = Growth()
    boundary_bytes: int = 0
    kept_bytes: Growth = Growth()
    held_bytes: tuple[Growth, ...] = ()

    def working_bytes(self, sequences: int, part: float = 1.0) -> int:
        """Return the most bytes at once beyond kept ones. `part`: how much of what is for each sequence counts."""
        return int(max((held.of(sequences, part) for held in self.held_bytes), default=0))


@dataclass(frozen=True, slots=True)
class Observed:
    """A model as a row: its own layers, between the code that runs before and after them.

    `facts`, `modules`: of each part of the row; a module lists the tensors that the part uses. `vocabulary`: the
    width of the logits; 0 for a model without logits. `is_counted`: whether the model ran on the meta device.
    Otherwise operations are two for each element of a matrix and token, and activations are guessed from widths.
    """

    facts: tuple[LayerAmounts, ...]
    modules: tuple[nn.Module, ...]
    hidden: int
    vocabulary: int
    is_counted: bool


class Holder(nn.Module):
    """The tensors that a part of the row uses outside the model's own layers."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        super().__init__()
        for number, tensor in enumerate(tensors):
            if isinstance(tensor, nn.Parameter):
                self.register_parameter(f"tensor{number}", tensor)
            else:
                self.register_buffer(f"tensor{number}", tensor)


def itemsize(model: nn.Module) -> int:
    """Return the bytes of an element of the widest of a model's weights."""
    return max((tensor.element_size() for tensor in model.parameters()), default=2)
