"""Checkpoints that are read piece by piece have the weights that transformers loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from rp_presets import streamed
from transformers import AutoModelForCausalLM, GPT2Config, GptOssConfig, LlamaConfig, MixtralConfig, Qwen3MoeConfig

_SIZES: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
_HEADS: dict[str, Any] = {**_SIZES, "intermediate_size": 48, "num_key_value_heads": 2}
CONFIGS: dict[str, Any] = {
    "llama": lambda: LlamaConfig(**_HEADS),
    "tied": lambda: LlamaConfig(**_HEADS, tie_word_embeddings=True),
    "gpt2": lambda: GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4),
    # Experts that the files have one by one.
    "mixtral": lambda: MixtralConfig(**_HEADS, num_local_experts=4),
    "qwen3-moe": lambda: Qwen3MoeConfig(**_HEADS, head_dim=8, num_experts=4, moe_intermediate_size=16),
    "gpt-oss": lambda: GptOssConfig(**_HEADS, head_dim=8, num_local_experts=4, num_experts_per_tok=2),
}


def saved(folder: Path, family: str, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(CONFIGS[family](), dtype=dtype)
    model.save_pretrained(folder, max_shard_size="20kB")
    return model


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pieces_are_what_transformers_loads(tmp_path: Path, family: str, dtype: torch.dtype) -> None:
    saved(tmp_path, family, dtype)
    expected = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype).state_dict()

    found = streamed(tmp_path)

    read: dict[str, torch.Tensor] = {}
    for piece in found.pieces:
        weights = dict(piece.read())
        assert {name: (one.shape, one.dtype) for name, one in weights.items()} == {
            name: (one.shape, one.dtype) for name, one in piece.outlines.items()
        }
        read |= weights
    assert all(torch.equal(one, expected[name]) for name, one in read.items())
    tied = {name for name in expected if name not in read}
    assert tied == ({"lm_head.weight"} if family in ("tied", "gpt2") else set())
    assert set(found.model.state_dict()) == set(expected)
    assert all(parameter.is_meta for parameter in found.model.parameters())


def test_experts_are_read_together_and_all_else_alone(tmp_path: Path) -> None:
    saved(tmp_path, "mixtral")

    names = [sorted(piece.outlines) for piece in streamed(tmp_path).pieces]

    assert ["model.layers.0.mlp.experts.gate_up_proj"] in names
    assert all(len(each) == 1 for each in names)


def test_what_the_model_has_no_use_for_is_told(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    model = saved(tmp_path, "llama")
    (file, *_) = sorted(tmp_path.glob("*.safetensors"))
    (tmp_path / "model.safetensors.index.json").unlink()
    for other in sorted(tmp_path.glob("*.safetensors"))[1:]:
        other.unlink()
    save_file({**load_file(file), "model.other.weight": torch.ones(2)}, file)

    found = streamed(tmp_path)

    assert found.unused == ["model.other.weight"]
    assert len(found.pieces) < len(model.state_dict())
