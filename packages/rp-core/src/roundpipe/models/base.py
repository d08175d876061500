"""Base class of wrapped models: what they share between calls, whatever their calls are."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import wraps
from typing import Any, Self

import torch
from rp_checkpoint import CheckpointLayout
from rp_engine import MemoryReport, Runtime, WholeModel
from rp_engine.context import doing_optimizer, lasting
from rp_engine.errors import TrainingWarning
from rp_engine.estimates import MemoryForecast
from rp_engine.wrapping import entrance_of
from rp_errors import warn_user
from rp_stand_in import NarrowAdapters, StandIn, publish_first, renamed
from torch import nn

from roundpipe.models.calls.surroundings import fsdp_error, refuse_walks
from roundpipe.models.saved.layout import layout_of
from roundpipe.models.wrapped.call_site import caller
from roundpipe.models.wrapped.foreign import check_not_packed_by_others
from roundpipe.models.wrapped.master_dtype import coarse_words

# Methods of transformers and PEFT that read the weights, or write them, on the host.
_READ_WEIGHTS = frozenset({"generate", "merge_adapter", "push_to_hub", "save_pretrained", "unmerge_adapter"})
# Those of them that take the weights from a state dict.
_SAVES = frozenset({"push_to_hub", "save_pretrained"})


class RoundPipeBase(StandIn):
    """Base of `RoundPipe` and `AutoRoundPipe`.

    `model`: the wrapped module. `original_model`: the model that a preset made `model` from, otherwise None (see
    `set_original_model`). Attributes that the wrapper lacks are read from, written to and deleted from these two.

    Modules, parameters, buffers and state dicts have the names that they have in the user's own model: in
    `original_model` if there is one, otherwise in `model`.
    """

    runtime: Runtime
    optim_dtype: torch.dtype | None
    _whole: WholeModel
    # Whether it was said that 16-bit masters are coarse.
    _is_told: bool
    # What reads the weights call after call, so that no step may change them meanwhile; None: nothing.
    _under_way: str | None
    # What of its adapters is rounded on the devices.
    _narrow: NarrowAdapters

    def __init__(self, model: nn.Module, name: str | None, optim_dtype: torch.dtype | None) -> None:
        _check(model, name, optim_dtype)
        super().__init__(model, caller() if name is None else name)
        self._own("optim_dtype", optim_dtype)
        self._own("_is_told", False)
        self._own("_under_way", None)
        self._own("_narrow", NarrowAdapters(model))

    # Between calls

    def step(self, step_fn: Callable[..., object], is_async: bool = True, *args: Any, **kwargs: Any) -> None:
        """Run ``step_fn(*args, **kwargs)`` on the optimizer's thread, with the gradients of all calls so far.

        An asynchronous step returns at once; calls read its result after the next `step` or `synchronize`. A
        synchronous step returns when it is done; calls launched afterwards read its result. The delay of one step
        saves time and costs loss, at high learning rates a lot; see `weights_delay`, and docs/staleness.md in the
        repository.

        Raises what a synchronous `step_fn` raises; the next call raises the error of an asynchronous one.
        """
        if not callable(step_fn):
            raise TypeError(f"step_fn must be callable, but is a {type(step_fn).__name__} instead")
        if not isinstance(is_async, bool):  # pyright: ignore[reportUnnecessaryIsInstance] - callers may be untyped
            raise TypeError(
                f"is_async must be a bool, but is {is_async!r} instead; arguments of step_fn come after it"
            )
        if self._under_way is not None:
            raise RuntimeError(f"{self._under_way} is under way; step after it has returned")
        self._whole.step(lambda: step_fn(*args, **kwargs), is_async=is_async)

    def synchronize(self) -> None:
        """Wait for all calls and steps; then parameters are current and hold their gradients in ``.grad``.

        Raises errors of earlier calls and steps that were not raised yet.
        """
        self._whole.synchronize()

    def sync_optim_param(self) -> None:
        """Publish the results of all steps so far to the model's parameters; gradients stay in the engine.

        On the training loop's thread it waits for the steps; calls launched afterwards read the result, as after
        `synchronize`. Inside a step function it returns at once, since running calls still read the weights:
        parameters already hold the results of earlier steps, and the result of this one is published at its end if
        it is synchronous, otherwise with the next step.

        Raises errors of earlier calls and steps that were not raised yet.
        """
        self._whole.sync_optim_param()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients, also those of a failed call; `set_to_none` is ignored, as if always True."""
        del set_to_none
        self._whole.zero_grad()

    def reset(self) -> None:
        """Return to the published weights: drop gradients and a failed step's partial update.

        The optimizer's own state, such as moments, is not restored; reload it if needed.
        """
        self._whole.reset()

    @property
    def weights_delay(self) -> int:
        """How many steps launched before the latest call are missing from the weights that it read: 0 or 1.

        After `s` steps the loss of a call is that of the weights after step ``s - weights_delay``: 1 if the step
        before the call was asynchronous and nothing has published its result since, 0 otherwise, also for the
        first call. Steps that changed nothing, such as those that a `GradScaler` skips, count.

        >>> from roundpipe import RoundPipe
        >>> with Runtime("cpu:1") as runtime:
        ...     model = RoundPipe(nn.Linear(4, 1), runtime=runtime)
        ...     delays = []
        ...     for is_async in (True, True, False, False):
        ...         _ = model.forward_backward((torch.ones(2, 4),), loss_fn=lambda outputs, _: outputs.sum())
        ...         delays.append(model.weights_delay)
        ...         model.step(lambda: None, is_async=is_async)
        >>> delays
        [0, 1, 1, 0]

        A forward counts from its launch; its backward reads the same weights. Evaluation counts as a call, too, so
        read this after the call whose loss it belongs to.
        """
        return self._whole.weights_delay()

    def memory_report(self, *optimizers: torch.optim.Optimizer) -> MemoryReport:
        """Report the host memory of this model, by kind, and the device memory of its runtime, at this moment.

        Args:
            optimizers: optimizers whose state to include; the model does not know them.

        >>> from roundpipe import RoundPipe
        >>> with Runtime("cpu:1") as runtime:
        ...     RoundPipe(nn.Linear(4, 4, bias=False), runtime=runtime).memory_report().weights_bytes
        64

        Raises `TypeError` for an argument that is not an optimizer.
        """
        return self._whole.memory_report(optimizers)

    def memory_forecast(self, *optimizers: torch.optim.Optimizer, additions: int = 1) -> MemoryForecast:
        """Foresee the host memory that training this model takes, by kind, beside what is free.

        Args:
            optimizers: optimizers whose state to include; without any, Adam's is assumed.
            additions: how many tasks add to a layer's gradients between two steps: more than one if calls are
                accumulated, or if devices divide the microbatches of a call.

        >>> from roundpipe import RoundPipe
        >>> with Runtime("cpu:1") as runtime:
        ...     forecast = RoundPipe(nn.Linear(4, 4, bias=False), runtime=runtime).memory_forecast()
        >>> forecast.whole.masters, forecast.whole.optimizer_state, forecast.fits
        (64, 128, True)

        Activations are those that are there now: they depend on the calls. Raises `TypeError` for an argument that
        is not an optimizer, `ValueError` for less than one addition or a part of one.
        """
        is_whole = isinstance(additions, int)  # pyright: ignore[reportUnnecessaryIsInstance] - callers may be untyped
        if not is_whole or additions < 1:
            raise ValueError(f"additions must be a whole number and at least 1, but is {additions!r}")
        return self._whole.memory_forecast(optimizers, additions)

    # Parameters

    def optim_parameters(self) -> Iterator[nn.Parameter]:
        """Yield the master weights, which optimizers update: one for each trainable parameter, in `optim_dtype`.

        Those of frozen parameters are not among them: after parameters were unfrozen, make the optimizer anew, or
        add theirs by its ``add_param_group``.
        """
        for _, parameter in self.optim_named_parameters():
            yield parameter

    def optim_named_parameters(
        self, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Like `optim_parameters`, with the names of the user's own model's ``named_parameters()``.

        Raises `RoundPipeError` if the user's model got parameters after it was wrapped that no layer uses.
        """
        self._refuse_added()
        if not doing_optimizer():
            self._narrow.follow(self)
        masters = self._whole.masters()
        self._warn_of_16_bits(masters.values())
        for name, parameter in self._named.named_parameters(prefix, remove_duplicate=remove_duplicate):
            # The module itself may hold parameters that no layer uses: these have no master.
            if parameter.requires_grad and parameter in masters:
                yield name, masters[parameter]

    def _warn_of_16_bits(self, masters: Iterable[torch.Tensor]) -> None:
        """Say, once, that masters are as coarse as 16-bit weights, unless that was asked for."""
        if self.optim_dtype is not None or self._is_told:
            return
        if words := coarse_words(self.name, masters):
            self._own("_is_told", True)
            warn_user(words, TrainingWarning)

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Yield the optimizer's parameters inside a step function; elsewhere the model's own, with a warning."""
        for _, parameter in self.named_parameters(recurse=recurse):
            yield parameter

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """See `parameters`."""
        if doing_optimizer():
            # The wrapper has no parameters of its own: without recursion there are none.
            yield from self.optim_named_parameters(prefix, remove_duplicate) if recurse else ()
            return
        warn_user(
            "these are the model's own parameters, which lag behind the optimizer's and have no .grad before "
            "model.synchronize(); give an optimizer model.optim_parameters(), clip gradients in the step "
            "function, as in model.step(lambda: (clip_grad_norm_(model.optim_parameters(), 1.0), "
            "optimizer.step(), optimizer.zero_grad())), or read model.model.parameters() after "
            "model.synchronize()",
        )
        yield from super().named_parameters(prefix, recurse, remove_duplicate)

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Generator[tuple[str, nn.Module]]:
        """As torch's. Raises `RoundPipeError` where ``torch.fx`` or FSDP walks, which would not see its layers."""
        refuse_walks(self.name)
        yield from super().named_modules(memo, prefix, remove_duplicate)

    def __setattr__(self, name: str, value: Any) -> None:
        # What torch's FSDP sets on each module whose parameters it is about to replace.
        if name == "_is_fsdp_managed_module":
            raise fsdp_error(self.name)
        super().__setattr__(name, value)

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Freeze or unfreeze all parameters, from the next call on."""
        self.model.requires_grad_(requires_grad)
        return self

    # Checkpoints: a wrapped model is a `rp_checkpoint.Saveable`

    def checkpoint_layout(self) -> CheckpointLayout:
        """Return the names of the user's own model's tensors, in the model and in the files of a checkpoint."""
        layout = layout_of(self.named_model)
        return replace(layout, unrounded=self._narrow.names_in(layout.tensors))

    @property
    def steps_in_backward(self) -> bool:
        """Whether the model was wrapped with ``step_in_backward=True``, so that its training calls step.

        >>> from roundpipe import RoundPipe, Runtime
        >>> with Runtime("cpu:1") as runtime:
        ...     RoundPipe(nn.Linear(4, 4), step_in_backward=True, runtime=runtime).steps_in_backward
        True
        """
        return self._whole.steps_in_backward

    @property
    def whole(self) -> WholeModel:
        """The model on the host, between calls."""
        return self._whole

    def settle(self) -> None:
        """Publish the results of all steps so far, and wait for all who write weights or buffers.

        On any thread: it waits for another thread's call. Inside a step function it returns at once. On several
        machines it publishes nothing, since one of them may call it alone: see `results_apart`.

        Raises errors of earlier calls and steps that were not raised yet.
        """
        self._whole.settle_weights()

    def results_apart(self) -> Mapping[torch.Tensor, torch.Tensor]:
        """Return what the parameters still lack of the last step after `settle`, on several machines."""
        return self._whole.results()

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the state dict of the user's own model: weights and buffers of one step, with all results so far.

        It waits for the calls and steps under way, on any thread. Its tensors are no copies: they are valid until
        the next call of `step` on this model (with a second weight block they then hold older values), so clone
        them to keep the values, or use `save_checkpoint`, which never mixes steps. Of several machines one alone
        may call it; without second weight blocks that raises `AloneOnly` after an asynchronous step, before
        `synchronize`.

        Raises errors of earlier calls and steps that were not raised yet, if a step's result is not published.
        """
        return self._named.state_dict(*args, **kwargs)  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load weights into the model and its master weights, and clear the error of a failed step.

        Names are those of the user's own model; names that version 0.1 saved, with ``model.`` before them, are
        understood, too. With `assign` the given tensors replace the parameters, as in torch. Tied parameters stay
        tied. With ``pin_model="off"`` tensors of a memory-mapped file stay there.
        """
        with self.runtime.launching(), lasting(), self._narrow.deferring(self):
            self._whole.restoring.make_current()
            before = self._named_tensors()
            incompatible = self._named.load_state_dict(renamed(state_dict, self._named), strict, assign)
            if assign:
                self._narrow.round_assigned(self)
                self._whole.restoring.replaced(self._keep_tied(before))
            self._whole.restoring.take_over()
            return incompatible

    def is_behind(self) -> bool:
        """Return whether the parameters lack the result of a step; `synchronize` and `state_dict` publish it."""
        return self._whole.is_behind()

    def _keep_current(self, module: nn.Module) -> None:
        """Let the module's own ``state_dict`` give the results of all steps so far."""
        publish_first(module, self)

    def set_original_model(self, original_model: nn.Module) -> None:
        """Set the model that this one was made from, where attributes that this one lacks are looked up.

        If it holds all of this model's parameters, names are its own from now on.

        Raises `TypeError` for anything but a module.
        """
        before = self._named
        super().set_original_model(original_model)
        if self._named is not before:
            self._keep_current(self._named)

    def set_narrow_adapters(self, narrow: NarrowAdapters) -> None:
        """Let the masters of these adapters have the values that the parameters have rounded."""
        self._own("_narrow", narrow)
        narrow.begin(self)

    def _passed_on(self, name: str, found: Any) -> Any:
        return self._settled(found) if name in _READ_WEIGHTS else found

    def _settled(self, method: Any) -> Any:
        """Return the method of the user's model, changed to wait first for what is under way."""
        if not inspect.ismethod(method):
            return method

        @wraps(method)
        def settled(*args: Any, **kwargs: Any) -> Any:
            if not self.runtime.peers.is_alone and method.__name__ not in _SAVES:
                # It reads the parameters themselves: all machines publish.
                self.sync_optim_param()
            self.settle()
            return method(*args, **kwargs)

        return settled


def wrappers(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, RoundPipeBase]]:
    """Yield the wrapped models in a module, itself included, by name, and those that run its submodules."""
    entrance = entrance_of(module)
    if isinstance(module, RoundPipeBase):
        yield prefix, module
    elif entrance is not None and isinstance(entrance.owner, RoundPipeBase):
        yield prefix, entrance.owner
    else:
        for name, child in module.named_children():
            yield from wrappers(child, f"{prefix}.{name}" if prefix else name)


def _check(model: object, name: object, optim_dtype: object) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module, but is a {type(model).__name__} instead")
    if isinstance(model, RoundPipeBase):
        raise TypeError(f"model is wrapped already, as {model.name!r}; use it as it is")
    if name is not None and not isinstance(name, str):
        raise TypeError(f"name must be a str or None, but is {name!r} instead")
    if optim_dtype is not None and not (isinstance(optim_dtype, torch.dtype) and optim_dtype.is_floating_point):
        raise TypeError(
            f"optim_dtype must be a floating-point torch.dtype or None, but is {optim_dtype!r} instead"
        )
    check_not_packed_by_others(model)
