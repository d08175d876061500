"""`GradientPair`: a gradient that is the sum of two tensors."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class GradientPair:
    """A gradient that is the sum of two tensors, such as those of two tasks, each rounded to 16 bits.

    `link` accepts it in place of one tensor. Readers add the two in fp32, or in the master's dtype if that is
    wider. Steps and norms add while they read, without a copy. The sum of two does not depend on their order.

    >>> half = torch.tensor([1.0], dtype=torch.bfloat16)
    >>> GradientPair(half, half / 256).sum()
    tensor([1.0039])

    Shapes: both contiguous, on the host, of the master's shape or flat, in any floating dtypes.
    """

    first: torch.Tensor
    second: torch.Tensor

    def sum(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return the sum in `dtype`; by default in fp32, or in the summands' dtype if that is wider."""
        own = torch.promote_types(torch.promote_types(self.first.dtype, self.second.dtype), torch.float32)
        wide = own if dtype is None else torch.promote_types(own, dtype)
        total = self.first.detach().to(wide, copy=True).add_(self.second.detach().view(self.first.shape))
        return total if dtype is None else total.to(dtype)
