"""Write a model whose weights are computed one after another, as `save_pretrained` would write it."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch
from rp_adapters.parts import modules_of
from rp_checkpoint.files.tensor_file import TensorSource, sources_of_converted
from rp_checkpoint.files.writer import FileWriter
from rp_checkpoint.saving.shards import divided, file_name, index_of
from rp_presets import Conversion, saved_layout, write_configuration
from torch import nn

from rp_export.weights import MergedWeights

SHARD_BYTES = 4 << 30
# Memory to write with: two strides of the writer.
_BUFFER_BYTES = 1 << 26
# What belongs to a tokenizer, and what belongs to a model beside weights and its configuration.
_OF_TOKENIZER = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.model",
    "*.tiktoken",
    "chat_template*",
    "additional_chat_templates/*.jinja",
)
_GENERATION = "generation_config.json"
_OF_MODEL = (_GENERATION, "*processor_config.json")
_ENDS, _IS_DERIVED = "eos_token_id", "_from_model_config"
# Makes, of the tokens that end a model's text by its generation config, those that end it in truth.
TextEnds: TypeAlias = Callable[[int | Sequence[int] | None], Sequence[int] | None]


def write_model(folder: Path, model: nn.Module, weights: MergedWeights, shard_bytes: int = SHARD_BYTES) -> None:
    """Write configuration and weights. `model`: on the meta device.

    Weights that were tied and differ now are written both, and the configuration says that they are not tied.
    At most one piece of the model is in memory at a time, beside what it is made of. Raises `Refused`, `OSError`.
    """
    if weights.are_untied():
        model = _untied(model)
    bare = _outlined(model, weights)
    write_configuration(bare, folder)
    # With a state dict, so that tied weights are written once.
    layout = saved_layout(bare, dict(bare.state_dict(keep_vars=True)))
    sources = [
        TensorSource(saved, weights.dtype(own), tuple(bare.state_dict()[own].shape), partial(weights.read, own))
        for saved, own in layout.names.items()
    ]
    for conversion in layout.conversions:
        sources += sources_of_converted(conversion.results, partial(_converted, conversion, weights))
    _write(folder, divided(sorted(sources, key=lambda one: one.name), shard_bytes))


def copy_beside(folder: Path, model: Path, tokenizer: Path | None) -> None:
    """Copy what belongs to the model and its tokenizer beside weights and configuration."""
    _copy(folder, model, _OF_MODEL)
    if tokenizer is not None:
        _copy(folder, tokenizer, _OF_TOKENIZER)


def write_ends(folder: Path, ends: TextEnds) -> tuple[int, ...]:
    """Let the generation config in a folder end text at these tokens, too; return those that it did not know."""
    file = folder / _GENERATION
    if not file.is_file():
        return ()
    config: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    known: int | list[int] | None = config.get(_ENDS)
    given = [known] if isinstance(known, int) else known or []
    new = tuple(one for one in ends(known) or () if one not in given)
    if new:
        # transformers 4 makes such a config anew from the model's, and would lose the ends.
        config.pop(_IS_DERIVED, None)
        file.write_text(json.dumps({**config, _ENDS: [*given, *new]}, indent=2) + "\n", encoding="utf-8")
    return new


def _copy(folder: Path, place: Path, patterns: Sequence[str]) -> None:
    for file in (one for pattern in patterns for one in sorted(place.glob(pattern))):
        target = folder / file.relative_to(place)
        target.parent.mkdir(exist_ok=True)
        shutil.copyfile(file, target)


def _untied(model: Any) -> nn.Module:
    config = copy.deepcopy(model.config)
    for each in {id(one): one for one in (config, config.get_text_config())}.values():
        each.tie_word_embeddings = False
    with torch.device("meta"):
        return type(model)(config)


def _outlined(model: nn.Module, weights: MergedWeights) -> nn.Module:
    """Return a copy whose weights are on the host, but take no memory, tied ones together."""
    bare = copy.deepcopy(model)
    made: dict[int, nn.Parameter] = {}
    for place, module in modules_of(bare):
        for own, one in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            dtype = weights.dtype(f"{place}.{own}" if place else own)
            made.setdefault(
                id(one), nn.Parameter(torch.zeros(1, dtype=dtype).expand(one.shape), requires_grad=False)
            )
            module.register_parameter(own, made[id(one)])
    return bare


def _converted(conversion: Conversion, weights: MergedWeights) -> dict[str, torch.Tensor]:
    return conversion.convert({name: weights.read(name) for name in conversion.sources})


def _write(folder: Path, shards: Sequence[Sequence[TensorSource]]) -> None:
    names = [file_name("model", index, len(shards)) for index in range(len(shards))]
    writer = FileWriter(folder, _BUFFER_BYTES)
    try:
        for name, shard in zip(names, shards, strict=True):
            writer.write(name, shard, {"format": "pt"})
    finally:
        writer.finish()
    if len(shards) > 1:
        contents: Mapping[str, Any] = dict(
            zip(names, ([(one.name, one.nbytes) for one in shard] for shard in shards), strict=True)
        )
        (folder / "model.safetensors.index.json").write_text(json.dumps(index_of(contents), indent=2) + "\n")
