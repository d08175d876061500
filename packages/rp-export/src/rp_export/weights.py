"""The weights of a model with its adapter, each computed when it is asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from roundpipe import pack_frozen
from rp_packing import Format, PackedWeight, format_of
from rp_presets import StoredPacked, Streamed, StreamedWeights
from rp_trainer.errors import Refused
from torch import nn

from rp_export.adapter import Adapter


@dataclass(frozen=True, slots=True)
class HeldPacking:
    """How a run held its frozen weights: cast to a dtype, then packed. `forms`: by the weights' names."""

    dtype: torch.dtype
    forms: Mapping[str, Format]

    @classmethod
    def of(cls, model: nn.Module, form: str, dtype: torch.dtype) -> HeldPacking:
        """Return which weights of a model, on the meta device, `pack_frozen` packs."""
        model = model.to(dtype).requires_grad_(False)
        pack_frozen(model, form)
        packed = dict(model.named_parameters(remove_duplicate=False))
        return cls(dtype, {name: one.format for name, one in packed.items() if isinstance(one, PackedWeight)})

    def rounded(self, name: str, weight: torch.Tensor) -> torch.Tensor:
        """Return a weight as the run had it, in the dtype that it is given in."""
        form = self.forms.get(name)
        if form is None:
            return weight
        return PackedWeight.of(form, weight.to(self.dtype)).expanded().to(weight.dtype)


NOT_PACKED = HeldPacking(torch.float32, {})


class BaseWeights:
    """The model's weights before the adapter, read one piece at a time; packed ones are expanded."""

    def __init__(self, streamed: Streamed, packing: HeldPacking = NOT_PACKED) -> None:
        self._pieces: dict[str, StreamedWeights] = {
            name: piece for piece in streamed.pieces for name in piece.outlines
        }
        self._same = ties_of(streamed.model)
        self._packing = packing
        self._rest: dict[str, torch.Tensor | StoredPacked] = {}

    def outline(self, name: str) -> torch.Tensor:
        """Return the weight on the meta device."""
        own = self._stored(name)
        return self._pieces[own].outlines[own]

    def has(self, name: str) -> bool:
        """Return whether the files have the weight, or one that is tied to it."""
        return any(one in self._pieces for one in (name, *self._same.get(name, ())))

    def read(self, name: str) -> torch.Tensor:
        """Read a weight. What is read with it is kept until it, or another piece, is read."""
        own = self._stored(name)
        if own not in self._rest:
            self._rest = dict(self._pieces[own].read())
        outline = self._pieces[own].outlines[own]
        return self._packing.rounded(own, _expanded(self._rest.pop(own), outline))

    def _stored(self, name: str) -> str:
        """Return the name of a weight, or of one that is tied to it, that the files have."""
        return next(one for one in (name, *self._same.get(name, ())) if one in self._pieces)


def _expanded(one: torch.Tensor | StoredPacked, outline: torch.Tensor) -> torch.Tensor:
    if isinstance(one, torch.Tensor):
        return one
    form = format_of(one.format, transposed=one.format == "mxfp4")
    return PackedWeight(form, one.codes, one.scales, outline.shape, outline.dtype).expanded()


def ties_of(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """Return the names of weights that are tied, by each of them."""
    names: dict[int, list[str]] = {}
    for name, one in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(one), []).append(name)
    return {name: tuple(group) for group in names.values() if len(group) > 1 for name in group}


class MergedWeights:
    """The model's weights with the adapter, in the dtypes of the base; sums are fp32 and rounded once.

    `names`: of all weights of the model.
    """

    def __init__(self, model: nn.Module, base: BaseWeights, adapter: Adapter | None) -> None:
        self.names: tuple[str, ...] = tuple(model.state_dict())
        self._base, self._adapter = base, adapter
        self._ties = ties_of(model)

    def check(self, folder: Path) -> None:
        """Raise `Refused` if neither the base, in `folder`, nor the adapter has some weight."""
        missing = [name for name in self.names if not (self._base.has(name) or self.is_changed(name))]
        if missing:
            raise Refused(
                f"{folder} must have all weights of the model, but lacks {missing[0]}; name the checkpoint of a "
                "whole language model"
            )

    def is_changed(self, name: str) -> bool:
        """Return whether the adapter has a part in a weight."""
        return self._adapter is not None and self._adapter.changes(name)

    def dtype(self, name: str) -> torch.dtype:
        """Return a weight's dtype: that of the base, for one that only the adapter has that of the others."""
        return self._base.outline(name if self._base.has(name) else next(filter(self._base.has, self.names))).dtype

    def read(self, name: str) -> torch.Tensor:
        """Compute a weight."""
        if self._adapter is None or not self._adapter.changes(name):
            return self._base.read(name)
        return self._adapter.merged(name, self._base.read).to(self.dtype(name))

    def are_untied(self) -> bool:
        """Return whether the adapter makes tied weights differ, such as those of embeddings and head."""
        return any(self._differ(names) for names in set(self._ties.values()))

    def _differ(self, names: Sequence[str]) -> bool:
        if not any(self.is_changed(name) for name in names):
            return False
        first = self.read(names[0])
        return not all(torch.equal(first, self.read(name)) for name in names[1:])
