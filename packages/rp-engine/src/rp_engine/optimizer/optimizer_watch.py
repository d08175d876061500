"""Check optimizers when they step: some would train nothing, or with settings that change meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from functools import cache
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from rp_errors import warn_user
from rp_errors.frameworks import advice
from rp_optim.masters import link_of, own_grad
from rp_state.master import is_from_engine, note_optimizer
from rp_state.modules.ownership import owner_of
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from rp_engine.errors import TrainingWarning, TrainsNothing

_STEP = "model.step(lambda: (optimizer.step(), optimizer.zero_grad()))"
_OPTIMIZER = "AdamW(model.optim_parameters(), lr=1e-5)"
_SETTINGS = (
    "an optimizer's settings, such as its learning rate, were changed outside of the step function while steps "
    "are asynchronous, so it is left to chance which step they apply to; change them in the step function: "
    "model.step(lambda: (optimizer.step(), scheduler.step(), optimizer.zero_grad())). Or pass is_async=False to "
    "model.step, or call synchronize() before"
)

# The settings of each group of parameters.
_Settings = list[dict[str, Any]]


class NoWatch:
    """Of code outside of all step functions: nobody watches the optimizers that step there."""

    is_inside: bool = False

    def begin(self, optimizer: Optimizer) -> None:
        """Note that an optimizer begins a step; check it."""

    def end(self, optimizer: Optimizer) -> None:
        """Note that the optimizer has stepped; warn if its settings changed while it waited for gradients."""


class OptimizerWatch(NoWatch):
    """The optimizers that step in one model's step functions.

    `check`: called with each before it steps. One `TrainingWarning` is given if settings change outside of step
    functions while one may be running.
    """

    is_inside: bool = True

    def __init__(self, check: Callable[[Optimizer], None]) -> None:
        self._check = check
        self._lock = threading.Lock()
        # The settings at the end of the last step function.
        self._known: WeakKeyDictionary[Optimizer, _Settings] = WeakKeyDictionary()
        self._stepping: WeakKeyDictionary[Optimizer, _Settings] = WeakKeyDictionary()
        # Whether nothing has been waited for since the last step.
        self._is_unsettled = False
        self._has_warned = False

    def launch(self, step_fn: Callable[[], object], *, is_async: bool, is_idle: bool) -> Callable[[], None]:
        """Note that a step is launched; return a function that runs `step_fn`, on the optimizer's thread.

        `is_idle`: all earlier steps have ended; a running step may change settings itself.
        """
        # Launched while another step runs: compared with the settings that it leaves.
        before = self._settings_now() if is_idle else self._settings_left
        self._is_unsettled = is_async
        return lambda: self._run(step_fn, before)

    def _settings_now(self) -> Callable[[], dict[Optimizer, _Settings]]:
        known = self._settings_left()
        if self._is_unsettled:
            self._compare(known)
        now = {optimizer: _settings(optimizer) for optimizer in known}
        return lambda: now

    def _settings_left(self) -> dict[Optimizer, _Settings]:
        with self._lock:
            return dict(self._known)

    def settle(self) -> None:
        """Note that all steps have been waited for."""
        self._is_unsettled = False

    def _run(self, step_fn: Callable[[], object], before: Callable[[], Mapping[Optimizer, _Settings]]) -> None:
        self._compare(before())
        token = _WATCH.set(self)
        try:
            step_fn()
        finally:
            _WATCH.reset(token)
            with self._lock:
                self._known.update({optimizer: _settings(optimizer) for optimizer in list(self._known)})

    def begin(self, optimizer: Optimizer) -> None:
        """Note that an optimizer begins a step; check it."""
        self._check(optimizer)
        with self._lock:
            self._known.setdefault(optimizer, [])
            self._stepping[optimizer] = _settings(optimizer)

    def end(self, optimizer: Optimizer) -> None:
        """Note that the optimizer has stepped; warn if its settings changed while it waited for gradients."""
        self._compare({optimizer: self._stepping.pop(optimizer, [])})

    def _compare(self, before: Mapping[Optimizer, _Settings]) -> None:
        if not self._has_warned and any(_differ(then, _settings(one)) for one, then in before.items()):
            self._has_warned = True
            warn_user(_SETTINGS, TrainingWarning)


def described(optimizer: Optimizer, places: Mapping[int, int]) -> str:
    """Describe which parameters an optimizer steps, and with what settings. `places`: by the parameter's id."""
    groups = [
        f"parameters {[places.get(id(parameter)) for parameter in group['params']]} with "
        + ", ".join(f"{name}={_rounded(value)}" for name, value in sorted(group.items()) if name != "params")
        for group in optimizer.param_groups
    ]
    return f"{type(optimizer).__name__} of {'; '.join(groups)}"


def _rounded(value: object) -> str:
    # The last bits of a schedule's values may differ between processors.
    if isinstance(value, torch.Tensor):
        return _rounded(value.item()) if value.numel() == 1 else str(tuple(value.shape))
    if isinstance(value, tuple | list):
        return str([_rounded(each) for each in cast("Sequence[object]", value)])
    if isinstance(value, float):
        return f"{value:.6g}"
    return str(value) if isinstance(value, bool | int | str | None) else type(value).__name__


def _settings(optimizer: Optimizer) -> _Settings:
    return [{name: value for name, value in group.items() if _is_plain(value)} for group in optimizer.param_groups]


def _is_plain(value: object) -> bool:
    return isinstance(value, bool | int | float | str | tuple | None)


def _differ(before: _Settings, after: _Settings) -> bool:
    """Return whether a setting that both have differs; settings that a scheduler adds do not count."""
    pairs = zip(before, after, strict=False)
    return any(one[name] != other[name] for one, other in pairs for name in one.keys() & other.keys())


# The object whose step function runs in this context.
_WATCH: ContextVar[NoWatch] = ContextVar("_WATCH", default=NoWatch())  # noqa: B039 - it has no state


@cache
def watch_optimizers() -> None:
    """Register hooks that check all optimizers of the process when they step.

    They are registered once and never removed: torch may be iterating over hooks on another thread.
    """
    register_optimizer_step_pre_hook(_before_step)
    register_optimizer_step_post_hook(_after_step)


def _before_step(optimizer: Optimizer, *_: object) -> None:
    note_optimizer(steps=True)
    watched = _WATCH.get()
    try:
        _refuse_nothing(optimizer, is_inside=watched.is_inside)
        watched.begin(optimizer)
    except BaseException:
        # It will not step: gradients that this thread reads from now on are not an optimizer's.
        note_optimizer(steps=False)
        raise


def _after_step(optimizer: Optimizer, *_: object) -> None:
    note_optimizer(steps=False)
    _WATCH.get().end(optimizer)


def _refuse_nothing(optimizer: Optimizer, *, is_inside: bool) -> None:
    """Raise if the optimizer has parameters of the engine, but no parameter has a gradient."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if any(link_of(parameter) is not None or own_grad(parameter) is not None for parameter in parameters):
        return
    if not is_inside and any(map(is_from_engine, parameters)):
        raise TrainsNothing(
            "an optimizer stepped outside of a step function, where its parameters have no gradients; write "
            f"{_STEP}; or, with step_in_backward=True, omit the step: forward_backward(..., "
            f"optimizer=optimizer) has stepped{advice()}"
        )
    for parameter in parameters:
        if parameter.requires_grad and (name := owner_of(parameter)) is not None:
            raise TrainsNothing(
                f"an optimizer was made over the parameters of model {name!r} itself, which have no gradients; "
                f"make it after wrapping, over the optimizer's: optimizer = {_OPTIMIZER}, and step it by {_STEP}. "
                "Or call model.synchronize() before it steps: that waits, and weights are then trained in their "
                f"own dtype{advice()}"
            )
