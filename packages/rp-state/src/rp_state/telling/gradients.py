"""Warnings of gradients that a step has none of, uses again, or leaves out."""

from __future__ import annotations

from collections.abc import Sequence

from rp_errors import TrainingWarning, warn_user

from rp_state.model_state import ModelState

_STEP = "model.step(lambda: (optimizer.step(), optimizer.zero_grad()))"


def warn_of_unfrozen(name: str, states: Sequence[ModelState]) -> None:
    """Warn, in the first step afterwards, of parameters that were unfrozen and that no optimizer can have.

    They have no masters: these are created when an optimizer's parameters are requested from the model.
    """
    known = {each for state in states for each in state.masters}
    unfrozen = [
        block for state in states for block in state.trainable for each in block.tensors if each not in known
    ]
    if known and unfrozen:
        warn_user(
            f"parameters of model {name!r} ({len(unfrozen)}, the first in {unfrozen[0]}) were unfrozen after its "
            "optimizer was made, which does not train them: make a new one over model.optim_parameters(), or add "
            "theirs by optimizer.add_param_group",
            TrainingWarning,
        )


def tell_reuse(name: str, state: ModelState) -> None:
    """Warn once if a step has used gradients again that the step before it had used."""
    if state.reuses_gradients and not state.is_reuse_told:
        state.is_reuse_told = True
        warn_user(
            f"gradients of model {name!r} were used by one step and, with others added, by the next: nothing has "
            f"dropped them between, which an optimizer's zero_grad() does in the step function alone: {_STEP}; or "
            "call model.zero_grad()",
            TrainingWarning,
        )


def tell_absent(name: str, state: ModelState) -> None:
    """Warn of gradients that a step leaves out, since their parameters are not trained in the model now."""
    if state.absent:
        warn_user(
            f"a step of model {name!r} leaves out and drops gradients of parameters ({len(state.absent)}) that "
            "were replaced, removed or frozen since the call that computed them; put them back before the step, "
            "or call model.zero_grad() before they are replaced",
            TrainingWarning,
        )
