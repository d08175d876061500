"""Tiny models that read images, of random weights, with their processors; pictures of a few pixels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

FAMILIES = ("qwen3-vl", "gemma3", "llava")
VOCABULARY = 160
_TEXT: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
_TOWER: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "patch_size": 4,
    "image_size": 8,
}
# What stands for an image in a rendered chat, and the other words that models of this family have of their own.
MARKS = {
    "qwen3-vl": "<|vision_start|><|image_pad|><|vision_end|>",
    "gemma3": "<start_of_image>",
    "llava": "<image>",
    "glm4v": "<|begin_of_image|><|image|><|end_of_image|>",
    "llava-onevision": "<image>",
}
# The same of a video.
VIDEO_MARKS = {
    "qwen3-vl": "<|vision_start|><|video_pad|><|vision_end|>",
    "glm4v": "<|begin_of_video|><|video|><|end_of_video|>",
    "llava-onevision": "<video>",
}
_PLACEHOLDERS = {
    "glm4v": "<|image|>",
    "qwen3-vl": "<|image_pad|>",
    "gemma3": "<image_soft_token>",
    "llava": "<image>",
    "llava-onevision": "<image>",
}
_SPECIAL = ["<|end|>", "<|im_start|>", "<|im_end|>", "<pad>"]
_SPECIAL += ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
_SPECIAL += ["<|image|>", "<|video|>", "<|begin_of_image|>", "<|end_of_image|>"]
_SPECIAL += ["<|begin_of_video|>", "<|end_of_video|>"]
_SPECIAL += ["<start_of_image>", "<end_of_image>", "<image_soft_token>", "<image>", "<video>"]


def placeholder(family: str) -> int:
    """The token that each feature of an image replaces."""
    return _SPECIAL.index(_PLACEHOLDERS[family])


def template(family: str) -> str:
    """Each message between marks, what the assistant says marked for training."""
    said = (
        "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
        "{% for part in message['content'] %}{% if part['type'] == 'image' %}"
        + MARKS[family]
        + "{% elif part['type'] == 'video' %}"
        + VIDEO_MARKS.get(family, "")
        + "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n"
    )
    return (
        "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
        "{% if message['role'] == 'assistant' %}{% generation %}" + said + "{% endgeneration %}"
        "{% else %}" + said + "{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )


def tokenizer(family: str) -> PreTrainedTokenizerFast:
    """Bytes, and the words that stand for images."""
    letters = sorted({*pre_tokenizers.ByteLevel.alphabet()})
    letters = [one for one in letters if one.isascii()] + ["Ġ", "Ċ"]
    words = {word: number for number, word in enumerate([*_SPECIAL, *letters])}
    made = Tokenizer(models.BPE(words, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(word, special=True) for word in _SPECIAL])
    named = {"gemma3": {"boi": "<start_of_image>", "eoi": "<end_of_image>", "image": "<image_soft_token>"}}
    extra = {f"{name}_token": word for name, word in named.get(family, {}).items()}
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        eos_token="<|end|>",
        pad_token="<pad>",
        **({"extra_special_tokens": extra} if extra else {}),
    )


def processor(family: str) -> Any:
    """The processor of a family, for images of 8 by 8 pixels; those of Qwen3-VL may have up to 16 by 16."""
    import transformers as hf

    made, chat = tokenizer(family), template(family)
    square = {"height": 8, "width": 8}
    if family == "qwen3-vl":
        area = {"shortest_edge": 64, "longest_edge": 256}
        sizes = {"patch_size": 4, "merge_size": 2, "temporal_patch_size": 2, "size": area}
        images, videos = hf.Qwen2VLImageProcessor(**sizes), hf.Qwen3VLVideoProcessor(**sizes)
        return hf.Qwen3VLProcessor(images, made, videos, chat_template=chat)
    if family == "glm4v":
        # Its bound of pixels is of all frames together.
        area = {"shortest_edge": 64, "longest_edge": 2048}
        sizes = {"patch_size": 4, "merge_size": 2, "temporal_patch_size": 2, "size": area}
        images, videos = hf.Glm4vImageProcessor(**sizes), hf.Glm4vVideoProcessor(**sizes)
        return hf.Glm4vProcessor(images, made, videos, chat_template=chat)
    if family == "llava-onevision":
        return hf.LlavaOnevisionProcessor(
            hf.LlavaOnevisionImageProcessor(size=square, image_grid_pinpoints=[[8, 8], [8, 16]]),
            made,
            hf.LlavaOnevisionVideoProcessor(size=square),
            num_image_tokens=4,
            vision_feature_select_strategy="full",
            chat_template=chat,
        )
    if family == "gemma3":
        return hf.Gemma3Processor(
            hf.Gemma3ImageProcessor(size=square), made, chat_template=chat, image_seq_length=4
        )
    return hf.LlavaProcessor(
        hf.CLIPImageProcessor(size={"shortest_edge": 8}, crop_size=square),
        made,
        patch_size=4,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=chat,
    )


def config(family: str) -> Any:
    """The config of a tiny model of a family."""
    import transformers as hf

    token = placeholder(family)
    if family == "qwen3-vl":
        rotary = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
        tower = {
            **{"depth": 2, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "patch_size": 4},
            **{"out_hidden_size": 32, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
        }
        words = {f"vision_{side}_token_id": _SPECIAL.index(f"<|vision_{side}|>") for side in ("start", "end")}
        return hf.Qwen3VLConfig(
            text_config={**_TEXT, "rope_parameters": rotary},
            vision_config=tower,
            image_token_id=token,
            video_token_id=_SPECIAL.index("<|video_pad|>"),
            **words,
        )
    if family == "glm4v":
        rotary = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
        return hf.Glm4vConfig(
            text_config={**_TEXT, "rope_parameters": rotary},
            vision_config={
                **{"depth": 2, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "patch_size": 4},
                **{"out_hidden_size": 32, "image_size": 16},
            },
            image_token_id=token,
            video_token_id=_SPECIAL.index("<|video|>"),
        )
    if family == "llava-onevision":
        return hf.LlavaOnevisionConfig(
            text_config={"model_type": "llama", **_TEXT},
            vision_config={"model_type": "siglip_vision_model", **_TOWER, "vision_use_head": False},
            image_token_index=token,
            video_token_index=_SPECIAL.index("<video>"),
            image_grid_pinpoints=[[8, 8], [8, 16]],
            vision_feature_layer=-1,
        )
    if family == "gemma3":
        return hf.Gemma3Config(
            text_config={**_TEXT, "sliding_window": 16, "query_pre_attn_scalar": 8},
            vision_config=_TOWER,
            mm_tokens_per_image=4,
            image_token_id=token,
            boi_token_index=_SPECIAL.index("<start_of_image>"),
            eoi_token_index=_SPECIAL.index("<end_of_image>"),
        )
    return hf.LlavaConfig(
        text_config={"model_type": "llama", **_TEXT},
        vision_config={"model_type": "clip_vision_model", "projection_dim": 16, **_TOWER},
        image_token_index=token,
        vision_feature_layer=-2,
        image_seq_length=4,
    )


def model(family: str, seed: int = 0) -> Any:
    """A tiny model of a family, whose random weights are not too small for images to matter."""
    from transformers import AutoModelForImageTextToText

    torch.manual_seed(seed)
    made = AutoModelForImageTextToText.from_config(config(family), dtype=torch.float32)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return made


def make_model(folder: Path, family: str) -> Path:
    """A folder with a tiny model and its processor."""
    model(family).save_pretrained(folder)
    processor(family).save_pretrained(folder)
    return folder


def picture(number: int, width: int = 9, height: int = 7) -> Any:
    """An image of random pixels."""
    from PIL import Image

    generator = torch.Generator().manual_seed(number)
    pixels = torch.randint(0, 256, (height * width * 3,), generator=generator, dtype=torch.uint8)
    return Image.frombytes("RGB", (width, height), bytes(pixels.tolist()))
