"""`SteppedByEngine`: the optimizer in a loop, ours or a trainer's, whose steps run on the optimizer's thread."""

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
from rp_optim import NonFiniteGradients
from rp_optim.worker import wait_for_steps

from rp_trainer.refusals import refuse_clipping

_Settings = list[dict[str, Any]]


@dataclass(slots=True)
class _Clipping:
    """The clipping of one step: limits of the norm and of each value (None: no limit), and the measured norm.

    `error`: raised if the norm is not finite; None: it scales all the same.
    """

    max_norm: float | None = None
    max_value: float | None = None
    error: Exception | None = None
    norm: Future[float] = field(default_factory=Future[float])


class SteppedByEngine(torch.optim.Optimizer):
    """Makes an optimizer over a model's own parameters train the master weights in the engine's steps.

    Args:
        engine: the wrapped model.
        optimizer: an optimizer over parameters of the user's model: torch's, RoundPipe's, or another that reads
            ``.grad``.
        asynchronous: whether `step` returns before the step is over.

    Its groups are those of `optimizer`, so schedulers set learning rates as usual. A step uses the settings that
    the groups have when it is launched. Groups may have frozen parameters, which train from the first step after
    their ``requires_grad`` is set.

    Raises `ValueError` if `optimizer` trains a parameter that is not one of the model's.
    """

    def __init__(
        self, engine: RoundPipe | AutoRoundPipe, optimizer: torch.optim.Optimizer, *, asynchronous: bool = False
    ) -> None:
        # Not super().__init__(): torch would run optimizer hooks around `step`, which only launches the step.
        self._engine = engine
        self._asynchronous = asynchronous
        # `shown`: the optimizer that schedulers see. `_stepping`: the one that steps; its settings change only in
        # steps.
        self.shown = optimizer
        self._stepping = _with_own_groups(optimizer)
        self._train_masters()
        self._clipping = _Clipping()
        self._last: Future[float] | None = None
        self._has_gradients = False
        self._call_has_stepped = False

    # Calls of a trainer's loop before the step

    def clip_at_next_step(self, max_norm: float, *, error: Exception | None = None) -> torch.Tensor | None:
        """Make the next step scale its gradients to a norm of at most `max_norm`. Infinity only measures the norm.

        `error`: what the step raises, and changes no weight, if the norm is not finite.

        Returns the norm: 0-dim, fp32, on the host. With synchronous steps it is the next step's norm, which is
        filled in when that step is over. With asynchronous steps it is the norm of the step before; None before
        the first. With steps during backward it is always None.

        Raises `ValueError` for a limit with steps during backward.
        """
        if self._engine.steps_in_backward:
            refuse_clipping(max_norm)
            return None
        self._clipping.max_norm, self._clipping.error = max_norm, error
        if self._asynchronous:
            return self._last_norm()
        norm = torch.tensor(math.nan)
        self._clipping.norm.add_done_callback(partial(_fill_norm, norm))
        return norm

    def clip_values_at_next_step(self, max_value: float) -> None:
        """Make the next step limit each value of its gradients to [-`max_value`, `max_value`].

        This needs memory for a copy of the gradients in the masters' dtype.
        """
        self._clipping.max_value = max_value

    def in_call(self) -> torch.optim.Optimizer:
        """Return the optimizer for ``forward_backward(optimizer=...)``, with the groups' current settings."""
        self._follow_flags()
        _set(self._stepping.param_groups, _settings(self.shown.param_groups))
        self._call_has_stepped = True
        return self._stepping

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Launch a step with the gradients of all calls so far; do nothing after a call that has stepped.

        Raises `TypeError` for a `closure`, and what a synchronous step raises.
        """
        if closure is not None:
            raise TypeError("step() takes no closure: the gradients are there when the step runs")
        # A scheduler of this optimizer checks this attribute for whether it has stepped.
        vars(self.shown)["_opt_called"] = True
        if self._call_has_stepped:
            self._call_has_stepped = False
            return
        self._follow_flags()
        clipping, self._clipping = self._clipping, _Clipping()
        run = partial(self._run_step, _settings(self.shown.param_groups), clipping)
        self._engine.step(run, is_async=self._asynchronous)
        self._last = clipping.norm
        self._has_gradients = False

    def note_gradients(self) -> None:
        """Note that there are gradients that no step has used."""
        self._has_gradients = True

    def forget(self) -> None:
        """Drop gradients that an interrupted training has left."""
        self._call_has_stepped = False
        self._engine.zero_grad()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients that no step has used, without waiting for an asynchronous step.

        Raises `RuntimeError` between a call that has stepped and `step`, since its gradients cannot be dropped.
        """
        del set_to_none
        if self._call_has_stepped:
            raise RuntimeError(
                "zero_grad() before the step cannot drop its gradients: with step_in_backward=True the "
                "optimizer has stepped in the call that made them; omit that option"
            )
        if self._has_gradients or not self._asynchronous:
            self._engine.zero_grad()
        self._has_gradients = False

    def _last_norm(self) -> torch.Tensor | None:
        """Return the norm of the last step; None if that failed, which the model's next call raises."""
        if self._last is None:
            return None
        if not self._last.done():
            wait_for_steps()
        return torch.tensor(self._last.result()) if self._last.done() else None

    def _run_step(self, settings: _Settings, clipping: _Clipping) -> None:
        """Run one step, on the optimizer's thread."""
        _set(self._stepping.param_groups, settings)
        self._clip(clipping)
        self._stepping.step()
        for master in self._engine.optim_parameters():
            master.grad = None

    def _clip(self, clipping: _Clipping) -> None:
        clipped = self._clipped()
        if clipping.max_norm is not None:
            clipping.norm.set_result(_clip_norm(clipped, clipping.max_norm, clipping.error))
        if clipping.max_value is not None:
            torch.nn.utils.clip_grad_value_(clipped, clipping.max_value)

    def _clipped(self) -> list[torch.nn.Parameter]:
        """Return the parameters to clip: all that train, even outside of the groups, as in `Trainer`."""
        return list(self._engine.optim_parameters())

    def finish(self) -> None:
        """Wait for the last step, without changing which weights calls read."""
        wait_for_steps()

    # Saving and loading

    def exposed(self) -> torch.optim.Optimizer:
        """Return the optimizer that steps, with the settings of the next step, for `roundpipe.save_checkpoint`."""
        self.finish()
        # A new object, since settings of one that has stepped may change only in steps.
        self._stepping = _with_own_groups(self._stepping)
        _set(self._stepping.param_groups, _settings(self.shown.param_groups))
        return self._stepping

    def follow(self) -> None:
        """Adopt the settings and state that were loaded into `exposed()`."""
        _set(self.shown.param_groups, _settings(self._stepping.param_groups))
        self.shown.state = self._stepping.state

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's state after the last step, in the form for the model's own parameters."""
        return self.exposed().state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:  # type: ignore[override]  # as torch's
        """Load a state of `state_dict`, or of the same optimizer in plain torch, with tensors on any device."""
        self.exposed().load_state_dict(dict(state_dict))
        self.follow()

    # Attributes of an optimizer

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]  # torch has an attribute
        """The groups, whose settings may be changed between steps."""
        return self.shown.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The state by master weight, after the last step."""
        self.finish()
        return self._stepping.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The default settings of groups."""
        return self.shown.defaults

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters of the model, to be trained from now on."""
        self.shown.add_param_group(param_group)
        self._follow_flags()

    # Following requires_grad

    def _follow_flags(self) -> None:
        """Make the optimizer step the masters of the parameters that train now, if those have changed."""
        if _flags(self.shown.param_groups) == self._flags:
            return
        self.finish()
        # A new object, since groups of one that has stepped must not change.
        self._stepping = _with_own_groups(self._stepping)
        self._stepping.param_groups += map(dict, self.shown.param_groups[len(self._stepping.param_groups) :])
        self._train_masters()

    def _train_masters(self) -> None:
        """Replace the model's own parameters by their masters in the optimizer that steps."""
        masters = _masters_of(self._engine, self.shown.param_groups)
        for group, shown in zip(self._stepping.param_groups, self.shown.param_groups, strict=True):
            group["params"] = [masters[one] for one in shown["params"]]
        state = self._stepping.state
        for one in [one for one in state if one in masters]:
            state[masters[one]] = state.pop(one)
        self._flags = _flags(self.shown.param_groups)


def _clip_norm(clipped: Iterable[torch.nn.Parameter], max_norm: float, error: Exception | None) -> float:
    try:
        checks = error is not None
        return float(roundpipe.optim.clip_grad_norm_(clipped, max_norm, error_if_nonfinite=checks))
    except NonFiniteGradients:
        assert error is not None
        raise error from None


def _fill_norm(norm: torch.Tensor, measured: Future[float]) -> None:
    norm.fill_(measured.result())


def _flags(groups: Iterable[Mapping[str, Any]]) -> list[list[bool]]:
    return [[one.requires_grad for one in group["params"]] for group in groups]


def _masters_of(
    engine: RoundPipe | AutoRoundPipe, groups: Iterable[Mapping[str, Any]]
) -> dict[torch.Tensor, torch.Tensor]:
    """Return the master of each parameter in groups; a frozen parameter is its own master.

    Raises `ValueError` for a trained parameter that is not one of the model's.
    """
    masters = dict(engine.optim_named_parameters())
    by_parameter: dict[torch.Tensor, torch.Tensor] = {master: master for master in masters.values()}
    own = engine.named_model.named_parameters()
    by_parameter.update((one, masters[name]) for name, one in own if name in masters)
    listed: list[torch.Tensor] = [one for group in groups for one in group["params"]]
    by_parameter.update((one, one) for one in listed if not one.requires_grad)
    return {one: _master(one, by_parameter) for one in listed}


def _master(one: torch.Tensor, masters: Mapping[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    if one in masters:
        return masters[one]
    raise ValueError(
        f"the optimizer has a parameter of shape {tuple(one.shape)} that is not a trained one of the model; "
        "create it from model.parameters() of the model that the trainer gets"
    )


def _with_own_groups(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Copy an optimizer with the same state and with separate settings of its groups."""
    copied = copy.copy(optimizer)
    copied.param_groups = [dict(group) for group in optimizer.param_groups]
    return copied


def _settings(groups: Iterable[Mapping[str, Any]]) -> _Settings:
    return [{name: _copied(value) for name, value in group.items() if name != "params"} for group in groups]


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def _set(groups: Iterable[dict[str, Any]], settings: _Settings) -> None:
    for group, own in zip(groups, settings, strict=True):
        group.update(own)
