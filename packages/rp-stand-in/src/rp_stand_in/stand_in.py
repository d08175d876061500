"""A module that stands for the user's own model: its names, its submodules and its attributes are that one's."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from typing import Any, NoReturn, Self

import torch
from rp_engine.errors import RoundPipeError
from rp_errors.frameworks import advice
from rp_state.modules.signature import modules_of
from torch import nn

from rp_stand_in.names import keep_tied, names_in, rename_nested, tensors

_STAYS = "a RoundPipe model stays on the host in the dtype it was wrapped in"
_BEFORE = "its layers run on the devices by themselves. Convert the model before wrapping it"


class StandIn(nn.Module):
    """Overrides what torch defines for every module, except calls, parameters and state dicts.

    `model`: the module whose layers run. `original_model`: the model that a preset made `model` from, otherwise
    None. The user's own model is `original_model` if there is one that has all parameters, otherwise `model`.
    Attributes that this module lacks are read from, written to and deleted from these two.
    """

    model: nn.Module
    original_model: nn.Module | None
    name: str
    # The user's own model, whose names count.
    _named: nn.Module
    # Parameters of `original_model` that `model` does not use, by id: from before it was wrapped.
    _outside: dict[int, nn.Parameter]
    # The modules of the user's own model when they were last looked at.
    _seen: tuple[nn.Module, ...]
    # Its training mode, likewise.
    _mode: bool

    def __init__(self, model: nn.Module, name: str) -> None:
        super().__init__()
        self._own("original_model", None)
        self.model = model
        self._own("_named", model)
        self._own("_outside", {})
        self._own("_seen", ())
        self._own("_mode", model.training)
        self._own("name", name)
        self.register_load_state_dict_pre_hook(_rename_nested)  # pyright: ignore[reportUnknownMemberType]

    # Names

    @property
    def named_model(self) -> nn.Module:
        """The user's own model, whose names count."""
        return self._named

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Generator[tuple[str, nn.Module]]:
        """Yield the modules of the user's own model; this one is not among them."""
        yield from self._named.named_modules(memo, prefix, remove_duplicate)

    def get_submodule(self, target: str) -> nn.Module:
        """Return the submodule of the user's own model with this name; this one for the empty name."""
        return self._named.get_submodule(target) if target else self

    def get_parameter(self, target: str) -> nn.Parameter:
        """Return the parameter of the user's own model with this name."""
        return self._named.get_parameter(target)

    def get_buffer(self, target: str) -> torch.Tensor:
        """Return the buffer of the user's own model with this name."""
        return self._named.get_buffer(target)

    def names_in_model(self) -> dict[str, list[str]]:
        """Return each tensor's names in `model`, by its name in the user's own model; empty if that is `model`."""
        if self._named is self.model:
            return {}
        return names_in(self.model, self._named)

    def _named_tensors(self) -> dict[str, torch.Tensor]:
        return dict(tensors(self._named))

    def _keep_tied(self, before: Mapping[str, torch.Tensor]) -> dict[torch.Tensor, torch.Tensor]:
        """Map each old parameter and buffer to its replacement; tie again what was tied, also in `model`."""
        modules = {*self._named.modules(), *self.model.modules()}
        replaced, latest = keep_tied(before, self._named_tensors(), modules)
        self._own("_outside", {id(new): new for old in self._outside.values() for new in [latest.get(old, old)]})
        return replaced

    def _refuse_added(self) -> None:
        """Raise if `original_model` got a parameter, such as an adapter's, that no layer of the row uses."""
        if self._named is self.model:
            return
        modules = modules_of(self._named)
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

    def train(self, mode: bool = True) -> Self:
        """Set training mode, also on `original_model`."""
        super().train(mode)
        if self.original_model is not None:
            self.original_model.train(mode)
        self._own("_mode", mode)
        return self

    def _follow_mode(self) -> None:
        """If the user's own model has changed its mode, set it on modules of `model` that are not in it, too."""
        if self._named.training == self._mode:
            return
        self._own("_mode", self._named.training)
        own = set(self._named.modules())
        for module in (self, *(one for one in self.model.modules() if one not in own)):
            module.training = self._mode

    # Operations that the engine does not support

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Return the model if it is where and what this asks for: on the host, of this dtype.

        Raises `RuntimeError` for anything else; it names the framework that called, and what to use.
        """
        wanted = list(_places_in([*args, *kwargs.values()]))
        own = {one.dtype for one in self._named.parameters() if one.is_floating_point() or one.is_complex()}
        if all(one.type == "cpu" if isinstance(one, torch.device) else own <= {one} for one in wanted):
            return self
        told = " and ".join(map(str, wanted))
        raise RuntimeError(f"{_STAYS}, but was asked to move to {told}; {_BEFORE}{advice()}")

    def float(self) -> Self:
        """Return the model if it is of this dtype; as `to`."""
        return self.to(torch.float32)

    def double(self) -> Self:
        """Return the model if it is of this dtype; as `to`."""
        return self.to(torch.float64)

    def half(self) -> Self:
        """Return the model if it is of this dtype; as `to`."""
        return self.to(torch.float16)

    def bfloat16(self) -> Self:
        """Return the model if it is of this dtype; as `to`."""
        return self.to(torch.bfloat16)

    def cpu(self) -> Self:
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

    def __prepare_scriptable__(self) -> NoReturn:
        raise TypeError(
            f"RoundPipe model {self.name!r} uses devices and threads, which torch.jit.script cannot compile; wrap "
            "it with compile_layers=True, or script the model that was wrapped, before wrapping it"
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

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            for source in self._sources():
                if hasattr(source, name):
                    return self._passed_on(name, getattr(source, name))
            raise

    def _passed_on(self, name: str, found: Any) -> Any:
        """Return an attribute of the user's own model as this one has it."""
        del name
        return found

    def __setattr__(self, name: str, value: Any) -> None:
        holders = [] if self._has_own(name) else [source for source in self._sources() if hasattr(source, name)]
        self._refuse_modules(name, value, holders)
        self._refuse_tensors(name, value, holders)
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

    def _refuse_tensors(self, name: str, value: object, holders: list[nn.Module]) -> None:
        """Refuse a plain tensor in the place of a parameter, of which torch would not say whose it is."""
        is_plain = isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter)
        if is_plain and any(name in holder._parameters for holder in holders):  # pyright: ignore[reportPrivateUsage]
            raise TypeError(
                f"{name} is a parameter of model {self.name!r}, which takes no plain tensor in its place; give "
                "torch.func.functional_call the module that was wrapped, model.model, not the model around it"
            )


def _places_in(arguments: Iterable[object]) -> Iterator[torch.device | torch.dtype]:
    """Yield the devices and dtypes among the arguments of `nn.Module.to`."""
    for one in arguments:
        if isinstance(one, torch.Tensor):
            yield from (one.device, one.dtype)
        elif isinstance(one, torch.device | torch.dtype):
            yield one
        elif isinstance(one, str) or (isinstance(one, int) and not isinstance(one, bool)):
            yield torch.device(one)


def _rename_nested(wrapper: nn.Module, state: dict[str, Any], prefix: str, *_: object) -> None:
    """Give each tensor its name in `model`, into which torch loads where the wrapper is a submodule."""
    assert isinstance(wrapper, StandIn)
    rename_nested(state, prefix, wrapper.names_in_model())
