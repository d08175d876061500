"""Base class of wrapped models: names, master weights, steps, and access to the wrapped module's attributes."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from functools import wraps
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import nn

from roundpipe.context import doing_optimizer
from roundpipe.device.entrance import entrance_of
from roundpipe.engine.group import Joint
from roundpipe.engine.memory.forecast import MemoryForecast
from roundpipe.engine.memory.report import MemoryReport
from roundpipe.errors import RoundPipeError, TrainingWarning
from roundpipe.frameworks import advice
from roundpipe.models.current import publish_first
from roundpipe.models.wrapped.names import keep_tied, names_in, rename_nested, renamed, tensors
from roundpipe.packing.foreign import check_not_packed_by_others
from roundpipe.runtime.runtime import Runtime, lasting


def caller() -> str:
    """The ``file:line`` of the nearest caller outside this package; ``"unnamed"`` if there is none."""
    here = Path(__file__).parents[1]
    frame = inspect.currentframe()
    while frame is not None and Path(frame.f_code.co_filename).is_relative_to(here):
        frame = frame.f_back
    if frame is None:
        return "unnamed"
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


# Methods of transformers and PEFT that read the weights, or write them, on the host.
_READ_WEIGHTS = frozenset({"generate", "merge_adapter", "push_to_hub", "save_pretrained", "unmerge_adapter"})
# Those of them that take the weights from a state dict.
_SAVES = frozenset({"push_to_hub", "save_pretrained"})


_STAYS = "a RoundPipe model stays on the host in the dtype it was wrapped in"
_BEFORE = "its layers run on the devices by themselves. Convert the model before wrapping it"


class RoundPipeBase(nn.Module):
    """Base of `RoundPipe` and `AutoRoundPipe`.

    `model`: the wrapped module. `original_model`: the model that a preset made `model` from, otherwise None (see
    `set_original_model`). Attributes that the wrapper lacks are read from, written to and deleted from these two.

    Modules, parameters, buffers and state dicts have the names that they have in the user's own model: in
    `original_model` if there is one, otherwise in `model`.
    """

    model: nn.Module
    original_model: nn.Module | None
    name: str
    runtime: Runtime
    optim_dtype: torch.dtype | None
    _joint: Joint
    # The user's own model, whose names count.
    _named: nn.Module
    # Parameters of `original_model` that `model` does not use, by id: from before it was wrapped.
    _outside: dict[int, nn.Parameter]
    # The modules of the user's own model when they were last looked at.
    _seen: tuple[nn.Module, ...]
    # Its training mode, likewise.
    _mode: bool
    # Whether it was said that 16-bit masters are coarse.
    _is_told: bool

    def __init__(self, model: nn.Module, name: str | None, optim_dtype: torch.dtype | None) -> None:
        super().__init__()
        _check(model, name, optim_dtype)
        self._own("original_model", None)
        self.model = model
        self._own("_named", model)
        self._own("_outside", {})
        self._own("_seen", ())
        self._own("_mode", model.training)
        self._own("name", caller() if name is None else name)
        self.register_load_state_dict_pre_hook(_rename_nested)  # pyright: ignore[reportUnknownMemberType]
        self._own("optim_dtype", optim_dtype)
        self._own("_is_told", False)

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
        self._joint.step(lambda: step_fn(*args, **kwargs), is_async=is_async)

    def synchronize(self) -> None:
        """Wait for all calls and steps; then parameters are current and hold their gradients in ``.grad``.

        Raises errors of earlier calls and steps that were not raised yet.
        """
        self._joint.synchronize()

    def sync_optim_param(self) -> None:
        """Publish the results of all steps so far to the model's parameters; gradients stay in the engine.

        On the training loop's thread it waits for the steps; calls launched afterwards read the result, as after
        `synchronize`. Inside a step function it returns at once, since running calls still read the weights:
        parameters already hold the results of earlier steps, and the result of this one is published at its end if
        it is synchronous, otherwise with the next step.

        Raises errors of earlier calls and steps that were not raised yet.
        """
        self._joint.sync_optim_param()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients, also those of a failed call; `set_to_none` is ignored, as if always True."""
        del set_to_none
        self._joint.zero_grad()

    def reset(self) -> None:
        """Return to the published weights: drop gradients and a failed step's partial update.

        The optimizer's own state, such as moments, is not restored; reload it if needed.
        """
        self._joint.reset()

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
        return self._joint.weights_delay()

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
        return self._joint.memory_report(optimizers)

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
        return self._joint.memory_forecast(optimizers, additions)

    # Parameters

    def optim_parameters(self) -> Iterator[nn.Parameter]:
        """The master weights, which optimizers update: one for each trainable parameter, in `optim_dtype`.

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
        masters = self._joint.masters()
        self._warn_of_16_bits(masters.values())
        for name, parameter in self._named.named_parameters(prefix, remove_duplicate=remove_duplicate):
            # The module itself may hold parameters that no layer uses: these have no master.
            if parameter.requires_grad and parameter in masters:
                yield name, masters[parameter]

    def _warn_of_16_bits(self, masters: Iterable[torch.Tensor]) -> None:
        """Say, once, that masters are as coarse as 16-bit weights, unless that was asked for."""
        coarse = {master.dtype for master in masters} & {torch.bfloat16, torch.float16}
        if self.optim_dtype is not None or self._is_told or not coarse:
            return
        self._own("_is_told", True)
        dtype = f"torch.{str(min(coarse, key=str)).removeprefix('torch.')}"
        warnings.warn(
            f"the optimizer's parameters of model {self.name!r} are {dtype}, like its weights, so small updates "
            "are lost; wrap the model with optim_dtype=torch.float32 for 4 more bytes a parameter, or with "
            f"optim_dtype={dtype} to keep them without this warning",
            TrainingWarning,
            stacklevel=3,
        )

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """The optimizer's parameters inside a step function; elsewhere the model's own, with a warning."""
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
        warnings.warn(
            "these are the model's own parameters, which lag behind the optimizer's and have no .grad before "
            "model.synchronize(); give an optimizer model.optim_parameters(), clip gradients in the step "
            "function, as in model.step(lambda: (clip_grad_norm_(model.optim_parameters(), 1.0), "
            "optimizer.step(), optimizer.zero_grad())), or read model.model.parameters() after "
            "model.synchronize()",
            stacklevel=2,
        )
        yield from super().named_parameters(prefix, recurse, remove_duplicate)

    def requires_grad_(self, requires_grad: bool = True) -> RoundPipeBase:
        """Freeze or unfreeze all parameters, from the next call on."""
        self.model.requires_grad_(requires_grad)
        return self

    # Checkpoints: see `roundpipe.checkpoints`

    @property
    def named_model(self) -> nn.Module:
        """The user's own model, whose names count."""
        return self._named

    @property
    def steps_in_backward(self) -> bool:
        """Whether the model was wrapped with ``step_in_backward=True``, so that its training calls step.

        >>> from roundpipe import RoundPipe, Runtime
        >>> with Runtime("cpu:1") as runtime:
        ...     RoundPipe(nn.Linear(4, 4), step_in_backward=True, runtime=runtime).steps_in_backward
        True
        """
        return self._joint.steps_in_backward

    @property
    def joint(self) -> Joint:
        """The model on the host, between calls."""
        return self._joint

    def settle(self) -> None:
        """Publish the results of all steps so far, and wait for all who write weights or buffers.

        On any thread: it waits for another thread's call. Inside a step function it returns at once. On several
        machines it publishes nothing, since one of them may call it alone: see `results_apart`.

        Raises errors of earlier calls and steps that were not raised yet.
        """
        self._joint.settle_weights()

    def results_apart(self) -> Mapping[torch.Tensor, torch.Tensor]:
        """What the parameters lack of the last step after `settle`, by parameter: on several machines."""
        return self._joint.results()

    # Names: those of the user's own model

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Generator[tuple[str, nn.Module]]:
        """The modules of the user's own model; this wrapper is not among them."""
        yield from self._named.named_modules(memo, prefix, remove_duplicate)

    def get_submodule(self, target: str) -> nn.Module:
        """The submodule of the user's own model with this name; the wrapper for the empty name."""
        return self._named.get_submodule(target) if target else self

    def get_parameter(self, target: str) -> nn.Parameter:
        """The parameter of the user's own model with this name."""
        return self._named.get_parameter(target)

    def get_buffer(self, target: str) -> torch.Tensor:
        """The buffer of the user's own model with this name."""
        return self._named.get_buffer(target)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The state dict of the user's own model: weights and buffers of one step, with all results so far.

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
        with self.runtime.launching(), lasting():
            self._joint.restoring.make_current()
            before = self._places()
            found = self._named.load_state_dict(renamed(state_dict, self._named), strict, assign)
            if assign:
                self._joint.restoring.replaced(self._keep_tied(before))
            self._joint.restoring.take_over()
            return found

    def is_behind(self) -> bool:
        """Whether the model's parameters lack the result of a step; `synchronize` and `state_dict` publish it."""
        return self._joint.is_behind()

    def names_in_model(self) -> dict[str, list[str]]:
        """The names in `model` of each tensor, by its name in the user's own model; empty if they are the same."""
        if self._named is self.model:
            return {}
        return names_in(self.model, self._named)

    def _places(self) -> dict[str, torch.Tensor]:
        return dict(tensors(self._named))

    def _keep_tied(self, before: Mapping[str, torch.Tensor]) -> dict[torch.Tensor, torch.Tensor]:
        """Map each old parameter and buffer to its replacement; tie again what was tied, also in `model`."""
        modules = {*self._named.modules(), *self.model.modules()}
        replaced, latest = keep_tied(before, self._places(), modules)
        self._own("_outside", {id(new): new for old in self._outside.values() for new in [latest.get(old, old)]})
        return replaced

    def _keep_current(self, module: nn.Module) -> None:
        """Let the module's own ``state_dict`` give the results of all steps so far."""
        publish_first(module, self)

    def _refuse_added(self) -> None:
        """Raise if `original_model` got a parameter, such as an adapter's, that no layer of the row uses."""
        if self._named is self.model:
            return
        modules = tuple(self._named.modules())
        if modules == self._seen:
            return
        used = {id(parameter) for parameter in self.model.parameters()}
        for name, parameter in self._named.named_parameters():
            if id(parameter) not in used and id(parameter) not in self._outside:
                raise RoundPipeError(
                    f"{name} was added to model {self.name!r} after it was wrapped, at a place that its row of "
                    "layers does not run; add adapters first, then wrap the model again"
                )
        self._own("_seen", modules)

    def train(self, mode: bool = True) -> RoundPipeBase:
        """Set training mode, also on `original_model`."""
        super().train(mode)
        if self.original_model is not None:
            self.original_model.train(mode)
        self._own("_mode", mode)
        return self

    def _follow_mode(self) -> None:
        """If the user's own model has changed its mode, let what a row copies of it follow."""
        if self._named.training == self._mode:
            return
        self._own("_mode", self._named.training)
        own = set(self._named.modules())
        for module in (self, *(one for one in self.model.modules() if one not in own)):
            module.training = self._mode

    # Operations that the engine does not support

    def to(self, *args: Any, **kwargs: Any) -> RoundPipeBase:
        """Return the model if it is where and what this asks for: on the host, of this dtype.

        Raises `RuntimeError` for anything else; it names the framework that called, and what to use.
        """
        wanted = list(_places_in([*args, *kwargs.values()]))
        own = {one.dtype for one in self._named.parameters() if one.is_floating_point() or one.is_complex()}
        if all(one.type == "cpu" if isinstance(one, torch.device) else own <= {one} for one in wanted):
            return self
        told = " and ".join(map(str, wanted))
        raise RuntimeError(f"{_STAYS}, but was asked to move to {told}; {_BEFORE}{advice()}")

    def cpu(self) -> RoundPipeBase:
        """Return the model, which is on the host."""
        return self

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Any:
        del fn, recurse
        raise RuntimeError(f"{_STAYS}; {_BEFORE}{advice()}")

    def compile(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Not supported: layers can be compiled, the engine around them cannot.

        Raises `TypeError`.
        """
        del args, kwargs
        raise TypeError(
            f"a RoundPipe model cannot be compiled as a whole; wrap it with compile_layers=True{advice()}"
        )

    def __deepcopy__(self, memo: object) -> NoReturn:
        raise TypeError(
            f"RoundPipe model {self.name!r} uses devices and threads, which cannot be copied; call synchronize(), "
            "then copy.deepcopy(model.model), and wrap the copy"
        )

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError(
            f"RoundPipe model {self.name!r} uses devices and threads, which cannot be pickled or copied; call "
            "synchronize(), then save model.model.state_dict()"
        )

    # Attributes

    def set_original_model(self, original_model: nn.Module) -> None:
        """Set the model that this one was made from, where attributes that this one lacks are looked up.

        If it holds all of this model's parameters, names are its own from now on.

        Raises `TypeError` for anything but a module.
        """
        if not isinstance(original_model, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"original_model must be an nn.Module, but is a {type(original_model).__name__}")
        self._own("original_model", original_model)
        used, held = (dict.fromkeys(module.parameters()) for module in (self.model, original_model))
        if used.keys() <= held.keys():
            self._own("_named", original_model)
            self._own("_mode", original_model.training)
            self._own("_outside", {id(parameter): parameter for parameter in held if parameter not in used})
            self._keep_current(original_model)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            for source in self._sources():
                if hasattr(source, name):
                    found = getattr(source, name)
                    return self._settled(found) if name in _READ_WEIGHTS else found
            raise

    def _settled(self, method: Any) -> Any:
        """A method of the user's model that first waits for what is under way."""
        if not inspect.ismethod(method):
            return method

        @wraps(method)
        def settled(*args: Any, **kwargs: Any) -> Any:
            if self.runtime.group is not None and method.__name__ not in _SAVES:
                # It reads the parameters themselves: all machines publish.
                self.sync_optim_param()
            self.settle()
            return method(*args, **kwargs)

        return settled

    def __setattr__(self, name: str, value: Any) -> None:
        holders = [] if self._has_own(name) else [source for source in self._sources() if hasattr(source, name)]
        self._refuse_modules(name, value, holders)
        for holder in holders:
            setattr(holder, name, value)
        if not holders:
            super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        holders = [] if self._has_own(name) else [source for source in self._sources() if hasattr(source, name)]
        for holder in holders:
            delattr(holder, name)
        if not holders:
            super().__delattr__(name)  # pyright: ignore[reportUnknownMemberType]

    def _own(self, name: str, value: object) -> None:
        # Set an attribute of the wrapper itself, without forwarding it or registering it as a submodule.
        object.__setattr__(self, name, value)

    def _has_own(self, name: str) -> bool:
        return name == "model" or name in self.__dict__ or hasattr(type(self), name)

    def _is_wrapping(self) -> bool:
        return "model" in self.__dict__.get("_modules", {})

    def _sources(self) -> list[nn.Module]:
        found = (self.__dict__.get("original_model"), self.__dict__.get("_modules", {}).get("model"))
        return [source for source in found if source is not None]

    def _refuse_modules(self, name: str, value: object, holders: list[nn.Module]) -> None:
        """Refuse a module or parameter unless it replaces one of `model`: calls would not use it."""
        if not (self._is_wrapping() and isinstance(value, nn.Module | nn.Parameter)):
            return
        if holders != [self.model]:
            raise TypeError(
                f"{name} = {type(value).__name__}: calls use the layers in model.model only; replace it there, or "
                "put it into the model before wrapping"
            )


def master_dtype(master: object, optim_dtype: torch.dtype | None) -> torch.dtype | None:
    """The dtype of masters of this kind: fp32 if they are in halves.

    >>> master_dtype("split", None)
    torch.float32

    Raises `ValueError` for another kind, and for halves of another dtype.
    """
    if master not in ("whole", "split"):
        raise ValueError(f"master must be 'whole' or 'split', but is {master!r} instead")
    if master == "whole":
        return optim_dtype
    if optim_dtype not in (None, torch.float32):
        raise ValueError(
            f'master="split" keeps fp32 masters in two halves, but optim_dtype is {optim_dtype}; leave it out'
        )
    return torch.float32


def wrappers(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, RoundPipeBase]]:
    """The wrapped models in a module, itself included, by name: submodules, and models that run submodules."""
    entrance = entrance_of(module)
    if isinstance(module, RoundPipeBase):
        yield prefix, module
    elif entrance is not None and isinstance(entrance.owner, RoundPipeBase):
        yield prefix, entrance.owner
    else:
        for name, child in module.named_children():
            yield from wrappers(child, f"{prefix}.{name}" if prefix else name)


def _places_in(arguments: Iterable[object]) -> Iterator[torch.device | torch.dtype]:
    """The devices and dtypes among the arguments of `nn.Module.to`."""
    for one in arguments:
        if isinstance(one, torch.Tensor):
            yield from (one.device, one.dtype)
        elif isinstance(one, torch.device | torch.dtype):
            yield one
        elif isinstance(one, str) or (isinstance(one, int) and not isinstance(one, bool)):
            yield torch.device(one)


def _rename_nested(wrapper: nn.Module, state: dict[str, Any], prefix: str, *_: object) -> None:
    """Give each tensor its name in `model`, into which torch loads where the wrapper is a submodule."""
    assert isinstance(wrapper, RoundPipeBase)
    rename_nested(state, prefix, wrapper.names_in_model())


def _check(model: object, name: object, optim_dtype: object) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module, but is a {type(model).__name__} instead")
    if isinstance(model, RoundPipeBase):
        raise TypeError(f"model is wrapped already, as {model.name!r}; wrap its inner module, model.model")
    if name is not None and not isinstance(name, str):
        raise TypeError(f"name must be a str or None, but is {name!r} instead")
    if optim_dtype is not None and not (isinstance(optim_dtype, torch.dtype) and optim_dtype.is_floating_point):
        raise TypeError(
            f"optim_dtype must be a floating-point torch.dtype or None, but is {optim_dtype!r} instead"
        )
    check_not_packed_by_others(model)
