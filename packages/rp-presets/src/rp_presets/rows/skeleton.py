"""Skeletons: private copies of the modules around a model's layers, with stubs for layers and parts for the rest.

A model's forward runs unchanged on a skeleton. The `Session` of the run decides what stubs and parts do. So
skeletons hold no state of a call, and each device may have a copy.
"""

from __future__ import annotations

import copy
import functools
import inspect
import types
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from rp_presets.errors import NotARow, UnsupportedModel
from rp_presets.rows.absent import Spec
from rp_presets.rows.capture import note_hooked
from rp_presets.rows.trees import is_plain


class Session(Protocol):
    """Decides what stubs and parts do while a forward runs on a skeleton. `device`: the device it runs on."""

    device: torch.device

    def layer(self, stub: Stub, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the result of a layer's call."""
        ...

    def part(self, part: CalledModule | Method, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the result of a call of a part or of one of its methods."""
        ...

    def read(self, part: CalledModule, name: str) -> Any:
        """Return an attribute of a part that is a tensor, a module or a method."""
        ...


_SESSION: ContextVar[Session] = ContextVar("rp_presets_session")


@contextmanager
def in_session(session: Session) -> Generator[None]:
    """Make `session` the session of this thread inside the context."""
    token = _SESSION.set(session)
    try:
        yield
    finally:
        _SESSION.reset(token)


class Facts:
    """The plain attributes of a layer and its submodules, for code around the layers that reads them.

    `path`: the name of the list of layers. `written`: names of attributes that layers set when they run; reading
    them raises an error.
    """

    def __init__(self, module: nn.Module, path: str, written: Collection[str]) -> None:
        self._name = type(module).__name__
        self._path = path
        self._written = written
        self._unknown = set(dir(type(module))) | vars(module).keys() | {name for name, _ in _own_tensors(module)}
        of_class = {name: value for name, value in _class_attributes(type(module)) if is_plain(value)}
        self._own = of_class | {name: value for name, value in vars(module).items() if _is_fact(name, value)}
        if isinstance(module, nn.ModuleDict):
            self._own["keys"] = dict.fromkeys(module.keys()).keys
        self._children = {name: Facts(child, path, written) for name, child in module.named_children()}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        for table in (self._own, self._children):
            if name in table and name not in self._written:
                return table[name]
        if name in self._unknown or name in self._written:
            # Not an AttributeError: code with a default for the attribute would go on.
            raise NotARow(
                self._path,
                f"the code around its layers reads {self._name}.{name}, but only plain attributes that no layer "
                "sets are known there",
            )
        raise AttributeError(f"{self._name!r} object has no attribute {name!r}")

    def __deepcopy__(self, memo: object) -> Facts:
        del memo
        return self


def _class_attributes(kind: type[nn.Module]) -> Iterable[tuple[str, Any]]:
    """Return the attributes, except methods, of a module's classes below `nn.Module`."""
    own = [base for base in reversed(kind.__mro__) if base not in nn.Module.__mro__]
    return ((name, value) for base in own for name, value in vars(base).items() if not callable(value))


def _is_fact(name: str, value: object) -> bool:
    return name not in _MODULE_STATE and not isinstance(value, nn.Module | Tensor)


_MODULE_STATE = frozenset(vars(nn.Module()))


class Stub(nn.Module):
    """Stands for layer `index` of segment number `segment`."""

    def __init__(self, segment: int, index: int, layer: nn.Module, facts: Facts) -> None:
        super().__init__()
        self.segment = segment
        self.index = index
        self.training = layer.training
        vars(self)["facts"] = facts

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Ask the session."""
        return _SESSION.get().layer(self, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("__"):
                raise
            return getattr(vars(self)["facts"], name)


class ModuleOutline:
    """The plain attributes of a module that is not held, and the shapes and dtypes of its tensors."""

    def __init__(self, module: nn.Module) -> None:
        self.own = {name: value for name, value in vars(module).items() if _is_fact(name, value)}
        self._specs = {name: cast(Spec, Spec.of(tensor)) for name, tensor in _own_tensors(module)}
        self._children = {name: ModuleOutline(child) for name, child in module.named_children()}
        # A property of transformers' models: that of the first weight.
        floating = (one.dtype for one in module.parameters() if one.is_floating_point())
        self._dtype = next(floating, None) if isinstance(getattr(type(module), "dtype", None), property) else None

    def has(self, name: str) -> bool:
        """Return whether an attribute is known."""
        own = (self.own, self._specs, self._children)
        return any(name in table for table in own) or (name == "dtype" and self._dtype is not None)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or not self.has(name):
            raise AttributeError(f"{name!r} is unknown of a module that this skeleton does not hold")
        if name in self._specs:
            spec = self._specs[name]
            # An expanded scalar takes no memory.
            return Spec(torch.Size(), spec.dtype).stand_in(_SESSION.get().device).expand(spec.shape)
        if name == "dtype" and name not in self.own:
            return self._dtype
        return self.own[name] if name in self.own else self._children[name]

    def __deepcopy__(self, memo: object) -> ModuleOutline:
        del memo
        return self


class CalledModule(nn.Module):
    """Stands for a module that the code around the layers calls; holds the module if it runs in this stage.

    `path`: the module's name in the model. `inner`: the module; None if it is not held.
    """

    inner: nn.Module | None

    def __init__(self, path: str, module: nn.Module, *, is_held: bool) -> None:
        super().__init__()
        self.path = path
        self.inner = module if is_held else None
        self.training = module.training
        vars(self)["outline"] = ModuleOutline(module)
        vars(self)["kind"] = type(module)
        vars(self)["_like"] = next((Spec.of(one) for one in module.parameters()), None)
        vars(self)["parameters"] = types.MethodType(_parameters, self)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Ask the session."""
        return _SESSION.get().part(self, args, kwargs)

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the module, or a copy if it has no parameters: it may write attributes, as rotary tables do."""
        inner = self.held()
        has_parameters = next(inner.parameters(), None) is not None
        return (inner if has_parameters else _scratch(inner))(*args, **kwargs)

    def held(self) -> nn.Module:
        """Return the module. Raises `UnsupportedModel` if it did not run in this stage when observed."""
        if self.inner is None:
            raise UnsupportedModel(
                f"the model calls {self.path!r} where it did not when it was observed; observe it with "
                "arguments like these: to_sequential(model, example_inputs=...)"
            )
        return self.inner

    def known(self, name: str) -> Any:
        """Return an attribute of a module that is not held: a stand-in or an outline for a tensor or submodule."""
        outline = cast(ModuleOutline, vars(self)["outline"])
        return getattr(outline, name) if outline.has(name) else getattr(self.held(), name)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            own, session = vars(self)["outline"].own, _SESSION.get(None)
            if name in own:
                return own[name]
            if session is None or name.startswith("__"):
                raise
            if inspect.isfunction(getattr(vars(self)["kind"], name, None)):
                return functools.partial(_called, Method(self, name))
            return session.read(self, name)


class Method:
    """A method of a part that the code around the layers calls. `path`: its name in the model."""

    def __init__(self, part: CalledModule, name: str) -> None:
        self.part = part
        self.name = name
        self.path = f"{part.path}.{name}"

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the method."""
        return getattr(self.part.held(), self.name)(*args, **kwargs)


def _called(method: Method, *args: Any, **kwargs: Any) -> Any:
    return _SESSION.get().part(method, args, kwargs)


def _own_tensors(module: nn.Module) -> Iterable[tuple[str, Tensor]]:
    yield from module.named_parameters(recurse=False)
    yield from module.named_buffers(recurse=False)


def children_of(module: nn.Module) -> dict[str, nn.Module]:
    """Return the children by name. Unlike torch's `named_children`, it lists a child once per name.

    >>> layer = nn.Identity()
    >>> list(children_of(nn.ModuleList([layer, layer])))
    ['0', '1']
    """
    table: dict[str, nn.Module | None] = vars(module)["_modules"]
    return {name: child for name, child in table.items() if child is not None}


def shallow(module: nn.Module) -> nn.Module:
    """Copy a module and its tables, but not its submodules and tensors."""
    copied = copy.copy(module)
    state = vars(copied)
    for table in ("_modules", "_parameters", "_buffers"):
        state[table] = dict(state[table])
    own = state.get("forward")
    if own is not None:
        state["forward"] = _rebound(own, module, copied)
    return copied


def _rebound(forward: Callable[..., Any], old: nn.Module, new: nn.Module) -> Callable[..., Any]:
    if isinstance(forward, types.MethodType) and forward.__self__ is old:
        return types.MethodType(forward.__func__, new)
    raise UnsupportedModel(
        f"{type(old).__name__}.forward was replaced on this object by a function that is not bound to it, as the "
        "hooks of device_map do; load the model without them"
    )


def skeleton(
    model: nn.Module,
    starts: Mapping[str, Sequence[tuple[int, int]]],
    is_held: Callable[[str], bool],
    spine: frozenset[str],
    written: Collection[str] = (),
) -> nn.Module:
    """Copy the model's modules that `spine` names, with stubs for layers and parts for other modules.

    `starts`: see `Starts` of `rows.layout`. `is_held`: whether the part with this name holds its
    module. `written`: names of attributes that layers set.
    """

    def copied(module: nn.Module, path: str) -> nn.Module:
        if path in starts:
            stubs = [
                Stub(*_place(starts[path], index), layer, Facts(layer, path, written))
                for index, layer in enumerate(children_of(module).values())
            ]
            return _list_like(module, stubs)
        if path in spine or _is_container(module):
            result = shallow(module)
            note_hooked(result)
            for name, child in children_of(module).items():
                vars(result)["_modules"][name] = copied(child, f"{path}.{name}" if path else name)
            vars(result)["_like"] = next((Spec.of(one) for one in module.parameters()), None)
            vars(result)["parameters"] = types.MethodType(_parameters, result)
            return result
        return CalledModule(path, module, is_held=is_held(path))

    return copied(model, "")


def _place(starts: Sequence[tuple[int, int]], index: int) -> tuple[int, int]:
    """Return the number of the segment that a layer of a list is in, and its index there."""
    start, segment = max(one for one in starts if one[0] <= index)
    return segment, index - start


def _parameters(module: nn.Module, recurse: bool = True) -> Iterable[Tensor]:
    """Iterate a module's parameters, or a stand-in if it holds none, for code that reads the first one's dtype."""
    parameters = [*nn.Module.parameters(module, recurse)]
    like = cast(Spec | None, vars(module)["_like"])
    if not parameters and like is not None and _SESSION.get(None) is not None:
        parameters = [cast(nn.Parameter, Spec(torch.Size(), like.dtype).stand_in(_SESSION.get().device))]
    return iter(parameters)


def _is_container(module: nn.Module) -> bool:
    # A list or dict of modules is never called.
    return type(module).forward is nn.Module.forward or isinstance(module, nn.ModuleList | nn.ModuleDict)


def _scratch(module: nn.Module) -> nn.Module:
    """Copy a module so that its attributes and buffers may be written."""
    copied = shallow(module)
    buffers: dict[str, Tensor | None] = vars(copied)["_buffers"]
    vars(copied)["_buffers"] = {name: None if one is None else one.clone() for name, one in buffers.items()}
    return copied


def _list_like(old: nn.Module, stubs: list[Stub]) -> nn.Module:
    copied = shallow(old)
    vars(copied)["_modules"] = dict(zip(children_of(old), stubs, strict=True))
    return copied
