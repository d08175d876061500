"""A tiny model with random weights of every causal language model class of the installed transformers."""

from __future__ import annotations

import dataclasses
import re
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

VOCABULARY = 96
HIDDEN, HEADS, HEAD_DIM = 64, 4, 16


@dataclass(frozen=True)
class Family:
    """One model class. `overrides`: what its tiny config sets beyond what `tiny_settings` finds by itself."""

    model_class: type[nn.Module]
    config_class: type[Any]
    overrides: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.model_class.__name__

    def config(self, **settings: Any) -> Any:
        """A tiny config."""
        return tiny_config(self.config_class, merged(self.overrides, settings))

    def build(self, **settings: Any) -> nn.Module:
        """A tiny model in eval mode, the same each time."""
        torch.manual_seed(0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = self.model_class(self.config(**settings))
        return randomized(model.float()).eval()


class Families(Mapping[str, Family]):
    """Families by the names of their classes, which are imported as each is asked for: all take seconds."""

    def __init__(self, names: Iterable[str], overrides: Mapping[str, Mapping[str, Any]] | None = None) -> None:
        self._names = dict.fromkeys(names)
        self._overrides = OVERRIDES if overrides is None else overrides

    def __getitem__(self, name: str) -> Family:
        import transformers

        if name not in self._names:
            raise KeyError(name)
        model_class = getattr(transformers, name)
        return Family(model_class, text_config_of(model_class), self._overrides.get(name, {}))

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def causal_families(without: Collection[str] = ()) -> Families:
    """Every causal language model class, by name, in the order of transformers' mapping."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as NAMES

    return Families(name for name in NAMES.values() if name not in without)


def text_config_of(model_class: type[Any]) -> type[Any]:
    """The config class that a model's constructor takes: some mappings name that of a larger model."""
    import transformers

    name = CONFIGS.get(model_class.__name__)
    return model_class.config_class if name is None else getattr(transformers, name)


def randomized(model: nn.Module) -> nn.Module:
    """Add noise to all parameters: some start as zeros or ones, by which a wrong gradient would not show."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)
    return model


# Tiny configs


def tiny_config(config_class: type[Any], settings: Mapping[str, Any]) -> Any:
    """A config with its default's kinds of layers, and sizes that take milliseconds."""
    needed = DEFAULTS.get(config_class.__name__, {})
    found = merged(needed, tiny_settings(config_class(**needed)))
    return config_class(**merged(found, settings))


def merged(changes: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    found = dict(changes)
    for name, value in settings.items():
        is_nested = isinstance(value, Mapping) and isinstance(found.get(name), Mapping)
        found[name] = merged(found[name], value) if is_nested else value
    return found


def tiny_settings(config: Any) -> dict[str, Any]:
    """The settings of a config that have to change, with small values."""
    # Read past properties: some configs raise where an attribute differs from layer to layer.
    values = {one.name: vars(config).get(one.name) for one in dataclasses.fields(config)}
    found: dict[str, Any] = {}
    if "qk_rope_head_dim" in values:  # latent attention
        found |= {"num_key_value_heads": HEADS, "head_dim": 8}
    layers = chosen_layers(values, number_of_layers(values))
    for name, value in values.items():
        if name in found:
            continue
        if hasattr(value, "to_dict"):
            found[name] = tiny_settings(value)
        elif is_by_layer(name, value, number_of_layers(values)):
            found[name] = type(value)(value[index] for index in layers)
        elif name in LAYER_COUNTS:
            found[name] = len(layers)
        else:
            small = tiny(name, value)
            if small is not None and small != value:
                found[name] = small
    return found


LAYER_COUNTS = (
    "num_hidden_layers",
    "n_layer",
    "n_layers",
    "num_layers",
    "num_blocks",
    "encoder_layers",
    "decoder_layers",
    "num_encoder_layers",
    "num_decoder_layers",
    "num_global_layers",
)


def number_of_layers(values: Mapping[str, Any]) -> int:
    return next((values[name] for name in LAYER_COUNTS if isinstance(values.get(name), int)), 0)


def is_by_layer(name: str, value: object, count: int) -> bool:
    """Whether it is a list with one item a layer."""
    del name
    return isinstance(value, list | tuple) and len(value) == count > 3


def chosen_layers(values: Mapping[str, Any], count: int) -> list[int]:
    """The first two layers of each kind; two layers if there is one kind."""
    lists = [value for name, value in values.items() if is_by_layer(name, value, count)]
    kinds = [repr(kind) for kind in zip(*lists, strict=True)] or [""] * count
    found = [index for index, kind in enumerate(kinds) if kinds[:index].count(kind) < 2]
    # Where there are many kinds, one of each is enough.
    return found if len(found) <= 6 else [index for index in found if kinds[index] not in kinds[:index]]


RULES: list[tuple[str, Callable[[Any], Any] | Any]] = [
    (r"(bos|cls)_token_id", lambda value: min(value, 1)),
    (r"eos_token_id", 2),
    (r"pad_token_id", lambda value: min(value, 3)),
    (r"\w+_token_(id|index)", lambda value: value if value < VOCABULARY else 80 + value % 16),
    (r"type_vocab_size", lambda value: value),
    (r"(\w+_)?vocab_size(_per_layer_input)?", lambda value: min(value, VOCABULARY)),
    (
        r"(num_|n_)?(kv_n_heads|key_value_heads|kv_heads|query_groups)|swa_num_key_value_heads",
        lambda value: min(value, 2),
    ),
    (r"(\w+_)?(n_head|n_heads|num_heads|attention_heads)", HEADS),
    (r"qk_rope_head_dim|index_head_dim|rotary_dim", 8),
    (r"(\w+_)?head_dim|kv_channels|d_kv|dim_head|attention_head_size|d_head", HEAD_DIM),
    (r"\w*(kv_lora_rank|q_lora_rank|lora_rank|laurel_rank|adapter_rank|gated_norm_rank)", 16),
    (
        r"\w*intermediate_size\w*|\w*ffn_dim|d_inner|n_inner|dff|dim_ff|d_ff|\w*ffn_hidden_size|feed_forward_size",
        48,
    ),
    (r"hidden_size_per_layer_input", lambda value: min(value, 16)),
    (
        r"hidden_size|d_model|n_embd|dim_model|emb_dim|word_embed_proj_dim|lru_width|embedding_dim|embed_dim",
        HIDDEN,
    ),
    (r"embedding_size|hidden_size_global|cross_attention_hidden_size|attention_hidden_size", HIDDEN),
    (r"num_experts|num_local_experts|n_routed_experts|moe_num_experts", 4),
    (r"num_experts_per_tok(en)?|moe_topk|moe_k|moe_top_k|top_k|top_k_experts", lambda value: min(value, 2)),
    (r"n_group|num_expert_group", lambda value: min(value, 2)),
    (r"topk_group", 1),
    (r"first_k_dense_replace|num_dense_layers", lambda value: min(value, 1)),
    (r"max_position_embeddings|n_positions|n_ctx|max_seq_len|context_length|max_target_positions", 64),
    (
        r"sliding_window(_size)?|attention_chunk_size|attention_window_size|window_size|block_size",
        lambda value: min(value, 4),
    ),
    (r"index_topk", 4),
    (r"\w*(state_size|d_state)", 8),
    (r"\w*chunk_size", lambda value: min(value, 4)),
    (r"time_step_rank|mamba_dt_rank", 4),
    (r"mamba_(n|num)_heads", 8),
    (r"mamba_d_head", HEAD_DIM),
    (r"linear_num_(key|value)_heads|linear_num_heads", lambda value: 2 if value <= 16 else 4),
    (r"image_size", 32),
    (r"patch_size", 8),
    (r"max_window_layers", 1),
    (r"depth", 2),
]


def tiny(name: str, value: Any) -> Any:
    """The small value of a setting; None if it needs none."""
    if "dropout" in name or "pdrop" in name or name.endswith("jitter_noise"):
        return 0.0 if isinstance(value, float) else None
    if name == "rope_parameters":
        return tiny_rope(value)
    if isinstance(value, bool) or not isinstance(value, int):
        return None
    for pattern, small in RULES:
        if re.fullmatch(pattern, name):
            return small(value) if callable(small) else small
    return None


def tiny_rope(value: Any) -> Any:
    if not isinstance(value, Mapping):
        return None
    found = {name: tiny_rope(one) if isinstance(one, Mapping) else one for name, one in value.items()}
    if "mrope_section" in found:
        found["mrope_section"] = [2, 1, 1]
    if "original_max_position_embeddings" in found:
        found["original_max_position_embeddings"] = 32
    return found


# What single classes need

# Configs that do not exist without settings.
DEFAULTS: dict[str, dict[str, Any]] = {
    name: {"text_config": {"model_type": text, "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}}
    for name, text in (
        ("Gemma4AssistantConfig", "gemma4_text"),
        ("Gemma4UnifiedAssistantConfig", "gemma4_unified_text"),
    )
}

# Models that are compared in training only, and why.
TRAINING_ONLY: dict[str, str] = {
    "ReformerModelWithLMHead": "its layers run backward in training mode only",
    "RwkvForCausalLM": "it rescales the weights of its layers when it is called in eval mode",
    "XLNetLMHeadModel": "it makes memories (use_mems) in eval mode",
}
# Models that transformers itself cannot build or run on the CPU without further packages, and why.
UNBUILDABLE: dict[str, str] = {
    "Gemma3nForConditionalGeneration": "needs timm and Pillow for its vision tower",
    "Gemma4AssistantForCausalLM": "all its layers share keys, which the config class refuses when layers are made",
    "Gemma4UnifiedAssistantForCausalLM": "all its layers share keys, which the config class refuses",
}

MAMBA2 = {"mamba_n_heads": 8, "mamba_d_head": 16}
SHARED_KEYS = {
    "num_hidden_layers": 6,
    "num_kv_shared_layers": 3,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"] * 2,
}
GEMMA3N = {
    **SHARED_KEYS,
    "intermediate_size": [48] * 6,
    "activation_sparsity_pattern": [0.95, 0.0, 0.95, 0.0, 0.0, 0.0],
}
GEMMA4 = {**SHARED_KEYS, "global_head_dim": 32, "num_key_value_heads": 2}

OVERRIDES: dict[str, dict[str, Any]] = {
    "BambaForCausalLM": {**MAMBA2, "num_hidden_layers": 4, "attn_layer_indices": [1, 3]},
    # Tokens are too few for its sparse blocks; then it sets another kind of attention on its layers as it runs.
    "BigBirdForCausalLM": {"attention_type": "original_full"},
    "BltForCausalLM": {
        "encoder_hash_byte_group_vocab": 50,
        "encoder_hash_byte_group_size": [3, 4],
        "patch_in_forward": False,
    },
    "CohereCompassForCausalLM": {
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}}
    },
    "DbrxForCausalLM": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"hidden_size": 64},
    },
    "DeepseekV2ForCausalLM": {"num_experts_per_tok": 2, "n_shared_experts": 1},
    "Dots1ForCausalLM": {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
    },
    "Dots3NoteForCausalLM": {
        "num_hidden_layers": 4,
        "layer_types": ["indexed_attention", "sliding_attention"] * 2,
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
        "qk_nope_head_dim": 16,
        "head_dim": 24,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4,
        "swa_q_lora_rank": 16,
        "swa_kv_lora_rank": 16,
        "swa_head_dim": 24,
        "swa_qk_nope_head_dim": 16,
        "swa_v_head_dim": 16,
        "rope_parameters": None,
    },
    "FalconH1ForCausalLM": {**MAMBA2, "mamba_d_ssm": 128},
    "Gemma3nForCausalLM": GEMMA3N,
    "Gemma3nForConditionalGeneration": {"text_config": GEMMA3N},
    "Gemma4ForCausalLM": GEMMA4,
    "Gemma4ForConditionalGeneration": {"text_config": GEMMA4},
    "Gemma4UnifiedForCausalLM": GEMMA4,
    "Gemma4UnifiedForConditionalGeneration": {"text_config": GEMMA4},
    "GPTNeoForCausalLM": {"attention_types": [[["global", "local"], 1]]},
    "GraniteMoeHybridForCausalLM": {
        **MAMBA2,
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "num_hidden_layers": 4,
    },
    "HunYuanDenseV1ForCausalLM": {"head_dim": 16},
    "HunYuanMoEV1ForCausalLM": {"head_dim": 16},
    "Inkling2ForCausalLM": {"n_layers_per_attn_res_block": 1},
    "JambaForCausalLM": {
        "num_hidden_layers": 4,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_offset": 1,
    },
    "Lfm2MoeForCausalLM": {"layer_types": ["conv", "full_attention"] * 2, "num_hidden_layers": 4},
    "LongcatFlashForCausalLM": {"head_dim": 8, "qk_head_dim": 24},
    "Mamba2ForCausalLM": {"num_heads": 8, "n_groups": 2},
    "Qwen4ExpForCausalLM": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 4,
        "indexer_compress_ratio": 2,
        "ple_layer_ids": [1],
        "ple_embed_dim": 64,
        "ngram_vocab_size_base": 64,
        "make_ngram_vocab_size_divisible_by": 8,
        "split_ngram_parts": 2,
        "heads_per_ngram": 2,
        "hc_lowrank": 8,
        "eos_token_id": 2,
    },
    "MinistralForCausalLM": {"head_dim": 16},
    "MusicgenForCausalLM": {"num_codebooks": 1},
    "MusicgenMelodyForCausalLM": {"num_codebooks": 1},
    "NemotronForCausalLM": {"num_key_value_heads": 2},
    "NemotronHForCausalLM": {"mamba_head_dim": 16, "n_groups": 2},
    "ReformerModelWithLMHead": {
        "is_decoder": True,
        "axial_pos_embds": False,
        "num_buckets": 2,
        "attn_layers": ["local", "lsh"],
    },
    "XmodForCausalLM": {"default_language": "en_XX"},
    "ZambaForCausalLM": {"attention_hidden_size": 128, "attention_head_dim": 32},
}

# Some mappings name the config of a larger model.
CONFIGS: dict[str, str] = {
    "MusicgenForCausalLM": "MusicgenDecoderConfig",
    "MusicgenMelodyForCausalLM": "MusicgenMelodyDecoderConfig",
}
