"""Masters in halves: which weights can have them, and the warnings about whole masters."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from rp_errors import TrainingWarning, warn_user


def can_split(weight: torch.Tensor) -> bool:
    """Return whether a trained weight can be the upper half of its fp32 master.

    >>> [can_split(torch.ones(2, dtype=dtype)) for dtype in (torch.bfloat16, torch.float16, torch.float32)]
    [True, False, False]
    """
    return weight.dtype == torch.bfloat16 and weight.is_contiguous()


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two bf16 tensors have the same bits."""
    return torch.equal(one.view(torch.int16), other.view(torch.int16))


class TellsWhole:
    """Warns, once per model, that masters in halves become whole, and which reader is the cause."""

    def __init__(self, name: str, *, on_disk: bool) -> None:
        self._name = name
        self._more = 4 if on_disk else 2
        self._is_told = False

    def __call__(self, reader: str) -> None:
        if self._is_told:
            return
        self._is_told = True
        warn_user(
            f"masters of model {self._name!r} are whole from now on, with {self._more} more bytes each, because "
            f"{reader} reads or writes their values; only the optimizers of roundpipe.optim step masters in "
            "halves",
            TrainingWarning,
        )


def tell_kept_whole(name: str, weights: Sequence[torch.Tensor]) -> None:
    """Warn that 16-bit parameters of model `name`, or all, have whole masters although halves were requested."""
    kept = [weight for weight in weights if not can_split(weight)]
    coarse = [weight for weight in kept if weight.itemsize == 2]
    if not coarse and len(kept) < max(len(weights), 1):
        return
    dtypes = ", ".join(sorted({str(weight.dtype).removeprefix("torch.") for weight in coarse or kept}))
    warn_user(
        f"{len(coarse or kept)} trained parameters of model {name!r} keep whole fp32 masters: with "
        f'master="split" only contiguous bf16 weights are halves of theirs, but these are {dtypes or "none"}',
        TrainingWarning,
    )
