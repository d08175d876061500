"""Find the attributes that modules set while they run, and whether anything reads them later."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import MethodType
from typing import Any, cast

import torch
from torch import Tensor, nn

from rp_presets.rows.capture import HOOKED
from rp_presets.rows.trees import contents_of, is_box, leaves, mapped, refill

# Torch's own attributes of a module, a layer's own number, and the mark of transformers' hooks, which stay.
_STATE = frozenset(vars(nn.Module())) | {"layer_idx", "layer_id", "layer_number", "block_idx", HOOKED}


class Attributes:
    """A snapshot of the plain attributes of a model's modules.

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
        """Return the attributes that have changed since: their module and name."""
        return [
            (module, name)
            for module, before in self._before
            for name in _names(module, before)
            if not _is_held(before.get(name), vars(module).get(name))
        ]

    def restore(self) -> None:
        """Restore the modules' attributes."""
        for module, name in self.changed():
            held = next(before for one, before in self._before if one is module).get(name)
            if held is None:
                del vars(module)[name]
            else:
                vars(module)[name] = held[0]
                if is_box(held[0]):
                    refill(held[0], held[1])


def own(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the plain attributes of a module."""
    return ((name, value) for name, value in vars(module).items() if name not in _STATE)


def holds_others(layer: nn.Module) -> bool:
    """Return whether a layer's plain attributes hold modules outside of it, which may be other layers."""
    inside = set(layer.modules())
    values = [value for module in inside for _, value in own(module)]
    held = [leaf.__self__ if isinstance(leaf, MethodType) else leaf for value in values for leaf in leaves(value)]
    return any(isinstance(one, nn.Module) and one not in inside for one in held)


def is_scratch(call: Callable[[Any], Any], arguments: Any) -> bool:
    """Return whether a layer's result depends only on its arguments, not on attributes that an earlier run set.

    `call(arguments)` runs the layer, with the same random numbers each time.
    """
    first = _run(call, arguments)
    _run(call, mapped(_changed_leaf, arguments))
    return _is_equal(first, _run(call, arguments))


def _run(call: Callable[[Any], Any], arguments: Any) -> list[Any]:
    # Copy the arguments, since layers write to containers that they get.
    copied = mapped(_same_leaf, arguments)
    return [*leaves(call(copied)), *leaves(copied)]


def _same_leaf(leaf: Any) -> Any:
    return leaf


def _changed_leaf(leaf: Any) -> Any:
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
