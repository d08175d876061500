"""`token_mean`: a loss that is summed over labels, divided by how many labels count in the whole batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import rp_batch
import torch
from rp_engine import LossFn
from rp_engine.context import loss_microbatches

from rp_calls.mean_loss import takes_mean

# How many labels a label tree has, or how many for each of several losses.
Counts = float | Sequence[float]
Count = Callable[[Any], Counts]


@dataclass(frozen=True, slots=True)
class TokenMean:
    """A loss function for `forward_backward` whose divisor is counted over the batch, before it is split.

    Called like any loss function, it takes its arguments for the whole batch.
    """

    sum_loss: LossFn
    count: Count

    def __call__(self, outputs: Any, label: Any) -> torch.Tensor | Sequence[torch.Tensor]:
        """The mean over the labels given.

        Raises `TypeError` in another loss function, which has the labels of one of several microbatches.
        """
        parts = loss_microbatches()
        if parts > 1:
            raise TypeError(
                f"token_mean was called in a loss_fn, which has the labels of one of {parts} microbatches, so it "
                "would divide by these alone; move what is around it inside: "
                "loss_fn=token_mean(lambda outputs, label: scaler.scale(sum_loss(outputs, label)), ...)"
            )
        return self.for_batch(label)(outputs, label)

    def for_batch(self, label: Any) -> LossFn:
        """The loss function of each microbatch of the batch that has this label."""
        if isinstance(label, rp_batch.Parts):
            raise TypeError(
                "token_mean counts the labels of the whole batch, but label is in microbatches already; give it "
                "in one piece, or divide in a loss_fn of your own"
            )
        return partial(_divided, self.sum_loss, _checked(self.count(label)))


def token_mean(
    sum_loss: LossFn, *, shift: bool | None = None, ignore_index: int = -100, count: Count | None = None
) -> TokenMean:
    """Make a loss that is a mean over all labels of a batch out of one that is a sum, for any microbatches.

    Args:
        sum_loss: maps ``(outputs, label)`` of one microbatch to the *sum* of its labels' losses, or to several.
        shift: whether `sum_loss` scores each position against the next label, so that the first label of each row
            is not scored, as causal language models do with ``labels=input_ids``. With False every label counts.
        ignore_index: labels of this value do not count.
        count: instead of `shift`: maps the label of the whole batch to the divisor; or to one for each loss.

    Without `count`, `label` has one tensor of integers, of any shape; whatever else it has is not counted.

    >>> from roundpipe import RoundPipe, RoundPipeRunConfig, Runtime, token_mean
    >>> def summed(logits, label):
    ...     return torch.nn.functional.cross_entropy(logits.flatten(0, 1), label.flatten(), reduction="sum")
    >>> inputs, label = torch.randn(5, 3, 4), torch.tensor([[1, -100, 2], [0, 1, 2], *[[3, -100, -100]] * 3])
    >>> with Runtime("cpu:2") as runtime:
    ...     model = RoundPipe(torch.nn.Linear(4, 6), runtime=runtime)
    ...     losses = [
    ...         model.forward_backward(
    ...             (inputs,), label=label, loss_fn=token_mean(summed, shift=False),
    ...             run_config=RoundPipeRunConfig(num_microbatch=parts),
    ...         )
    ...         for parts in (1, 4)
    ...     ]
    >>> bool(torch.isclose(*losses))
    True

    If no label counts, the loss is NaN and its gradients are zero, as with torch's cross entropy.

    Raises `TypeError` unless one of `shift` and `count` is given, and at the call if the labels cannot be counted;
    `ValueError` for a loss function of torch that takes a mean.
    """
    if not callable(sum_loss):
        raise TypeError(f"sum_loss must be callable, but is a {type(sum_loss).__name__} instead")
    if takes_mean(sum_loss):
        raise ValueError(
            "token_mean divides by the labels of the batch, so sum_loss must be a sum, but it takes a mean; give "
            "it reduction='sum'"
        )
    if (shift is None) == (count is None):
        raise TypeError(
            "token_mean takes either shift or count: shift=True if sum_loss scores each position against the next "
            "label, shift=False if against its own, or count, a function from the label to the divisor"
        )
    return TokenMean(sum_loss, count or partial(_counted, bool(shift), ignore_index))


def _counted(shift: bool, ignore_index: int, label: Any) -> int:
    leaves = [leaf for leaf in rp_batch.flatten(label)[0] if isinstance(leaf, torch.Tensor)]
    integers = [leaf for leaf in leaves if not (leaf.is_floating_point() or leaf.is_complex()) and leaf.ndim]
    integers = [leaf for leaf in integers if leaf.dtype != torch.bool]
    if len(integers) != 1:
        found = ", ".join(f"{leaf.dtype} of shape {tuple(leaf.shape)}" for leaf in leaves) or "no tensor"
        raise TypeError(
            f"label must have one tensor of integers for token_mean to count, but has {found}; give count, a "
            "function from label to the divisor"
        )
    labels = integers[0]
    if shift and labels.ndim < 2:
        raise ValueError(
            f"shift=True leaves the first label of each row out, but the labels have shape {tuple(labels.shape)}; "
            "give them as (rows, positions), or count"
        )
    return int(((labels[..., 1:] if shift else labels) != ignore_index).sum())


def _checked(found: Any) -> Counts:
    divisor: Any = found.item() if isinstance(found, torch.Tensor) and found.numel() == 1 else found
    numbers = cast(Sequence[object], divisor if isinstance(divisor, list | tuple) else [divisor])
    if not numbers or not all(map(_is_count, numbers)):
        raise TypeError(
            "count must return a number of labels, 0 or more, or a list of one for each loss, but returned "
            f"{divisor!r}"
        )
    return cast(Counts, divisor)


def _is_count(number: object) -> bool:
    return isinstance(number, int | float) and not isinstance(number, bool) and number >= 0


def _divided(sum_loss: LossFn, divisor: Counts, outputs: Any, label: Any) -> torch.Tensor | list[torch.Tensor]:
    losses = sum_loss(outputs, label)
    several = isinstance(divisor, Sequence)
    if not isinstance(losses, list | tuple):
        if several:
            raise TypeError(f"count returned {len(divisor)} numbers, but sum_loss one loss; return one number")
        return _over(losses, divisor)
    divisors = divisor if several else [divisor] * len(losses)
    if len(divisors) != len(losses):
        raise TypeError(
            f"count returned {len(divisors)} numbers, but sum_loss {len(losses)} losses; return as many"
        )
    return [_over(loss, each) for loss, each in zip(losses, divisors, strict=True)]


def _over(loss: Any, divisor: float) -> Any:
    # Any: what a user's function returned; the engine says what a loss is.
    if divisor or not isinstance(loss, torch.Tensor):
        return loss / divisor if isinstance(loss, torch.Tensor) else loss
    # Not 0 / 0, whose gradient would be NaN, too.
    return torch.where(torch.ones_like(loss, dtype=torch.bool), torch.nan, loss)
