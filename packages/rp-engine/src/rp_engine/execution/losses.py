"""Checks of what a loss function returned, and sums of losses over the microbatches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import rp_batch
import torch

Losses = torch.Tensor | list[torch.Tensor]


def check_losses(found: Any, *, with_grad: bool) -> tuple[list[torch.Tensor], Any]:
    """Return a loss function's result as a list of tensors and its tree structure.

    Raises `TypeError` unless it is a tensor of one element or a sequence of such tensors, `RuntimeError` if
    one has no graph but `with_grad`.
    """
    leaves, treedef = rp_batch.flatten(found)
    if isinstance(found, torch.Tensor | list | tuple):
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        if tensors and len(tensors) == len(leaves) and all(tensor.numel() == 1 for tensor in tensors):
            if with_grad:
                _check_graphs(tensors)
            return tensors, treedef
    raise TypeError(
        "loss_fn must return a tensor of one element or a sequence of such tensors, but returned "
        f"{_described(found)} instead; reduce it with .sum() or .mean()"
    )


def _check_graphs(losses: Sequence[torch.Tensor]) -> None:
    for number, loss in enumerate(losses):
        if not loss.requires_grad:
            raise RuntimeError(
                f"{'the loss' if len(losses) == 1 else f'loss {number}'} of loss_fn has no graph, so nothing is "
                "trained by it: compute it from the outputs without detach(), item() or no_grad(); if it is only "
                "to be looked at, keep it elsewhere; and some trainable parameter must be used for it"
            )


class LossesSeen:
    """How many losses the microbatches of a call have."""

    def __init__(self) -> None:
        self._counts: list[int] = []

    def check(self, count: int) -> None:
        """Raise `TypeError` if a microbatch has more or fewer than one before."""
        self._counts.append(count)
        check_counts([self._counts[0], count])


def check_counts(counts: Sequence[int]) -> None:
    """Raise `TypeError` unless microbatches have as many losses as each other."""
    if len(set(counts)) > 1:
        raise TypeError(
            f"loss_fn must return as many losses for every microbatch, but returned {max(counts)} for one and "
            f"{min(counts)} for another; return zeros for those that a microbatch has nothing of, such as "
            "0 * outputs.sum()"
        )


def _described(found: Any) -> str:
    if isinstance(found, torch.Tensor):
        return f"a tensor of shape {tuple(found.shape)}"
    return repr(type(found).__name__)


def sum_losses(rows: Sequence[Sequence[torch.Tensor]], treedef: Any) -> Losses:
    """Sum the losses over the microbatches, in order: a tensor, or a list if `loss_fn` returned several.

    `rows`: the losses of each microbatch. `treedef`: how `loss_fn` has returned them.
    """
    sums = [_sum(column) for column in zip(*rows, strict=True)]
    found = rp_batch.unflatten(treedef, sums)
    return found if isinstance(found, torch.Tensor) else sums


def _sum(column: Sequence[torch.Tensor]) -> torch.Tensor:
    total = column[0].clone()
    for loss in column[1:]:
        total = total + loss
    return total
