"""The preset for dense Qwen3: an embedding layer, the decoder layers and a head."""
# The attention implementation is a private attribute of transformers' configs, and its functions are partly typed:
# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Protocol, cast

import torch
from torch import Tensor, nn
from transformers import masking_utils
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.qwen3.modeling_qwen3 import Qwen3ForCausalLM, Qwen3Model

from rp_presets.arguments import refuse_unserved
from rp_presets.carry import Carry


class _Config(Protocol):
    """The fields of `Qwen3Config` that the layers read."""

    num_hidden_layers: int
    layer_types: list[str]
    _attn_implementation: str


def to_row(model: nn.Module) -> nn.Sequential | None:
    """A row of layers that holds the model's own modules; None for another class or an overridden forward.

    Raises:
        ValueError: the model has a setting that the row does not support.
    """
    if not isinstance(model, Qwen3ForCausalLM) or type(model).forward is not Qwen3ForCausalLM.forward:
        return None
    _refuse_settings(model)
    row = nn.Sequential(Embed(model.model), *_blocks(model.model), Head(model.model.norm, model.lm_head))
    # Set only the new modules: the model's own may have different training flags.
    for module in (row, *row):
        module.training = model.training
    return row


class Embed(nn.Module):
    """The first layer: token embeddings, and the rotary tables and masks that the decoder layers share.

    Shapes:
        input_ids: (batch, positions) int64; or instead inputs_embeds: (batch, positions, hidden).
        attention_mask: (batch, positions), zero for padding; or a mask of four dimensions, used as it is; or a
            dict of such masks by layer type.
        position_ids: (batch, positions) or (1, positions) int64; from 0 on if not given.
    """

    def __init__(self, model: Qwen3Model) -> None:
        super().__init__()
        self.config = cast(_Config, model.config)
        self.embed_tokens = model.embed_tokens
        self.rotary_emb = model.rotary_emb

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | dict[str, Tensor | None] | None = None,
        position_ids: Tensor | None = None,
        past_key_values: None = None,
        inputs_embeds: Tensor | None = None,
        labels: None = None,
        use_cache: bool | None = None,
        logits_to_keep: int = 0,
        **others: object,
    ) -> Carry:
        """Run with the arguments of `Qwen3ForCausalLM.forward`, in the same order.

        Raises:
            ValueError: not exactly one of input_ids and inputs_embeds was given, or an argument requests a cache,
                a loss, part of the logits, or outputs other than logits.
            TypeError: an argument is unknown.
        """
        refuse_unserved(
            {
                "past_key_values": past_key_values,
                "labels": labels,
                "use_cache": use_cache,
                "logits_to_keep": logits_to_keep,
                **others,
            }
        )
        hidden_states = self._embedded(input_ids, inputs_embeds)
        return Carry(
            hidden_states,
            self._rotary_tables(hidden_states, position_ids),
            position_ids,
            self._masks(hidden_states, attention_mask, position_ids),
        )

    def _embedded(self, input_ids: Tensor | None, inputs_embeds: Tensor | None) -> Tensor:
        if input_ids is not None and inputs_embeds is None:
            return self.embed_tokens(input_ids)
        if inputs_embeds is not None and input_ids is None:
            return inputs_embeds
        found = "neither" if input_ids is None else "both"
        raise ValueError(f"forward takes exactly one of input_ids and inputs_embeds, but got {found}; give one")

    def _rotary_tables(self, hidden_states: Tensor, position_ids: Tensor | None) -> tuple[Tensor, Tensor]:
        if position_ids is None:
            position_ids = torch.arange(hidden_states.shape[1], device=hidden_states.device)[None]
        return _stateless(self.rotary_emb)(hidden_states, position_ids)

    def _masks(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | dict[str, Tensor | None] | None,
        position_ids: Tensor | None,
    ) -> dict[str, Tensor | None]:
        if isinstance(attention_mask, dict):
            return attention_mask
        return {
            layer_type: _mask_of(layer_type)(
                config=self.config,
                inputs_embeds=hidden_states,
                attention_mask=attention_mask,
                past_key_values=None,
                position_ids=position_ids,
            )
            for layer_type in sorted(set(self.config.layer_types[: self.config.num_hidden_layers]))
        }

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Embed:
        # Rotary frequencies must stay in fp32 when the row is cast to 16 bits: rounding changes the angles.
        before = dict(self.rotary_emb.named_buffers())
        super()._apply(fn, recurse)
        for name, after in list(self.rotary_emb.named_buffers()):
            if after.dtype != before[name].dtype:
                setattr(self.rotary_emb, name, before[name].to(after.device))
        return self


class Block(nn.Module):
    """One decoder layer, with the mask of its layer type ("full_attention" or "sliding_attention")."""

    def __init__(self, layer: nn.Module, layer_type: str) -> None:
        super().__init__()
        self.layer = layer
        self.layer_type = layer_type

    def forward(self, carry: Carry) -> Carry:
        """Run the layer on the hidden states; pass the other tensors on unchanged."""
        hidden_states: Tensor = self.layer(
            carry.hidden_states,
            attention_mask=carry.masks[self.layer_type],
            position_ids=carry.position_ids,
            position_embeddings=carry.position_embeddings,
        )
        return carry.advance(hidden_states)


class Head(nn.Module):
    """The last layer: the final norm, then the logits of all positions."""

    def __init__(self, norm: nn.Module, lm_head: nn.Module) -> None:
        super().__init__()
        self.norm = norm
        self.lm_head = lm_head

    def forward(self, carry: Carry) -> CausalLMOutputWithPast:
        """Return the model's output class with only the logits set: (batch, positions, vocabulary)."""
        return CausalLMOutputWithPast(logits=self.lm_head(self.norm(carry.hidden_states)))


def _blocks(model: Qwen3Model) -> list[Block]:
    config = cast(_Config, model.config)
    used = list(model.layers)[: config.num_hidden_layers]
    return [Block(layer, config.layer_types[index]) for index, layer in enumerate(used)]


def _mask_of(layer_type: str) -> Callable[..., Tensor | None]:
    makers: Mapping[str, Callable[..., Tensor | None]] = {
        "full_attention": masking_utils.create_causal_mask,
        "sliding_attention": masking_utils.create_sliding_window_causal_mask,
    }
    return makers[layer_type]


def _stateless(rotary: nn.Module) -> nn.Module:
    """The rotary module, or a temporary copy if its forward writes to it.

    The dynamic and longrope kinds store the longest sequence seen. Layers run in several threads, so each call
    starts from the model's own state.
    """
    kind: str = rotary.rope_type  # pyright: ignore[reportAssignmentType] - a plain attribute of a module
    if "dynamic" not in kind and kind != "longrope":
        return rotary
    return copy.deepcopy(rotary, {id(rotary.config): rotary.config})


def _refuse_settings(model: Qwen3ForCausalLM) -> None:
    config = cast(_Config, model.config)
    if any(getattr(module, "gradient_checkpointing", False) for module in model.modules()):
        raise ValueError(
            "gradient checkpointing must be off, but is on: the engine that runs the layers recomputes them; "
            "call model.gradient_checkpointing_disable() first"
        )
    if config._attn_implementation == "flex_attention":
        raise ValueError(
            "the attention implementation must be one whose mask is a tensor, but is 'flex_attention'; "
            "call model.set_attn_implementation('sdpa') first"
        )
    if getattr(config, "is_causal", None) is False:
        raise ValueError(
            "config.is_causal must not be False, but is: a row of layers supports causal attention only"
        )
