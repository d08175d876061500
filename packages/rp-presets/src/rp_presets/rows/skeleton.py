"""Skeletons: private copies of the modules around a model's layers, with stubs for the layers and for their parts.

A model's forward runs on a skeleton as it is. The `Session` of that run decides what stubs and parts do, so
skeletons hold no state of a call, and each device may have a copy.
"""

from __future__ import annotations

import copy
import functools
import inspect
import types
from collections.abc import Callable, Collection, Generator, Iterable, Mapping
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
    """Decides what stubs and parts do while one forward runs on a skeleton. `device`: where it runs."""

    device: torch.device

    def layer(self, stub: Stub, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A layer is called; return its result."""
        ...

    def part(self, part: Part | Method, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A part is called, or one of its methods; return its result."""
        ...

    def read(self, part: Part, name: str) -> Any:
        """An attribute of a part that is a tensor, a module or a method is read; return it."""
        ...


_SESSION: ContextVar[Session] = ContextVar("rp_presets_session")


@contextmanager
def in_session(session: Session) -> Generator[None]:
    """Let `session` decide inside the context, in this thread."""
    token = _SESSION.set(session)
    try:
        yield
    finally:
        _SESSION.reset(token)


class Facts:
    """The plain attributes of a module and of its submodules, for code that reads them of a layer.

    `path`: the name of the list of layers. `written`: names of attributes that layers set when they run; these are
    not known.
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
            # No AttributeError: code that has a default for it would go on.
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
    """The attributes of its classes below `nn.Module` that are no methods."""
    own = [base for base in reversed(kind.__mro__) if base not in nn.Module.__mro__]
    return ((name, value) for base in own for name, value in vars(base).items() if not callable(value))


def _is_fact(name: str, value: object) -> bool:
    return name not in _MODULE_STATE and not isinstance(value, nn.Module | Tensor)


_MODULE_STATE = frozenset(vars(nn.Module()))


class Stub(nn.Module):
    """Stands for the layer `index` of the layers `segment`."""

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


class Outline:
    """What is known of a module that is not here: its plain attributes, and the shapes of its tensors."""

    def __init__(self, module: nn.Module) -> None:
        self.own = {name: value for name, value in vars(module).items() if _is_fact(name, value)}
        self._specs = {name: cast(Spec, Spec.of(tensor)) for name, tensor in _own_tensors(module)}
        self._children = {name: Outline(child) for name, child in module.named_children()}

    def has(self, name: str) -> bool:
        """Whether it knows an attribute."""
        return name in self.own or name in self._specs or name in self._children

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or not self.has(name):
            raise AttributeError(f"{name!r} is read of a module that is not here")
        if name in self._specs:
            spec = self._specs[name]
            # It takes no memory.
            return Spec(torch.Size(), spec.dtype).stand_in(_SESSION.get().device).expand(spec.shape)
        return self.own[name] if name in self.own else self._children[name]

    def __deepcopy__(self, memo: object) -> Outline:
        del memo
        return self


class Part(nn.Module):
    """Stands for a module that the code around the layers calls; holds it where it runs for real.

    `path`: its name in the model. `inner`: the module, or None.
    """

    inner: nn.Module | None

    def __init__(self, path: str, module: nn.Module, *, is_held: bool) -> None:
        super().__init__()
        self.path = path
        self.inner = module if is_held else None
        self.training = module.training
        vars(self)["outline"] = Outline(module)
        vars(self)["kind"] = type(module)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Ask the session."""
        return _SESSION.get().part(self, args, kwargs)

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the module. One without parameters runs as a copy: some write attributes, such as rotary tables."""
        inner = self.held()
        has_parameters = next(inner.parameters(), None) is not None
        return (inner if has_parameters else _scratch(inner))(*args, **kwargs)

    def held(self) -> nn.Module:
        """The module. Raises `UnsupportedModel` if it did not run here when the model was observed."""
        if self.inner is None:
            raise UnsupportedModel(
                f"the model calls {self.path!r}, which it did not here when it was observed; observe it with "
                "arguments like these: to_sequential(model, example_inputs=...)"
            )
        return self.inner

    def known(self, name: str) -> Any:
        """An attribute of the module where it is not held: a stand-in for a tensor, an outline of a submodule."""
        outline = cast(Outline, vars(self)["outline"])
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
    """A method of a part that the code around the layers calls by name. `path`: its name in the model."""

    def __init__(self, part: Part, name: str) -> None:
        self.part = part
        self.name = name
        self.path = f"{part.path}.{name}"

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run it."""
        return getattr(self.part.held(), self.name)(*args, **kwargs)


def _called(method: Method, *args: Any, **kwargs: Any) -> Any:
    return _SESSION.get().part(method, args, kwargs)


def _own_tensors(module: nn.Module) -> Iterable[tuple[str, Tensor]]:
    yield from module.named_parameters(recurse=False)
    yield from module.named_buffers(recurse=False)


def children_of(module: nn.Module) -> dict[str, nn.Module]:
    """The children by name. Unlike torch's, one that has several names counts for each.

    >>> layer = nn.Identity()
    >>> list(children_of(nn.ModuleList([layer, layer])))
    ['0', '1']
    """
    table: dict[str, nn.Module | None] = vars(module)["_modules"]
    return {name: child for name, child in table.items() if child is not None}


def shallow(module: nn.Module) -> nn.Module:
    """A copy of a module with tables of its own that holds the same submodules and tensors."""
    found = copy.copy(module)
    state = vars(found)
    for table in ("_modules", "_parameters", "_buffers"):
        state[table] = dict(state[table])
    own = state.get("forward")
    if own is not None:
        state["forward"] = _rebound(own, module, found)
    return found


def _rebound(forward: Callable[..., Any], old: nn.Module, new: nn.Module) -> Callable[..., Any]:
    if isinstance(forward, types.MethodType) and forward.__self__ is old:
        return types.MethodType(forward.__func__, new)
    raise UnsupportedModel(
        f"{type(old).__name__}.forward was replaced on this object by a function that is not bound to it, as the "
        "hooks of device_map do; load the model without them"
    )


def skeleton(
    model: nn.Module,
    segments: Mapping[str, int],
    is_held: Callable[[str], bool],
    spine: frozenset[str],
    written: Collection[str] = (),
) -> nn.Module:
    """Copy the model's modules named in `spine`, with stubs for layers and parts for other modules.

    `segments`: the lists of layers, by name. `is_held`: whether a part holds its module. `written`: names of
    attributes that layers set.
    """

    def copied(module: nn.Module, path: str) -> nn.Module:
        if path in segments:
            stubs = [
                Stub(segments[path], index, layer, Facts(layer, path, written))
                for index, layer in enumerate(children_of(module).values())
            ]
            return _list_like(module, stubs)
        if path in spine or _is_container(module):
            found = shallow(module)
            note_hooked(found)
            for name, child in children_of(module).items():
                vars(found)["_modules"][name] = copied(child, f"{path}.{name}" if path else name)
            vars(found)["_like"] = next((Spec.of(one) for one in module.parameters()), None)
            vars(found)["parameters"] = types.MethodType(_parameters, found)
            return found
        return Part(path, module, is_held=is_held(path))

    return copied(model, "")


def _parameters(module: nn.Module, recurse: bool = True) -> Iterable[Tensor]:
    """A module's parameters; a stand-in if a skeleton holds none, for code that asks the first for its dtype."""
    found = [*nn.Module.parameters(module, recurse)]
    like = cast(Spec | None, vars(module)["_like"])
    if not found and like is not None:
        found = [cast(nn.Parameter, Spec(torch.Size(), like.dtype).stand_in(_SESSION.get().device))]
    return iter(found)


def _is_container(module: nn.Module) -> bool:
    # A list or dict of modules is never called itself.
    return type(module).forward is nn.Module.forward or isinstance(module, nn.ModuleList | nn.ModuleDict)


def _scratch(module: nn.Module) -> nn.Module:
    """A copy whose attributes and buffers may be written."""
    found = shallow(module)
    buffers: dict[str, Tensor | None] = vars(found)["_buffers"]
    vars(found)["_buffers"] = {name: None if one is None else one.clone() for name, one in buffers.items()}
    return found


def _list_like(old: nn.Module, stubs: list[Stub]) -> nn.Module:
    found = shallow(old)
    vars(found)["_modules"] = dict(zip(children_of(old), stubs, strict=True))
    return found
