"""Adapters of the command: counted as PEFT makes them, in the parts and layers that are asked for."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from rp_adapters.choice import Adapters
from rp_adapters.making import adapt
from rp_adapters.parts import parts_of
from rp_cli.main import main
from rp_estimate.meta.observe import observe
from torch import nn
from transformers import AutoModelForCausalLM

SIZES: dict[str, Any] = {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 160, "intermediate_size": 96}
HEADS: dict[str, Any] = {**SIZES, "num_attention_heads": 4, "num_key_value_heads": 2}
SMALL: dict[str, Any] = {**HEADS, "head_dim": 16}
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LATENT: dict[str, Any] = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8}
ROUTED: dict[str, Any] = {"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2}
SHARED: dict[str, Any] = {"shared_expert_intermediate_size": 32}
MODELS: dict[str, Callable[[], Any]] = {
    "qwen3": lambda: transformers.Qwen3Config(**SMALL),
    "llama": lambda: transformers.LlamaConfig(**HEADS),
    "phi3": lambda: transformers.Phi3Config(**HEADS, pad_token_id=0),
    "gpt2": lambda: transformers.GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=160),
    "opt": lambda: transformers.OPTConfig(
        hidden_size=64, ffn_dim=96, num_hidden_layers=2, num_attention_heads=4, word_embed_proj_dim=32
    ),
    "qwen3-moe": lambda: transformers.Qwen3MoeConfig(**SMALL, **EXPERTS),
    "qwen2-moe": lambda: transformers.Qwen2MoeConfig(**HEADS, **EXPERTS, **SHARED),
    "mixtral": lambda: transformers.MixtralConfig(**SMALL, num_local_experts=4),
    "olmoe": lambda: transformers.OlmoeConfig(**HEADS, num_experts=4, num_experts_per_tok=2),
    "gpt-oss": lambda: transformers.GptOssConfig(**SMALL, num_local_experts=4, num_experts_per_tok=2),
    "granite-moe": lambda: transformers.GraniteMoeConfig(**HEADS, num_local_experts=4),
    "deepseek-v3": lambda: transformers.DeepseekV3Config(
        **SIZES, **LATENT, **ROUTED, num_attention_heads=4, v_head_dim=16, moe_intermediate_size=32,
        first_k_dense_replace=1,
    ),
}  # fmt: skip


def on_meta(family: str) -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(MODELS[family](), dtype=torch.bfloat16).train()


def trained(model: nn.Module) -> int:
    return sum(one.numel() for one in model.parameters() if one.requires_grad)


def planned(folder: Path, capsys: pytest.CaptureFixture[str], family: str, *given: str) -> int:
    MODELS[family]().save_pretrained(folder)
    options = ("--gpu", "RTX 4090", "--ram", "64GB", "--batch", "2", "--sequence", "32", "--lora", "4")
    assert main(["plan", "--model", str(folder), *options, *given, "--json"]) == 0
    return json.loads(capsys.readouterr().out)["model"]["trained_parameters"]


@pytest.mark.few(1)
@pytest.mark.parametrize("family", MODELS)
def test_plan_counts_what_peft_makes(family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with torch.device("meta"):
        theirs = get_peft_model(on_meta(family), LoraConfig(r=4, target_modules="all-linear"))

    assert planned(tmp_path, capsys, family, "--lora-targets", "all-linear") == trained(theirs)


STACKS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
# What PEFT is asked for where the command is asked for nothing: all of `all-linear` but the routers.
USUAL: dict[str, tuple[list[str], list[str]]] = {
    "qwen3": ([*ATTENTION, "gate_proj", "up_proj", "down_proj"], []),
    "phi3": (["qkv_proj", "o_proj", "gate_up_proj", "down_proj"], []),
    "gpt2": (["c_attn", "c_proj", "c_fc"], []),
    "qwen3-moe": (ATTENTION, STACKS),
    # PEFT takes the names of these dense layers for those of experts, so their weights are named.
    "qwen2-moe": (ATTENTION, [*STACKS, *(f"shared_expert.{one}_proj.weight" for one in ("gate", "up", "down"))]),
    "mixtral": (ATTENTION, STACKS),
    "gpt-oss": (ATTENTION, STACKS),
    "granite-moe": (ATTENTION, [one.replace("mlp", "block_sparse_moe") for one in STACKS]),
}


@pytest.mark.few(1)
@pytest.mark.parametrize("family", USUAL)
def test_all_but_routers_is_adapted_unless_parts_are_named(
    family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    modules, parameters = USUAL[family]
    # A stack of two matrices has twice the rank, as PEFT has it in `all-linear`.
    patterns = {one: 8 for one in parameters if one.endswith("experts.gate_up_proj")}
    config = LoraConfig(r=4, target_modules=modules, target_parameters=parameters, rank_pattern=patterns)
    theirs = get_peft_model(on_meta(family), config)

    assert planned(tmp_path, capsys, family) == trained(theirs)
    names = {name for name, one in theirs.named_parameters() if one.requires_grad}
    assert names
    assert not any("router" in name or ".gate." in name for name in names)


def test_parts_hold_each_layer_once() -> None:
    for family in MODELS:
        model = on_meta(family)
        parts = parts_of(model)
        names = [name for own in parts.values() for name in own]
        assert len(set(names)) == len(names)
        linear = {
            name
            for name, module in model.named_modules()
            if isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"
        }
        assert linear - set(names) == {"lm_head"}
        is_mixture = any(word in family for word in ("mo", "mixtral", "gpt-oss", "deepseek"))
        assert bool(parts["experts"]) == bool(parts["router"]) == is_mixture, family
        assert parts["attention"], family


@pytest.mark.parametrize(
    ("parts", "ends"),
    [
        (["attention"], ("self_attn",)),
        (["dense"], ("shared_expert.",)),
        (["experts"], ("experts.",)),
        (["router"], ("gate", "shared_expert_gate")),
        (["attention", "router"], ("self_attn", "gate")),
    ],
)
def test_only_the_parts_that_are_named_get_adapters(parts: list[str], ends: tuple[str, ...]) -> None:
    model = on_meta("qwen2-moe")

    adapted = adapt(model, Adapters(rank=2, parts=tuple(parts)))

    names = [name for name, one in adapted.named_parameters() if one.requires_grad]
    assert names
    assert all(any(end in name for end in ends) for name in names)
    assert all(any(end in name for name in names) for end in ends)


TARGETS: dict[str, tuple[str, list[str], dict[str, Any]]] = {
    "ends of names": ("qwen3", ["q_proj", "mlp.up_proj"], {"target_modules": ["q_proj", "mlp.up_proj"]}),
    "the head and the embeddings": (
        "qwen3",
        ["lm_head", "embed_tokens"],
        {"target_modules": ["lm_head", "embed_tokens"]},
    ),
    "an expression": ("qwen3", [r".*\.1\..*[qv]_proj"], {"target_modules": r".*\.1\..*[qv]_proj"}),
    "experts": (
        "gpt-oss",
        ["q_proj", "mlp.experts.down_proj"],
        {"target_modules": ["q_proj"], "target_parameters": ["mlp.experts.down_proj"]},
    ),
    "an expression for experts": (
        "gpt-oss",
        [r".*(q_proj|experts\.down_proj)"],
        {"target_modules": r".*q_proj", "target_parameters": ["mlp.experts.down_proj"]},
    ),
    "a router by its name": ("qwen3-moe", ["gate", "q_proj"], {"target_modules": ["gate", "q_proj"]}),
    "names of earlier files": (
        "qwen3-moe",
        ["gate_proj", "up_proj", "v_proj"],
        {"target_modules": ["gate_proj", "up_proj", "v_proj"]},
    ),
}


@pytest.mark.parametrize("name", TARGETS)
def test_targets_are_what_peft_takes(name: str) -> None:
    family, targets, settings = TARGETS[name]
    model, other = on_meta(family), on_meta(family)

    adapted = adapt(model, Adapters(rank=4, targets=tuple(targets)))

    theirs = get_peft_model(other, LoraConfig(r=4, task_type="CAUSAL_LM", **settings))
    found, wanted = (
        {key: tuple(one.shape) for key, one in each.named_parameters() if one.requires_grad}
        for each in (adapted, theirs)
    )
    assert found == wanted != {}


REFUSED: dict[str, tuple[str, list[str], str]] = {
    "a layer that is nowhere": ("qwen3", ["--lora-targets", "w_proj", "q_proj"], "no layers named w_proj; it has"),
    "an expression for nothing": ("qwen3", ["--lora-targets", ".*w_proj"], "--lora-targets: "),
    "a block of layers": ("qwen3", ["--lora-targets", "mlp"], "not a layer, but has some: name down_proj, gate_p"),
    "all experts": ("gpt-oss", ["--lora-targets", "q_proj", "experts"], "experts is not a layer, but has some: "),
    "half an expression": ("qwen3", ["--lora-targets", "(q_proj"], "is no regular expression"),
    "an expression among names": ("qwen3", ["--lora-targets", ".*q", "k_proj"], "but '.*q' is among others"),
    "all among names": ("qwen3", ["--lora-targets", "k_proj,all-linear"], "but 'all-linear' is among others"),
    "parts and targets": ("qwen3", ["--lora-targets", "q_proj", "--lora-parts", "dense"], "exclude each other"),
    "a part that is none": ("qwen3", ["--lora-parts", "mlp"], "--lora-parts must be one of attention, dense"),
    "experts of a dense model": ("qwen3", ["--lora-parts", "experts"], "nothing to adapt in experts; it has att"),
    "a module that is nowhere": ("qwen3", ["--modules-to-save", "heads"], "no module named heads"),
    "dropout on experts": ("qwen3-moe", ["--lora-dropout", "0.1"], "--lora-dropout cannot be used with adapters"),
    "DoRA on experts": ("gpt-oss", ["--dora"], "--dora cannot be used with adapters on mlp.experts.down_proj, "),
    "biases where there are none": ("qwen3", ["--lora-bias", "all"], "biases, but the model has none; omit it"),
    "biases on experts": ("mixtral", ["--lora-bias", "adapters"], "--lora-bias adapters cannot be used with"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_peft_cannot_do_is_refused_by_name(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    family, given, told = REFUSED[name]
    MODELS[family]().save_pretrained(tmp_path)

    assert main(["plan", "--model", str(tmp_path), "--gpu", "RTX 4090", "--lora", "4", *given]) == 2

    shown = capsys.readouterr().err
    assert told in shown
    assert shown.count("\n") == 1


def test_whole_experts_are_counted_once_for_all_sequences() -> None:
    plain, adapted = on_meta("qwen3-moe"), on_meta("qwen3-moe")
    adapt(plain, Adapters(rank=4, parts=("attention",)))
    adapt(adapted, Adapters(rank=4, parts=("attention", "experts")))
    experts = 2 * 4 * 3 * 64 * 32

    before, after = (observe(model, 16).facts[1] for model in (plain, adapted))

    # W + dW of all experts of a layer, in bf16, is kept for backward, however many sequences there are.
    assert experts <= after.kept_bytes.shared - before.kept_bytes.shared < 1.3 * experts
    # And the gradient of the stack that comes first in backward, the smaller one, while all of that is kept.
    most = [max(held.shared for held in facts.held_bytes) for facts in (before, after)]
    assert most[1] - max(most[0], 0) >= 0.9 * experts / 3
