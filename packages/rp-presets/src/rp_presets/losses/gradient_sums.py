"""The gradients of a head's hidden states, weight and bias, summed over chunks of rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rp_presets.losses.row_chunks import Chunk, wide


@dataclass(slots=True)
class ChunkSums:
    """The gradients of hidden states, weight and bias, summed over the chunks in the wide dtype."""

    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None
    # The weight in the wide dtype, where the device has no product of 16-bit matrices with a wide result.
    widened: Tensor | None

    @classmethod
    def of(cls, hidden: Tensor, weight: Tensor, bias: Tensor | None, needs: Sequence[bool]) -> ChunkSums:
        """Zeros for the gradients that are needed."""
        zeros = [
            torch.zeros_like(tensor, dtype=wide(tensor.dtype)) if needed and tensor is not None else None
            for tensor, needed in zip((hidden, weight, bias), needs, strict=True)
        ]
        widened = weight.to(wide(weight.dtype)) if needs[0] and not weight.is_cuda else None
        return cls(zeros[0], zeros[1], zeros[2], widened)

    def all(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """In the order of the arguments."""
        return self.hidden, self.weight, self.bias

    def add(self, chunk: Chunk, grad: Tensor) -> None:
        """Add a chunk's part. grad: (rows, vocabulary), of its projected logits."""
        if self.hidden is not None:
            weight = chunk.weight if self.widened is None else self.widened
            self.hidden[chunk.rows] = _product(grad, weight)
        if self.weight is not None:
            _add_product(self.weight, grad.T, chunk.hidden)
        if self.bias is not None:
            self.bias += grad.sum(0, dtype=self.bias.dtype)


def _product(left: Tensor, right: Tensor) -> Tensor:
    """`left @ right` in the wide dtype, without rounding to 16 bits."""
    dtype = wide(left.dtype)
    if left.dtype == dtype:
        return left @ right
    if left.is_cuda:
        return torch.mm(left, right, out_dtype=dtype)
    return left.to(dtype) @ right.to(dtype)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    if left.dtype != total.dtype and left.is_cuda:
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total.addmm_(left.to(total.dtype), right.to(total.dtype))
