"""A tiny model with random weights of every class of transformers that reads images beside text, and its calls."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from comparison import Inputs, takes
from families import GEMMA4, HIDDEN, Families, merged
from families import OVERRIDES as CAUSAL
from rp_presets.images.belonging import BySample
from rp_presets.images.examples import Example, both, examples, video_examples
from torch import Tensor, nn

# Towers whose features have the size that the language model reads.
OUT: dict[str, Any] = {"vision_config": {"out_hidden_size": HIDDEN}}
DEEP = merged(OUT, {"vision_config": {"deepstack_visual_indexes": [0, 1]}})


def rotary(*sections: int, **others: Any) -> dict[str, Any]:
    """Rotary positions of time, height and width."""
    settings = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": list(sections), **others}
    return {"text_config": {"rope_parameters": settings}}


WINDOWS: dict[str, Any] = {"vision_config": {"window_size": 32, "fullatt_block_indexes": [1]}}
TILES: dict[str, Any] = {"image_grid_pinpoints": [[32, 64], [64, 32], [64, 64]]}
GEMMA4_VISION: dict[str, Any] = {
    "vision_config": {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 16,
        "intermediate_size": 48,
        "patch_size": 8,
        "pooling_kernel_size": 2,
        "position_embedding_size": 64,
    }
}
MINICPM: dict[str, Any] = {
    "image_token_id": 93,
    "video_token_id": 92,
    "insert_layer_id": 0,
    "vision_config": {"insert_layer_id": 0},
}
INDEXED = CAUSAL["Qwen4ExpForCausalLM"]

OVERRIDES: dict[str, dict[str, Any]] = {
    "AriaForConditionalGeneration": {"projector_patch_to_query_dict": {16: 4}},
    "CohereCompassForConditionalGeneration": {"text_config": CAUSAL["CohereCompassForCausalLM"], **OUT},
    "Cosmos3EdgeForConditionalGeneration": rotary(2, 3, 3),
    "Cosmos3OmniForConditionalGeneration": DEEP,
    "Exaone4_5_ForConditionalGeneration": {
        "text_config": {
            "model_type": "exaone4",
            "num_hidden_layers": 2,
            "hidden_size": 64,
            "intermediate_size": 48,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "vocab_size": 96,
            "layer_types": ["sliding_attention", "full_attention"],
            "sliding_window": 4,
        },
        "vision_config": {"window_size": 32, "fullatt_block_indexes": [1], "out_hidden_size": 64},
    },
    "Ernie4_5_VLMoeForConditionalGeneration": rotary(3, 3, 2),
    "Gemma3ForConditionalGeneration": {"mm_tokens_per_image": 4},
    "Gemma4ForConditionalGeneration": {"text_config": GEMMA4, **GEMMA4_VISION},
    "Gemma4UnifiedForConditionalGeneration": {"text_config": GEMMA4, **GEMMA4_VISION},
    "Glm46VForConditionalGeneration": merged(OUT, rotary(2, 3, 3)),
    "Glm4vForConditionalGeneration": merged(OUT, rotary(2, 3, 3)),
    "Glm4vMoeForConditionalGeneration": merged(OUT, rotary(2, 1, 1, partial_rotary_factor=0.5)),
    "GlmOcrForConditionalGeneration": merged(OUT, rotary(2, 3, 3)),
    "Glm5NextForConditionalGeneration": {"text_config": {"index_topk": 16, "qk_rope_head_dim": 0}, **OUT},
    "Granite4VisionForConditionalGeneration": {
        **TILES,
        "downsample_rate": "1/2",
        "deepstack_layer_map": [[-2, 0], [-1, 1]],
        "spatial_target_layers": [],
        "vision_config": {"hidden_size": 64},
    },
    "GraniteDoclingForConditionalGeneration": {**OUT, "vision_config": {"out_hidden_size": 64, "image_size": 64}},
    "HunYuanVLForConditionalGeneration": {
        **merged(rotary(2, 2, 2, 2, alpha=1000.0), {"text_config": {"head_dim": 16}}),
        "vision_config": {"out_hidden_size": 64, "text_hidden_size": 64, "max_image_size": 64},
    },
    "HyperCLOVAXVisionV2ForConditionalGeneration": WINDOWS,
    "Inkling2ForConditionalGeneration": {
        "text_config": CAUSAL["Inkling2ForCausalLM"],
        "vision_config": {"text_hidden_size": HIDDEN},
    },
    "DeepseekVLHybridForConditionalGeneration": {"high_res_vision_config": {"global_attn_indexes": [0]}},
    "JanusForConditionalGeneration": {
        "vision_config": {"projection_dim": HIDDEN},
        "vq_config": {"base_channels": 32, "embed_dim": 8, "num_embeddings": 16, "projection_dim": 16},
    },
    "Kimi_K25ForConditionalGeneration": {"projection_hidden_size": 64},
    "Llama4ForConditionalGeneration": {
        "vision_config": {
            "projector_input_dim": 64,
            "projector_output_dim": 64,
            "vision_output_dim": 64,
            "intermediate_size": 256,
        }
    },
    "LlavaNextForConditionalGeneration": TILES,
    "LlavaNextVideoForConditionalGeneration": TILES,
    "LlavaOnevisionForConditionalGeneration": TILES,
    "MiniCPMOcrForConditionalGeneration": MINICPM,
    "MiniCPMV4_6ForConditionalGeneration": MINICPM,
    "MiniCPMV4_7ForConditionalGeneration": MINICPM,
    "Molmo2ForConditionalGeneration": {
        "adapter_config": {"vision_feature_layer": [-1, -2]},
        "vision_config": {"image_size": [32, 32], "num_position_embeddings": 16},
    },
    "MuseGlimmerForConditionalGeneration": {"out_hidden_size": 256, "projector_hidden_size": 64},
    "MuseSparkForConditionalGeneration": {
        "out_hidden_size": 256,
        "projector_hidden_size": 64,
        "audio_config": {"out_hidden_size": 64},
    },
    "NemotronH_Omni_Reasoning_V3": {
        "video_temporal_patch_size": 2,
        "vision_config": {"video_temporal_patch_size": 2},
    },
    "Dots3NoteForConditionalGeneration": {
        "text_config": CAUSAL["Dots3NoteForCausalLM"],
        "vision_config": {"adapter_in_dim": 64, "adapter_out_dim": 64},
        "audio_config": {"adapter_input_size": 64, "adapter_output_size": 64},
    },
    "PaddleOCRVLForConditionalGeneration": rotary(2, 3, 3),
    "PaliGemmaForConditionalGeneration": {
        "projection_dim": HIDDEN,
        "vision_config": {"projection_dim": HIDDEN, "num_attention_heads": 4},
        "text_config": {"num_key_value_heads": 2, "num_attention_heads": 4, "head_dim": 16},
    },
    "Qwen2VLForConditionalGeneration": {**rotary(2, 3, 3), "vision_config": {"hidden_size": 64, "embed_dim": 64}},
    "Qwen2_5_VLForConditionalGeneration": merged(merged(OUT, WINDOWS), rotary(2, 3, 3)),
    "Qwen2_5OmniThinkerForConditionalGeneration": {
        **merged(merged(OUT, WINDOWS), rotary(2, 3, 3)),
        "vision_start_token_id": 93,
        "audio_start_token_id": 94,
    },
    "Qwen3_5ForConditionalGeneration": OUT,
    "Qwen3_5MoeForConditionalGeneration": OUT,
    "Qwen3VLForConditionalGeneration": DEEP,
    "Qwen3VLMoeForConditionalGeneration": DEEP,
    "Qwen3OmniMoeThinkerForConditionalGeneration": {
        **DEEP,
        "vision_start_token_id": 93,
        "audio_start_token_id": 94,
    },
    "Qwen4ExpForConditionalGeneration": {"text_config": INDEXED, **OUT},
    "Step3p7ForConditionalGeneration": {"text_config": {"sliding_window": 4}},
    "VipLlavaForConditionalGeneration": {"vision_feature_layer": [-1, -2]},
}


def seeing_families(without: Collection[str] = ()) -> Families:
    """Every class that reads images beside text, by name, in the order of transformers' mapping."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES as NAMES

    return Families((name for name in NAMES.values() if name not in without), OVERRIDES)


def example_of(model: nn.Module) -> Example:
    """The first samples with images that the model itself takes: images of up to three sizes."""
    with torch.no_grad():
        for example in examples(model):
            try:
                model(**example.arguments)
            except (RuntimeError, ValueError, IndexError, TypeError, AttributeError):
                continue
            return example
    raise ValueError(f"{type(model).__name__} takes no images")


def batch_of(model: nn.Module, owned: Sequence[Sequence[int]]) -> Inputs:
    """A batch with labels, padded. `owned`: for each sample, which of the example's images it has, in order."""
    example = example_of(model)
    features = features_of(example)
    token = placeholder(example)
    generator = torch.Generator().manual_seed(len(owned))
    rows = [row_of(token, [features[image] for image in images], generator) for images in owned]
    longest = max(map(len, rows))
    ids = torch.stack([torch.cat([row, torch.full((longest - len(row),), 4)]) for row in rows])
    mask = torch.stack([(torch.arange(longest) < len(row)).long() for row in rows])
    labels = ids.masked_fill((mask == 0) | (ids == token), -100)
    batch: Inputs = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    for name in example.arguments:
        if name.endswith("token_type_ids"):
            batch[name] = (ids == token).long()
    if any(owned):
        batch |= {
            name: images_in(example, name, owned) for name in example.images.names if name in example.arguments
        }
    return batch if takes(model, "attention_mask") else {**batch, "attention_mask": None}


def video_example_of(model: nn.Module) -> Example:
    """The first samples with videos that the model itself takes beside images: videos of up to three frames."""
    example = example_of(model)
    with torch.no_grad():
        for video in video_examples(model):
            try:
                model(**(video.arguments if are_apart(example, video) else both(example, video)))
            except (RuntimeError, ValueError, IndexError, TypeError, AttributeError, StopIteration):
                continue
            return video
    raise ValueError(f"{type(model).__name__} takes no videos")


def are_apart(example: Example, video: Example) -> bool:
    """Whether videos fill the placeholders of images, so that no call has both."""
    return example.images.token == video.images.token


def batch_with_videos_of(
    model: nn.Module, owned: Sequence[Sequence[int]], own_videos: Sequence[Sequence[int]]
) -> Inputs:
    """A batch with labels, padded. `owned`, `own_videos`: which images and videos each sample has, in order.

    Of a model that takes no call with both, `owned` counts for nothing.
    """
    example, video = example_of(model), video_example_of(model)
    of_images, of_videos = placeholder(example), video.images.token
    owned = [()] * len(owned) if are_apart(example, video) else owned
    features, pieces = features_of(example), pieces_of(video)
    generator = torch.Generator().manual_seed(len(owned))
    rows: list[Tensor] = []
    for images, videos in zip(owned, own_videos, strict=True):
        row = [row_of(of_images, [features[one] for one in images], generator)]
        for count in (count for one in videos for count in pieces[one]):
            row += [torch.full((count,), of_videos), torch.tensor([5])]
        rows.append(torch.cat(row))
    longest = max(map(len, rows))
    ids = torch.stack([torch.cat([row, torch.full((longest - len(row),), 4)]) for row in rows])
    mask = torch.stack([(torch.arange(longest) < len(row)).long() for row in rows])
    kinds = (ids == of_images).long().masked_fill(ids == of_videos, 2)
    batch: Inputs = {
        "input_ids": ids,
        "attention_mask": mask,
        "labels": ids.masked_fill((mask == 0) | (kinds > 0), -100),
    }
    batch |= {name: kinds for name in example.arguments if name.endswith("token_type_ids")}
    for one, chosen in ((example, owned), (video, own_videos)):
        if any(chosen):
            batch |= {name: images_in(one, name, chosen) for name in one.images.names if name in one.arguments}
    return batch


def pieces_of(video: Example) -> list[list[int]]:
    """The lengths of the pieces in which each video of an example has its placeholders."""
    marks = torch.nn.functional.pad(video.arguments["input_ids"] == video.images.token, (1, 1)).flatten().int()
    turns = marks.diff().nonzero().flatten()
    lengths = iter((turns[1::2] - turns[::2]).tolist())
    found: list[list[int]] = []
    for count in features_of(video):
        own: list[int] = []
        while sum(own) < count:
            own.append(next(lengths))
        found.append(own)
    return found


def images_in(example: Example, name: str, owned: Sequence[Sequence[int]]) -> Tensor:
    """An argument that holds the chosen images of each sample."""
    value = example.arguments[name]
    if not isinstance(example.images, BySample):
        own = [value[example.place(name, image)] for images in owned for image in images]
        return torch.cat(own, example.images.dims.get(name, 0))
    padded = value.new_zeros(len(owned), max(map(len, owned)), *value.shape[2:])
    for sample, images in enumerate(owned):
        for slot, image in enumerate(images):
            padded[sample, slot] = value[example.place(name, image)]
    return padded


def features_of(example: Example) -> list[int]:
    """How many placeholders each image of an example has."""
    total = int((example.arguments["input_ids"] == example.images.token).sum())
    if isinstance(example.images, BySample):
        return [total // 3] * 3
    weights = example.images.measure.weights(
        {name: example.arguments[name] for name in example.images.names if name in example.arguments}
    )
    return [weight * total // sum(weights) for weight in weights]


def placeholder(example: Example) -> int:
    """The token that stands for a feature of an image: the one that the first sample has most of."""
    return int(example.arguments["input_ids"][0].mode().values)


def row_of(token: int, features: Sequence[int], generator: torch.Generator) -> Tensor:
    """The tokens of a sample, with the placeholders of its images between others."""
    text = torch.randint(4, 70, (4 + 2 * len(features),), generator=generator)
    text = text.where(text != token, 75)
    parts = [text[:3]]
    for number, count in enumerate(features):
        parts += [torch.full((count,), token), text[3 + 2 * number : 5 + 2 * number]]
    return torch.cat([*parts, text[-1:]])


# Rows that take videos, too. The first has deep-stack features and a piece a frame, the second tells of seconds.
# Then: placeholders of images for both; frames with positions of patches; frames of one size.
TAKE_VIDEOS = (
    "Qwen3VLForConditionalGeneration",
    "Qwen2_5_VLForConditionalGeneration",
    "Glm4vForConditionalGeneration",
    "Gemma4ForConditionalGeneration",
    "LlavaOnevisionForConditionalGeneration",
    "Cosmos3EdgeForConditionalGeneration",
    "Cosmos3OmniForConditionalGeneration",
    "Dots3NoteForConditionalGeneration",
    "Exaone4_5_ForConditionalGeneration",
    "Gemma4UnifiedForConditionalGeneration",
    "Glm46VForConditionalGeneration",
    "Glm4vMoeForConditionalGeneration",
    "GlmOcrForConditionalGeneration",
    "HyperCLOVAXVisionV2ForConditionalGeneration",
    "Lfm3VlForConditionalGeneration",
    "LlavaNextVideoForConditionalGeneration",
    "MiniMaxM3SparseForConditionalGeneration",
    "MuseGlimmerForConditionalGeneration",
    "MuseSparkForConditionalGeneration",
    "Qwen2_5OmniThinkerForConditionalGeneration",
    "Qwen2VLForConditionalGeneration",
    "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForConditionalGeneration",
    "Qwen3OmniMoeThinkerForConditionalGeneration",
    "Qwen3VLMoeForConditionalGeneration",
    "Qwen4ExpForConditionalGeneration",
    "VideoLlavaForConditionalGeneration",
)
# Classes that transformers itself cannot build or run here, and why.
NOT_BUILT: dict[str, str] = {
    "ChameleonForConditionalGeneration": "its images are tokens of a vocabulary that only its checkpoints have",
    "DeepseekOcr2ForConditionalGeneration": "its config does not exist without all settings of two towers",
    "DiffusionGemmaForBlockDiffusion": "it makes blocks by diffusion, not the next token",
    "Emu3ForConditionalGeneration": "its images are tokens of a vocabulary that only its checkpoints have",
    "FastVlmForConditionalGeneration": "needs timm for its vision tower",
    "Gemma3nForConditionalGeneration": "needs timm for its vision tower",
    "Mistral4ForCausalLM": "reads no images, and transformers itself fails in forward of a tiny one",
    "NemotronH_Omni_Reasoning_V3": "transformers itself fails in forward of a tiny one",
    "PPFormulaNetForConditionalGeneration": "transformers itself fails in forward of a tiny one",
    "PerceptionLMForConditionalGeneration": "needs timm for its vision tower",
}
# Classes that cannot be observed without images, or whose samples are something else.
NO_ROW = (
    "BlipForConditionalGeneration",
    "Blip2ForConditionalGeneration",
    "CohereCompassForConditionalGeneration",
    "IdeficsForVisionText2Text",
    "InstructBlipForConditionalGeneration",
    "InstructBlipVideoForConditionalGeneration",
    "Kosmos2ForConditionalGeneration",
    "Molmo2ForConditionalGeneration",
    "PI0ForConditionalGeneration",
    "Pix2StructForConditionalGeneration",
    "UdopForConditionalGeneration",
)
# Classes that are rows without images, but take none, or take them otherwise than beside tokens.
NO_IMAGES = (
    "EvollaForProteinText2Text",
    "Florence2ForConditionalGeneration",
    "FuyuForCausalLM",
    "GitForCausalLM",
    "HunYuanVLForConditionalGeneration",
    "InklingForConditionalGeneration",
    "Kosmos2_5ForConditionalGeneration",
    "MllamaForConditionalGeneration",
    "T5Gemma2ForConditionalGeneration",
    "UnlimitedOcrForConditionalGeneration",
    "VisionEncoderDecoderModel",
)
