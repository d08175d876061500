"""`NarrowAdapters`: adapters whose weights are rounded copies of the values that are trained and saved."""

from __future__ import annotations

import weakref
from collections.abc import Container, Generator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol, cast

import torch
from rp_checkpoint.errors import CheckpointWarning
from rp_engine import Runtime, WholeModel
from rp_engine.wrapping import unrounded
from rp_errors import warn_user
from torch import nn

from rp_stand_in.current import CopiedHook, is_as_it_is

_NARROW = (torch.bfloat16, torch.float16, torch.float32)


class Wrapped(Protocol):
    """A wrapped model: what its adapters' values are read from and written to."""

    runtime: Runtime

    @property
    def whole(self) -> WholeModel:
        """The model on the host, between calls."""
        ...

    @property
    def named_model(self) -> nn.Module:
        """The user's own model."""
        ...


class NarrowAdapters:
    """The trained parameters of a PEFT model that are of more bits than its layers get on the devices.

    Masters start from their values as they are, and state dicts, and so PEFT's own files, have the masters' values
    in the parameters' own dtype. Code that reads a parameter itself gets the rounded one.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype | None = None) -> None:
        """Round the parameters of the model in place.

        Raises `ValueError` or `TypeError` for an invalid dtype.
        """
        self._dtype = dtype
        # Whether who loads a state dict ends the loading.
        self.is_deferring = False
        # Of the state dict that is being loaded: the parameter of each name, and its value there.
        self._loaded: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        self._dtypes: dict[torch.Tensor, torch.dtype] = {}
        self._first: dict[torch.Tensor, torch.Tensor] = {}
        if dtype is not None:
            self._first = {parameter: parameter.data for parameter in _wider(model, dtype).values()}
            self._round(self._first, dtype)

    def _round(self, values: Mapping[torch.Tensor, torch.Tensor], dtype: torch.dtype) -> None:
        for parameter, value in values.items():
            self._dtypes[parameter] = value.dtype
            parameter.data = value.to(dtype)

    def undo(self) -> None:
        """Give the parameters their values back."""
        for parameter, value in self._first.items():
            parameter.data = value

    def master_dtype(self, given: torch.dtype | None) -> torch.dtype | None:
        """Return the dtype of masters: what was `given`, else fp32 if adapters are or may become narrow."""
        return given if self._dtype is None or given is not None else torch.float32

    def begin(self, wrapped: Wrapped) -> None:
        """Let the masters start from the first values, and state dicts have the masters' values."""
        if self._dtype is None:
            return
        self._start_masters(wrapped, self._first)
        self._first = {}
        model: Any = wrapped.named_model
        model.register_state_dict_post_hook(_Widen(wrapped, self))
        # The wrapped model's are for a module that holds it, which loads past the user's own model.
        whole: Any = wrapped
        for one in (model, whole):
            handle = one.register_load_state_dict_pre_hook(_Loading(wrapped, self))
            # Before names are changed to those in the row.
            one._load_state_dict_pre_hooks.move_to_end(handle.id, last=False)
            one.register_load_state_dict_post_hook(_Loaded(wrapped, self))
        # PEFT makes adapters fp32 again after it has loaded values into them.
        tuner = getattr(model, "base_model", None)
        if hasattr(tuner, "_cast_adapter_dtype"):
            vars(tuner)["_cast_adapter_dtype"] = _Cast(wrapped, self)

    def follow(self, wrapped: Wrapped) -> None:
        """Round what has become a trained adapter since, as by PEFT's `set_adapter` or `add_adapter`.

        Raises `RuntimeError` if there are gradients, which the new masters would cost.
        """
        if self._dtype is None or not (late := _wider(wrapped.named_model, self._dtype)):
            return
        if wrapped.whole.has_gradients:
            raise RuntimeError(
                f"{next(iter(late))} is trained only now, and adapter_dtype={self._dtype} is for it, too, but "
                "there are gradients of earlier calls, which that would drop; switch adapters after a step that "
                "drops its gradients, or call model.zero_grad() first"
            )
        first = {parameter: parameter.data for parameter in late.values()}
        self._round(first, self._dtype)
        self._start_masters(wrapped, first)

    def _start_masters(self, wrapped: Wrapped, values: Mapping[torch.Tensor, torch.Tensor]) -> None:
        if values:
            with wrapped.runtime.launching():
                wrapped.whole.restoring.set_masters(values)

    def has_rounded(self, model: nn.Module, adapter: str) -> bool:
        """Return whether parameters of this adapter are narrow."""
        return any(one in self._dtypes and adapter in name.split(".") for name, one in model.named_parameters())

    def names_in(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.dtype]:
        """Return the dtype of each narrow parameter's own values by its name among `tensors`."""
        return {name: self._dtypes[one] for name, one in tensors.items() if one in self._dtypes}

    def widen(self, wrapped: Wrapped, module: nn.Module, state: dict[str, Any], prefix: str) -> None:
        """Put the masters' values into a state dict of the user's own model."""
        masters = {weight: one for held in wrapped.whole.states() for weight, one in held.masters.items()}
        for name, parameter in module.named_parameters(prefix.removesuffix("."), remove_duplicate=False):
            # With `keep_vars` the parameter itself was asked for.
            if parameter in self._dtypes and state.get(name, parameter) is not parameter:
                state[name] = unrounded(masters.get(parameter), parameter.detach(), self._dtypes[parameter])

    @property
    def is_loading(self) -> bool:
        """Whether a state dict is being loaded that has values for the masters."""
        return bool(self._loaded)

    @contextmanager
    def deferring(self, wrapped: Wrapped) -> Generator[None]:
        """Let a caller who holds the launch lock load a state dict inside; masters get their values at the end."""
        self.is_deferring = True
        try:
            yield
            self.end_loading(wrapped)
        finally:
            self.is_deferring, self._loaded = False, {}

    def note_loading(self, wrapped: Wrapped, state: Mapping[str, Any], prefix: str) -> None:
        """Note the values of a state dict, of which the parameters are about to get the rounded ones."""
        named = wrapped.named_model.named_parameters(remove_duplicate=False)
        values = {name: (one, state.get(prefix + name)) for name, one in named if one in self._dtypes}
        # Those of another shape are not loaded, either. Detached: a parameter that is assigned will be rounded.
        self._loaded = {
            name: (one, value.detach())
            for name, (one, value) in values.items()
            if isinstance(value, torch.Tensor) and value.shape == one.shape
        }

    def round_assigned(self, wrapped: Wrapped) -> None:
        """Round the parameters that have taken the place of others, as with ``assign=True``."""
        named = dict(wrapped.named_model.named_parameters(remove_duplicate=False))
        for name, (old, value) in self._loaded.items():
            if (new := named[name]) is not old:
                self._dtypes[new] = self._dtypes[old]
                new.data = new.data.to(old.dtype)
                self._loaded[name] = new, value

    def end_loading(self, wrapped: Wrapped) -> None:
        """Let the masters have the values of the state dict. The caller holds the launch lock."""
        self.round_assigned(wrapped)
        loaded, self._loaded = self._loaded, {}
        if loaded:
            wrapped.whole.restoring.set_masters(dict(loaded.values()))


@contextmanager
def narrowed(model: nn.Module, dtype: torch.dtype | None, runtime: Runtime) -> Generator[NarrowAdapters]:
    """Round the adapters of a model that is wrapped inside the context; undo it if that raises.

    Raises what `NarrowAdapters` raises, and `AloneOnly` on several machines.
    """
    if dtype is not None:
        runtime.peers.refuse(
            "adapter_dtype needs all masters of the adapters on one machine, to save them, but there are "
            f"{runtime.peers.size}, which divide them; leave it out"
        )
    narrow = NarrowAdapters(model, dtype)
    try:
        yield narrow
    except BaseException:
        narrow.undo()
        raise


class _Hook:
    """A hook of the user's own model. It does not keep the wrapped model alive, and copies of it do nothing."""

    def __init__(self, wrapped: Wrapped, narrow: NarrowAdapters) -> None:
        self._wrapped = weakref.ref(wrapped)
        self._narrow = narrow

    def __reduce__(self) -> tuple[Any, ...]:
        return CopiedHook, ()


class _Widen(_Hook):
    """After ``state_dict``: puts in the masters' values."""

    def __call__(self, module: nn.Module, state: dict[str, Any], prefix: str, *_: object) -> None:
        wrapped = self._wrapped()
        if is_as_it_is():
            return
        if wrapped is None:
            warn_user(
                "the wrapped model is gone, and with it what adapter_dtype has rounded away: this state dict has "
                "the rounded adapters; save them while there is the wrapped model",
                CheckpointWarning,
            )
        else:
            self._narrow.widen(wrapped, module, state, prefix)


class _Cast(_Hook):
    """In place of what PEFT makes new adapters fp32 with: those that are narrow stay so."""

    def __call__(self, adapter_name: str, *args: Any, **kwargs: Any) -> None:
        wrapped = self._wrapped()
        if wrapped is not None and not self._narrow.has_rounded(wrapped.named_model, adapter_name):
            tuner = cast("nn.Module", wrapped.named_model.base_model)
            kind: Any = type(tuner)
            kind._cast_adapter_dtype(tuner, adapter_name, *args, **kwargs)


class _Loading(_Hook):
    """Before ``load_state_dict``, also that of PEFT's `load_adapter`."""

    def __call__(self, _: nn.Module, state: Mapping[str, Any], prefix: str, *__: object) -> None:
        wrapped = self._wrapped()
        if wrapped is not None and not wrapped.runtime.closed:
            self._narrow.note_loading(wrapped, state, prefix)


class _Loaded(_Hook):
    """After it."""

    def __call__(self, *_: object) -> None:
        wrapped = self._wrapped()
        if wrapped is not None and self._narrow.is_loading and not self._narrow.is_deferring:
            with wrapped.runtime.launching():
                self._narrow.end_loading(wrapped)


def _wider(model: nn.Module, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return the trained parameters of adapters that are of more bits, by name."""
    if dtype not in _NARROW:
        raise TypeError(f"adapter_dtype must be torch.bfloat16, torch.float16 or torch.float32, but is {dtype!r}")
    adapters = cast("Mapping[str, object] | None", getattr(model, "peft_config", None))
    if not isinstance(adapters, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance] - of models that are none of PEFT's
        raise ValueError(
            f"adapter_dtype is for a model with adapters of PEFT, but the {type(model).__name__} has none; add "
            "them before wrapping, or leave it out"
        )
    return {
        name: parameter
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and parameter.is_floating_point() and parameter.itemsize > dtype.itemsize
        if _is_of_adapter(name, adapters)
    }


def _is_of_adapter(name: str, adapters: Container[str]) -> bool:
    # Not biases of the base, nor modules that are trained whole: these compute with the base, in its dtype.
    parts = name.split(".")
    return "modules_to_save" not in parts and any(part in adapters for part in parts)
