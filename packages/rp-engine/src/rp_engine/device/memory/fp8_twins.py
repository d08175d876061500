"""Linear layers of twins that multiply in FP8: told so, and given the codes of their weights, once an upload."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, cast

from rp_packing import Fp8, Fp8Choice, Fp8Linear, PackedTwin, Rows, become, by_name, reads_codes_alone
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
        # Packed weights whose codes are multiplied as they are, by layer.
        self._direct: dict[int, set[PackedTwin]] = {}

    def prepare(
        self,
        index: int,
        twin: nn.Module,
        products: Fp8Products | None,
        packed: Mapping[int, PackedTwin],
        coded: Mapping[int, Rows],
        *,
        for_backward: bool,
    ) -> None:
        """Have a layer whose weights are there multiply as `products` says.

        `packed`: packed weights by the id of their parameter. Those in FP8 by rows are multiplied as they are; the
        others are expanded when the layer runs, and cast then. `coded`: codes that came in place of trained
        weights, by the same.
        """
        ready = self._ready.get(index, _PLAIN)
        if ready.products is products and (ready.for_backward or not for_backward):
            return
        recipes = {} if products is None else dict.fromkeys(products.choice.chosen[index], products.recipe)
        linears = self._linears.setdefault(index, {})
        if missing := [name for name in recipes if name not in linears]:
            modules = by_name(twin)
            linears.update((name, _made(modules[name])) for name in missing)
        for name, linear in linears.items():
            linear.recipe = recipes.get(name)
        using = [(name, one) for name, one in linears.items() if name in recipes]
        self._direct[index] = _multiplied_packed(twin, using, packed)
        for _, linear in using:
            key = id(linear.parameter)
            if key in coded:
                linear.take(coded[key], backward=for_backward, has_shape=True)
            elif key not in packed:
                linear.cast(backward=for_backward)
            elif packed[key] in self._direct[index] and (rows := packed[key].row_codes()) is not None:
                linear.take(rows, backward=for_backward)
            else:
                linear.forget()
        self._ready[index] = _Ready(products, for_backward)

    def expanded(self, index: int, packed: Sequence[PackedTwin]) -> Sequence[PackedTwin]:
        """Return those of a layer's packed weights that it reads expanded."""
        direct = self._direct.get(index)
        return [one for one in packed if one not in direct] if direct else packed

    def note_moved(self, layers: Iterable[int]) -> None:
        """The weights of these layers are others than before."""
        for index in layers:
            self._ready.pop(index, None)
            self._direct.pop(index, None)
            for linear in self._linears.get(index, {}).values():
                linear.recipe = None

    def release(self, layers: Iterable[int]) -> None:
        """Free the codes of these layers."""
        layers = list(layers)
        self.note_moved(layers)
        for index in layers:
            for linear in self._linears.get(index, {}).values():
                linear.forget()

    def note_rebuilt(self, index: int) -> None:
        """A layer's twin is a new one."""
        self._linears.pop(index, None)
        self._ready.pop(index, None)
        self._direct.pop(index, None)


def _multiplied_packed(
    twin: nn.Module, using: Sequence[tuple[str, Fp8Linear]], packed: Mapping[int, PackedTwin]
) -> set[PackedTwin]:
    """Return the packed weights of which nothing but the codes is read."""
    if not packed:
        return set()
    modules = by_name(twin)
    ids = [id(linear.parameter) for name, linear in using if _reads_codes_alone(modules, name, linear)]
    holding = [id(one) for module in twin.modules() for one in module.parameters(recurse=False)]
    found = {own for one in set(ids) if (own := packed.get(one)) and ids.count(one) == holding.count(one)}
    return {own for own in found if own.row_codes() is not None}


def _reads_codes_alone(modules: Mapping[str, nn.Module], name: str, linear: Fp8Linear) -> bool:
    return linear.recipe is not None and linear.recipe.inputs != "bf16" and reads_codes_alone(modules, name)


def _made(module: nn.Module) -> Fp8Linear:
    if not isinstance(module, Fp8Linear):
        become(cast("nn.Linear", module))
    return cast("Fp8Linear", module)
