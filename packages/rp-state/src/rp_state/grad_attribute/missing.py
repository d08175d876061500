"""What to say when code reads a gradient that is not there: of a master, or of a model's own parameter."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Protocol

import torch
from rp_optim.masters import link_of

from rp_state.master import ANOTHERS, CONSUMED, PENDING, is_in_optimizer, stepping_model
from rp_state.options import HostOptions
from rp_state.shards import Owners

_OWN = (
    "the .grad of a model's own parameter was read, where it is None although there are gradients, so norms, "
    "clipping and logs leave them out: clip, log and drop them in the step function, by the optimizer's "
    "parameters, as in model.step(lambda: (clip_grad_norm_(model.optim_parameters(), 1.0), optimizer.step(), "
    "optimizer.zero_grad()))"
)
_ALONE = "; or call model.synchronize() before, after which .grad is there until the next call or step"
_NOT_DROPPED = (
    "zero_grad() of a module that is wrapped, or of its parameters, drops no gradients, which are not in .grad: "
    "call zero_grad() of the wrapped model, or of the optimizer in the step function"
)


class GradientsHeld(Protocol):
    """What a model's state on the host knows of its gradients."""

    name: str
    options: HostOptions
    masters: dict[torch.Tensor, torch.nn.Parameter]
    num_runs: int
    stepped_runs: int
    is_stepping: bool
    shows_gradients: bool
    shards: Owners


class MissingOfMaster:
    """Returns the warning about a read of a master's missing gradient: once, if a step would have or had it."""

    def __init__(self, state: GradientsHeld) -> None:
        self._state = weakref.ref(state)
        self._is_told = False

    def __call__(self, *, is_under_way: bool) -> str | None:
        """See `rp_state.master.TellsNone`."""
        state = self._state()
        if self._is_told or state is None or (state.is_stepping and not is_under_way):
            return None
        launched = 0 if state.options.steps_in_backward else state.stepped_runs
        if state.num_runs == launched and not is_under_way:
            return None
        if state.options.steps_in_backward and is_in_optimizer():
            # An optimizer over several models reads the gradients of all of them in each model's step.
            return None
        self._is_told = True
        if state.options.steps_in_backward:
            return CONSUMED
        other = "" if is_under_way else stepping_model()
        return ANOTHERS.format(own=state.name, other=other) if other else PENDING


class MissingOfParameter:
    """Returns a warning about a read of an own parameter's missing gradient, each once, if it is elsewhere."""

    def __init__(self, state: GradientsHeld) -> None:
        self._state = weakref.ref(state)
        self._told: set[str] = set()

    def __call__(self, parameter: torch.Tensor, *, drops: bool) -> str | None:
        """See `rp_state.grad_attribute.reads.TellsRead`."""
        state = self._state()
        if state is None or not _is_elsewhere(state, parameter):
            return None
        words = _words(state, drops=drops)
        if words is None or words in self._told:
            return None
        self._told.add(words)
        return words


def _words(state: GradientsHeld, *, drops: bool) -> str | None:
    if state.options.steps_in_backward:
        return None if drops else CONSUMED
    if drops:
        return _NOT_DROPPED
    return _OWN if state.shards.is_divided else _OWN + _ALONE


def _is_elsewhere(state: GradientsHeld, parameter: torch.Tensor) -> bool:
    """Whether the engine has gradients that the parameter, without a ``.grad``, may be one of."""
    # Only the optimizer's thread steps, and knows that it does.
    if stepping_model() and state.is_stepping:
        return _is_linked(state.masters, parameter)
    launched = 0 if state.options.steps_in_backward else state.stepped_runs
    return state.num_runs != launched and not state.shows_gradients


def _is_linked(masters: Mapping[torch.Tensor, torch.nn.Parameter], parameter: torch.Tensor) -> bool:
    """Whether the step under way still has the parameter's gradient: the optimizer has not dropped it."""
    link = link_of(masters[parameter]) if parameter in masters else None
    return link is not None and not link.is_dropped
