"""`Deferred`: a tensor of a state dict that is read only when it is needed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod

import torch


@dataclass(frozen=True, slots=True)
class Deferred:
    """A tensor that is elsewhere. `read_part`: returns elements [start, stop), flat, in `dtype`, as new memory.

    >>> Deferred(torch.int64, (2, 2), torch.arange).read()
    tensor([[0, 1],
            [2, 3]])
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    read_part: Callable[[int, int], torch.Tensor]

    def numel(self) -> int:
        """Return the number of elements."""
        return prod(self.shape)

    def read(self) -> torch.Tensor:
        """Return the whole tensor in new memory."""
        return self.read_part(0, self.numel()).view(self.shape)
