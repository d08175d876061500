"""Which weights nothing reads but products in FP8, so that their codes are enough."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import cast

from torch import nn

from rp_packing.products.layers import Fp8Choice


def only_multiplied(layers: Sequence[nn.Module], choice: Fp8Choice) -> frozenset[int]:
    """Return the ids of the weights that all modules of a row of layers which hold them multiply in FP8.

    Those of adapters that read the weight's numbers, as DoRA's magnitudes do, are not among them. Nor are those of
    torch's `nn.TransformerEncoderLayer`, which in evaluation mode multiplies all of its weights by one operation.

    >>> import torch
    >>> one, other = (nn.Linear(16, 16, dtype=torch.bfloat16) for _ in range(2))
    >>> found = only_multiplied([one, other], Fp8Choice((("",), ()), ()))
    >>> found == {id(one.weight)}
    True
    """
    holders = Counter(id(held) for layer in layers for held in _held(layer))
    products = Counter(
        id(linear.get_parameter("weight"))
        for layer, names in zip(layers, choice.chosen, strict=True)
        for linear in _multiplied(layer, names)
    )
    return frozenset(one for one, count in products.items() if count == holders[one])


def _held(layer: nn.Module) -> list[nn.Parameter]:
    return [one for module in layer.modules() for one in module.parameters(recurse=False)]


def _multiplied(layer: nn.Module, names: Sequence[str]) -> Iterator[nn.Module]:
    modules = by_name(layer)
    for name in names:
        if reads_codes_alone(modules, name) and not isinstance(_parent(modules, name), nn.TransformerEncoderLayer):
            yield modules[name]


def by_name(layer: nn.Module) -> dict[str, nn.Module]:
    """Return a layer's modules by name. A child's name may have dots, which ``get_submodule`` does not find.

    >>> layer = nn.ModuleDict()
    >>> layer._modules["encoder.0"] = nn.Identity()
    >>> list(by_name(layer))
    ['', 'encoder.0']
    """
    return dict(cast("Iterator[tuple[str, nn.Module]]", layer.named_modules()))  # pyright: ignore[reportUnknownMemberType]


def reads_codes_alone(modules: Mapping[str, nn.Module], name: str) -> bool:
    """Return whether what is around a linear layer leaves the numbers of its weight alone, as DoRA does not.

    `modules`: a layer's, by name.
    """
    return not getattr(_parent(modules, name), "lora_magnitude_vector", None)


def _parent(modules: Mapping[str, nn.Module], name: str) -> nn.Module:
    above = name.rpartition(".")[0]
    return modules[above] if above in modules else _parent(modules, above)
