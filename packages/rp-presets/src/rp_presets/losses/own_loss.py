"""A model's own loss over a batch that is split: what each part contributes to the loss of the whole."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rp_presets.losses.counts import Rule, count

TOTAL = "num_items_in_batch"
# What a model does with `shift_labels`: counts them instead of its labels, ignores them, or something else.
Shifts = Literal["counted", "ignored", "unknown"]


class Share(NamedTuple):
    """How much a part's loss counts in the loss of the whole batch.

    `main`: the factor of the mean over labels; NaN if no label of the whole batch counts. `auxiliary`: the factor
    of what does not depend on labels, which is in the loss `coefficient` times.
    """

    main: float
    auxiliary: float
    coefficient: float


@dataclass(frozen=True, slots=True)
class OwnLoss:
    """How a model's own loss divides, as `observe_loss` found it.

    `rule`: what it counts. `takes_total`: it divides by `num_items_in_batch`, if that is given. `coefficient`: of
    `aux_loss` in the loss, 0 without one. `labels`: the name of the argument.

    >>> own = OwnLoss("shifted", takes_total=False)
    >>> whole = {"labels": torch.tensor([[1, 2, 3], [1, 2, -100], [1, -100, -100]])}
    >>> whole = own.with_total(whole)
    >>> [own.share({"labels": part}, whole).main for part in whole["labels"].split(1)]
    [0.6666666666666666, 0.3333333333333333, 0.0]
    """

    rule: Rule
    takes_total: bool
    coefficient: float = 0.0
    shift_labels: Shifts = "ignored"
    labels: str = "labels"

    def with_total(self, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments of the whole batch, with the number of its labels if the model divides by that.

        A number that the caller gives stays: the labels of several accumulated batches, say.

        Raises:
            ValueError: there are no rows; or `shift_labels`, and it is unknown how the model counts them.
            TypeError: the labels are not a tensor.
        """
        found = dict(kwargs)
        if self.takes_total and found.get(TOTAL) is None:
            found[TOTAL] = self._count(found)
        else:
            self._counted(found)
        return found

    def share(self, part: Mapping[str, Any], whole: Mapping[str, Any]) -> Share:
        """What a part of the rows contributes. `whole`: the arguments that `with_total` returned."""
        rows = len(self._counted(part)[1]) / len(self._counted(whole)[1])
        return Share(self._main(part, whole), rows, self.coefficient)

    @staticmethod
    def loss_fn(outputs: Any, share: Share) -> Tensor:
        """A part's contribution, from the model's output object; the sum over the parts is the loss of the whole.

        Where no label of a part counts, it is zero, and so is its gradient, though the mean over nothing is NaN.
        If none of the whole batch counts, the loss is NaN and gradients zero, as with torch's cross entropy.

        An auxiliary loss, such as a router's, is no sum over rows: it is averaged over the parts by their rows.
        That is not its value over the unsplit batch.
        """
        loss, auxiliary = _losses(outputs, share)
        if auxiliary is None:
            return _main(loss, share)
        return _main(loss - auxiliary, share) + share.auxiliary * auxiliary

    def _main(self, part: Mapping[str, Any], whole: Mapping[str, Any]) -> float:
        if self.takes_total and whole.get(TOTAL) is not None:
            return math.nan if whole[TOTAL] == 0 else 1.0
        total = self._count(whole)
        return self._count(part) / total if total else math.nan

    def _count(self, kwargs: Mapping[str, Any]) -> int:
        return count(*self._counted(kwargs), kwargs)

    def _counted(self, kwargs: Mapping[str, Any]) -> tuple[Rule, Tensor]:
        """The rule, and the labels that it counts."""
        shifted = kwargs.get("shift_labels")
        if shifted is not None and self.shift_labels == "unknown":
            raise ValueError("how this model counts shift_labels is unknown; give it labels alone")
        rule, name = (self.rule, self.labels)
        if shifted is not None and self.shift_labels == "counted":
            rule, name = "tokens", "shift_labels"
        labels = kwargs.get(name)
        if not isinstance(labels, Tensor) or labels.ndim == 0:
            raise TypeError(
                f"{name} must be a tensor whose first dimension is the batch, but is {_described(labels)}"
            )
        if not len(labels):
            raise ValueError(f"the batch is empty: {name} has no rows; give one sample or more")
        return rule, labels


class OwnLosses:
    """The own losses of a model that reads the kind of its loss off the labels, as classifiers do.

    `observe` gets the arguments of the first call with labels of a kind, and finds the loss for that.

    >>> losses = OwnLosses(lambda kwargs: OwnLoss("rows", takes_total=False))
    >>> whole = losses.with_total({"labels": torch.ones(4, 3)})
    >>> losses.share({"labels": torch.ones(1, 3)}, whole).main
    0.25
    """

    def __init__(self, observe: Callable[[Mapping[str, Any]], OwnLoss], *, labels: str = "labels") -> None:
        self._observe = observe
        self._labels = labels
        self._found: dict[object, OwnLoss] = {}

    def with_total(self, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """See `OwnLoss.with_total`. Raises what `observe` raises, such as `UnknownLoss`."""
        return self._of(kwargs).with_total(kwargs)

    def share(self, part: Mapping[str, Any], whole: Mapping[str, Any]) -> Share:
        """See `OwnLoss.share`."""
        return self._of(whole).share(part, whole)

    def loss_fn(self, outputs: Any, share: Share) -> Tensor:
        """See `OwnLoss.loss_fn`."""
        return OwnLoss.loss_fn(outputs, share)

    def _of(self, kwargs: Mapping[str, Any]) -> OwnLoss:
        labels = kwargs.get(self._labels)
        if not isinstance(labels, Tensor):
            raise TypeError(f"{self._labels} must be a tensor, but is {_described(labels)}")
        kind = (labels.is_floating_point(), labels.ndim, kwargs.get("attention_mask") is not None)
        if kind not in self._found:
            self._found[kind] = self._observe(kwargs)
        return self._found[kind]


def _losses(outputs: Any, share: Share) -> tuple[Tensor, Tensor | None]:
    """The loss, and what is in it of the auxiliary loss."""
    loss = getattr(outputs, "loss", None)
    if not isinstance(loss, Tensor):
        raise TypeError(
            f"the model must return an object with its loss, but returned a {type(outputs).__name__} with "
            f"{_described(loss)}; leave return_dict alone"
        )
    auxiliary = getattr(outputs, "aux_loss", None) if share.coefficient else None
    return loss, None if auxiliary is None else share.coefficient * auxiliary.to(loss.device)


def _main(loss: Tensor, share: Share) -> Tensor:
    if share.main and not math.isnan(share.main):
        return loss if share.main == 1 else share.main * loss
    # `apply` is untyped in torch.
    return cast(Tensor, cast(Any, _Constant).apply(loss, share.main))


class _Constant(torch.autograd.Function):
    """A number in the place of a loss that may be NaN. No gradient goes back: zero times infinity is NaN, too."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, value: float) -> Tensor:
        del ctx
        return torch.full_like(loss, value)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] - the decorator hides the names
        ctx: Any, grad: Tensor
    ) -> tuple[None, None]:
        del ctx, grad
        return None, None


def _described(value: object) -> str:
    return "none" if value is None else f"a {type(value).__name__}"
