"""Make the batches of the next step while one trains."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock

from torch import Tensor

from rp_data.batching.batches import StepBatches

_Calls = list[dict[str, Tensor]]


class Ahead:
    """The batches of `steps`, of which a thread makes the next step's meanwhile. It keeps those of two steps."""

    def __init__(self, steps: StepBatches) -> None:
        self._steps = steps
        self.accumulation = steps.accumulation
        self._worker = ThreadPoolExecutor(1, "batches")
        self._made: dict[int, Future[_Calls]] = {}
        # The order of rows is made as it is needed, by whoever needs it.
        self._lock = Lock()

    def calls(self, step: int) -> Sequence[dict[str, Tensor]]:
        """Return the batches of step number `step`, counted from 1. Raises what making them raises."""
        wanted = (step, step + 1)
        self._made = {number: one for number, one in self._made.items() if number in wanted}
        for number in wanted:
            if number not in self._made:
                self._made[number] = self._worker.submit(self._calls, number)
        return self._made[step].result()

    def _calls(self, step: int) -> _Calls:
        with self._lock:
            rows = self._steps.documents(step)
        return [self._steps.call(some) for some in rows]

    @property
    def rows(self) -> int:
        """The sequences of a step."""
        return self._steps.rows

    def in_epochs(self, epochs: int) -> int:
        """Return the number of steps in `epochs` epochs."""
        with self._lock:
            return self._steps.in_epochs(epochs)

    def epoch(self, step: int) -> float:
        """Return how often the data was trained on by the end of step number `step`."""
        with self._lock:
            return self._steps.epoch(step)

    def tokens(self, step: int) -> int:
        """Return the number of tokens of a step, without padding."""
        with self._lock:
            return self._steps.tokens(step)
