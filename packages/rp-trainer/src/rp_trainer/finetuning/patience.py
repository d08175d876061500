"""`Patience`: how long the held-out loss may go without falling."""

from __future__ import annotations

import math
from typing import Any, cast


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
