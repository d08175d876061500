"""`roundpipe train --adapter-dtype`: adapters in bf16 on the devices, whose fp32 values are saved and go on."""

from __future__ import annotations

import json
from pathlib import Path

import finetuning
import pytest
import torch
from peft import PeftModel
from rp_cli.main import main
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

pytestmark = pytest.mark.usefixtures("measured_once")

SETTINGS = ["--sequence", "48", "--batch", "2", "--steps", "4", "--lr", "1e-2", "--no-packing", "--lora", "4"]
SETTINGS += ["--devices", "cpu:2", "--num-microbatch", "2", "--warm-up", "0"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return finetuning.make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    texts = [{"text": finetuning.words(number, 12)} for number in range(6)]
    return finetuning.json_lines(tmp_path_factory.mktemp("data") / "data.jsonl", texts)


def train(model: Path, data: Path, run: Path, *more: str) -> list[float]:
    given = ["--model", str(model), "--data", str(data), "--output", str(run), *SETTINGS, *more]
    assert main(["train", *given]) == 0
    return [line["loss"] for line in finetuning.lines(run)]


@pytest.mark.slow
def test_losses_stay_near_and_what_is_saved_is_in_fp32(tmp_path: Path, model: Path, data: Path) -> None:
    wanted = train(model, data, tmp_path / "whole")

    found = train(model, data, tmp_path / "narrow", "--adapter-dtype", "bfloat16")

    assert found != wanted
    assert found == pytest.approx(wanted, rel=5e-3)
    saved = load_file(tmp_path / "narrow" / "model" / "adapter_model.safetensors")
    assert {one.dtype for one in saved.values()} == {torch.float32}
    assert any(not torch.equal(one, one.bfloat16().float()) for one in saved.values())
    loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model), tmp_path / "narrow" / "model")
    assert all(torch.isfinite(one).all() for one in loaded.merge_and_unload().parameters())


@pytest.mark.later
def test_an_extended_run_and_a_continued_adapter_begin_with_the_fp32_values(
    tmp_path: Path, model: Path, data: Path
) -> None:
    narrow = ["--adapter-dtype", "bfloat16", "--schedule", "constant", "--save-every", "2"]
    whole = train(model, data, tmp_path / "whole", *narrow)
    run = tmp_path / "run"
    train(model, data, run, *narrow, "--steps", "2")

    assert train(model, data, run, *narrow, "--resume") == whole

    first = load_file(run / "model" / "adapter_model.safetensors")
    arguments = ["--init-adapter", str(run / "model"), "--adapter-dtype", "bfloat16", "--lr", "1e-30"]
    given = ["--model", str(model), "--data", str(data), "--output", str(tmp_path / "next"), "--steps", "1"]
    assert main(["train", *given, *arguments, *SETTINGS[:4], "--devices", "cpu:2", "--num-microbatch", "2"]) == 0
    last = load_file(tmp_path / "next" / "model" / "adapter_model.safetensors")
    assert all(torch.equal(last[name], one) for name, one in first.items())


@pytest.mark.slow
def test_the_plan_counts_adapters_of_two_bytes(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes: list[int] = []
    for more in ([], ["--adapter-dtype", "bfloat16"]):
        capsys.readouterr()
        arguments = ["--model", str(model), "--lora", "8", "--ram", "64GB", "--gpu", "RTX 4090", "--json", *more]
        assert main(["plan", *arguments]) == 0
        answer = json.loads(capsys.readouterr().out)
        sizes.append(answer["host_bytes"]["weights"])

    assert sizes[1] < sizes[0]


def test_without_adapters_it_is_refused(
    model: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--model", str(model), "--data", str(data), "--output", str(tmp_path / "run")]

    assert main(["train", *given, "--adapter-dtype", "bfloat16"]) == 2

    assert "--adapter-dtype needs adapters" in capsys.readouterr().err
