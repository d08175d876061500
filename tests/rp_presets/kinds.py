"""Tiny models beyond causal language models: heads, encoders, encoder-decoders and vision-language models."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import transformers
from comparison import Inputs, labels_of, padding, tokens
from families import causal_families, randomized, tiny_config
from torch import Tensor, nn


def build(class_name: str, settings: Mapping[str, Any] | None = None) -> nn.Module:
    """A tiny model of a class of transformers, in eval mode."""
    model_class = getattr(transformers, class_name)
    torch.manual_seed(0)
    return randomized(model_class(tiny_config(model_class.config_class, settings or {})).float()).eval()


def head_of(family: str, class_name: str) -> nn.Module:
    """A model with another head, with the config of a causal family."""
    torch.manual_seed(0)
    config = causal_families()[family].config(pad_token_id=3)
    return randomized(getattr(transformers, class_name)(config).float()).eval()


def pixels(channels: int = 3, size: int = 32, count: int = 2) -> Tensor:
    return torch.randn(count, channels, size, size, generator=torch.Generator().manual_seed(2))


def classified(labels: Tensor) -> dict[str, Inputs]:
    ids = tokens()
    padded = {"input_ids": ids.masked_fill(padding("right") == 0, 3), "attention_mask": padding("right")}
    return {"labels": {"input_ids": ids, "labels": labels}, "padded": {**padded, "labels": labels}}


ONE = torch.tensor([1, 0])
EACH = (tokens() % 2).masked_fill(padding("right") == 0, -100)
MASKED = labels_of(tokens())
SOUND = torch.randn(2, 16, 64, generator=torch.Generator().manual_seed(2))
WHISPER = {"num_mel_bins": 16, "max_source_positions": 32, "vocab_size": 96, "decoder_start_token_id": 1}
TWO_LISTS: dict[str, Inputs] = {
    "labels": {"input_ids": tokens(), "labels": labels_of(tokens())},
    "padded": {"input_ids": tokens(), "attention_mask": padding("right"), "labels": labels_of(tokens())},
    "both": {
        "input_ids": tokens(),
        "decoder_input_ids": tokens()[:, :5],
        "decoder_attention_mask": padding("left")[:, 3:],
    },
}


def image_tokens(model: nn.Module, count: int) -> Tensor:
    """Tokens of which the second to the last but one of each row stand for an image."""
    config: Any = model.config
    found = torch.full((2, count + 2), 5)
    found[:, 1:-1] = getattr(config, "image_token_id", None) or config.image_token_index
    return found


def llava() -> tuple[nn.Module, dict[str, Inputs]]:
    model = build(
        "LlavaForConditionalGeneration",
        {"image_token_index": 90, "vision_config": {"projection_dim": 64}, "vision_feature_layer": -1},
    )
    ids = image_tokens(model, 16)
    return model, {"images": {"input_ids": ids, "pixel_values": pixels(), "labels": labels_of(ids).clamp(max=80)}}


def gemma3() -> tuple[nn.Module, dict[str, Inputs]]:
    model = causal_families()["Gemma3ForConditionalGeneration"].build(mm_tokens_per_image=4)
    ids = image_tokens(model, 4)
    inputs = {"input_ids": ids, "pixel_values": pixels(), "token_type_ids": (ids != 5).long()}
    return model, {"images": {**inputs, "labels": ids.clamp(max=80)}}


# Arguments of the calls by which models are observed that take more than one kind of input.
OBSERVED_WITH = {
    "LLaVA": ("input_ids", "pixel_values"),
    "Gemma 3": ("input_ids", "pixel_values", "token_type_ids"),
}

KINDS: dict[str, Callable[[], tuple[nn.Module, dict[str, Inputs]]]] = {
    **{
        f"{family}, {class_name}": lambda family=family, class_name=class_name, labels=labels: (
            head_of(family, class_name),
            classified(labels),
        )
        for family, class_name, labels in (
            ("LlamaForCausalLM", "LlamaForSequenceClassification", ONE),
            ("LlamaForCausalLM", "LlamaForTokenClassification", EACH),
            ("GPT2LMHeadModel", "GPT2ForSequenceClassification", ONE),
            ("GPT2LMHeadModel", "GPT2ForTokenClassification", EACH),
            ("Qwen3ForCausalLM", "Qwen3ForSequenceClassification", ONE),
            ("MixtralForCausalLM", "MixtralForSequenceClassification", ONE),
            ("Gemma2ForCausalLM", "Gemma2ForSequenceClassification", ONE),
            ("RobertaForCausalLM", "RobertaForSequenceClassification", ONE),
        )
    },
    "Bert, sequences": lambda: (build("BertForSequenceClassification"), classified(ONE)),
    "Bert, tokens": lambda: (build("BertForTokenClassification"), classified(EACH)),
    "Bert, masked": lambda: (build("BertForMaskedLM"), classified(MASKED)),
    "DistilBert": lambda: (
        build("DistilBertForSequenceClassification", {"dim": 64, "n_heads": 4, "hidden_dim": 48}),
        classified(ONE),
    ),
    "ModernBert": lambda: (build("ModernBertForSequenceClassification"), classified(ONE)),
    "ViT": lambda: (build("ViTForImageClassification"), {"labels": {"pixel_values": pixels(), "labels": ONE}}),
    "CLIP, text": lambda: (
        build("CLIPTextModel"),
        {"tokens": {"input_ids": tokens()}, "padded": {"input_ids": tokens(), "attention_mask": padding("right")}},
    ),
    "CLIP, vision": lambda: (build("CLIPVisionModel"), {"pixels": {"pixel_values": pixels()}}),
    "CLIP": lambda: (
        build("CLIPModel", {"projection_dim": 32}),
        {"both": {"input_ids": tokens(), "pixel_values": pixels(), "return_loss": True}},
    ),
    "Whisper": lambda: (
        build("WhisperForConditionalGeneration", WHISPER),
        {"labels": {"input_features": SOUND, "labels": labels_of(tokens())}},
    ),
    "T5": lambda: (build("T5ForConditionalGeneration", {"decoder_start_token_id": 0}), TWO_LISTS),
    "BART": lambda: (build("BartForConditionalGeneration"), TWO_LISTS),
    "BART, sequences": lambda: (
        build("BartForSequenceClassification"),
        {"labels": {"input_ids": torch.cat([tokens(), torch.full((2, 1), 2)], 1), "labels": ONE}},
    ),
    "LLaVA": llava,
    "Gemma 3": gemma3,
}
