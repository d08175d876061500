"""Packed weights as models of transformers are saved: expanded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Self

import torch
from rp_checkpoint import Conversion
from rp_checkpoint.model.layout import stored_as
from rp_packing import PackedWeight, expand


class ExpandedWeights:
    """Expands the packed ones of some weights, then applies a conversion, if given.

    `names`: the weights; `sources` has codes and scales in place of the packed ones.
    """

    def __init__(
        self,
        packed: Mapping[str, PackedWeight],
        names: Sequence[str],
        results: Mapping[str, torch.Tensor],
        conversion: Conversion | None = None,
    ) -> None:
        self._packed = {name: packed[name] for name in names if name in packed}
        self._conversion = conversion
        self._names = names
        self.sources = tuple(
            part for name in names for part in (stored_as(name, packed[name]) if name in packed else (name,))
        )
        self.results = results

    @classmethod
    def alone(cls, packed: Mapping[str, PackedWeight], name: str, saved: str) -> Self:
        """Of one packed weight that is saved unchanged. `saved`: its name in the files."""
        return cls(packed, (name,), {saved: torch.empty_like(outline(packed[name]), device="meta")})

    def convert(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the tensors to save, by saved name, from those of `sources`."""
        whole = {
            name: expand(self._packed[name], tensors[f"{name}.codes"], tensors[f"{name}.scales"])
            if name in self._packed
            else tensors[name]
            for name in self._names
        }
        if self._conversion is not None:
            return self._conversion.convert(whole)
        return dict(zip(self.results, whole.values(), strict=True))


def outline(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor, or for a packed weight one of its shape and dtype without memory of that size."""
    if isinstance(tensor, PackedWeight):
        return torch.zeros(1, dtype=tensor.dtype).expand(tensor.shape)
    return tensor.detach()
