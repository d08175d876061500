"""Warnings of weights that code outside has written where a step's result goes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from rp_errors import TrainingWarning, warn_user

from rp_state.model_state import ModelState


def tell_written(name: str, state: ModelState, written: Sequence[torch.Tensor]) -> None:
    """Warn of weights that code outside has written in a way that loses something, or may be overlooked."""
    if state.unpublished:
        warn_user(
            f"weights of model {name!r} ({_named(state, written)}) were written while the result of its last, "
            "asynchronous step was not in them yet: they keep what was written, and lose that step's change of "
            "them. Before you write weights, call model.synchronize(); or take synchronous steps, "
            "model.step(..., is_async=False)",
            TrainingWarning,
        )
    if state.is_written_unseen() and not state.is_unseen_told:
        state.is_unseen_told = True
        warn_user(
            f"weights of model {name!r} ({_named(state, written)}) were written past torch's version counters, as "
            "by weight.data or NumPy. That was noticed by a few numbers of each weight, so a write to some others "
            "is lost at the next step: write weights themselves, under torch.no_grad()",
            TrainingWarning,
        )


def tell_written_in_step(name: str, state: ModelState) -> None:
    """Warn that a step function has written weights themselves, which its own result replaces."""
    # Without second blocks the step itself writes where calls read.
    if written := state.settle_written(samples=state.has_backs()):
        warn_user(
            f"the step function of model {name!r} wrote its weights ({_named(state, written)}), which the step's "
            "result replaces: in a step function write model.optim_parameters(), or write weights after the step",
            TrainingWarning,
        )


def _named(state: ModelState, written: Sequence[torch.Tensor]) -> str:
    places = {id(tensor): block for block in state.trainable for tensor in block.tensors}
    first = places.get(id(written[0]))
    return f"{len(written)} of them" + (f", the first in {first}" if first is not None else "")
