"""`SteppedByEngine`: the optimizer that a trainer's loop holds, whose steps run on the optimizer's thread."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import roundpipe
import torch
from roundpipe import AutoRoundPipe, RoundPipe
from rp_optim.worker import wait_for_steps

from rp_trainer.refusals import refuse_clipping

_Settings = list[dict[str, Any]]


@dataclass(slots=True)
class _Clipping:
    """What a step does to its gradients: limits of their norm and of each value (None: none), the norm found."""

    max_norm: float | None = None
    max_value: float | None = None
    norm: Future[float] = field(default_factory=Future[float])


class SteppedByEngine(torch.optim.Optimizer):
    """An optimizer over a model's own parameters, made to train its master weights in the engine's steps.

    Args:
        engine: the wrapped model.
        optimizer: one over parameters of the user's model: torch's, RoundPipe's, or another that reads ``.grad``.
        asynchronous: whether `step` returns before the step is over.

    Its groups are those of `optimizer`, so schedulers set learning rates as ever; a step takes the settings that
    the groups have when it is launched. Frozen parameters may be among them: they train from the first step after
    somebody has set their ``requires_grad``.

    Raises `ValueError` if `optimizer` has a parameter that trains and is not one of the model's.
    """

    def __init__(
        self, engine: RoundPipe | AutoRoundPipe, optimizer: torch.optim.Optimizer, *, asynchronous: bool = False
    ) -> None:
        # Not super().__init__(): torch would run the hooks of optimizers around `step`, where nothing steps yet.
        self._engine = engine
        self._asynchronous = asynchronous
        # What schedulers see, and what steps: settings of the latter change in steps only.
        self.shown = optimizer
        self._stepping = _with_own_groups(optimizer)
        self._train_masters()
        self._clipping = _Clipping()
        self._last: Future[float] | None = None
        self._has_gradients = False
        self._call_has_stepped = False

    # What a trainer's loop asks for, before the step

    def clip_at_next_step(self, max_norm: float) -> torch.Tensor | None:
        """Let the next step scale its gradients so that their norm is at most `max_norm`; infinity: only measure.

        Returns the norm: 0-dim, fp32, on the host. With synchronous steps it is the next step's, and is filled in
        when that is over. With asynchronous ones it is the norm of the step before; None before the first. Steps
        during backward have none.

        Raises `ValueError` for a limit with steps during backward.
        """
        if self._engine.steps_in_backward:
            refuse_clipping(max_norm)
            return None
        self._clipping.max_norm = max_norm
        if self._asynchronous:
            return self._last_norm()
        found = torch.tensor(math.nan)
        self._clipping.norm.add_done_callback(partial(_fill, found))
        return found

    def clip_values_at_next_step(self, max_value: float) -> None:
        """Let the next step limit each value of its gradients to at most `max_value`, and at least its negative.

        It takes a copy of the gradients in the masters' dtype.
        """
        self._clipping.max_value = max_value

    def in_call(self) -> torch.optim.Optimizer:
        """The optimizer for ``forward_backward(optimizer=...)``, with the settings that the groups have now."""
        self._follow_flags()
        _set(self._stepping.param_groups, _settings(self.shown.param_groups))
        self._call_has_stepped = True
        return self._stepping

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Launch a step of the engine, with the gradients of all calls so far; a call that has stepped needs none.

        Raises `TypeError` for a `closure`, and what a synchronous step raises.
        """
        if closure is not None:
            raise TypeError("a closure must not be given: the gradients are there when the step runs")
        # For a scheduler that was made with this optimizer, and asks whether it has stepped.
        vars(self.shown)["_opt_called"] = True
        if self._call_has_stepped:
            self._call_has_stepped = False
            return
        self._follow_flags()
        clipping, self._clipping = self._clipping, _Clipping()
        run = partial(self._carry_out, _settings(self.shown.param_groups), clipping)
        self._engine.step(run, is_async=self._asynchronous)
        self._last = clipping.norm
        self._has_gradients = False

    def note_gradients(self) -> None:
        """There are gradients that no step has used."""
        self._has_gradients = True

    def forget(self) -> None:
        """Drop what a training that was broken off has left."""
        self._call_has_stepped = False
        self._engine.zero_grad()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients that no step has used. It does not wait for an asynchronous step.

        Raises `RuntimeError` between a call that has stepped and `step`: there is nothing left to drop.
        """
        del set_to_none
        if self._call_has_stepped:
            raise RuntimeError(
                "zero_grad() before the step cannot leave its gradients out: with step_in_backward=True the "
                "optimizer has stepped in the call that made them; leave that option out"
            )
        if self._has_gradients or not self._asynchronous:
            self._engine.zero_grad()
        self._has_gradients = False

    def _last_norm(self) -> torch.Tensor | None:
        """The norm of the last step; None if it failed, which the model's next call tells."""
        if self._last is None:
            return None
        if not self._last.done():
            wait_for_steps()
        return torch.tensor(self._last.result()) if self._last.done() else None

    def _carry_out(self, settings: _Settings, clipping: _Clipping) -> None:
        """One step, on the optimizer's thread."""
        _set(self._stepping.param_groups, settings)
        self._clip(clipping)
        self._stepping.step()
        for master in self._engine.optim_parameters():
            master.grad = None

    def _clip(self, clipping: _Clipping) -> None:
        clipped = self._clipped()
        if clipping.max_norm is not None:
            clipping.norm.set_result(float(roundpipe.optim.clip_grad_norm_(clipped, clipping.max_norm)))
        if clipping.max_value is not None:
            torch.nn.utils.clip_grad_value_(clipped, clipping.max_value)

    def _clipped(self) -> list[torch.nn.Parameter]:
        """As `Trainer` clips: all parameters that train, also those that are in no group."""
        return list(self._engine.optim_parameters())

    def finish(self) -> None:
        """Wait for the last step; calls go on reading the weights that they read."""
        wait_for_steps()

    # What is saved and loaded

    def exposed(self) -> torch.optim.Optimizer:
        """The optimizer that steps, with the settings of the next step: for `roundpipe.save_checkpoint`."""
        self.finish()
        # A new one: settings of one that has stepped must change in steps only.
        self._stepping = _with_own_groups(self._stepping)
        _set(self._stepping.param_groups, _settings(self.shown.param_groups))
        return self._stepping

    def follow(self) -> None:
        """Take over what was loaded into `exposed()`."""
        _set(self.shown.param_groups, _settings(self._stepping.param_groups))
        self.shown.state = self._stepping.state

    def state_dict(self) -> dict[str, Any]:
        """That of the optimizer, after the last step, as it would be for the model's own parameters."""
        return self.exposed().state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:  # type: ignore[override]  # as torch's
        """Load a state from here, or from the same optimizer in plain torch; tensors may be on any device."""
        self.exposed().load_state_dict(dict(state_dict))
        self.follow()

    # An optimizer's attributes

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]  # torch has an attribute
        """The groups, with master weights; settings may be changed between steps."""
        return self.shown.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The state by master weight, after the last step."""
        self.finish()
        return self._stepping.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The settings of groups that do not have their own."""
        return self.shown.defaults

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters of the model that are trained from now on."""
        self.shown.add_param_group(param_group)
        self._follow_flags()

    # Which parameters train

    def _follow_flags(self) -> None:
        """Step the masters of what trains now."""
        if _flags(self.shown.param_groups) == self._flags:
            return
        self.finish()
        # A new one: groups of one that has stepped must not change.
        self._stepping = _with_own_groups(self._stepping)
        self._stepping.param_groups += map(dict, self.shown.param_groups[len(self._stepping.param_groups) :])
        self._train_masters()

    def _train_masters(self) -> None:
        """Put the master weights in the place of the model's own parameters, in what steps."""
        masters = _masters_of(self._engine, self.shown.param_groups)
        for group, shown in zip(self._stepping.param_groups, self.shown.param_groups, strict=True):
            group["params"] = [masters[one] for one in shown["params"]]
        state = self._stepping.state
        for one in [one for one in state if one in masters]:
            state[masters[one]] = state.pop(one)
        self._flags = _flags(self.shown.param_groups)


def _fill(norm: torch.Tensor, found: Future[float]) -> None:
    norm.fill_(found.result())


def _flags(groups: Iterable[Mapping[str, Any]]) -> list[list[bool]]:
    return [[one.requires_grad for one in group["params"]] for group in groups]


def _masters_of(
    engine: RoundPipe | AutoRoundPipe, groups: Iterable[Mapping[str, Any]]
) -> dict[torch.Tensor, torch.Tensor]:
    """The master weight of each parameter in groups; a frozen one stands for itself.

    Raises `ValueError` for one that trains and is not a parameter of the model.
    """
    masters = dict(engine.optim_named_parameters())
    found: dict[torch.Tensor, torch.Tensor] = {master: master for master in masters.values()}
    own = engine.named_model.named_parameters()
    found.update((one, masters[name]) for name, one in own if name in masters)
    listed: list[torch.Tensor] = [one for group in groups for one in group["params"]]
    found.update((one, one) for one in listed if not one.requires_grad)
    return {one: _master(one, found) for one in listed}


def _master(one: torch.Tensor, masters: Mapping[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    if one in masters:
        return masters[one]
    raise ValueError(
        f"the optimizer has a parameter of shape {tuple(one.shape)} that is not a trained one of the model; make "
        "it from model.parameters() of the model that the trainer gets"
    )


def _with_own_groups(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """A copy with the same state, whose groups have settings of their own."""
    found = copy.copy(optimizer)
    found.param_groups = [dict(group) for group in optimizer.param_groups]
    return found


def _settings(groups: Iterable[Mapping[str, Any]]) -> _Settings:
    return [{name: _copied(value) for name, value in group.items() if name != "params"} for group in groups]


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def _set(groups: Iterable[dict[str, Any]], settings: _Settings) -> None:
    for group, found in zip(groups, settings, strict=True):
        group.update(found)
