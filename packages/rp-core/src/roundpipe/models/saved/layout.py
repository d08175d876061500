"""The names under which the user's own model is saved: those that `from_pretrained` reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import rp_checkpoint
import torch
from rp_checkpoint import CheckpointLayout
from rp_checkpoint.model.layout import divided_state
from rp_packing import PackedWeight
from rp_stand_in import as_it_is
from torch import nn

from roundpipe.models.presets import Presets, presets_that_save
from roundpipe.models.saved.expanded import ExpandedWeights, outline


def layout_of(module: nn.Module) -> CheckpointLayout:
    """Return the layout in which the user's own model is saved."""
    with as_it_is():
        plain = rp_checkpoint.layout_of(module)
        if _saves_adapters(module):
            return replace(plain, kind="adapter", exported={}, write_adapters=partial(_write_adapters, module))
        saving = presets_that_save(module)
        return plain if saving is None else _as_presets_save(module, plain, saving)


def _saves_adapters(module: nn.Module) -> bool:
    """Return whether the module's own `save_pretrained` saves adapters only."""
    is_peft = isinstance(getattr(module, "peft_config", None), Mapping) and hasattr(module, "base_model")
    return is_peft or bool(getattr(module, "_hf_peft_config_loaded", False))


def _write_adapters(module: Any, folder: Path, adapters: Mapping[str, torch.Tensor]) -> None:
    module.save_pretrained(folder, state_dict=adapters)


def _as_presets_save(module: nn.Module, plain: CheckpointLayout, saving: Presets) -> CheckpointLayout:
    """Return the layout of `save_pretrained`, in which packed weights are expanded."""
    held, _ = divided_state(module)
    packed = {name: one for name, one in held.items() if isinstance(one, PackedWeight)}
    saved = saving.saved_layout(module, {name: outline(tensor) for name, tensor in held.items()})
    kept = {name: inner for name, inner in saved.names.items() if inner not in packed}
    expanded = {name: inner for name, inner in saved.names.items() if inner in packed}
    return replace(
        plain,
        exported={name: plain.dropped.get(inner, inner) for name, inner in kept.items()},
        conversions=(
            *(ExpandedWeights(packed, one.sources, one.results, one) for one in saved.conversions),
            *(ExpandedWeights.alone(packed, inner, name) for name, inner in expanded.items()),
        ),
        write_configuration=partial(saving.write_configuration, module),
    )
