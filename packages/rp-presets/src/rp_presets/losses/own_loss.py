"""A model's own loss over a split batch: what each part contributes to the loss of the whole."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rp_presets.losses.counts import Rule, count

TOTAL = "num_items_in_batch"
# How a model treats `shift_labels`: counts them instead of its labels, ignores them, or something else.
Shifts = Literal["counted", "ignored", "unknown"]


class LossShare(NamedTuple):
    """How much a part's loss counts in the loss of the whole batch.

    `main`: the factor of the mean over labels; NaN if no label of the whole batch counts. `auxiliary`: the factor
    of the auxiliary loss, which does not depend on labels and is in the loss `coefficient` times.
    """

    main: float
    auxiliary: float
    coefficient: float


@dataclass(frozen=True, slots=True)
class OwnLoss:
    """How a model's own loss follows from the losses of parts, as `observe_loss` found it.

    `rule`: what the loss counts. `takes_total`: it divides by `num_items_in_batch`, if that is passed.
    `coefficient`: the factor of `aux_loss` in the loss, 0 without one. `labels`: the name of the argument for
    labels. `rows`: those of all calls that a step adds up; None for those of the call.

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
    rows: int | None = None

    def over(self, calls: Sequence[Mapping[str, Any]]) -> OwnLoss:
        """Return the loss of one of these calls, by their arguments, of which the sum is a mean over all.

        Otherwise each call would add a whole auxiliary loss. `num_items_in_batch` is for the caller to add up.
        """
        return replace(self, rows=sum(len(self._counted(call)[1]) for call in calls))

    def with_total(self, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Add the number of labels to the arguments of the whole batch, if the model divides by it.

        A number that the caller has passed stays, such as that of several accumulated batches.

        Raises:
            ValueError: there are no rows, or there are `shift_labels` and it is unknown how the model counts them.
            TypeError: the labels are not a tensor.
        """
        completed = dict(kwargs)
        if self.takes_total and completed.get(TOTAL) is None:
            completed[TOTAL] = self._count(completed)
        else:
            self._counted(completed)
        return completed

    def labels_in(self, kwargs: Mapping[str, Any]) -> int:
        """Return how many labels of a batch count in its loss. Raises as `with_total`."""
        return self._count(kwargs)

    def share(self, part: Mapping[str, Any], whole: Mapping[str, Any]) -> LossShare:
        """Return the share of a part of the batch. `whole`: the arguments that `with_total` returned."""
        rows = len(self._counted(whole)[1]) if self.rows is None else self.rows
        return LossShare(self._main(part, whole), len(self._counted(part)[1]) / rows, self.coefficient)

    @staticmethod
    def loss_fn(outputs: Any, share: LossShare) -> Tensor:
        """Return a part's contribution, from the model's output object. The parts' sum is the loss of the whole.

        If no label of a part counts, its contribution and gradient are zero, although the mean over nothing is
        NaN. If no label of the whole batch counts, the loss is NaN and gradients are zero, as with torch's cross
        entropy.

        An auxiliary loss, such as a router's, is not a sum over rows. It is averaged over the parts, weighted by
        their rows, which differs from its value over the unsplit batch.
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
        """Return the rule and the labels that it counts."""
        shifted = kwargs.get("shift_labels")
        if shifted is not None and self.shift_labels == "unknown":
            raise ValueError("it is unknown how this model counts shift_labels; pass labels only")
        rule, name = (self.rule, self.labels)
        if shifted is not None and self.shift_labels == "counted":
            rule, name = "tokens", "shift_labels"
        labels = kwargs.get(name)
        if not isinstance(labels, Tensor) or labels.ndim == 0:
            raise TypeError(
                f"{name} must be a tensor whose first dimension is the batch, but is {_described(labels)}"
            )
        if not len(labels):
            raise ValueError(f"the batch is empty: {name} has no rows; pass at least one sample")
        return rule, labels


class OwnLosses:
    """The own losses of a model that chooses its loss by the kind of labels, as classifiers do.

    `observe` is called with the arguments of the first call with each kind of labels, and returns the loss for it.

    >>> losses = OwnLosses(lambda kwargs: OwnLoss("rows", takes_total=False))
    >>> whole = losses.with_total({"labels": torch.ones(4, 3)})
    >>> losses.share({"labels": torch.ones(1, 3)}, whole).main
    0.25
    """

    def __init__(self, observe: Callable[[Mapping[str, Any]], OwnLoss], *, labels: str = "labels") -> None:
        self._observe = observe
        self._labels = labels
        self._by_kind: dict[object, OwnLoss] = {}

    def with_total(self, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """See `OwnLoss.with_total`. Raises what `observe` raises, such as `UnknownLoss`."""
        return self._of(kwargs).with_total(kwargs)

    def over(self, calls: Sequence[Mapping[str, Any]]) -> OwnLoss:
        """See `OwnLoss.over`; all calls have labels of the first one's kind."""
        return self._of(calls[0]).over(calls)

    def labels_in(self, kwargs: Mapping[str, Any]) -> int:
        """See `OwnLoss.labels_in`."""
        return self._of(kwargs).labels_in(kwargs)

    def share(self, part: Mapping[str, Any], whole: Mapping[str, Any]) -> LossShare:
        """See `OwnLoss.share`."""
        return self._of(whole).share(part, whole)

    def loss_fn(self, outputs: Any, share: LossShare) -> Tensor:
        """See `OwnLoss.loss_fn`."""
        return OwnLoss.loss_fn(outputs, share)

    def _of(self, kwargs: Mapping[str, Any]) -> OwnLoss:
        labels = kwargs.get(self._labels)
        if not isinstance(labels, Tensor):
            raise TypeError(f"{self._labels} must be a tensor, but is {_described(labels)}")
        kind = (labels.is_floating_point(), labels.ndim, kwargs.get("attention_mask") is not None)
        if kind not in self._by_kind:
            self._by_kind[kind] = self._observe(kwargs)
        return self._by_kind[kind]


def _losses(outputs: Any, share: LossShare) -> tuple[Tensor, Tensor | None]:
    """Return the loss, and the auxiliary loss's part of it; None without one."""
    loss = getattr(outputs, "loss", None)
    if not isinstance(loss, Tensor):
        raise TypeError(
            f"the model must return an object with its loss, but returned a {type(outputs).__name__} with "
            f"{_described(loss)}; do not set return_dict"
        )
    auxiliary = getattr(outputs, "aux_loss", None) if share.coefficient else None
    return loss, None if auxiliary is None else share.coefficient * auxiliary.to(loss.device)


def _main(loss: Tensor, share: LossShare) -> Tensor:
    if share.main and not math.isnan(share.main):
        return loss if share.main == 1 else share.main * loss
    # `apply` is untyped in torch.
    return cast(Tensor, cast(Any, _Constant).apply(loss, share.main))


class _Constant(torch.autograd.Function):
    """Replaces a loss that may be NaN by a number. It passes no gradient: zero times infinity would be NaN."""

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
