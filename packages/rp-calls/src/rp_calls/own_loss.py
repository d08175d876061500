"""Which loss a call computes: the caller's function, the model's own, or what the model returns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, cast, runtime_checkable

import rp_batch
import torch
from rp_engine import LossFn
from rp_engine.wrapping import check_losses
from torch import nn

from rp_calls.mean_loss import WatchedLoss
from rp_calls.token_mean import TokenMean

_WHAT_TO_DO = (
    "give a loss_fn that uses the outputs, such as roundpipe.token_mean(...), without labels in input_kwargs, or "
    "set num_microbatch=1"
)


@runtime_checkable
class OwnLoss(Protocol):
    """How a model's own loss divides: the attribute `own_loss` of the module that is wrapped.

    `rp_presets.OwnLoss` is one. The attribute may also be an exception, which says why there is none.
    """

    def with_total(self, kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
        """The arguments of the whole batch, with what its loss needs of the whole."""
        ...

    def share(self, part: Mapping[str, Any], whole: Mapping[str, Any]) -> Any:
        """What a microbatch contributes, by its arguments and those that `with_total` returned; any tree."""
        ...

    def loss_fn(self, outputs: Any, share: Any) -> torch.Tensor:
        """A microbatch's contribution: their sum is the loss of the batch."""
        ...


def outputs_are_loss(outputs: Any, labels: Any) -> Any:
    """The default of `loss_fn`: stands for "the model's own loss, or else its outputs"."""
    del labels
    return outputs


@dataclass(frozen=True, slots=True)
class ChosenLoss:
    """The loss of one call. `kwargs`: the keyword arguments of the model, which its own loss may add to.

    `may_hide`: tuples that the model returns may begin with a loss of its own.
    """

    kwargs: dict[str, Any]
    in_parts: Callable[[rp_batch.Parts[Any]], tuple[Sequence[Any], LossFn]]
    is_own: bool = False
    may_hide: bool = False

    def loss_of(self, parts: rp_batch.Parts[Any], outputs: Sequence[Any]) -> torch.Tensor | None:
        """The loss of the batch, from the microbatches' outputs; None if these have none that is a scalar.

        Raises `TypeError` for tuples in which a loss of the model's own would be averaged.
        """
        found = [_loss_in(output, None) for output in outputs]
        if len(outputs) > 1 and found[0] is None and self._hides_loss(outputs[0]):
            raise TypeError(
                f"the model has returned tuples, among whose parts the loss of {len(outputs)} microbatches cannot "
                "be told; omit return_dict=False, and take .to_tuple() of what comes, or set num_microbatch=1"
            )
        if not all(isinstance(loss, torch.Tensor) and loss.dim() == 0 for loss in found):
            return None
        labels, loss_fn = self.in_parts(parts)
        losses: list[Any] = list(map(loss_fn, outputs, labels))
        return torch.stack(losses).sum() if len(losses) > 1 else losses[0]

    def _hides_loss(self, output: Any) -> bool:
        """Whether a model of transformers has returned its loss in a tuple."""
        if not isinstance(output, tuple) or not (self.is_own or self.may_hide):
            return False
        first = next(iter(cast("tuple[Any, ...]", output)), None)
        return self.is_own or (isinstance(first, torch.Tensor) and first.dim() == 0)


def choose_loss(
    model: nn.Module, kwargs: Mapping[str, Any], label: Any, loss_fn: LossFn | OwnLoss, split_label: Any
) -> ChosenLoss:
    """Choose the loss; `in_parts` gives the microbatches' labels and their loss function.

    Raises `ValueError` if labels are given in two places, or a `label` that nothing reads.
    """
    if isinstance(loss_fn, OwnLoss):
        refuse_label(label, kwargs)
        return _own(loss_fn, kwargs)
    if loss_fn is not outputs_are_loss:
        over = loss_fn.for_batch(label) if isinstance(loss_fn, TokenMean) else None

        def in_parts(parts: rp_batch.Parts[Any]) -> tuple[Sequence[Any], LossFn]:
            return _split(label, parts, split_label), over or WatchedLoss(loss_fn, len(parts), _rows(parts))

        return ChosenLoss(dict(kwargs), in_parts)
    refuse_label(label, kwargs)
    own = getattr(model, "own_loss", None)
    if not isinstance(own, OwnLoss | Exception | None):
        raise TypeError(f"own_loss of the model must be an OwnLoss, but is a {type(own).__name__}")
    reason = own if isinstance(own, Exception) else None
    if kwargs.get("labels") is not None and isinstance(own, OwnLoss):
        try:
            return _own(own, kwargs)
        except NotImplementedError as error:
            # How it divides is unknown, which does not matter for one microbatch.
            reason = error
    return ChosenLoss(
        dict(kwargs),
        lambda parts: ([None] * len(parts), partial(_of_outputs, len(parts), reason)),
        may_hide=_may_hide(model, kwargs),
    )


def _may_hide(model: nn.Module, kwargs: Mapping[str, Any]) -> bool:
    """Whether tuples of a model may begin with its loss, as those of transformers do by call or configuration."""
    asked = kwargs.get("return_dict", getattr(getattr(model, "config", None), "return_dict", None))
    has_own = kwargs.get("labels") is not None and getattr(model, "own_loss", None) is not None
    return asked is False or has_own


def check_arguments(input_args: object, input_kwargs: object, loss_fn: object) -> None:
    """Raise `TypeError` unless the arguments of a call that computes a loss are of their kinds."""
    if not isinstance(input_args, tuple):
        raise TypeError(f"input_args must be a tuple, but is a {type(input_args).__name__}; write (x,)")
    if input_kwargs is not None and not isinstance(input_kwargs, Mapping):
        raise TypeError(f"input_kwargs must be a dict, but is a {type(input_kwargs).__name__}; write {{'x': x}}")
    if not callable(loss_fn) and not isinstance(loss_fn, OwnLoss):
        raise TypeError(f"loss_fn must be callable, but is a {type(loss_fn).__name__} instead")


def loss_of_whole(outputs: Any, label: Any, loss_fn: LossFn) -> torch.Tensor | list[torch.Tensor]:
    """The loss of a batch in one piece, from its outputs, or a list of losses; see `choose_loss`.

    Raises `TypeError` for anything else.
    """
    is_own = loss_fn is outputs_are_loss
    found: Any = _of_outputs(1, None, outputs, None) if is_own else loss_fn(outputs, label)
    losses, _ = check_losses(found, with_grad=False)
    return losses[0] if isinstance(found, torch.Tensor) else losses


def _own(own: OwnLoss, kwargs: Mapping[str, Any]) -> ChosenLoss:
    whole = dict(own.with_total(kwargs))

    def in_parts(parts: rp_batch.Parts[Any]) -> tuple[Sequence[Any], LossFn]:
        return [own.share(part[1], whole) for part in parts], own.loss_fn

    return ChosenLoss(whole, in_parts, is_own=True)


def _rows(parts: rp_batch.Parts[Any]) -> int | None:
    return None if parts.sizes is None else sum(parts.sizes)


def _split(label: Any, parts: rp_batch.Parts[Any], split_label: Any) -> Sequence[Any]:
    return rp_batch.split(label, len(parts), split_label, sizes=parts.sizes, exact=True, name="label")


def refuse_label(label: Any, kwargs: Mapping[str, Any]) -> None:
    """Raise `ValueError` for a `label` where no `loss_fn` reads it."""
    if label is None:
        return
    if kwargs.get("labels") is not None:
        raise ValueError(
            "label and labels in input_kwargs are both given, but no loss_fn; leave label out for the model's own "
            "loss, or give the loss_fn that label is for"
        )
    raise ValueError(
        "label is given, but no loss_fn that reads it; give loss_fn, or labels in input_kwargs for the model's "
        "own loss"
    )


def _why(reason: Exception | None) -> str:
    return "the model has no own_loss" if reason is None else f"{type(reason).__name__}: {reason}"


_NO_LOSS = object()


def _loss_in(outputs: Any, default: Any) -> Any:
    """The loss among outputs, which may be of any class."""
    try:
        return getattr(outputs, "loss", default)
    except KeyError:
        # A dict whose items are attributes: many are written with `__getattr__ = dict.__getitem__`.
        return default


def _of_outputs(num_microbatches: int, reason: Exception | None, outputs: Any, label: None) -> Any:
    """The outputs, or their loss if they have one and are those of the whole batch."""
    del label
    loss = _loss_in(outputs, _NO_LOSS)
    if isinstance(outputs, torch.Tensor) and outputs.numel() != 1:
        raise TypeError(
            f"the model returned a tensor of shape {tuple(outputs.shape)}, but a loss has one element, and "
            "there is no loss_fn; give one, such as loss_fn=roundpipe.token_mean(...), with its label"
        )
    if isinstance(outputs, torch.Tensor) or loss is _NO_LOSS:
        return outputs
    if loss is None:
        raise TypeError(
            f"the model returned a {type(outputs).__name__} without a loss; give it labels, by name in "
            "input_kwargs, or give a loss_fn"
        )
    if num_microbatches > 1:
        raise ValueError(
            f"the outputs of {num_microbatches} microbatches each have a loss, but what each contributes to the "
            f"loss of the batch is unknown: {_why(reason)}; {_WHAT_TO_DO}"
        ) from reason
    return loss


def with_loss(outputs: Any, loss: Any) -> Any:
    """The merged outputs with the loss of the batch: merging has averaged those of the microbatches."""
    found = _loss_in(outputs, None)
    if loss is None or loss is found or not isinstance(found, torch.Tensor):
        return outputs
    if hasattr(outputs, "_replace"):
        # A named tuple, as `nn.AdaptiveLogSoftmaxWithLoss` returns, cannot be written.
        return outputs._replace(loss=loss)
    outputs.loss = loss
    return outputs
