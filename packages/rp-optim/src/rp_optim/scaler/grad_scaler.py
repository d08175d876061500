"""`GradScaler`: loss scaling for 16-bit gradients, with steps that may run later on the optimizer's thread."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, replace
from typing import Any, Final, Self, TypeVar, cast

import torch

from rp_optim.errors import ScalerMisuse, WrongThread
from rp_optim.jobs import Outcome
from rp_optim.scaler.loop_view import LoopView
from rp_optim.scaler.numbers import ScaleNumbers, Setting, fp32, one_number
from rp_optim.scaler.steps import ScaledSteps
from rp_optim.worker import OptimizerThread, on_any_optimizer_thread

_Outputs = TypeVar("_Outputs")


class GradScaler:
    """``torch.amp.GradScaler`` for optimizers on the host, whose steps may run later than the training loop.

    Args:
        init_scale, growth_factor, backoff_factor, growth_interval, enabled: as in torch.
        thread: the thread that runs the steps. Without one everything runs at once, as in torch.

    With a thread, call `scale` in the training loop and its workers, and `step` and `unscale_` in the step
    function, which runs later. Each gradient is divided by the scale of its loss: an asynchronous `update` runs in
    order with the steps, while the training loop continues with the result of the update before it. So results do
    not depend on the speed of the machine.

    Like torch's it can be pickled and copied between iterations. A copy steps on the same thread; one that was
    pickled has none until you give it one by ``GradScaler(thread=...)`` and `load_exact_state`.

    >>> scaler = GradScaler(init_scale=8.0)
    >>> weight = torch.nn.Parameter(torch.ones(1))
    >>> optimizer = torch.optim.SGD([weight], lr=1.0)
    >>> scaler.scale(weight.sum()).backward()
    >>> scaler.step(optimizer)
    >>> scaler.update()
    >>> weight.data, scaler.get_scale()
    (tensor([0.]), 8.0)

    Raises `InvalidOption` (a `ValueError`) for factors and intervals out of range.
    """

    def __init__(
        self,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        *,
        thread: OptimizerThread | None = None,
    ) -> None:
        self.enabled: Final = enabled
        self._thread = thread
        # State of the thread that steps.
        self._own = ScaleNumbers(0, fp32(init_scale), growth_factor, backoff_factor, growth_interval)
        self._own.check()
        self._unscale_with = self._own.scale
        self._steps = ScaledSteps()
        self._failed_before = 0
        # State of the training loop.
        self._loop = LoopView(self._own)

    # Scaling the loss, on any thread

    def scale(self, outputs: _Outputs) -> _Outputs:
        """Multiply a tensor, or each tensor of an iterable, nested ones too, by the scale.

        Raises `TypeError` for anything else.
        """
        if not self.enabled:
            return outputs
        # 0-dim on the CPU: torch multiplies tensors on any device by it. Fp32: a scaled 0-dim loss is fp32, too.
        return cast(_Outputs, _scaled(outputs, torch.tensor(self.get_scale(), dtype=torch.float32, device="cpu")))

    def get_scale(self) -> float:
        """The current scale; 1.0 if not enabled.

        In a step function: the scale of that step's loss. Elsewhere: the scale that `scale` uses.
        """
        if not self.enabled:
            return 1.0
        if self._on_thread():
            return self._unscale_with
        return self._loop.scale()

    # The step, on the thread that steps

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the optimizer's gradients by the scale, and check them for infinities and NaN.

        Gradients of linked masters are read as they arrive and not rewritten. Called on another thread than the
        one that steps, it runs on that thread and waits for it.

        Raises `WrongThread` on the thread of another optimizer; `ScalerMisuse` after another `unscale_` or `step`
        since the last `update`; `InvalidParameter` for fp16 gradients, which would underflow when unscaled.
        """
        if self.enabled:
            self._on_optimizer_thread(lambda: self._steps.unscale(optimizer, self._unscale_with))

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Unscale, unless done, and call ``optimizer.step(*args, **kwargs)`` if all gradients are finite.

        Returns what the optimizer's step returns; None if it was skipped. Called on another thread than the one
        that steps, it runs on that thread, waits for it, and returns None.

        Raises as `unscale_` does; `ScalerMisuse` also after another `step` since the last `update`, without any
        gradient, and for a closure.
        """
        if not self.enabled:
            plain: Callable[..., Any] = optimizer.step
            return plain(*args, **kwargs)
        if "closure" in kwargs or any(callable(argument) for argument in args):
            raise ScalerMisuse(
                "a closure recomputes gradients, which would not be unscaled; call step without a closure"
            )
        return self._on_optimizer_thread(lambda: self._steps.step(optimizer, self._unscale_with, args, kwargs))

    # The update, on the calling thread

    def update(self, new_scale: float | torch.Tensor | None = None, is_async: bool = True) -> None:
        """Lower the scale if a step was skipped, raise it after enough finite steps, or set it to `new_scale`.

        Call it in the training loop, after the step. An asynchronous update returns at once: the next losses are
        scaled with the result of the update before, or with `new_scale`. A synchronous one waits for the step, and
        the next losses use its result. Without a thread every update is synchronous.

        Raises `WrongThread` on the optimizer's thread; `ScalerMisuse` if there was no step since the last update.
        If the update is asynchronous, the thread keeps that `ScalerMisuse` like the exceptions of other jobs. An
        exception that the thread keeps is raised here too, after this update is queued; do not repeat the update.
        """
        if not self.enabled:
            return
        if self._on_thread():
            raise WrongThread(
                "update was called in a step function; call it from the training loop, after the step"
            )
        given = None if new_scale is None else one_number(new_scale)
        done = Outcome(lambda: self._own)
        if self._thread is None:
            try:
                self._update_kernel(given, done, is_async=False)
            finally:
                self._loop.use(done)
            return
        # Queued even if a step has failed: the next step needs the update of the failed one.
        failure = self._thread.take_failure()
        self._thread.queue(self._update_kernel, given, done, is_async=is_async)
        self._loop.note_launched(done, given, is_async=is_async)
        if failure is not None:
            raise failure
        if not is_async:
            self._thread.synchronize_optim()

    def _update_kernel(self, given: float | None, done: Outcome[ScaleNumbers], *, is_async: bool) -> None:
        old = self._own
        try:
            self._own = self._moved(given)
        finally:
            # Also after an error: the training loop waits for this update.
            self._forget_steps()
            self._own = replace(self._own, updates=old.updates + 1)
            # The losses of later steps are scaled with what the training loop saw after calling `update`.
            self._unscale_with = given if given is not None else (old if is_async else self._own).scale
            done.carry_out()

    def _moved(self, given: float | None) -> ScaleNumbers:
        own = self._own
        if given is not None:
            return replace(own, scale=given)
        if self._steps.has_any():
            return own.lowered() if self._steps.has_skipped() else own.advanced()
        if not self._has_failed():
            raise ScalerMisuse("update found no step since the last update; call it after step")
        return own

    def _has_failed(self) -> bool:
        """Whether a job of the thread has failed since the last update, so that its step may be missing."""
        return self._thread is not None and self._thread.num_failed > self._failed_before

    def _forget_steps(self) -> None:
        self._steps = ScaledSteps()
        self._failed_before = 0 if self._thread is None else self._thread.num_failed

    # Settings, on any thread

    def get_growth_factor(self, up_to_date: bool = False) -> float:
        """The factor by which the scale grows.

        In the training loop: the value it has set, or that of the update whose result it uses; with `up_to_date`,
        the latest value, after waiting for all launched steps.
        """
        return float(self._get("growth_factor", up_to_date))

    def get_backoff_factor(self, up_to_date: bool = False) -> float:
        """The factor by which the scale is lowered after an infinity or NaN; see `get_growth_factor`."""
        return float(self._get("backoff_factor", up_to_date))

    def get_growth_interval(self, up_to_date: bool = False) -> int:
        """The number of finite steps after which the scale grows; see `get_growth_factor`."""
        return int(self._get("growth_interval", up_to_date))

    def _get(self, name: Setting, up_to_date: bool) -> Any:
        if self._thread is None or self._on_thread():
            return getattr(self._own, name)
        if up_to_date:
            self._thread.synchronize_optim()
            return getattr(self._own, name)
        return self._loop.setting(name)

    def set_growth_factor(self, new_factor: float) -> None:
        """Set the growth factor, in order with the steps: those launched before keep the old one."""
        self._set("growth_factor", new_factor)

    def set_backoff_factor(self, new_factor: float) -> None:
        """Set the backoff factor, in order with the steps: those launched before keep the old one."""
        self._set("backoff_factor", new_factor)

    def set_growth_interval(self, new_interval: int) -> None:
        """Set the growth interval, in order with the steps: those launched before keep the old one."""
        self._set("growth_interval", new_interval)

    def _set(self, name: Setting, value: Any) -> None:
        replace(self._own, **{name: value}).check()
        if self._thread is None or self._on_thread():
            self._assign(name, value)
            return
        self._thread.launch_optim_kernel(self._assign, name, value)
        self._loop.note_set(name, value)

    def _assign(self, name: Setting, value: Any) -> None:
        self._own = replace(self._own, **{name: value})

    def is_enabled(self) -> bool:
        """Whether losses are scaled."""
        return self.enabled

    # Saving

    def state_dict(self) -> dict[str, Any]:
        """The state under the names of torch's scaler; each loads the other's. Empty if not enabled.

        Waits for all launched steps.
        """
        if not self.enabled:
            return {}
        self._settle()
        return self._own.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a saved state, after waiting for all launched steps. Does nothing if not enabled.

        Raises `ScalerMisuse` for the empty state of a scaler that was not enabled.
        """
        if not self.enabled:
            return
        if not state_dict:
            raise ScalerMisuse("the state is empty, as that of a scaler that is not enabled; load another one")
        self._settle()
        loaded = ScaleNumbers.loaded(self._own.updates, state_dict)
        self._forget_steps()
        self._own = loaded
        self._unscale_with = loaded.scale
        self._loop.load(loaded)

    def exact_state(self) -> dict[str, Any]:
        """The state, and what an asynchronous `update` has left to do: plain numbers, for `load_exact_state`.

        The training loop uses the scale of the update before the last one, which `state_dict` does not have. Call
        it while the training loop does not use the scaler; waits for all launched steps.

        >>> scaler = GradScaler(init_scale=8.0)
        >>> other = GradScaler()
        >>> other.load_exact_state(scaler.exact_state())
        >>> other.get_scale()
        8.0
        """
        if not self.enabled:
            return {}
        self._settle()
        return {
            "latest": asdict(self._own),
            "unscale_with": self._unscale_with,
            **self._loop.exact_state(),
        }

    def load_exact_state(self, state: Mapping[str, Any]) -> None:
        """Load what `exact_state` returned, after waiting for all launched steps. Does nothing if not enabled.

        Raises `ScalerMisuse` for the empty state of a scaler that was not enabled.
        """
        if not self.enabled:
            return
        if not state:
            raise ScalerMisuse("the state is empty, as that of a scaler that is not enabled; load another one")
        self._settle()
        latest, used = ScaleNumbers(**state["latest"]), ScaleNumbers(**state["used"])
        for numbers in (latest, used):
            numbers.check()
        self._forget_steps()
        self._own, self._unscale_with = latest, state["unscale_with"]
        self._loop.load_exact_state(used, latest, state)

    # Copies

    def __getstate__(self) -> dict[str, Any]:
        """What is pickled: all numbers and settings, and no thread, which belongs to this process.

        As with torch's scaler between the steps of an iteration: raises `ScalerMisuse` after an `unscale_` or
        `step` that no `update` has followed.
        """
        self._settle()
        if self._steps.has_begun():
            raise ScalerMisuse(
                "a GradScaler was pickled or copied between unscale_ or step and the update of that iteration; do "
                "it after update"
            )
        added = {name: value for name, value in vars(self).items() if name not in _OWN}
        return {**added, "enabled": self.enabled, "numbers": asdict(self._own), "exact": self.exact_state()}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        """Begin with what was pickled. Steps run at once, as without a thread."""
        self._begin_from(state, None)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return an independent scaler, whose steps run on the same thread."""
        made = type(self).__new__(type(self))
        made._begin_from(copy.deepcopy(self.__getstate__(), memo), self._thread)
        return made

    def __copy__(self) -> Self:
        """Return an independent scaler: two that shared their numbers would both change them."""
        return self.__deepcopy__({})

    def _begin_from(self, state: Mapping[str, Any], thread: OptimizerThread | None) -> None:
        own = {"enabled", "numbers", "exact"}
        vars(self).update({name: value for name, value in state.items() if name not in own})
        vars(self)["enabled"] = state["enabled"]
        self._thread = thread
        self._own = ScaleNumbers(**state["numbers"])
        self._unscale_with = self._own.scale
        self._forget_steps()
        self._loop = LoopView(self._own)
        if self.enabled:
            self.load_exact_state(state["exact"])

    def _settle(self) -> None:
        if self._thread is not None and not self._on_thread():
            self._thread.synchronize_optim()

    # Threads

    def _on_thread(self) -> bool:
        return self._thread is not None and self._thread.on_optim_stream()

    def _on_optimizer_thread(self, job: Callable[[], Any]) -> Any:
        if self._on_thread():
            return self._noted(job)
        if on_any_optimizer_thread():
            raise WrongThread(
                "a gradient scaler was used on an optimizer's thread that is not its own, so it cannot know the "
                "scale of the step's loss; make it with GradScaler(thread=...), the thread of its steps"
            )
        if self._thread is not None:
            self._thread.submit(job).result()
            return None
        return job()

    def _noted(self, job: Callable[[], Any]) -> Any:
        try:
            return job()
        except BaseException:
            # Makes `_has_failed` return True even if the step function swallows the exception.
            self._failed_before = -1
            raise


# What `GradScaler` sets on itself; users and subclasses may add to it.
_OWN = frozenset({"enabled", "_thread", "_own", "_unscale_with", "_steps", "_failed_before", "_loop"})


def _scaled(outputs: Any, factor: torch.Tensor) -> Any:
    if isinstance(outputs, torch.Tensor):
        return outputs * factor
    if isinstance(outputs, (list, tuple)):
        many = cast("list[Any] | tuple[Any, ...]", outputs)
        return type(many)(_scaled(value, factor) for value in many)
    if isinstance(outputs, Iterable):
        return (_scaled(value, factor) for value in cast(Iterable[Any], outputs))
    raise TypeError(f"only tensors and iterables of them can be scaled, but this is a {type(outputs).__name__}")
