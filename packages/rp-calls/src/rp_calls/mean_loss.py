"""Loss functions that return a mean, which is one of each microbatch: torch's own, and others that call these."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any, cast
from weakref import WeakKeyDictionary

import rp_batch
import torch
from rp_engine import LossFn
from rp_engine.context import computing_loss
from rp_engine.errors import TrainingWarning
from rp_errors import warn_user
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

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
    """A loss function of microbatches. Its first run is watched: a mean may be what it returns, and it may train.

    `rows`: how many samples the batch has, if that is known. `trains`: whether it was seen to compute with a
    tensor that requires grad, of which the model does not know, such as a learned temperature.

    >>> loss = WatchedLoss(lambda outputs, label: functional.mse_loss(outputs, label) + 1, 2)
    >>> loss(torch.ones(3), torch.zeros(3)), loss.is_mean
    (tensor(2.), True)
    >>> loss = WatchedLoss(lambda outputs, label: outputs.sum() / len(label), 2, rows=6)
    >>> loss(torch.ones(3), torch.zeros(3)), loss.is_mean
    (tensor(1.), True)
    """

    def __init__(self, loss_fn: LossFn, microbatches: int, rows: int | None = None) -> None:
        self._loss_fn = loss_fn
        self._microbatches = microbatches
        self._rows = rows
        self.trains = False
        self.is_mean = microbatches > 1 and takes_mean(loss_fn)
        self._is_watched = not takes_mean(loss_fn) and _may_watch(loss_fn)

    def __call__(self, outputs: Any, label: Any) -> Any:
        """Return the loss of one microbatch."""
        with computing_loss(self._microbatches):
            if not self._is_watched:
                return self._loss_fn(outputs, label)
            self._is_watched = False
            given = [leaf for leaf in rp_batch.flatten((outputs, label))[0] if _has_sizes(leaf)]
            with _Means(given, self._rows, self._microbatches) as means:
                loss = self._loss_fn(outputs, label)
        self.is_mean = self._microbatches > 1 and means.include(loss)
        self.trains = means.trains
        return loss

    def tell(self) -> None:
        """Warn of weights, and of a mean, for `forward_backward` and `loss`: losses of microbatches are summed."""
        if self.trains:
            warn_user(
                "loss_fn computes with a tensor that requires grad and is not the model's output, such as a "
                "learned weight: its .grad is complete in a step function, or after model.synchronize(), not when "
                "this call returns; and an asynchronous step changes it while the next call reads it, so steps "
                "must be model.step(..., is_async=False). Let the last layer compute with it, or freeze it",
                TrainingWarning,
            )
        if self.is_mean:
            warn_user(
                "loss_fn takes a mean over each microbatch, and the losses of microbatches are summed, so the "
                f"loss and gradients of this batch are {self._microbatches} times as large as its mean's; write "
                "loss_fn=roundpipe.token_mean(f, shift=False) with a function f that sums (reduction='sum'), or "
                "divide by the number of microbatches",
                TrainingWarning,
            )


# Functions that are means if they are given nothing but a tensor, or as much too large as these.
_REDUCTIONS = (torch.mean, torch.Tensor.mean, torch.std, torch.Tensor.std, torch.var, torch.Tensor.var)
# Names of operations after which a mean is still one: if their argument is, if it is multiplied by a number, if
# one of their arguments is. Those of divisions; of sums; of what makes a divisor of a sum; of what tells sizes; of
# what tells values.
_UNARY = frozenset(
    ("__neg__", "clone", "double", "exp", "float", "log", "neg", "negative", "sqrt", "squeeze", "to")
)
_PRODUCTS = frozenset(("__imul__", "__mul__", "__rmul__", "mul", "mul_", "multiply"))
_ADDITIONS = frozenset(
    ("add", "add_", "rsub", "sub", "sub_", "__add__", "__iadd__", "__isub__", "__radd__", "__rsub__", "__sub__")
)
_DIVISIONS = frozenset(("div", "div_", "divide", "true_divide", "__itruediv__", "__truediv__"))
_SUMS = frozenset(("count_nonzero", "sum"))
_OF_SUMS = frozenset(
    ("add", "__add__", "__radd__", "clamp", "clamp_min", "double", "float", "max", "maximum", "to")
)
_SIZES = frozenset(("__get__", "__len__", "nelement", "numel", "size"))
_VALUES = frozenset(("__float__", "__int__", "item", "tolist"))


class _Means(TorchFunctionMode):
    """Notes the means that are taken inside: by functions of torch, or as a sum divided by a count.

    `given`: the tensors of the microbatch. `rows`: how many samples the batch has, in so many `microbatches`.
    """

    def __init__(self, given: Sequence[torch.Tensor], rows: int | None, microbatches: int) -> None:
        super().__init__()
        self._microbatches = microbatches
        # Whether the number of rows or a value was asked for, so that a mean may be weighted by its share.
        self._may_weigh = False
        # With their versions: what is written since, as by ``loss /= 2``, is a mean no more.
        self._taken: list[tuple[torch.Tensor, int]] = []
        # What is computed from the microbatch, which of that are sums, and sizes that were asked for. What is
        # counted in the whole batch is none of these.
        self._computed = WeakIdKeyDictionary(dict.fromkeys(given))
        # All that is given or made here. Whether something else that requires grad is computed with.
        self._known = WeakIdKeyDictionary(dict.fromkeys(given))
        self.trains = False
        self._sums = WeakIdKeyDictionary()
        self._counts = set[int]()
        self._of_batch = {1, *((rows or 1) * one.shape[1:].numel() for one in given if one.ndim), rows or 1}

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call the function of torch."""
        named, name = kwargs or {}, getattr(func, "__name__", "")
        given = (*args, *named.values())
        was_mean = [self.include(one) for one in given]
        result = func(*args, **named)
        if name in _SIZES and self._is_computed(given[0]):
            self._note_sizes(given[0], {*self._numbers(given[0], result)})
        self._may_weigh |= name in _VALUES and self._is_computed(given[0])
        # Nothing counts what is written to a tensor of inference mode, such as a metric.
        if isinstance(result, torch.Tensor) and not result.is_inference():
            self._note_computed(name, given, result)
            self.trains |= result.requires_grad and any(map(self._is_foreign, given))
            self._known[result] = None
            if self._is_mean(func, given, named, was_mean):
                self._taken.append((result, result._version))
        return result

    def _note_sizes(self, sized: torch.Tensor, sizes: set[int]) -> None:
        self._counts |= sizes - self._of_batch
        self._may_weigh |= sized.ndim > 0 and not sizes.isdisjoint((sized.shape[0], sized.numel()))

    def _note_computed(self, name: str, args: Sequence[Any], result: torch.Tensor) -> None:
        # Tensors that are put together come in a list.
        several = (cast("Sequence[object]", one) if isinstance(one, list | tuple) else (one,) for one in args)
        if _has_sizes(result) and any(map(self._is_computed, chain.from_iterable(several))):
            self._computed[result] = None
            of_sum = name in _OF_SUMS and any(map(self._is_sum, args))
            if result.numel() == 1 and (name in _SUMS or of_sum):
                self._sums[result] = None

    def _is_mean(
        self,
        func: Callable[..., Any],
        given: Sequence[Any],
        named: Mapping[str, Any],
        was_mean: Sequence[bool],
    ) -> bool:
        name = getattr(func, "__name__", "")
        if func in _REDUCTIONS:
            # That of a single number is that number, as in a loss that is reduced once more to be sure.
            is_number = isinstance(given[0], torch.Tensor) and given[0].ndim == 0
            return was_mean[0] if is_number else len(given) - len(named) <= 1 and named.get("dim") is None
        if name in _ADDITIONS:
            return any(was_mean)
        if name in _UNARY:
            return was_mean[:1] == [True]
        if name in _PRODUCTS and any(was_mean):
            return self._keeps_mean(given[was_mean.index(False)] if False in was_mean else None)
        if name in _DIVISIONS and was_mean[0]:
            return self._keeps_mean(1 / given[1] if isinstance(given[1], int | float) and given[1] else None)
        if name in _DIVISIONS and len(given) == 2:
            is_number = self._is_computed(given[0]) and given[0].numel() == 1
            return is_number and (self._is_sum(given[1]) or self._is_count(given[1]))
        return func in _FUNCTIONS and named.get("reduction", "mean") in _MEANS

    @staticmethod
    def _numbers(sized: torch.Tensor, found: object) -> Iterable[int]:
        """Return the numbers of rows or elements among the sizes that were asked for."""
        if isinstance(found, int):
            return [found]
        return [sized.shape[0], sized.numel()] if isinstance(found, torch.Size) and sized.ndim else []

    def _keeps_mean(self, factor: object) -> bool:
        """Return whether a mean times this is M times too large: it may be a share of the batch, such as 1 / M."""
        if self._may_weigh or not isinstance(factor, int | float) or not factor:
            return False
        return not math.isclose(factor * self._microbatches, 1)

    def _is_computed(self, value: object) -> bool:
        return isinstance(value, torch.Tensor) and value in self._computed

    def _is_foreign(self, value: object) -> bool:
        is_leaf = isinstance(value, torch.Tensor) and value.requires_grad and value.is_leaf
        return is_leaf and value not in self._known

    def _is_sum(self, value: object) -> bool:
        return isinstance(value, torch.Tensor) and value in self._sums

    def _is_count(self, value: object) -> bool:
        return isinstance(value, int | float) and value in self._counts

    def include(self, loss: Any) -> bool:
        """Return whether a loss function has returned one of them, as its only loss or one of several."""
        losses = cast("Sequence[object]", loss) if isinstance(loss, list | tuple) else [loss]
        return any(one is mean and mean._version == version for one in losses for mean, version in self._taken)


def _has_sizes(leaf: object) -> bool:
    return isinstance(leaf, torch.Tensor) and not leaf.is_nested


def _may_watch(loss_fn: object) -> bool:
    """Whether to watch a run of a loss function: its first ones, unless it is compiled, which it would be anew."""
    if hasattr(loss_fn, "_torchdynamo_orig_callable"):
        return False
    code = getattr(loss_fn, "__code__", type(loss_fn))
    _WATCHED[code] = _WATCHED.get(code, 0) + 1
    return _WATCHED[code] <= _MOST
