"""What failures have left of a model's gradients, of its last step and of its weights."""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from rp_state.errors import GradientsIncomplete, Stale, StepFailed


class _State(Protocol):
    """Whether something is whole. `run`: the number of the run that left it so; if it is whole, after all."""

    @property
    def is_whole(self) -> bool: ...
    @property
    def run(self) -> float: ...
    @property
    def error(self) -> str | None: ...

    def refuse(self, refusal: Callable[[str], BaseException]) -> None:
        """Raise what `refusal` makes of the error in words, unless it is whole."""
        ...


class _Whole:
    is_whole: bool = True
    run: float = math.inf
    error: str | None = None

    def refuse(self, refusal: Callable[[str], BaseException]) -> None:
        """Nothing to refuse."""


@dataclass(frozen=True, slots=True)
class _Left:
    """Part of it was left by an error, in words."""

    error: str
    run: float = 0
    is_whole: bool = False

    def refuse(self, refusal: Callable[[str], BaseException]) -> None:
        raise refusal(self.error)


_WHOLE = _Whole()


class Health:
    """One owner of all that is not whole in a model.

    `version`: number of changes of the weights that a backward of an earlier forward must not see.

    All is stored as text: an error object would keep its frames alive. Any thread notes; the launcher mends.

    >>> health = Health("mine")
    >>> health.note_incomplete(4, "ZeroDivisionError")
    >>> health.incomplete_before(4), health.incomplete_before(5)
    (None, 'ZeroDivisionError')
    >>> health.forget_gradients()
    >>> health.has_all_gradients, health.has_whole_step, health.has_whole_weights
    (True, True, True)
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._noting = threading.Lock()
        self._gradients: _State = _WHOLE
        self._step: _State = _WHOLE
        # Some weights that calls read are of one step, some of the next: a step wrote them in place, or a
        # publication failed, as where a machine was lost. Until a state is loaded.
        self._weights: _State = _WHOLE
        self._publication: _State = _WHOLE
        self.version = 0
        # The latest versions with what made them, in words.
        self._changes: deque[tuple[int, str]] = deque(maxlen=64)

    # Asked

    @property
    def has_all_gradients(self) -> bool:
        """Whether no call has failed and left part of its gradients."""
        return self._gradients.is_whole

    def incomplete_before(self, run: int) -> str | None:
        """Return the error, in words, of a run that left part of its gradients and was launched before `run`."""
        found = self._gradients
        return found.error if found.run < run else None

    def refuse_incomplete_before(self, run: int, refusal: Callable[[str], BaseException]) -> None:
        """Raise what `refusal` makes of the error if a run before this one left part of its gradients."""
        if self._gradients.run < run:
            self._gradients.refuse(refusal)

    @property
    def has_whole_step(self) -> bool:
        """Whether the masters are of one step: none has failed and left part of its update."""
        return self._step.is_whole

    @property
    def has_whole_weights(self) -> bool:
        """Whether the weights that calls read are whole after a failed step."""
        return self._weights.is_whole

    # Noted

    def note_incomplete(self, run: int, error: str) -> None:
        """Note that a run failed and left part of its gradients; the earliest run counts."""
        with self._noting:
            if run < self._gradients.run:
                self._gradients = _Left(error, run)

    def describe_incomplete(self, run: int, error: str) -> None:
        """Replace the noted error of this run by a fuller description."""
        with self._noting:
            if run == self._gradients.run:
                self._gradients = _Left(error, run)

    def note_failed_step(self, error: str) -> None:
        """Note that a step has left part of its update in the masters."""
        self._step = _Left(error)

    def note_torn(self, error: str) -> None:
        """Note that a step which failed had begun to update weights in place."""
        self._weights = _Left(error)

    def note_half_published(self, error: str) -> None:
        """Note that some weights are published and others will not be."""
        self._publication = _Left(error)

    def note_changed(self, what: str) -> None:
        """Refuse the backward of earlier forwards from now on. `what`: what was done, in words."""
        self.version += 1
        self._changes.append((self.version, what))

    # Refused

    def refuse_stale(self, version: int) -> None:
        """Raise `Stale` if the weights are no longer those of `version`, which a forward has read."""
        if version == self.version:
            return
        what = next((what for number, what in self._changes if number > version), "newer weights were published")
        remedy = "call backward() before the next step, or use forward_backward()"
        if "published" not in what:
            remedy = "call backward() before that"
        raise Stale(
            f"model {self._name!r}: {what} since this forward, so its backward would mix two versions; {remedy}"
        )

    def refuse_torn(self) -> None:
        """Raise `StepFailed` if a step in place has left some weights of it, others of the one before."""
        self._weights.refuse(
            lambda error: StepFailed(
                f"a step of model {self._name!r} failed half-way ({error}) while it updated weights in "
                'place, as master="split" does without second blocks: some weights are of that step, others of '
                "the one before; load a state, or start from a checkpoint"
            )
        )

    def refuse_mixed(self) -> None:
        """Raise `StepFailed` if some weights are of one step and others of the one before."""
        self.refuse_torn()
        self._publication.refuse(
            lambda error: StepFailed(
                f"the publication of a step of model {self._name!r} failed half-way ({error}): "
                "some weights are of that step, others of the one before; load a state, or start from a checkpoint"
            )
        )

    def refuse_failed_step(self) -> None:
        """Raise `StepFailed` if a step has left part of its update."""
        self._step.refuse(
            lambda error: StepFailed(
                f"an earlier step of model {self._name!r} failed half-way ({error}); load a state "
                "with load_state_dict() or go back to the last published weights with reset()"
            )
        )

    def refuse_without_result(self) -> None:
        """Raise `StepFailed` if the last step has no result to save."""
        self._step.refuse(
            lambda error: StepFailed(f"the last step failed half-way ({error}), so it has no result to save")
        )

    def refuse_half_made(self) -> None:
        """Raise if a step has left part of its update, or a call part of its gradients."""
        self.refuse_failed_step()
        self._gradients.refuse(
            lambda error: GradientsIncomplete(
                f"an earlier call of model {self._name!r} failed ({error}) and left part of its gradients; "
                "drop them with zero_grad() or reset()"
            )
        )

    # Mended

    def forget_gradients(self) -> None:
        """All gradients were dropped."""
        self._gradients = _WHOLE

    def forget_step(self) -> None:
        """The masters were set anew."""
        self._step = _WHOLE

    def forget_mixed(self) -> None:
        """All weights were written."""
        self._weights = self._publication = _WHOLE
