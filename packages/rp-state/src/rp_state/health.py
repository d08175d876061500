"""What failures have left of a model's gradients, of its last step and of its weights."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from rp_state.errors import GradientsIncomplete, StepFailed


@dataclass(frozen=True, slots=True)
class _Earliest:
    """The earliest run that failed and left part of its gradients: its number, and its error in words."""

    run: int
    error: str


class Health:
    """One owner of all that is not whole in a model.

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
        self._incomplete: _Earliest | None = None
        self._failed_step: str | None = None
        # Some weights that calls read are of one step, some of the next: a step wrote them in place, or a
        # publication failed, as where a machine was lost. Until a state is loaded.
        self._torn: str | None = None
        self._half_published: str | None = None

    # Asked

    @property
    def has_all_gradients(self) -> bool:
        """Whether no call has failed and left part of its gradients."""
        return self._incomplete is None

    def incomplete_before(self, run: int) -> str | None:
        """Return the error, in words, of a run that left part of its gradients and was launched before `run`."""
        found = self._incomplete
        return found.error if found is not None and found.run < run else None

    @property
    def has_whole_step(self) -> bool:
        """Whether the masters are of one step: none has failed and left part of its update."""
        return self._failed_step is None

    @property
    def has_whole_weights(self) -> bool:
        """Whether the weights that calls read are whole after a failed step."""
        return self._torn is None

    # Noted

    def note_incomplete(self, run: int, error: str) -> None:
        """Note that a run failed and left part of its gradients; the earliest run counts."""
        with self._noting:
            if self._incomplete is None or run < self._incomplete.run:
                self._incomplete = _Earliest(run, error)

    def describe_incomplete(self, run: int, error: str) -> None:
        """Replace the noted error of this run by a fuller description."""
        with self._noting:
            if self._incomplete is not None and run == self._incomplete.run:
                self._incomplete = _Earliest(run, error)

    def note_failed_step(self, error: str) -> None:
        """Note that a step has left part of its update in the masters."""
        self._failed_step = error

    def note_torn(self, error: str) -> None:
        """Note that a step which failed had begun to update weights in place."""
        self._torn = error

    def note_half_published(self, error: str) -> None:
        """Note that some weights are published and others will not be."""
        self._half_published = error

    # Refused

    def refuse_torn(self) -> None:
        """Raise `StepFailed` if a step in place has left some weights of it, others of the one before."""
        if self._torn is not None:
            raise StepFailed(
                f"a step of model {self._name!r} failed half-way ({self._torn}) while it updated weights in "
                'place, as master="split" does without second blocks: some weights are of that step, others of '
                "the one before; load a state, or start from a checkpoint"
            )

    def refuse_mixed(self) -> None:
        """Raise `StepFailed` if some weights are of one step and others of the one before."""
        self.refuse_torn()
        if self._half_published is not None:
            raise StepFailed(
                f"the publication of a step of model {self._name!r} failed half-way ({self._half_published}): "
                "some weights are of that step, others of the one before; load a state, or start from a checkpoint"
            )

    def refuse_failed_step(self) -> None:
        """Raise `StepFailed` if a step has left part of its update."""
        if self._failed_step is not None:
            raise StepFailed(
                f"an earlier step of model {self._name!r} failed half-way ({self._failed_step}); load a state "
                "with load_state_dict() or go back to the last published weights with reset()"
            )

    def refuse_without_result(self) -> None:
        """Raise `StepFailed` if the last step has no result to save."""
        if self._failed_step is not None:
            raise StepFailed(f"the last step failed half-way ({self._failed_step}), so it has no result to save")

    def refuse_half_made(self) -> None:
        """Raise if a step has left part of its update, or a call part of its gradients."""
        self.refuse_failed_step()
        found = self._incomplete
        if found is not None:
            raise GradientsIncomplete(
                f"an earlier call of model {self._name!r} failed ({found.error}) and left part of its gradients; "
                "drop them with zero_grad() or reset()"
            )

    # Mended

    def forget_gradients(self) -> None:
        """All gradients were dropped."""
        self._incomplete = None

    def forget_step(self) -> None:
        """The masters were set anew."""
        self._failed_step = None

    def forget_mixed(self) -> None:
        """All weights were written."""
        self._torn = self._half_published = None
