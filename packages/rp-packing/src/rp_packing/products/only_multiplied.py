"""Which weights nothing reads but products in FP8, so that their codes are enough."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

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
        id(layer.get_submodule(name).get_parameter("weight"))
        for layer, names in zip(layers, choice.chosen, strict=True)
        for name in names
        if reads_codes_alone(layer, name) and not isinstance(_parent(layer, name), nn.TransformerEncoderLayer)
    )
    return frozenset(one for one, count in products.items() if count == holders[one])


def _held(layer: nn.Module) -> list[nn.Parameter]:
    return [one for module in layer.modules() for one in module.parameters(recurse=False)]


def reads_codes_alone(layer: nn.Module, name: str) -> bool:
    """Return whether what is around a linear layer leaves the numbers of its weight alone, as DoRA does not."""
    return not getattr(_parent(layer, name), "lora_magnitude_vector", None)


def _parent(layer: nn.Module, name: str) -> nn.Module:
    return layer.get_submodule(name.rpartition(".")[0])
