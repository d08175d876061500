"""`Sample`: a few numbers of each tensor of a block, by which writes are noticed that no version counter shows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from rp_transfer import Layout

# Numbers of each tensor, evenly spaced.
_COUNT = 16


class Sampling(Protocol):
    """What is known of a block's tensors beside their version counters. `memories`: the block's memory."""

    def take(self, memories: Sequence[torch.Tensor]) -> None: ...
    def changed(self, memories: Sequence[torch.Tensor]) -> list[int]: ...


class NoSample:
    """Of tensors that nobody samples: nothing is seen of them. See `Sampling`."""

    def take(self, memories: Sequence[torch.Tensor]) -> None:
        """Nothing."""

    def changed(self, memories: Sequence[torch.Tensor]) -> list[int]:
        """None are seen."""
        return []


class Sample:
    """Numbers of a block's tensors, which lie in one piece of memory, as they were when last taken.

    >>> layout = Layout.of([torch.zeros(40), torch.zeros(3)])
    >>> memory = torch.zeros(layout.numel)
    >>> sample = Sample(layout, [memory])
    >>> layout.views(memory)[1].fill_(2.0).tolist(), sample.changed([memory])
    ([2.0, 2.0, 2.0], [1])
    """

    def __init__(self, layout: Layout, memories: Sequence[torch.Tensor]) -> None:
        filled = [(index, one.offset, one.numel) for index, one in enumerate(layout.extents) if one.numel]
        self._indices = [index for index, _, _ in filled]
        places = [_places(offset, numel) for _, offset, numel in filled]
        self._places = torch.cat(places) if places else torch.empty(0, dtype=torch.int64, device="cpu")
        self.take(memories)

    def take(self, memories: Sequence[torch.Tensor]) -> None:
        """Take a sample of the tensors as they are now. `memories`: one, (numel,)."""
        self._taken = self._bits(*memories)

    def changed(self, memories: Sequence[torch.Tensor]) -> list[int]:
        """Return the indices of the tensors whose numbers are others now."""
        now = self._bits(*memories)
        if torch.equal(now, self._taken):
            return []
        differs = (now != self._taken).view(len(self._indices), -1).any(1)
        return [index for index, is_other in zip(self._indices, differs, strict=True) if is_other]

    @torch.no_grad()
    def _bits(self, memory: torch.Tensor) -> torch.Tensor:
        # Bits, so that a NaN is equal to itself.
        return memory.index_select(0, self._places).view(torch.uint8)


def _places(offset: int, numel: int) -> torch.Tensor:
    """Return where the sampled numbers of a tensor are: as many of each, so those of small ones repeat."""
    # Whatever torch's default device is.
    places = torch.arange(_COUNT, dtype=torch.int64, device="cpu")
    return offset + places * max(numel - 1, 0) // (_COUNT - 1)
