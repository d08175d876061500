"""What a fine-tuning asks of its data: the calls of each step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor

# The label of a token that is not learned.
IGNORED = -100
Call = Mapping[str, Tensor]


class Batches(Protocol):
    """The batches of each step. They depend only on the step's number, so a training can go on at any step."""

    @property
    def accumulation(self) -> int:
        """The number of calls in a step."""
        ...

    def calls(self, step: int) -> Sequence[Call]:
        """Return the keyword arguments of each call in step number `step`, counted from 1, with ``labels``."""
        ...

    def tokens(self, step: int) -> int:
        """Return the number of tokens of a step, without padding."""
        ...

    def epoch(self, step: int) -> float:
        """Return how often the data was trained on by the end of step number `step`."""
        ...


class InTurn:
    """Batches in the order of a list, again and again. `accumulation`: how many a step takes.

    >>> import torch
    >>> rows = [{"input_ids": torch.full((1, 4), at), "labels": torch.full((1, 4), at)} for at in range(3)]
    >>> [int(call["labels"][0, 0]) for call in InTurn(rows, accumulation=2).calls(2)]
    [2, 0]
    """

    def __init__(self, batches: Sequence[Call], accumulation: int = 1) -> None:
        if not batches or accumulation < 1:
            raise ValueError(f"there must be a batch and a call a step, but are {len(batches)} and {accumulation}")
        self._batches = batches
        self.accumulation = accumulation

    def calls(self, step: int) -> Sequence[Call]:
        """Return the batches of step number `step`, counted from 1."""
        first = (step - 1) * self.accumulation
        return [self._batches[at % len(self._batches)] for at in range(first, first + self.accumulation)]

    def tokens(self, step: int) -> int:
        """Return the number of labels of a step, learned or not, without those that an attention mask excludes."""
        return sum(int(call.get("attention_mask", call["labels"] >= IGNORED).sum()) for call in self.calls(step))

    def epoch(self, step: int) -> float:
        """Return how often the list was gone through by the end of a step."""
        return step * self.accumulation / len(self._batches)


def labels_in(batch: Mapping[str, Any], model: Any = None) -> int:
    """Return how many labels of a batch count in the loss of a wrapped model.

    Where the model does not tell (`rp_presets.OwnLoss`), those of a causal model: not the first of a row, since no
    token precedes it.
    """
    own: Any = getattr(getattr(model, "model", None), "own_loss", None)
    if hasattr(own, "labels_in"):
        return own.labels_in(batch)
    return int((batch["labels"][..., 1:] != IGNORED).sum())
