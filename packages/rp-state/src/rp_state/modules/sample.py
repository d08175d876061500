"""`Sample`: a few numbers of each tensor of a block, by which writes are noticed that no version counter shows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from rp_transfer import Layout

# Numbers of each tensor, evenly spaced.
_COUNT = 16


class SamplesWrites(Protocol):
    """What is known of a block's tensors beside their version counters. `memories`: the block's memory."""

    def take(self, memories: Sequence[torch.Tensor]) -> None: ...
    def changed(self, memories: Sequence[torch.Tensor]) -> list[int]: ...


class NoSample:
    """Of tensors that nobody samples: nothing is seen of them. See `SamplesWrites`."""

    def take(self, memories: Sequence[torch.Tensor]) -> None:
        """Nothing."""

    def changed(self, memories: Sequence[torch.Tensor]) -> list[int]:
        """None are seen."""
        return []


class Sample:
    """Numbers of a block's tensors as they were when last taken. `memories`: one for all tensors, or one for each.

    >>> layout = Layout.of([torch.zeros(40), torch.zeros(3)])
    >>> memory = torch.zeros(layout.numel)
    >>> sample = Sample(layout, [memory])
    >>> layout.views(memory)[1].fill_(2.0).tolist(), sample.changed([memory])
    ([2.0, 2.0, 2.0], [1])
    >>> apart = [torch.zeros(40), torch.zeros(3)]
    >>> sample = Sample(layout, apart)
    >>> apart[0].fill_(2.0).shape, sample.changed(apart)
    (torch.Size([40]), [0])
    """

    def __init__(self, layout: Layout, memories: Sequence[torch.Tensor]) -> None:
        filled = [(index, one) for index, one in enumerate(layout.extents) if one.numel]
        self._indices = [index for index, _ in filled]
        if len(memories) == 1:
            self._places = [torch.cat([_NOWHERE, *(_places(one.offset, one.numel) for _, one in filled)])]
        else:
            self._places = [_places(0, one.numel) if one.numel else _NOWHERE for one in layout.extents]
        self.take(memories)

    def take(self, memories: Sequence[torch.Tensor]) -> None:
        """Take a sample of the tensors as they are now."""
        self._taken = self._bits(memories)

    def changed(self, memories: Sequence[torch.Tensor]) -> list[int]:
        """Return the indices of the tensors whose numbers are others now."""
        now = self._bits(memories)
        if torch.equal(now, self._taken):
            return []
        differs = (now != self._taken).view(len(self._indices), -1).any(1)
        return [index for index, is_other in zip(self._indices, differs, strict=True) if is_other]

    @torch.no_grad()
    def _bits(self, memories: Sequence[torch.Tensor]) -> torch.Tensor:
        pairs = zip(memories, self._places, strict=True)
        # Bits, so that a NaN is equal to itself.
        return torch.cat([memory.view(-1).index_select(0, places) for memory, places in pairs]).view(torch.uint8)


# Whatever torch's default device is.
_NOWHERE = torch.empty(0, dtype=torch.int64, device="cpu")


def _places(offset: int, numel: int) -> torch.Tensor:
    """Return where the sampled numbers of a tensor are: as many of each, so those of small ones repeat."""
    # Whatever torch's default device is.
    places = torch.arange(_COUNT, dtype=torch.int64, device="cpu")
    return offset + places * max(numel - 1, 0) // (_COUNT - 1)
