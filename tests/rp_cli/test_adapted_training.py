"""`roundpipe train --lora`: the numbers of a plain loop with PEFT, and adapters that PEFT loads and merges."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import finetuning
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from rp_cli.main import main
from rp_data.batching.batches import Sequences, StepBatches
from rp_data.rows.documents import read_samples
from rp_data.tokens import Reader
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

pytestmark = pytest.mark.usefixtures("measured_once")

TEXTS = [{"text": finetuning.words(number, 12)} for number in range(4)]
RATE, STEPS = 1e-2, 2
SETTINGS = ["--sequence", "48", "--batch", "2", "--steps", str(STEPS), "--lr", str(RATE), "--schedule", "constant"]
SETTINGS += ["--warm-up", "0", "--weight-decay", "0", "--clip", "0", "--devices", "cpu:2", "--num-microbatch", "2"]
SETTINGS += ["--no-packing", "--lora", "4"]
STACKS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
FUSED: dict[str, Any] = {
    "rank_pattern": {"mlp.experts.gate_up_proj": 8},
    "alpha_pattern": {"mlp.experts.gate_up_proj": 16},
}
# Of each: the model, what the command is told, and what PEFT is.
RUNS: dict[str, tuple[str, list[str], dict[str, Any]]] = {
    "experts": (
        "qwen3-moe",
        [],
        {"target_modules": ATTENTION, "target_parameters": STACKS, **FUSED},
    ),
    "experts of another family": (
        "gpt-oss",
        ["--lora-parts", "experts"],
        {"target_modules": [], "target_parameters": STACKS, **FUSED},
    ),
    **{
        f"experts of {family}": (
            family,
            ["--lora-parts", "experts"],
            {"target_modules": [], "target_parameters": STACKS, **FUSED},
        )
        for family in ("mixtral", "olmoe", "deepseek-v3")
    },
    "shared experts": (
        "qwen2-moe",
        ["--lora-parts", "dense"],
        {
            "target_modules": [],
            "target_parameters": [f"shared_expert.{name}_proj.weight" for name in ("gate", "up", "down")],
        },
    ),
    "the router": ("qwen3-moe", ["--lora-parts", "router"], {"target_modules": ["gate"]}),
    "all that PEFT calls linear": ("mixtral", ["--lora-targets", "all-linear"], {"target_modules": "all-linear"}),
    "an expression": ("llama", ["--lora-targets", r".*\.[qv]_proj"], {"target_modules": r".*\.[qv]_proj"}),
    "the head and the embeddings": (
        "llama",
        ["--lora-targets", "lm_head", "embed_tokens", "q_proj"],
        {"target_modules": ["lm_head", "embed_tokens", "q_proj"]},
    ),
    "DoRA": ("llama", ["--dora", "--lora-parts", "attention"], {"target_modules": ATTENTION, "use_dora": True}),
    "rsLoRA": (
        "llama",
        ["--rslora", "--lora-targets", "q_proj"],
        {"target_modules": ["q_proj"], "use_rslora": True},
    ),
    "biases": (
        "gpt2",
        ["--lora-bias", "lora_only", "--lora-targets", "c_fc"],
        {"target_modules": ["c_fc"], "bias": "lora_only"},
    ),
    "biases of adapters": (
        "gpt2",
        ["--lora-bias", "adapters", "--lora-targets", "c_fc"],
        {"target_modules": ["c_fc"], "lora_bias": True},
    ),
    "modules trained whole": (
        "llama",
        ["--modules-to-save", "lm_head", "norm", "--lora-targets", "v_proj"],
        {"target_modules": ["v_proj"], "modules_to_save": ["lm_head", "norm"]},
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def folders() -> dict[str, Path]:
    """Of the models that were made, by family."""
    return {}


def folder_of(family: str, folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    if family not in folders:
        folders[family] = finetuning.make_model(tmp_path_factory.mktemp(family), family)
    return folders[family]


@pytest.mark.few(2)
@pytest.mark.parametrize("name", RUNS)
def test_a_run_equals_a_plain_loop_and_its_adapters_load_and_merge(
    name: str, tmp_path: Path, folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> None:
    family, given, settings = RUNS[name]
    folder = folder_of(family, folders, tmp_path_factory)
    data = finetuning.json_lines(tmp_path / "data.jsonl", TEXTS)

    arguments = ["--model", str(folder), "--data", str(data), "--output", str(tmp_path / "run")]
    assert main(["train", *arguments, *SETTINGS, *given]) == 0

    plain = plain_model(folder, settings)
    start = {key: value.clone() for key, value in plain.state_dict().items()}
    losses = plain_loop(plain, folder, data)
    assert [line["loss"] for line in finetuning.lines(tmp_path / "run")] == pytest.approx(losses, rel=1e-5)
    loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder), tmp_path / "run" / "model")
    assert_moved_alike(loaded.state_dict(), plain.state_dict(), start)
    ids = torch.tensor([[3, 20, 41, 7]])
    wanted, found = (one.eval()(input_ids=ids).logits for one in (plain, loaded.merge_and_unload()))
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-4)


def plain_model(folder: Path, settings: Mapping[str, Any]) -> nn.Module:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(folder)
    return get_peft_model(model, LoraConfig(r=4, lora_alpha=8, task_type="CAUSAL_LM", **settings)).train()


def plain_loop(model: nn.Module, folder: Path, data: Path) -> list[float]:
    """Transformers' own loss of whole batches, and torch's AdamW."""
    trained = [one for one in model.parameters() if one.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=RATE, betas=(0.9, 0.95), weight_decay=0.0)
    reader = Reader(AutoTokenizer.from_pretrained(folder), sequence=48, completions_only=False)
    sequences = Sequences(reader.read(read_samples("--data", [data])), size=48, packing=False, seed=0)
    steps = StepBatches(sequences, batch=2, accumulation=1, pad=0)
    losses: list[float] = []
    for step in range(1, STEPS + 1):
        (batch,) = steps.calls(step)
        loss = model(**batch, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def assert_moved_alike(
    found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor], start: Mapping[str, torch.Tensor]
) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        moved = (tensor - start[name]).norm()
        assert (found[name] - tensor).norm() <= 1e-2 * moved + 1e-6, name


@pytest.mark.later
def test_dropout_is_of_the_adapters_inputs(
    tmp_path: Path, folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = folder_of("llama", folders, tmp_path_factory)
    data = finetuning.json_lines(tmp_path / "data.jsonl", TEXTS)
    losses: list[list[float]] = []
    for dropout in ("0", "0.5"):
        run = tmp_path / dropout
        arguments = ["--model", str(folder), "--data", str(data), "--output", str(run), "--lora-dropout", dropout]
        assert main(["train", *arguments, *SETTINGS]) == 0
        losses.append([line["loss"] for line in finetuning.lines(run)])
        config = json.loads((run / "model" / "adapter_config.json").read_text())
        assert config["lora_dropout"] == float(dropout)

    # The adapters' second matrices begin as zeros, so that their inputs count from the second step on.
    (first, second), (same, other) = losses
    assert first == same
    assert second != other


@pytest.mark.slow
def test_adapters_on_embeddings_are_saved_without_a_word(tmp_path: Path) -> None:
    model = finetuning.make_model(tmp_path / "model")
    data = finetuning.json_lines(tmp_path / "data.jsonl", TEXTS)
    given = ["--model", str(model), "--data", str(data), "--output", str(tmp_path / "run"), *SETTINGS]

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        assert main(["train", *given, "--lora-targets", "embed_tokens", "--save-every", "1", "--quiet"]) == 0

    assert [str(one.message) for one in told if "embedding" in str(one.message)] == []
