"""Attributes that modules set while they run: which, and whether anything reads what they leave there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import MethodType
from typing import Any, cast

import torch
from torch import Tensor, nn

from rp_presets.rows.capture import HOOKED
from rp_presets.rows.trees import contents_of, is_box, leaves, mapped, refill

# What torch keeps in a module, the numbers by which layers know their place, and the mark of transformers' hooks,
# which stay.
_STATE = frozenset(vars(nn.Module())) | {"layer_idx", "layer_id", "layer_number", "block_idx", HOOKED}


class Attributes:
    """The plain attributes of a model's modules at one time.

    >>> model = nn.Sequential(nn.Identity())
    >>> before = Attributes(model)
    >>> model[0].seen = 3
    >>> before.changed()
    [(Identity(), 'seen')]
    >>> before.restore()
    >>> hasattr(model[0], "seen")
    False
    """

    def __init__(self, model: nn.Module) -> None:
        self._before = [
            (module, {name: _held(value) for name, value in own(module)}) for module in model.modules()
        ]

    def changed(self) -> list[tuple[nn.Module, str]]:
        """The modules that were written since then, with the attribute's name."""
        return [
            (module, name)
            for module, before in self._before
            for name in _names(module, before)
            if not _is_held(before.get(name), vars(module).get(name))
        ]

    def restore(self) -> None:
        """Give the modules their attributes of then."""
        for module, name in self.changed():
            held = next(before for one, before in self._before if one is module).get(name)
            if held is None:
                del vars(module)[name]
            else:
                vars(module)[name] = held[0]
                if is_box(held[0]):
                    refill(held[0], held[1])


def own(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """The plain attributes of a module."""
    return ((name, value) for name, value in vars(module).items() if name not in _STATE)


def holds_others(layer: nn.Module) -> bool:
    """Whether a layer has other modules in its plain attributes: these may be other layers."""
    inside = set(layer.modules())
    values = [value for module in inside for _, value in own(module)]
    found = [leaf.__self__ if isinstance(leaf, MethodType) else leaf for value in values for leaf in leaves(value)]
    return any(isinstance(one, nn.Module) and one not in inside for one in found)


def is_scratch(call: Callable[[Any], Any], arguments: Any) -> bool:
    """Whether a layer's result depends on its arguments alone, whatever it has left in its attributes.

    `call(arguments)`: run it, with the same random numbers each time.
    """
    first = _run(call, arguments)
    _run(call, mapped(_other, arguments))
    return _is_equal(first, _run(call, arguments))


def _run(call: Callable[[Any], Any], arguments: Any) -> list[Any]:
    # Copies: layers write containers that they are handed.
    copied = mapped(_as_it_is, arguments)
    return [*leaves(call(copied)), *leaves(copied)]


def _as_it_is(leaf: Any) -> Any:
    return leaf


def _other(leaf: Any) -> Any:
    is_floating = isinstance(leaf, Tensor) and leaf.is_floating_point()
    return leaf * 0.5 + 0.25 if is_floating else leaf


def _is_equal(ones: list[Any], others: list[Any]) -> bool:
    return len(ones) == len(others) and all(
        torch.equal(one, other)
        if isinstance(one, Tensor) and isinstance(other, Tensor)
        else one is other or one == other
        for one, other in zip(ones, others, strict=True)
    )


def _held(value: Any) -> tuple[Any, Any]:
    return value, contents_of(value) if is_box(value) else None


def _is_held(held: tuple[Any, Any] | None, now: Any) -> bool:
    if held is None or held[0] is not now:
        return False
    return not is_box(now) or _alike(held[1], contents_of(now))


def _alike(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        old, new = cast("dict[Any, Any]", one), cast("dict[Any, Any]", other)
        return list(old) == list(new) and _alike(list(old.values()), list(new.values()))
    return len(one) == len(other) and all(a is b for a, b in zip(one, other, strict=True))


def _names(module: nn.Module, before: Mapping[str, Any]) -> list[str]:
    return list(dict.fromkeys([*before, *(name for name, _ in own(module))]))
