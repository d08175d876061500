"""Linear layers that multiply in FP8: which of a model's they are, why others are not, their class on devices."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import nn

from rp_packing.products.casts import cast_input
from rp_packing.products.elsewhere import Elsewhere
from rp_packing.products.linear import WeightCodes, multiplied
from rp_packing.products.recipe import Fp8
from rp_packing.products.scaled import MULTIPLE, ones, transposed
from rp_packing.rows import Rows, numbers_of

# Codes, scales, codes transposed, and their scales.
_Memory = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]
_NO_MEMORY: _Memory = (None, None, None, None)


class Fp8Linear(nn.Linear):
    """A linear layer that multiplies as `recipe` says, or in its own dtype where that is None.

    A layer becomes one by its class, `become`: its parameters, hooks and other attributes stay.

    >>> layer = nn.Linear(32, 16, dtype=torch.bfloat16)
    >>> become(layer)
    >>> layer.recipe = Fp8()
    >>> layer(torch.ones(3, 32, dtype=torch.bfloat16)).shape
    torch.Size([3, 16])
    """

    # What devices put there between calls of the layer.
    scratch_attributes = ("recipe", "codes", "scales", "turned", "ones", "is_taken", "has_shape", "others")
    recipe: Fp8 | None
    codes: torch.Tensor | None
    scales: torch.Tensor | None
    turned: torch.Tensor | None
    ones: torch.Tensor | None
    # Whether the codes are all that there is of the weight; and whether its parameter has its shape even so.
    is_taken: bool
    has_shape: bool
    # Of codes that were cast, while those that were there are used; and the other way round.
    others: _Memory

    @property
    def parameter(self) -> nn.Parameter:
        """The weight's parameter, empty where the codes are all that there is of it."""
        return cast("nn.Parameter", self._parameters["weight"])

    @property
    def weight(self) -> torch.Tensor:  # pyright: ignore[reportIncompatibleVariableOverride] - an attribute
        """The weight as hooks and other modules read it; if its codes are all that there is, made from them.

        Of a trained weight that would be other numbers than the weight's: `Elsewhere` refuses to be read.
        """
        if self.recipe is None or not self.is_taken or self.codes is None or self.scales is None:
            return self.parameter
        if self.has_shape:
            return Elsewhere.like(self.parameter)
        return numbers_of(Rows(self.codes, self.scales)).to(self.parameter.dtype)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Run the layer on (..., in)."""
        if self.recipe is None or (self.is_taken and not self.has_shape and not input.numel()):
            return super().forward(input)
        return multiplied(input, self.parameter, self.bias, self._cast_weight(), self.recipe)

    def _cast_weight(self) -> WeightCodes | None:
        if self.codes is None or self.scales is None:
            return None
        rows = Rows(self.codes, self.scales)
        if self.turned is None or self.ones is None:
            return WeightCodes(rows, None)
        return WeightCodes(rows, Rows(self.turned, self.ones))

    def cast(self, *, backward: bool) -> None:
        """Cast the weight, for all calls until it is cast again or `forget`; `backward`: for that, too.

        Codes stay in the memory that they have, if there is some already.
        """
        with torch.no_grad(), torch.inference_mode(False):
            self._use(taken=False)
            rows, turned = cast_input(self.parameter.detach(), turned=backward or self.turned is not None)
            if self.codes is None or self.scales is None:
                self.codes, self.scales = rows
            else:
                self.codes.copy_(rows.codes)
                self.scales.copy_(rows.scales)
            if turned is not None:
                self._keep_turned(turned)

    def take(self, rows: Rows, *, backward: bool, has_shape: bool = False) -> None:
        """Use codes of the weight that are there already, until `forget`. Its parameter is not read then.

        `has_shape`: the parameter has its shape, since it gets a gradient.
        """
        with torch.no_grad(), torch.inference_mode(False):
            self._use(taken=True)
            self.has_shape = has_shape
            self.codes, self.scales = rows
            if backward or self.turned is not None:
                self._keep_turned(transposed(rows.codes).codes)

    def _keep_turned(self, codes: torch.Tensor) -> None:
        """Keep the codes' transpose, in the memory that there is: graphs know it by address."""
        if self.turned is None:
            self.turned, self.ones = codes, ones(codes)
        else:
            self.turned.copy_(codes)

    def _use(self, *, taken: bool) -> None:
        if taken != self.is_taken:
            now = (self.codes, self.scales, self.turned, self.ones)
            (self.codes, self.scales, self.turned, self.ones), self.others = self.others, now
            self.is_taken = taken

    def forget(self) -> None:
        """Free the weight's codes."""
        self.is_taken = self.has_shape = False
        self.codes, self.scales, self.turned, self.ones = self.others = _NO_MEMORY


def become(layer: nn.Linear) -> None:
    """Give a linear layer the class that can multiply in FP8; it does as before until it has a recipe."""
    layer.__class__ = Fp8Linear
    # A copy may have the forward of its class as its own.
    vars(layer).pop("forward", None)
    made = cast("Fp8Linear", layer)
    made.recipe = None
    made.forget()


def codes_bytes(weight: torch.Tensor, *, backward: bool) -> int:
    """Return the device memory of a weight's codes and scales, (out, in); `backward`: with those turned.

    >>> codes_bytes(torch.empty(64, 32), backward=False)
    2304
    """
    rows, columns = weight.shape
    each = rows * columns + 4 * rows
    return each + rows * columns + 4 * columns if backward else each


@dataclass(frozen=True, slots=True)
class Fp8Choice:
    """The linear layers of a row of layers that multiply in FP8.

    `chosen`: by layer, the names of modules in it. `left`: why others do not, in words, and how many.
    """

    chosen: tuple[tuple[str, ...], ...]
    left: tuple[tuple[str, int], ...]

    @property
    def count(self) -> int:
        """How many linear layers multiply in FP8."""
        return sum(map(len, self.chosen))

    def __str__(self) -> str:
        """Return what is computed how, as for a log."""
        rest = "; ".join(f"{count} {reason}" for reason, count in self.left)
        return f"{self.count} linear layers multiply in FP8" + (f"; as before: {rest}" if rest else "")


def choose(
    layers: Sequence[nn.Module], recipe: Fp8, has_own_forward: Callable[[nn.Module], bool] | None = None
) -> Fp8Choice:
    """Choose the linear layers that multiply in FP8 among those of a row of layers.

    They are of class `nn.Linear`, in bfloat16, with multiples of 16 inputs and outputs, and neither skipped by
    name nor the router of experts, nor tied to an embedding. `has_own_forward`: whether a module computes
    something else than its class; default: whether it has an attribute `forward`.

    >>> row = [nn.Embedding(99, 32), nn.Linear(32, 64, dtype=torch.bfloat16), nn.Linear(64, 99)]
    >>> print(choose(row, Fp8()))
    1 linear layers multiply in FP8; as before: 1 of float32 rather than bfloat16
    """
    embedded = {id(one.weight) for layer in layers for one in layer.modules() if isinstance(one, nn.Embedding)}
    reasons: Counter[str] = Counter()
    chosen: list[tuple[str, ...]] = []
    for layer in layers:
        found = list(_candidates(layer, recipe.skip, embedded, has_own_forward or _has_own_forward))
        reasons.update(reason for _, reason in found if reason is not None)
        chosen.append(tuple(name for name, reason in found if reason is None))
    for ended in _ends([index for index, names in enumerate(chosen) if names], recipe.skip_ends):
        reasons["in the first or last layers"] += len(chosen[ended])
        chosen[ended] = ()
    return Fp8Choice(tuple(chosen), tuple(sorted(reasons.items())))


def _ends(layers: Sequence[int], count: int) -> set[int]:
    return {*layers[:count], *layers[max(len(layers) - count, 0) :]} if count else set()


def _has_own_forward(module: nn.Module) -> bool:
    return "forward" in vars(module)


def _candidates(
    layer: nn.Module, skip: Sequence[str], embedded: set[int], is_changed: Callable[[nn.Module], bool]
) -> Iterator[tuple[str, str | None]]:
    """Yield the name of each linear layer, and why it stays as it is; None if it does not."""
    routers = {id(gate) for parent in layer.modules() for gate in _routers(parent)}
    for name, module in cast("Iterator[tuple[str, nn.Module]]", layer.named_modules()):  # pyright: ignore[reportUnknownMemberType]
        if isinstance(module, nn.Linear):
            changed = "with a class or a forward of their own" if is_changed(module) else None
            yield name, changed or _reason(name, module, skip, routers, embedded)
        elif stacks := [one for one in module.parameters(recurse=False) if one.ndim == 3]:
            yield from ((name, "stacks of experts") for _ in stacks)


def _routers(parent: nn.Module) -> Iterator[nn.Module]:
    # What decides between experts is beside them, and small changes of it change which of them run.
    if hasattr(parent, "experts"):
        yield from (child for child in parent.children() if isinstance(child, nn.Linear))


def _reason(
    name: str, module: nn.Linear, skip: Sequence[str], routers: set[int], embedded: set[int]
) -> str | None:
    weight = module.weight
    if any(part in skip for part in name.split(".")):
        return "skipped by name"
    if id(module) in routers:
        return "routers of experts"
    if id(weight) in embedded:
        return "tied to an embedding"
    if type(module) not in (nn.Linear, Fp8Linear):
        return "with a class or a forward of their own"
    if weight.dtype != torch.bfloat16:
        return f"of {str(weight.dtype).removeprefix('torch.')} rather than bfloat16"
    if any(size % MULTIPLE for size in weight.shape):
        return "with a size that is no multiple of 16"
    return None
