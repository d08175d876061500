"""The states in which a model refuses to go on: after a failed step, publication or call, and a stale backward."""

from __future__ import annotations

from roundpipe.errors import GradientsIncomplete, Stale, StepFailed
from roundpipe.state.model_state import ModelState


def refuse_torn(name: str, state: ModelState) -> None:
    """Raise `StepFailed` if a step in place has left some weights of it, others of the one before."""
    if state.torn is not None:
        raise StepFailed(
            f"a step of model {name!r} failed half-way ({state.torn}) while it updated weights in "
            'place, as master="split" does without second blocks: some weights are of that step, others of '
            "the one before; load a state, or start from a checkpoint"
        )


def refuse_mixed(name: str, state: ModelState) -> None:
    """Raise `StepFailed` if some weights are of one step and others of the one before."""
    refuse_torn(name, state)
    if state.mixed is not None:
        raise StepFailed(
            f"the publication of a step of model {name!r} failed half-way ({state.mixed}): some "
            "weights are of that step, others of the one before; load a state, or start from a checkpoint"
        )


def refuse_failed(name: str, state: ModelState) -> None:
    """Raise `StepFailed` if a step has left part of its update."""
    if state.failed is not None:
        raise StepFailed(
            f"an earlier step of model {name!r} failed half-way ({state.failed}); load a state with "
            "load_state_dict() or go back to the last published weights with reset()"
        )


def refuse_half_made(name: str, state: ModelState) -> None:
    """Raise if a step has left part of its update, or a call part of its gradients."""
    refuse_failed(name, state)
    broken = state.broken
    if broken is not None:
        raise GradientsIncomplete(
            f"an earlier call of model {name!r} failed ({broken.error}) and left part of its gradients; "
            "drop them with zero_grad() or reset()"
        )


def refuse_stale(name: str, state: ModelState, version: int) -> None:
    """Raise `Stale` if weights newer than `version` were published."""
    if version != state.version:
        raise Stale(
            f"model {name!r}: newer weights were published since this forward, so its backward would "
            "mix two versions; call backward() before the next step, or use forward_backward()"
        )
