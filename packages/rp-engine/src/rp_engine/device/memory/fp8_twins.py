"""Linear layers of twins that multiply in FP8: told so, and given the codes of their weights, once an upload."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import NamedTuple, cast

from rp_packing import Fp8, Fp8Choice, Fp8Linear, become
from torch import nn


class Fp8Products(NamedTuple):
    """Which linear layers of a model multiply in FP8, and how."""

    recipe: Fp8
    choice: Fp8Choice


class _Ready(NamedTuple):
    """What a layer's twin was made ready for. `for_backward`: its weights' codes are there for that, too."""

    products: Fp8Products | None
    for_backward: bool


_PLAIN = _Ready(None, for_backward=True)


class Fp8Twins:
    """The linear layers of a device's twins that have ever multiplied in FP8; used by its thread only."""

    def __init__(self) -> None:
        self._linears: dict[int, dict[str, Fp8Linear]] = {}
        # Until the layer's weights are others.
        self._ready: dict[int, _Ready] = {}

    def prepare(
        self,
        index: int,
        twin: nn.Module,
        products: Fp8Products | None,
        expanded: Collection[int],
        *,
        for_backward: bool,
    ) -> None:
        """Have a layer whose weights are there multiply as `products` says.

        `expanded`: ids of parameters whose values come later, when the layer runs; these are cast then.
        """
        ready = self._ready.get(index, _PLAIN)
        if ready.products is products and (ready.for_backward or not for_backward):
            return
        names = () if products is None else products.choice.chosen[index]
        linears = self._linears.setdefault(index, {})
        for name in names:
            if name not in linears:
                linears[name] = _made(twin.get_submodule(name))
        for name, linear in linears.items():
            linear.recipe = products.recipe if products is not None and name in names else None
            if linear.recipe is not None and id(linear.weight) not in expanded:
                linear.cast(backward=for_backward)
        self._ready[index] = _Ready(products, for_backward)

    def note_moved(self, layers: Iterable[int]) -> None:
        """The weights of these layers are others than before."""
        for index in layers:
            self._ready.pop(index, None)
            for linear in self._linears.get(index, {}).values():
                linear.recipe = None

    def release(self, layers: Iterable[int]) -> None:
        """Free the codes of these layers."""
        for index in layers:
            self._ready.pop(index, None)
            for linear in self._linears.get(index, {}).values():
                linear.recipe = None
                linear.forget()

    def note_rebuilt(self, index: int) -> None:
        """A layer's twin is a new one."""
        self._linears.pop(index, None)
        self._ready.pop(index, None)


def _made(module: nn.Module) -> Fp8Linear:
    if not isinstance(module, Fp8Linear):
        become(cast("nn.Linear", module))
    return cast("Fp8Linear", module)
