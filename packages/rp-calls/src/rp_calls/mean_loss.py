"""Loss functions that return a mean, which is one of each microbatch: torch's own, and others that call these."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from rp_engine import LossFn
from rp_engine.context import computing_loss
from rp_engine.errors import TrainingWarning
from rp_errors import warn_user
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

# Functions whose `reduction` is "mean" by default.
_FUNCTIONS = (
    functional.binary_cross_entropy,
    functional.binary_cross_entropy_with_logits,
    functional.cross_entropy,
    functional.gaussian_nll_loss,
    functional.hinge_embedding_loss,
    functional.huber_loss,
    functional.kl_div,
    functional.l1_loss,
    functional.mse_loss,
    functional.multi_margin_loss,
    functional.multilabel_soft_margin_loss,
    functional.nll_loss,
    functional.poisson_nll_loss,
    functional.smooth_l1_loss,
    functional.soft_margin_loss,
)
_MEANS = frozenset(("mean", "batchmean"))
# How often loss functions were watched, by their code: they are often made anew, for each call or from a setting.
_WATCHED: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
_MOST = 8


def takes_mean(loss_fn: object) -> bool:
    """Return whether a loss function is one of torch's and takes a mean.

    >>> takes_mean(nn.MSELoss()), takes_mean(nn.MSELoss(reduction="sum"))
    (True, False)
    >>> takes_mean(partial(functional.cross_entropy, ignore_index=0)), takes_mean(max)
    (True, False)
    """
    if isinstance(loss_fn, partial):
        made = cast("partial[Any]", loss_fn)
        return made.keywords.get("reduction", "mean") in _MEANS and takes_mean(made.func)
    if isinstance(loss_fn, nn.Module):
        return getattr(loss_fn, "reduction", None) in _MEANS
    return any(loss_fn is function for function in _FUNCTIONS)


class WatchedLoss:
    """A loss function of one of several microbatches. Its first run is watched: a mean may be what it returns.

    >>> loss = WatchedLoss(lambda outputs, label: functional.mse_loss(outputs, label), 2)
    >>> loss(torch.ones(3), torch.zeros(3)), loss.is_mean
    (tensor(1.), True)
    """

    def __init__(self, loss_fn: LossFn, microbatches: int) -> None:
        self._loss_fn = loss_fn
        self._microbatches = microbatches
        self.is_mean = microbatches > 1 and takes_mean(loss_fn)
        self._is_watched = microbatches > 1 and not self.is_mean and _may_watch(loss_fn)

    def __call__(self, outputs: Any, label: Any) -> Any:
        """Return the loss of one microbatch."""
        with computing_loss(self._microbatches):
            if not self._is_watched:
                return self._loss_fn(outputs, label)
            self._is_watched = False
            with _Means() as means:
                loss = self._loss_fn(outputs, label)
        self.is_mean = means.include(loss)
        return loss

    def tell(self) -> None:
        """Warn of a mean, for `forward_backward` and `loss`: the losses of microbatches are summed."""
        if self.is_mean:
            warn_user(
                "loss_fn takes a mean over each microbatch, and the losses of microbatches are summed, so the "
                f"loss and gradients of this batch are {self._microbatches} times as large as its mean's; write "
                "loss_fn=roundpipe.token_mean(f, shift=False) with a function f that sums (reduction='sum'), or "
                "divide by the number of microbatches",
                TrainingWarning,
            )


class _Means(TorchFunctionMode):
    """Notes the means that are taken inside."""

    def __init__(self) -> None:
        super().__init__()
        # With their versions: what is written since, as by ``loss /= 2``, is a mean no more.
        self._taken: list[tuple[torch.Tensor, int]] = []

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call the function of torch."""
        named = kwargs or {}
        result = func(*args, **named)
        if func in (torch.mean, torch.Tensor.mean):
            given = args[0] if args else None
            # That of a single number is that number, as in a loss that is reduced once more to be sure.
            is_number = isinstance(given, torch.Tensor) and given.ndim == 0
            is_mean = self.include(given) if is_number else len(args) == 1 and named.get("dim") is None
        else:
            is_mean = func in _FUNCTIONS and named.get("reduction", "mean") in _MEANS
        # Nothing counts what is written to a tensor of inference mode, such as a metric.
        if is_mean and not result.is_inference():
            self._taken.append((result, result._version))
        return result

    def include(self, loss: Any) -> bool:
        """Return whether a loss function has returned one of them, as its only loss or one of several."""
        losses = cast("Sequence[object]", loss) if isinstance(loss, list | tuple) else [loss]
        return any(one is mean and mean._version == version for one in losses for mean, version in self._taken)


def _may_watch(loss_fn: object) -> bool:
    """Whether to watch a run of a loss function: its first ones, unless it is compiled, which it would be anew."""
    if hasattr(loss_fn, "_torchdynamo_orig_callable"):
        return False
    code = getattr(loss_fn, "__code__", type(loss_fn))
    _WATCHED[code] = _WATCHED.get(code, 0) + 1
    return _WATCHED[code] <= _MOST
