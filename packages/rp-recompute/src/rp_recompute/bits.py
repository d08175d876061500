"""Sums of the bits of a twin's tensors, by which writes are noticed that no version counter shows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


@torch.no_grad()
def sums_of_bits(tensors: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Return the sum of each tensor's bits, as whole numbers, on its device: (tensors,) int64.

    >>> weight = torch.ones(3)
    >>> before = sums_of_bits([weight], weight.device)
    >>> weight.data.clamp_(max=0.5) is None, torch.equal(sums_of_bits([weight], weight.device), before)
    (False, False)
    """
    # Whole numbers, so that the order of summing changes nothing, and a NaN is equal to itself.
    sums = [_words(one).sum(dtype=torch.int64) for one in tensors]
    return torch.stack(sums) if sums else torch.zeros(0, dtype=torch.int64, device=device)


def names_of(names: Iterable[str], differences: torch.Tensor) -> list[str]:
    """Return the names whose differences, of sums of bits before and after, are not 0.

    >>> names_of(["weight", "bias"], torch.tensor([0, 3]))
    ['bias']
    """
    return [name for name, gap in zip(names, differences, strict=True) if gap]


def _words(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().flatten().view(_WORDS.get(tensor.dtype.itemsize, torch.int64))
