"""`OnDevices`: the model in a trainer's loop, whose calls run on the devices."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import MethodType
from typing import Any, NoReturn

import torch
from accelerate.utils import convert_to_fp32  # pyright: ignore[reportMissingTypeStubs, reportUnknownVariableType]
from roundpipe import AutoRoundPipe, RoundPipe
from torch import nn

from rp_trainer.optimizer import SteppedByEngine
from rp_trainer.rows import settings_for, unadapted

Engine = RoundPipe | AutoRoundPipe


class OnDevices(nn.Module):
    """Replaces the user's model in a trainer's loop: calls run on the devices, everything else is that model's.

    Args:
        engine: the wrapped model.
        autocast_dtype: the dtype of autocast for layers, as with the argument `bf16`; None: no autocast.

    `optimizer`: the optimizer that trains the model; None without one. `zero_grad` calls its `zero_grad`.
    """

    engine: Engine
    optimizer: SteppedByEngine | None = None

    def __init__(self, engine: Engine, autocast_dtype: torch.dtype | None = None) -> None:
        super().__init__()
        # Not a submodule, since parameters and names must be those of the user's model.
        vars(self)["engine"] = engine
        vars(self)["_autocast_dtype"] = autocast_dtype
        vars(self)["_adapters"] = _Flags(engine.named_model)
        vars(self)["_only_loss"] = False
        vars(self)["_undrawn"] = _Undrawn()
        self.training = engine.named_model.training

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model on the devices; its outputs are on the host."""
        if torch.is_grad_enabled():
            self.note_gradients()
        with self._undrawn(), self.autocast(), self._adapters.as_trained():
            outputs = self._call(args, kwargs)
        # Accelerate does the same for a model that it runs under autocast.
        return outputs if self._autocast_dtype is None else convert_to_fp32(outputs)  # pyright: ignore[reportUnknownVariableType]

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Generate text on the devices, with the results of all steps so far; see `RoundPipe`.

        Tokens that are sampled on the host are those of the user's own model with the same seed.
        """
        with self.autocast(), self._adapters.as_trained():
            return self.engine.generate(*args, **kwargs)

    def forward_backward(self, *args: Any, **kwargs: Any) -> Any:
        """Compute a loss and its gradients in one call of the engine."""
        self.note_gradients()
        with self.autocast():
            return self.engine.forward_backward(*args, **kwargs)

    def loss(self, *args: Any, **kwargs: Any) -> Any:
        """Compute a loss without gradients in one call of the engine; see `RoundPipe.loss`."""
        with self.autocast(), self._adapters.as_trained():
            return self.engine.loss(*args, **kwargs)

    @contextmanager
    def giving_only_losses(self) -> Generator[None]:
        """Return the loss alone from calls with labels but without gradients, inside the context.

        Logits then stay on the devices. For a row of layers with a loss of its own; other models return all.
        """
        vars(self)["_only_loss"] = True
        try:
            yield
        finally:
            vars(self)["_only_loss"] = False

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not isinstance(self.engine, RoundPipe):
            return self.engine(*args, **kwargs)
        names = inspect.signature(self.engine.named_model.forward).parameters
        batch = {**dict(zip(names, args, strict=False)), **kwargs}
        config = settings_for(self.engine, batch)
        if self._only_loss and not torch.is_grad_enabled() and batch.get("labels") is not None:
            return {"loss": self.engine.loss(input_kwargs=batch, run_config=config)}
        return self.engine(*args, **{"roundpipe_run_config": config, **kwargs})

    def autocast(self) -> AbstractContextManager[object]:
        """Return the autocast context for layers."""
        if self._autocast_dtype is None:
            return nullcontext()
        kind = self.engine.runtime.lanes[0].device.torch_device.type
        return torch.autocast(kind, self._autocast_dtype)

    @contextmanager
    def in_place_of_model(self) -> Generator[None]:
        """Make calls of the user's model itself run on the devices, too, inside the context.

        It changes nothing if the engine runs this model object itself: if it was taken apart, or is a single
        layer.
        """
        model = self.engine.named_model
        if model is self.engine.model:
            yield
            return
        own: Callable[..., Any] | None = vars(model).get("forward")

        @functools.wraps(model.forward)
        def forward(called: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if called is model:
                return self(*args, **kwargs)
            # The call is of a copy of the model, on which the engine observes its loss.
            inner = own.__func__ if isinstance(own, MethodType) else type(called).forward
            return inner(called, *args, **kwargs)

        vars(model)["forward"] = MethodType(forward, model)
        try:
            yield
        finally:
            if own is None:
                del vars(model)["forward"]
            else:
                vars(model)["forward"] = own

    def note_gradients(self) -> None:
        """Note that there are, or will be, gradients that no step has used."""
        if self.optimizer is not None:
            self.optimizer.note_gradients()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients that no step has used."""
        if self.optimizer is not None:
            self.optimizer.zero_grad(set_to_none)

    def train(self, mode: bool = True) -> OnDevices:
        """Set the training mode, also of the user's model."""
        self.training = mode
        self.engine.train(mode)
        return self

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Iterate the parameters of the user's model."""
        return self.engine.named_model.parameters(recurse)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Iterate the named parameters of the user's model."""
        return self.engine.named_model.named_parameters(*args, **kwargs)

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Generator[tuple[str, nn.Module]]:
        """Iterate the modules of the user's model, so that a module around this one has their parameters."""
        yield from self.engine.named_model.named_modules(memo, prefix, remove_duplicate)

    def named_children(self) -> Iterator[tuple[str, nn.Module]]:
        """Iterate the children of the user's model."""
        yield from self.engine.named_model.named_children()

    def get_submodule(self, target: str) -> nn.Module:
        """Return the submodule of the user's model with this name; this one for the empty name."""
        return self.engine.get_submodule(target) if target else self

    def get_parameter(self, target: str) -> nn.Parameter:
        """Return the parameter of the user's model with this name."""
        return self.engine.get_parameter(target)

    def get_buffer(self, target: str) -> torch.Tensor:
        """Return the buffer of the user's model with this name."""
        return self.engine.get_buffer(target)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the state dict of the user's model, with the results of all steps so far."""
        return self.engine.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load weights into the user's model."""
        return self.engine.load_state_dict(state_dict, strict, assign)

    # Conversions

    def to(self, *args: Any, **kwargs: Any) -> OnDevices:
        """Return the model, whose calls run on the devices wherever it is asked to be.

        Raises `RuntimeError` for a dtype other than that of its weights.
        """
        given = [*args, *kwargs.values()]
        for dtype in (one.dtype if isinstance(one, torch.Tensor) else one for one in given):
            if isinstance(dtype, torch.dtype):
                self.engine.to(dtype)
        return self

    def cpu(self) -> OnDevices:
        """Return the model, whose weights are on the host."""
        return self

    def float(self) -> OnDevices:
        """Return the model if its weights are fp32; as `to`."""
        return self.to(torch.float32)

    def cuda(self, device: object = None) -> OnDevices:
        """Return the model, whose calls run on the devices."""
        del device
        return self

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Any:
        # What is not overridden would convert the user's own model, from which the engine takes its weights.
        return self.engine._apply(fn, recurse)  # pyright: ignore[reportPrivateUsage] - as torch calls it

    def __deepcopy__(self, memo: object) -> NoReturn:
        raise TypeError(self._words("copied", "then copy.deepcopy"))

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError(self._words("pickled or copied", "then pickle or copy"))

    def _words(self, what: str, instead: str) -> str:
        return (
            f"{self.engine.name} runs on devices and threads, which cannot be {what}; call "
            f"trainer.model_wrapped.engine.synchronize(), {instead} the model that the trainer was given "
            "(trainer.model; engine.named_model of a reference)"
        )

    def _get_name(self) -> str:
        # Trainer decides by this name whether its label smoother shifts labels.
        return type(unadapted(self.engine.named_model)).__name__

    def __getattr__(self, name: str) -> Any:
        if name == "engine" or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.engine, name)


class _Undrawn:
    """Leaves the caller's generator as it is in calls without gradients, since the model itself draws nothing.

    Where it has dropout, calls that follow each other draw differently nevertheless, and so again after a resume.
    """

    def __init__(self) -> None:
        self._state = torch.empty(0)
        self._calls = 0

    @contextmanager
    def __call__(self) -> Generator[None]:
        if torch.is_grad_enabled():
            yield
            return
        with torch.random.fork_rng(devices=[]):  # pyright: ignore[reportUnknownMemberType]
            state = torch.get_rng_state()
            self._calls = self._calls + 1 if torch.equal(state, self._state) else 0
            self._state = state
            if self._calls:
                torch.manual_seed(int(torch.randint(2**62, ())) + self._calls)  # pyright: ignore[reportUnknownMemberType]
            yield


class _Flags:
    """Keeps ``requires_grad`` of a model's parameters while the caller has disabled its PEFT adapters.

    PEFT clears ``requires_grad`` of disabled adapters and sets it again later. Without this the engine would
    rearrange its blocks, and refuse the backward pass of an earlier forward.
    """

    def __init__(self, model: nn.Module) -> None:
        self._parameters = list(model.parameters()) if hasattr(model, "peft_config") else []
        self._flags = [one.requires_grad for one in self._parameters]

    @contextmanager
    def as_trained(self) -> Generator[None]:
        """Use the flags of the last call with gradients inside the context, if gradients are disabled now."""
        now = [one.requires_grad for one in self._parameters]
        if torch.is_grad_enabled():
            self._flags = now
        wanted = self._flags
        self._set(wanted, now)
        try:
            yield
        finally:
            self._set(now, wanted)

    def _set(self, flags: list[bool], before: list[bool]) -> None:
        for parameter, flag, was in zip(self._parameters, flags, before, strict=True):
            if flag is not was:
                parameter.requires_grad_(flag)
