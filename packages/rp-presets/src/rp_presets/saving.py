"""Find the names and tensors that `save_pretrained` writes for a model's weights, without writing them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Conversion:
    """Weights that are saved in another form, such as stacked experts that are saved one by one.

    `sources`: their names in the model. `results`: the saved tensors by saved name, on the meta device.
    """

    model: nn.Module
    sources: tuple[str, ...]
    results: Tensors

    def convert(self, tensors: Tensors) -> dict[str, torch.Tensor]:
        """Convert the tensors of `sources` to the tensors to save, by saved name."""
        return _reverted(self.model, {name: tensors[name] for name in self.sources})


@dataclass(frozen=True, slots=True)
class SavedLayout:
    """How a model is saved. `names`: the model's names of weights that are saved unchanged, by saved name."""

    names: Mapping[str, str]
    conversions: tuple[Conversion, ...] = ()


def saves_itself(model: nn.Module) -> bool:
    """Return whether the model is one of transformers, which saves a configuration with its weights."""
    return callable(getattr(model, "save_pretrained", None)) and hasattr(model, "_tied_weights_keys")


def saved_layout(model: nn.Module, tensors: Tensors) -> SavedLayout:
    """Return the names and forms in which `save_pretrained` saves these tensors of the model's state dict.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> config = LlamaConfig(
    ...     vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
    ...     tie_word_embeddings=True,
    ... )
    >>> model = LlamaForCausalLM(config)
    >>> layout = saved_layout(model, model.state_dict())
    >>> "lm_head.weight" in layout.names, layout.names["model.norm.weight"]
    (False, 'model.norm.weight')

    As in `save_pretrained`, tied weights have one name. No tensor is copied.

    Raises the errors of `save_pretrained` for weights that share memory without being tied.
    """
    from transformers.modeling_utils import remove_tied_weights_from_state_dict

    kept = {name: tensor for name, tensor in tensors.items() if name not in _ignored(model)}
    kept = dict(remove_tied_weights_from_state_dict(kept, model))  # type: ignore[arg-type]  # a PreTrainedModel
    metas = {name: torch.empty_like(tensor, device="meta") for name, tensor in kept.items()}
    results = _reverted(model, metas)
    own = {id(meta): name for name, meta in metas.items()}
    names = {saved: own[id(meta)] for saved, meta in results.items() if id(meta) in own}
    converted = [name for name in metas if name not in names.values()]
    return SavedLayout(names, _conversions(model, metas, converted, results))


def write_configuration(model: nn.Module, folder: Path) -> None:
    """Write everything that `save_pretrained` writes except weights: configurations, and code of custom models."""
    write: Any = model.save_pretrained
    write(folder, state_dict={})


def _ignored(model: nn.Module) -> set[str]:
    return set(getattr(model, "_keys_to_ignore_on_save", None) or ())


def _reverted(model: nn.Module, tensors: Tensors) -> dict[str, torch.Tensor]:
    from transformers.core_model_loading import revert_weight_conversion

    revert: Any = revert_weight_conversion
    return dict(revert(model, dict(tensors)))


def _conversions(
    model: nn.Module, metas: Tensors, converted: Sequence[str], results: Tensors
) -> tuple[Conversion, ...]:
    """Return the conversions, one per layer if their results are the same as those of one for all."""
    if not converted:
        return ()
    groups: dict[str, list[str]] = {}
    for name in converted:
        groups.setdefault(_layer_of(name), []).append(name)
    wanted = _described(_reverted(model, {name: metas[name] for name in converted}))
    conversions = [_conversion(model, metas, group) for group in groups.values()]
    together = [item for each in conversions for item in _described(each.results)]
    if sorted(together) != sorted(wanted):
        conversions = [_conversion(model, metas, list(converted))]
    assert {name for each in conversions for name in each.results} <= results.keys()
    return tuple(conversions)


def _conversion(model: nn.Module, metas: Tensors, names: Sequence[str]) -> Conversion:
    return Conversion(model, tuple(names), _reverted(model, {name: metas[name] for name in names}))


def _layer_of(name: str) -> str:
    """Return the name up to its last number, such as ``model.layers.3``."""
    match = re.match(r"(.*\.\d+)\.", name)
    return match.group(1) if match else ""


def _described(tensors: Tensors) -> list[tuple[str, tuple[int, ...]]]:
    return [(name, tuple(tensor.shape)) for name, tensor in tensors.items()]
