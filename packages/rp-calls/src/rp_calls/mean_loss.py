"""Torch's own loss functions that take a mean, which is one of each microbatch."""

from __future__ import annotations

from functools import partial
from typing import Any, cast

from rp_engine import LossFn
from rp_engine.errors import TrainingWarning
from rp_errors import warn_user
from torch import nn
from torch.nn import functional

# Functions whose `reduction` is "mean" by default.
_FUNCTIONS = (
    functional.binary_cross_entropy,
    functional.binary_cross_entropy_with_logits,
    functional.cross_entropy,
    functional.gaussian_nll_loss,
    functional.huber_loss,
    functional.kl_div,
    functional.l1_loss,
    functional.mse_loss,
    functional.nll_loss,
    functional.poisson_nll_loss,
    functional.smooth_l1_loss,
)


def takes_mean(loss_fn: object) -> bool:
    """Return whether a loss function is one of torch's and takes a mean.

    >>> takes_mean(nn.MSELoss()), takes_mean(nn.MSELoss(reduction="sum"))
    (True, False)
    >>> takes_mean(partial(functional.cross_entropy, ignore_index=0)), takes_mean(max)
    (True, False)
    """
    if isinstance(loss_fn, partial):
        made = cast("partial[Any]", loss_fn)
        return made.keywords.get("reduction", "mean") == "mean" and takes_mean(made.func)
    if isinstance(loss_fn, nn.Module):
        return getattr(loss_fn, "reduction", None) == "mean"
    return any(loss_fn is function for function in _FUNCTIONS)


def tell_mean(loss_fn: LossFn, microbatches: int) -> None:
    """Warn of a mean over each of several microbatches, whose losses are summed; for `forward_backward`."""
    if microbatches > 1 and takes_mean(loss_fn):
        warn_user(
            "loss_fn takes a mean over each microbatch, and the losses of microbatches are summed, so the loss "
            f"and gradients of this batch are {microbatches} times as large as its mean's; write "
            "loss_fn=roundpipe.token_mean(f, shift=False) with a function f that sums (reduction='sum'), or "
            "divide by the number of microbatches",
            TrainingWarning,
        )
