"""`ModelWeights`: what a server takes of a model, layer by layer, by the names that transformers saves."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import groupby

import torch
from rp_packing import PackedWeight
from rp_presets import Conversion, saved_layout, saves_itself
from torch import nn

from rp_serving.server import Outline
from rp_serving.weights.adapters import Held, base_of, held_by, merged, whole


@dataclass(frozen=True, slots=True)
class SentTensors:
    """Tensors that are sent together. `read`: returns their values at that moment, in the order of `outlines`."""

    outlines: tuple[Outline, ...]
    read: Callable[[], list[torch.Tensor]]

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""
        return sum(one.dtype.itemsize * torch.Size(one.shape).numel() for one in self.outlines)


class ModelWeights:
    """The weights of a model of transformers, with or without adapters of PEFT.

    They are sent layer by layer: each tied weight once, forms converted as `save_pretrained` does, packed weights
    expanded, adapters merged into copies in fp32 and rounded once. No step may write while they are read.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
    >>> model = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=2, tie_word_embeddings=True))
    >>> weights = ModelWeights(model)
    >>> [(piece.outlines[0].name, len(piece.outlines)) for piece in weights.pieces]
    [('model.embed_tokens.weight', 1), ('model.layers.0.self_attn.q_proj.weight', 9), \
('model.layers.1.self_attn.q_proj.weight', 9), ('model.norm.weight', 1)]

    Raises `ValueError` for other models, and for adapters on a weight that is tied to another.
    """

    def __init__(self, model: nn.Module) -> None:
        base = base_of(model)
        if not saves_itself(base):
            raise ValueError(
                f"a server takes the weights of a model of transformers, but this is a {type(base).__name__}"
            )
        self._base = base
        self._held: dict[str, Held] = {}
        self._pieces: tuple[SentTensors, ...] = ()
        self._look()

    @property
    def pieces(self) -> tuple[SentTensors, ...]:
        """What is sent together, in order, of the tensors that the model has now."""
        self._look()
        return self._pieces

    def _look(self) -> None:
        """Find the model's tensors: ``load_state_dict(assign=True)`` may have put others in their place."""
        held = dict(held_by(self._base))
        if _are_same(held, self._held):
            return
        _refuse_untied(held)
        layout = saved_layout(self._base, {name: _outline(one.tensor) for name, one in held.items()})
        self._held = held
        layers = groupby(layout.names.items(), key=lambda pair: _layer_of(pair[0]))
        plain = [self._piece(dict(names)) for _, names in layers]
        self._pieces = (*plain, *map(self._converted, layout.conversions))

    @property
    def nbytes(self) -> int:
        """The size of all in bytes."""
        return sum(piece.nbytes for piece in self.pieces)

    @property
    def vocabulary(self) -> int | None:
        """The entries of the embedding, if it has one."""
        self._look()
        found = [held.tensor.shape[0] for name, held in self._held.items() if name.endswith("embed_tokens.weight")]
        return found[0] if found else None

    def _piece(self, names: Mapping[str, str]) -> SentTensors:
        outlines = [_described(saved, self._held[inner].tensor) for saved, inner in names.items()]
        return SentTensors(tuple(outlines), partial(self._read, tuple(names.values())))

    def _converted(self, conversion: Conversion) -> SentTensors:
        def read() -> list[torch.Tensor]:
            made = conversion.convert(dict(zip(conversion.sources, self._read(conversion.sources), strict=True)))
            return [made[name] for name in conversion.results]

        return SentTensors(tuple(_described(name, meta) for name, meta in conversion.results.items()), read)

    def _read(self, names: Iterable[str]) -> list[torch.Tensor]:
        made: dict[int, dict[str, torch.Tensor]] = {}
        return [self._value(self._held[name], made) for name in names]

    def _value(self, held: Held, made: dict[int, dict[str, torch.Tensor]]) -> torch.Tensor:
        """Return a weight; what was merged with it is in `made`, by module."""
        if held.unit is None:
            return whole(held.tensor)
        key = id(held.unit)
        if key not in made:
            made[key] = merged(held.unit)
        return made[key].pop(held.own).to(held.tensor.dtype)


def _are_same(one: Mapping[str, Held], other: Mapping[str, Held]) -> bool:
    return one.keys() == other.keys() and all(
        held.tensor is other[name].tensor and held.unit is other[name].unit for name, held in one.items()
    )


def _refuse_untied(all_held: Mapping[str, Held]) -> None:
    names: defaultdict[int, list[str]] = defaultdict(list)
    for name, held in all_held.items():
        names[id(held.tensor)].append(name)
    for tied in names.values():
        if len(tied) > 1 and any(all_held[name].unit is not None for name in tied):
            raise ValueError(
                f"{tied[0]} is tied to {tied[1]}, but adapters make them differ, which a server with tied weights "
                "cannot hold; leave both out of target_modules and modules_to_save"
            )


def _outline(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor, or for a packed weight one of its shape and dtype without memory of that size."""
    if isinstance(tensor, PackedWeight):
        return torch.zeros(1, dtype=tensor.dtype).expand(tensor.shape)
    return tensor.detach()


def _described(name: str, tensor: torch.Tensor) -> Outline:
    return Outline(name, tensor.dtype, tuple(tensor.shape))


def _layer_of(name: str) -> str:
    """Return the name up to its last number, such as ``model.layers.3``; else the module's."""
    match = re.match(r"(.*\.\d+)\.", name)
    return match[1] if match else name.rpartition(".")[0]
