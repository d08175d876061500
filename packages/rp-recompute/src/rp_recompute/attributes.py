"""What a layer's modules hold in plain attributes: compared before and after a forward, path by path."""

from __future__ import annotations

import copy
import random
import sys
from collections import deque
from collections.abc import Generator, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from enum import Enum
from numbers import Number
from typing import Any, NamedTuple, cast

import torch
from rp_transfer import bytes_of

# Attributes that torch sets on every module.
_OWN = frozenset(vars(torch.nn.Module()))
# Attributes of transformers' modules that nothing but their own forward reads: caches for generation, which
# training resets at its first position, and seeds for an own recomputation.
_SCRATCH = {
    "RecurrentGemmaRglru": ("recurrent_states",),
    "RecurrentGemmaRecurrentBlock": ("conv1d_state",),
    "ReformerLayer": ("attention_seed", "feed_forward_seed"),
}
# How deep containers and objects are looked into, and how many items of one are compared beside its length.
_DEPTH = 4
_ITEMS = 64
# Larger tensors are compared by identity and version counter only, smaller ones also by value.
_NUMEL = 1 << 20
_VALUES = (Number, str, bytes, type(None), torch.dtype, torch.device, torch.Size, Enum)


class Leaf(NamedTuple):
    """One value in an attribute. `value`: what is compared; `owner`: kept, so that its id stays its own."""

    kind: str
    value: Any
    owner: Any = None


# Leaves by path, such as ``blocks.0.log[2]``.
Attributes = Mapping[str, Leaf]


class ModuleCopy(NamedTuple):
    """A module of a layer: its name there, the device's copy, and the user's own."""

    name: str
    module: torch.nn.Module
    original: torch.nn.Module


def attributes_of(parts: Sequence[ModuleCopy]) -> Attributes:
    """All leaves of the plain attributes of these modules, but those that a module calls its scratch.

    A module may list names in ``scratch_attributes``: what nothing but its own forward reads. Objects that a copy
    shares with the original, as their ``__deepcopy__`` may have it, are left out: nothing is lost there.

    >>> class Counter(torch.nn.Module):
    ...     calls = 0
    >>> counter = Counter()
    >>> counter.calls += 1
    >>> [(path, leaf.value) for path, leaf in attributes_of([ModuleCopy("a", counter, Counter())]).items()]
    [('a.calls', 1)]
    """
    found: dict[str, Leaf] = {}
    # Shared objects, such as a model's configuration, are looked into once.
    seen: set[int] = set()
    for name, module, original in parts:
        scratch = _scratch(module)
        originals = vars(original)
        for own, value in list(vars(module).items()):
            if own not in _OWN and own not in scratch:
                path = f"{name}.{own}" if name else own
                found.update(_leaves(path, value, originals.get(own), seen, _DEPTH))
    return found


class KeptAttributes:
    """What modules hold in plain attributes now, to be set again for a run.

    >>> layer = torch.nn.Tanh()
    >>> kept = KeptAttributes([ModuleCopy("", layer, torch.nn.Tanh())])
    >>> layer.seen = 3
    >>> with kept.set_again(["seen"]):
    ...     print(hasattr(layer, "seen"))
    False
    >>> layer.seen
    3
    """

    def __init__(self, parts: Sequence[ModuleCopy]) -> None:
        self._held = [(name, module, _held(module)) for name, module, _ in parts]

    @contextmanager
    def set_again(self, paths: Sequence[str]) -> Generator[None]:
        """Let what these paths lead to be as it was, and put back at the end what it is now."""
        roots = [path.removeprefix("len(") for path in paths]
        now = [(name, module, _held(module)) for name, module, _ in self._held]
        self._set(self._held, roots)
        try:
            yield
        finally:
            self._set(now, roots)

    def _set(self, held: Sequence[tuple[str, torch.nn.Module, Mapping[str, Any]]], roots: Sequence[str]) -> None:
        for name, module, values in held:
            for own in {*_held(module), *values}:
                path = f"{name}.{own}" if name else own
                if not any(root.startswith(path) and root[len(path) :][:1] in _ENDS for root in roots):
                    continue
                vars(module).pop(own, None)
                if own in values:
                    # A copy: what is kept must stay as it is.
                    vars(module)[own] = _shallow(values[own])


# What follows an attribute's name in a path.
_ENDS = ("", ".", "[", "{", ")")


def _held(module: torch.nn.Module) -> dict[str, Any]:
    return {own: _shallow(value) for own, value in vars(module).items() if own not in _OWN}


def _shallow(value: Any) -> Any:
    return copy.copy(value) if issubclass(type(value), (dict, list, set, deque)) else value


def _scratch(module: torch.nn.Module) -> Sequence[str]:
    kind = type(module)
    known = _SCRATCH.get(kind.__name__, ()) if kind.__module__.startswith("transformers.") else ()
    return (*known, *getattr(module, "scratch_attributes", ()))


def changes(before: Attributes, after: Attributes) -> list[str]:
    """The paths at which leaves differ, or are only in one of the two."""
    paths = dict.fromkeys([*before, *after])
    return [path for path in paths if not _same(before.get(path), after.get(path))]


def generators_among(paths: Sequence[str], leaves: Attributes) -> list[str]:
    """Those of the paths that lead to random generators."""
    return [path for path in paths if path in leaves and leaves[path].kind == "generator"]


def with_graph(paths: Sequence[str], leaves: Attributes) -> list[str]:
    """Those of the paths that lead to tensors through which gradients would flow."""
    return [path for path in paths if path in leaves and _has_graph(leaves[path].owner)]


def _has_graph(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad and not isinstance(value, torch.nn.Parameter)


def _leaves(path: str, value: Any, original: Any, seen: set[int], depth: int) -> Iterator[tuple[str, Leaf]]:
    if isinstance(value, _VALUES):
        yield path, Leaf("value", value)
    elif value is original:
        return
    elif isinstance(value, torch.Tensor):
        yield path, Leaf("tensor", _tensor(value), value)
    elif (state := _generator_state(value)) is not None:
        yield path, Leaf("generator", state, value)
    elif (array := _array(value)) is not None:
        yield path, Leaf("value", array)
    elif isinstance(value, torch.nn.Module) or callable(value) or depth == 0 or id(value) in seen:
        yield path, _opaque(value)
    else:
        seen.add(id(value))
        yield from _inside(path, value, original, seen, depth - 1)


def _opaque(value: object) -> Leaf:
    # Not by identity: a function or object that each forward makes anew tells nothing.
    return Leaf("object", type(value), value)


def _inside(path: str, value: Any, original: Any, seen: set[int], depth: int) -> Iterator[tuple[str, Leaf]]:
    items, originals = _items(value), dict(_items(original) or ())
    if items is None:
        yield path, _opaque(value)
        return
    yield f"len({path})", Leaf("value", len(items))
    for key, item in [*items[:_ITEMS], *items[_ITEMS:][-_ITEMS:]]:
        yield from _leaves(path + key, item, originals.get(key), seen, depth)


def _items(value: Any) -> list[tuple[str, Any]] | None:
    """The named parts of a container or object; None if it shows none."""
    if isinstance(value, Mapping):
        pairs = list(cast("Mapping[Any, Any]", value).items())
        return [(f"[{_key(key, place)}]", item) for place, (key, item) in enumerate(pairs)]
    if isinstance(value, list | tuple | deque):
        return [(f"[{index}]", item) for index, item in enumerate(cast("Sequence[Any]", value))]
    if isinstance(value, Set):
        return [(f"{{{item!r}}}", None) for item in cast("Set[Any]", value) if isinstance(item, _VALUES)]
    parts: dict[str, Any] | None = getattr(value, "__dict__", None)
    return None if parts is None else [(f".{name}", item) for name, item in list(parts.items())]


def _key(key: object, place: int) -> str:
    shown: tuple[type, ...] = (*_VALUES, tuple)
    return repr(key) if issubclass(type(key), shown) else f"{type(key).__name__} {place}"


def _array(value: Any) -> Any:
    """What is compared of a NumPy array; None for anything else."""
    numpy: Any = sys.modules.get("numpy")
    if numpy is None or not isinstance(value, numpy.ndarray) or value.dtype.hasobject or value.size > _NUMEL:
        return None
    return value.shape, str(value.dtype), value.tobytes()


def _tensor(value: torch.Tensor) -> tuple[int, int, torch.Tensor | None]:
    is_compared = value.layout == torch.strided and type(value) is torch.Tensor and value.numel() <= _NUMEL
    return id(value), value._version, value.detach().clone() if is_compared else None


def _generator_state(value: Any) -> Any:
    """The state of a random generator; None for anything else."""
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, torch.Generator):
        return bytes(bytes_of(value.get_state()))
    numpy: Any = sys.modules.get("numpy.random")
    if numpy is not None and isinstance(value, numpy.Generator):
        return repr(value.bit_generator.state)
    if numpy is not None and isinstance(value, numpy.RandomState):
        return repr(value.get_state(legacy=False))
    return None


def _same(one: Leaf | None, other: Leaf | None) -> bool:
    if one is None or other is None or one.kind != other.kind:
        return False
    if one.kind != "tensor":
        return one.value == other.value or (one.value != one.value and other.value != other.value)
    return one.value[:2] == other.value[:2] if not _have_values(one, other) else _equal(one, other)


def _have_values(one: Leaf, other: Leaf) -> bool:
    return isinstance(one.value[2], torch.Tensor) and isinstance(other.value[2], torch.Tensor)


def _equal(one: Leaf, other: Leaf) -> bool:
    """Whether two tensors have the same values; NaN equals NaN."""
    before, after = one.value[2], other.value[2]
    return is_same_tensor(before, after) and (one.owner.requires_grad == other.owner.requires_grad)


def is_same_tensor(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors have the same type, shape and values; NaN equals NaN.

    >>> is_same_tensor(torch.tensor([torch.nan]), torch.tensor([torch.nan]))
    True
    """
    if (one.shape, one.dtype, one.device) != (other.shape, other.dtype, other.device):
        return False
    return bool(((one == other) | ((one != one) & (other != other))).all())
