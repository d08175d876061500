"""Measure where a trainer that generates text spends its time, and how old its text is, and log both."""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Generator
from contextlib import contextmanager
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from transformers import Trainer, TrainerCallback

_Base = Trainer if TYPE_CHECKING else object
_LOG = logging.getLogger(__name__)


class Phases(TrainerCallback):
    """Seconds by phase, and which weights have generated; a phase inside another one is not part of that.

    `asynchronous`: whether a call reads weights that are one step older, unless one has waited for the last step.

    >>> phases = Phases()
    >>> with phases("train"), phases("generate"):
    ...     pass
    >>> sorted(phases.taken())
    ['seconds/generate', 'seconds/train']
    """

    def __init__(self, asynchronous: bool = False) -> None:
        self._asynchronous = asynchronous
        self._generated_at = self._settled_at = 0
        self._entered: list[str] = []
        self._since = 0.0
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._in_total: defaultdict[str, float] = defaultdict(float)

    @contextmanager
    def __call__(self, name: str) -> Generator[None]:
        """Count the time inside the context for a phase."""
        self._turn()
        self._entered.append(name)
        try:
            yield
        finally:
            self._turn()
            self._entered.pop()

    def _turn(self) -> None:
        now = time.perf_counter()
        if self._entered:
            self._seconds[self._entered[-1]] += now - self._since
        self._since = now

    @property
    def generates(self) -> bool:
        """Whether there was any text to generate."""
        return "generate" in self._seconds or "generate" in self._in_total

    def generated_at(self, step: int) -> None:
        """Note that the weights after `step` steps generate."""
        self._generated_at = step

    def settled_at(self, step: int) -> None:
        """Note that the next call reads the result of `step` steps."""
        self._settled_at = step

    def staleness(self, step: int) -> int:
        """Return how many steps newer the weights of a step's calls were than those that generated.

        `step`: its number, from 1.

        >>> phases = Phases()
        >>> phases.generated_at(4)
        >>> phases.staleness(5), phases.staleness(6)
        (0, 1)
        """
        before = step - 1
        is_older = self._asynchronous and self._settled_at < before
        return before - is_older - self._generated_at

    def taken(self) -> dict[str, float]:
        """Return the seconds of each phase since the last time, and count from zero again."""
        self._turn()
        taken, self._seconds = self._seconds, defaultdict(float)
        for name, seconds in taken.items():
            self._in_total[name] += seconds
        return {f"seconds/{name}": seconds for name, seconds in taken.items()}

    def table(self) -> str:
        """Return the seconds of all phases so far, one a line, with their shares."""
        whole = sum(self._in_total.values()) or 1.0
        longest = sorted(self._in_total.items(), key=itemgetter(1), reverse=True)
        return "\n".join(f"{name:>10} {seconds:10.2f} s {seconds / whole:5.0%}" for name, seconds in longest)

    # Events of a trainer

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        """Count from zero again, also after a step that failed."""
        del args, kwargs
        self._entered.clear()
        self._seconds.clear()
        self._in_total.clear()

    def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """Begin the step."""
        del args, kwargs
        self._turn()
        self._entered.append("step")

    def on_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """End the step."""
        del args, kwargs
        self._turn()
        self._entered.pop()

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        """Log the table."""
        del args, kwargs
        self.taken()
        if self.generates:
            _LOG.info("seconds by phase:\n%s", self.table())


class TimedPhases(_Base):
    """Measures the phases of TRL's trainers that generate, by the methods that they have for them."""

    _phases: Phases

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log a trainer's figures, the seconds of each phase since the last ones, and how old the text was."""
        if self._phases.generates and "loss" in logs:
            logs.update(self._phases.taken())
            logs["staleness"] = float(self._phases.staleness(self.state.global_step))
        super().log(logs, start_time)

    def _generate_and_score_completions(self, *args: Any, **kwargs: Any) -> Any:
        # The rest of it: rewards, and log-probabilities of the policy and the reference.
        with self._phases("score"):
            return super()._generate_and_score_completions(*args, **kwargs)  # type: ignore[misc]

    def _generate(self, *args: Any, **kwargs: Any) -> Any:
        with self._phases("generate"):
            return super()._generate(*args, **kwargs)  # type: ignore[misc]

    def _calculate_rewards_from_functions(self, *args: Any, **kwargs: Any) -> Any:
        with self._phases("score"):
            return super()._calculate_rewards_from_functions(*args, **kwargs)  # type: ignore[misc]
