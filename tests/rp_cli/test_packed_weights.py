"""`roundpipe train --pack` trains as on the expanded weights, and `roundpipe plan --pack` counts packed bytes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import finetuning
import pytest
import torch
from roundpipe import PackedWeight, pack_frozen, unpack_frozen
from rp_cli.main import main
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM

SETTINGS = ["--lora", "4", "--sequence", "16", "--batch", "4", "--steps", "3", "--devices", "cpu:2"]
SETTINGS += ["--num-microbatch", "2", "--dtype", "float32"]
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
QWEN3_32B = {
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 5120,
    "intermediate_size": 25600,
    "num_hidden_layers": 64,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}


def run(folder: Path, output: Path, *options: str) -> list[float]:
    """The losses of a fine-tuning."""
    data = finetuning.json_lines(output.parent / "data.jsonl", finetuning.texts())
    arguments = ["--model", str(folder), "--data", str(data), "--output", str(output)]
    assert main(["train", *arguments, *SETTINGS, *options]) == 0
    return [line["loss"] for line in finetuning.lines(output) if "loss" in line]


def expanded(folder: Path, name: str, target: Path) -> Path:
    """A checkpoint of the weights as they are once packed and expanded."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).requires_grad_(False)
    pack_frozen(model, name)
    unpack_frozen(model)
    model.save_pretrained(target)
    for file in folder.glob("*token*"):
        (target / file.name).write_bytes(file.read_bytes())
    return target


@pytest.mark.slow
@pytest.mark.usefixtures("measured_once")
def test_training_on_packed_weights_is_training_on_the_expanded_ones(tmp_path: Path) -> None:
    folder = finetuning.make_model(tmp_path / "model", "qwen3-moe")
    losses = run(folder, tmp_path / "packed", "--pack", "nf4")
    assert losses == run(expanded(folder, "nf4", tmp_path / "expanded"), tmp_path / "plain")
    assert losses != run(folder, tmp_path / "unpacked")


@pytest.mark.later
@pytest.mark.usefixtures("measured_once")
def test_a_run_is_evaluated_and_speaks_on_its_weights_as_it_had_packed_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = finetuning.make_model(tmp_path / "model", "qwen3-moe")
    output, merged = tmp_path / "packed", tmp_path / "merged"
    run(folder, output, "--pack", "nf4", "--held-out", "0.3", "--lr", "1e-2")
    told = [line["held_out_loss"] for line in finetuning.lines(output) if "held_out_loss" in line]
    (tmp_path / "prompts.txt").write_text("one two\nthe cat\n")
    capsys.readouterr()

    assert main(["eval", str(output), "--devices", "cpu:1", "--json"]) == 0
    loss = json.loads(capsys.readouterr().out)["loss"]
    assert main(["merge", str(output), "--output", str(merged)]) == 0
    said = [tmp_path / f"{one.name}.jsonl" for one in (output, merged)]
    for one, file in zip((output, merged), said, strict=True):
        asked = ["--prompts", str(tmp_path / "prompts.txt"), "--output", str(file)]
        assert main(["generate", str(one), *asked, "--max-tokens", "6", "--greedy", "--devices", "cpu:1"]) == 0

    assert loss == pytest.approx(told[-1], rel=1e-6)
    assert said[0].read_text() == said[1].read_text()
    # Its adapter goes on there, too.
    data = ["--data", str(tmp_path / "data.jsonl"), "--output", str(tmp_path / "next"), "--held-out", "0.3"]
    given = ["--model", str(folder), "--init-adapter", str(output), "--pack", "nf4", *data, *SETTINGS[2:]]
    assert main(["train", *given]) == 0
    first = next(line for line in finetuning.lines(tmp_path / "next") if "held_out_loss" in line)
    assert first["held_out_loss"] == pytest.approx(told[-1], rel=1e-6)


@pytest.mark.slow
@pytest.mark.usefixtures("measured_once")
def test_weights_stay_as_they_are_stored(tmp_path: Path) -> None:
    # given a checkpoint in FP8
    folder = finetuning.make_model(tmp_path / "model", "llama")
    other = expanded(folder, "fp8", tmp_path / "expanded")
    in_fp8(folder)
    # when, then
    losses = run(folder, tmp_path / "stored", "--pack", "stored")
    assert losses == run(other, tmp_path / "plain")


def in_fp8(folder: Path) -> None:
    model: nn.Module = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).requires_grad_(False)
    pack_frozen(model, "fp8")
    tensors = load_file(folder / "model.safetensors")
    for name, one in model.named_parameters():
        if isinstance(one, PackedWeight):
            tensors[name], tensors[f"{name}_scale_inv"] = one.codes.view(torch.float8_e4m3fn), one.scales
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": FP8}))


def planned(capsys: pytest.CaptureFixture[str], folder: Path, *options: str) -> dict[str, Any]:
    machine = ("--gpu", "RTX 4090", "--ram", "64GB", "--lora", "16", "--batch", "8", "--num-microbatch", "8")
    assert main(["plan", "--model", str(folder), *machine, *options, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.slow
def test_a_plan_counts_packed_bytes_and_suggests_packing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # given
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_32B))
    elements = 64 * (2 * 5120 * 64 * 128 + 2 * 5120 * 8 * 128 + 3 * 5120 * 25600)
    # when
    whole, packed = planned(capsys, tmp_path), planned(capsys, tmp_path, "--pack", "nf4")
    # then
    assert (whole["fits"], packed["fits"]) == (False, True)
    assert whole["changes"][0]["option"] == "--pack nf4"
    saved = whole["host_bytes"]["weights"] - packed["host_bytes"]["weights"]
    assert saved == pytest.approx(elements * (2 - 4.5 / 8), rel=1e-3)
    assert packed["model"]["parameters"] == whole["model"]["parameters"]
    assert packed["model"]["expanded_bytes"] == 2 * elements // 64


@pytest.mark.later
@pytest.mark.parametrize(("how", "name"), [({"load_in_4bit": True}, "nf4"), ({"load_in_8bit": True}, "int8")])
def test_a_plan_of_a_checkpoint_of_bitsandbytes_counts_its_linear_layers(
    how: dict[str, Any], name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # given a mixture, whose stacked experts bitsandbytes leaves as they are
    experts = {"model_type": "qwen3_moe", "num_experts": 4, "num_hidden_layers": 2, "moe_intermediate_size": 768}
    method = {"quant_method": "bitsandbytes", "bnb_4bit_quant_type": "nf4", **how}
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_32B | experts | {"quantization_config": method}))
    # when
    stored = planned(capsys, tmp_path, "--pack", "stored")
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_32B | experts))
    whole, packed = planned(capsys, tmp_path), planned(capsys, tmp_path, "--pack", name)
    # then
    bits = {"nf4": 4.5, "int8": 8 + 32 / 768}[name]
    saved = stored["host_bytes"]["weights"] - packed["host_bytes"]["weights"]
    assert saved == pytest.approx(2 * 4 * 3 * 5120 * 768 * (2 - bits / 8), rel=0.01)
    assert stored["host_bytes"]["weights"] < whole["host_bytes"]["weights"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            ["--pack", "nf5", "--lora", "4"],
            "--pack must be one of fp8, fp8-rows, int8, nf4, mxfp4, stored, but is 'nf5'",
        ),
        (["--pack", "nf4"], "--pack needs --lora"),
        (["--pack", "stored", "--lora", "4"], "is of weights that are not packed; name a format"),
        (["--pack", "mxfp4", "--lora", "4", "--gpu", "RTX 4090"], "rows of 40; use another format"),
    ],
)
def test_what_cannot_be_packed_is_refused(
    options: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = QWEN3_32B | {"hidden_size": 40, "num_hidden_layers": 1, "vocab_size": 64, "intermediate_size": 64}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert main(["plan", "--model", str(tmp_path), *options]) == 2
    assert words in capsys.readouterr().err
