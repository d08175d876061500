"""Evaluate a model on held-out data, and tell when it gets no better there."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from roundpipe import RoundPipe

from rp_trainer.errors import Refused
from rp_trainer.finetuning.batches import IGNORED, Call, labels_in
from rp_trainer.rows import settings_for
from rp_trainer.stopping import Interruption


def _untold(done: int, batches: int) -> None:
    del done, batches


class Evaluation:
    """Held-out data. `batches`: the arguments of each call, with ``labels``."""

    def __init__(self, batches: Sequence[Call]) -> None:
        if not batches:
            raise ValueError("held-out data must have a batch, but has none; leave evaluation out")
        self._batches = batches

    def __len__(self) -> int:
        """Return the number of batches."""
        return len(self._batches)

    def loss(
        self,
        model: RoundPipe,
        interruption: Interruption,
        machines: int = 1,
        told: Callable[[int, int], None] = _untold,
    ) -> float | None:
        """Return the mean loss over all labels, None after a signal. `machines`: how many share each call.

        `told`: is called before each batch with how many are done, of how many.

        The devices compute the losses: a batch's logits would fill the host's memory.
        """
        losses: list[float] = []
        counts: list[int] = []
        # One after another: a batch may be made when it is asked for, of much memory.
        for number, batch in enumerate(self._batches):
            count = labels_in(batch, model)
            if not count:
                continue
            if interruption.is_asked():
                return None
            told(number, len(self._batches))
            # The last batch may have fewer sequences.
            whole = _for_each(batch, machines)
            losses.append(model.loss(input_kwargs=whole, run_config=settings_for(model, whole)).item())
            counts.append(count)
        if not losses:
            raise Refused("no label of the held-out data counts, so it has no loss")
        return sum(loss * count for loss, count in zip(losses, counts, strict=True)) / sum(counts)


def _for_each(batch: Call, machines: int) -> Call:
    """Return a batch with at least one row per machine, padded by its last row without labels.

    >>> batch = {"input_ids": torch.tensor([[3, 4]]), "labels": torch.tensor([[3, 4]])}
    >>> _for_each(batch, 2)["labels"].tolist()
    [[3, 4], [-100, -100]]
    """
    rows = len(batch["input_ids"])
    if rows >= machines:
        return batch
    padded = {name: torch.cat([value, *[value[-1:]] * (machines - rows)]) for name, value in batch.items()}
    padded["labels"][rows:] = IGNORED
    return padded


class Patience:
    """Counts evaluations without improvement. `limit`: how many end the training; None: none do.

    `threshold`: by how much a loss must be below the lowest to be an improvement.

    >>> patience = Patience(2, 0.1)
    >>> [patience.note(step, loss) for step, loss in enumerate([3.0, 2.0, 1.95, 1.92])]
    [False, False, False, True]
    >>> patience.lowest
    (3, 1.92)
    """

    def __init__(self, limit: int | None, threshold: float = 0.0) -> None:
        self._limit, self._threshold = limit, threshold
        self.lowest: tuple[int, float] | None = None
        self.count = 0
        # The loss that the next one is compared with.
        self._mark = math.inf

    def note(self, step: int, loss: float) -> bool:
        """Take the loss after a step; return whether the training is to end."""
        if self.lowest is None or loss < self.lowest[1]:
            self.lowest = step, loss
        is_better = loss < self._mark - self._threshold
        self._mark, self.count = (loss, 0) if is_better else (self._mark, self.count + 1)
        return self.is_over

    @property
    def is_over(self) -> bool:
        """Whether the training is to end."""
        return self._limit is not None and self.count >= self._limit

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps, as JSON holds it."""
        if self.lowest is None:
            return {}
        return {"lowest": list(self.lowest), "mark": self._mark, "count": self.count}

    def load(self, state: object) -> None:
        """Go on from a checkpoint; from one without this state, begin anew."""
        if isinstance(state, dict) and state:
            kept = cast("dict[str, Any]", state)
            self.lowest = kept["lowest"][0], kept["lowest"][1]
            self._mark, self.count = kept["mark"], kept["count"]
