"""The names of a model's tensors, in the model and in the files that `from_pretrained` reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import rp_presets
import torch
from torch import nn

from roundpipe.models.base import RoundPipeBase
from roundpipe.models.current import as_it_is
from roundpipe.packing.weight import PackedWeight, expand

Kind = Literal["model", "adapter"]


class Conversion(Protocol):
    """A conversion of tensors for saving: see `rp_presets.Conversion`."""

    @property
    def sources(self) -> Sequence[str]:
        """Their names in `Layout.tensors`."""
        ...

    @property
    def results(self) -> Mapping[str, torch.Tensor]:
        """The converted tensors by saved name, on the meta device."""
        ...

    def convert(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the tensors to save."""
        ...


@dataclass(frozen=True, slots=True)
class Layout:
    """How a model is saved.

    `tensors`: its parameters and buffers by their names in its state dict, each once; for a packed weight, its
    codes and scales. `computed`: the other values of the state dict. `exported`: maps names in the files to names
    of a whole model's weights. `dropped`: maps the further names of tied tensors to the name that is saved.
    """

    kind: Kind
    module: nn.Module
    tensors: Mapping[str, torch.Tensor]
    computed: Mapping[str, Any]
    exported: Mapping[str, str] = field(default_factory=dict[str, str])
    conversions: tuple[Conversion, ...] = ()
    dropped: Mapping[str, str] = field(default_factory=dict[str, str])

    @property
    def is_of_transformers(self) -> bool:
        """Whether the model has configuration files beside its weights."""
        return self.kind == "model" and rp_presets.saves_itself(self.module)

    def write_configuration(self, folder: Path) -> None:
        """Write the configuration files beside the weights."""
        if self.is_of_transformers:
            rp_presets.write_configuration(self.module, folder)


def is_adapted(module: nn.Module) -> bool:
    """Return whether the module's own `save_pretrained` saves adapters only."""
    is_peft = isinstance(getattr(module, "peft_config", None), Mapping) and hasattr(module, "base_model")
    return is_peft or bool(getattr(module, "_hf_peft_config_loaded", False))


def layout_of(model: RoundPipeBase) -> Layout:
    """Return the layout in which this model is saved."""
    module = model.named_model
    with as_it_is():
        every: dict[str, Any] = dict(module.state_dict(keep_vars=True))
    own = {id(tensor) for tensor in (*module.parameters(), *module.buffers())}
    held = {name: value for name, value in every.items() if id(value) in own}
    computed = {name: value for name, value in every.items() if id(value) not in own}
    first: dict[int, str] = {}
    for name, tensor in held.items():
        first.setdefault(id(tensor), name)
    tensors = {inner: part for name in first.values() for inner, part in _parts(name, held[name]).items()}
    dropped = {name: first[id(tensor)] for name, tensor in held.items() if first[id(tensor)] != name}
    if is_adapted(module):
        return Layout("adapter", module, tensors, computed, dropped=dropped)
    if not rp_presets.saves_itself(module):
        return Layout("model", module, tensors, computed, {name: name for name in tensors}, dropped=dropped)
    packed = {name: one for name, one in held.items() if isinstance(one, PackedWeight)}
    saved = rp_presets.saved_layout(module, {name: _outline(tensor) for name, tensor in held.items()})
    exported = {name: first[id(held[inner])] for name, inner in saved.names.items() if inner not in packed}
    conversions = (
        *(_Expanded(packed, one.sources, one.results, one) for one in saved.conversions),
        *(
            _Expanded(packed, (inner,), {name: torch.empty_like(_outline(packed[inner]), device="meta")})
            for name, inner in saved.names.items()
            if inner in packed
        ),
    )
    return Layout("model", module, tensors, computed, exported, conversions, dropped)


def _parts(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    if isinstance(tensor, PackedWeight):
        return {f"{name}.codes": tensor.codes, f"{name}.scales": tensor.scales}
    return {name: tensor}


def _outline(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor, or for a packed weight one of its shape and dtype without memory of that size."""
    if isinstance(tensor, PackedWeight):
        return torch.zeros(1, dtype=tensor.dtype).expand(tensor.shape)
    return tensor.detach()


class _Expanded:
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
            part for name in names for part in (_parts(name, packed[name]) if name in packed else (name,))
        )
        self.results = results

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
