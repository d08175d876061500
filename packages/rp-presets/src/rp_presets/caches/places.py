"""Where samples are in their microbatches, given where they are in the batch."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate, pairwise

import torch
from torch import Tensor


class CachePlaces:
    """Finds them once for all layers of a cache.

    >>> CachePlaces().within(torch.tensor([1, 0, 2]), (2, 1))
    [tensor([1, 0]), tensor([0])]
    """

    def __init__(self) -> None:
        self._index: Tensor | None = None
        self._asked: tuple[object, ...] = ()
        self._found: list[Tensor] = []

    def within(self, index: Tensor, sizes: tuple[int, ...]) -> list[Tensor]:
        """Return for each microbatch which of its own samples come to be its first one, second one, ...

        Raises `ValueError` if a sample would have to change to another microbatch.
        """
        return self._known(index, sizes, _places_within)

    def chosen(self, index: Tensor, sizes: tuple[int, ...]) -> list[Tensor]:
        """Return for each microbatch which of its samples are chosen, by numbers or a mask.

        Raises `ValueError` unless they are in their order.
        """
        return self._known(index, sizes, _chosen_places)

    def _known(
        self, index: Tensor, sizes: tuple[int, ...], find: Callable[[Tensor, tuple[int, ...]], list[Tensor]]
    ) -> list[Tensor]:
        # Reading them waits for the device.
        asked = find, index._version, sizes
        if self._index is not index or self._asked != asked:
            self._found = find(index.cpu(), sizes)
            self._index, self._asked = index, asked
        return self._found


def _places_within(index: Tensor, sizes: tuple[int, ...]) -> list[Tensor]:
    if len(index) != sum(sizes):
        raise ValueError(f"the cache holds {sum(sizes)} samples, but is to be reordered to {len(index)}")
    ends = [0, *accumulate(sizes)]
    places = [index[start:end] - start for start, end in pairwise(ends)]
    for part, size in zip(places, sizes, strict=True):
        if bool(((part < 0) | (part >= size)).any()):
            raise ValueError(
                f"the cache holds its samples in microbatches of {sizes}, but is to be reordered to "
                f"{_numbers(index)}, from one to another; beams of one sample must be in one: call generate, "
                "which sees to that, or give num_microbatch=1"
            )
    return places


def _chosen_places(index: Tensor, sizes: tuple[int, ...]) -> list[Tensor]:
    index = index.nonzero()[:, 0] if index.dtype == torch.bool else index
    starts = [0, *accumulate(sizes)]
    owners = torch.bucketize(index, torch.tensor(starts), right=True) - 1
    if bool((owners.diff() < 0).any()):
        raise ValueError(
            f"the cache holds its samples in microbatches of {sizes}, so samples that are kept must be in their "
            f"order, but are {_numbers(index)}"
        )
    return [index[owners == part] - start for part, start in enumerate(starts[:-1])]


def _numbers(index: Tensor) -> list[int]:
    return [int(one) for one in index]
