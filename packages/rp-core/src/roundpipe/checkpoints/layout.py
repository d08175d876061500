"""The names of a model's tensors, in the model and in the files that `from_pretrained` reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import rp_presets
import torch
from rp_presets import Conversion
from torch import nn

from roundpipe.models.base import RoundPipeBase
from roundpipe.models.current import as_it_is

Kind = Literal["model", "adapter"]


@dataclass(frozen=True, slots=True)
class Layout:
    """How a model is saved.

    `tensors`: its parameters and buffers by their names in its state dict, each once. `computed`: what else the
    state dict has. `exported`: the name of each weight of a whole model by its name in the files. `dropped`:
    further names of tied tensors, with the one that counts.
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
        """Whether the model has files beside its weights."""
        return self.kind == "model" and rp_presets.saves_itself(self.module)

    def write_configuration(self, folder: Path) -> None:
        """Write the files beside the weights."""
        if self.is_of_transformers:
            rp_presets.write_configuration(self.module, folder)


def is_adapted(module: nn.Module) -> bool:
    """Whether the module's own `save_pretrained` saves adapters only."""
    is_peft = isinstance(getattr(module, "peft_config", None), Mapping) and hasattr(module, "base_model")
    return is_peft or bool(getattr(module, "_hf_peft_config_loaded", False))


def layout_of(model: RoundPipeBase) -> Layout:
    """How this model is saved."""
    module = model.named_model
    with as_it_is():
        every: dict[str, Any] = dict(module.state_dict(keep_vars=True))
    own = {id(tensor) for tensor in (*module.parameters(), *module.buffers())}
    held = {name: value for name, value in every.items() if id(value) in own}
    computed = {name: value for name, value in every.items() if id(value) not in own}
    first: dict[int, str] = {}
    for name, tensor in held.items():
        first.setdefault(id(tensor), name)
    tensors = {name: held[name] for name in first.values()}
    dropped = {name: first[id(tensor)] for name, tensor in held.items() if first[id(tensor)] != name}
    if is_adapted(module):
        return Layout("adapter", module, tensors, computed, dropped=dropped)
    if not rp_presets.saves_itself(module):
        return Layout("model", module, tensors, computed, {name: name for name in tensors}, dropped=dropped)
    saved = rp_presets.saved_layout(module, {name: tensor.detach() for name, tensor in held.items()})
    exported = {name: first[id(held[inner])] for name, inner in saved.names.items()}
    conversions = saved.conversions
    return Layout("model", module, tensors, computed, exported, conversions, dropped)
