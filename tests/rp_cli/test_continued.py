"""`roundpipe train` goes on from an adapter, from a run with other data, and from a checkpoint of a Trainer."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from finetuning import json_lines, lines, make_model, words
from peft import LoraConfig, PeftModel, get_peft_model
from rp_cli.main import main
from test_adapted_training import SETTINGS as OF_ADAPTERS
from test_adapted_training import TEXTS, plain_loop
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

pytestmark = pytest.mark.usefixtures("measured_once")

SETTINGS = OF_ADAPTERS[: OF_ADAPTERS.index("--lora")]
OTHER_TEXTS = [{"text": words(number + 9, 10)} for number in range(4)]
Q = ["q_proj"]
KINDS: dict[str, Callable[[], Any]] = {
    "lora": lambda: LoraConfig(r=3, lora_alpha=5, target_modules=["q_proj", "down_proj"], init_lora_weights=False),
    "dora and a module": lambda: LoraConfig(
        r=4, target_modules=Q, use_dora=True, modules_to_save=["lm_head"], init_lora_weights=False
    ),
    "lokr": lambda: peft.LoKrConfig(r=4, target_modules=Q, init_weights=False),
}


def train(model: Path, data: Path, run: Path, *more: str) -> int:
    return main(["train", "--model", str(model), "--data", str(data), "--output", str(run), *SETTINGS, *more])


def adapter_for(model: Path, folder: Path, config: Any) -> Path:
    torch.manual_seed(1)
    get_peft_model(AutoModelForCausalLM.from_pretrained(model), config).save_pretrained(folder)
    return folder


def losses_of(run: Path) -> list[float]:
    return [line["loss"] for line in lines(run)]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_from_an_adapter_has_the_losses_of_a_plain_loop_from_it(tmp_path: Path, kind: str) -> None:
    model, data = make_model(tmp_path / "model"), json_lines(tmp_path / "data.jsonl", TEXTS)
    adapter = adapter_for(model, tmp_path / "adapter", KINDS[kind]())

    assert train(model, data, tmp_path / "run", "--init-adapter", str(adapter)) == 0

    plain = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model), adapter, is_trainable=True)
    expected = plain_loop(plain.train(), model, data)
    assert losses_of(tmp_path / "run") == pytest.approx(expected, rel=1e-5)
    made, given = (
        json.loads((each / "adapter_config.json").read_text()) for each in (tmp_path / "run/model", adapter)
    )
    same = ("peft_type", "r", "target_modules", "modules_to_save")
    assert {name: made.get(name) for name in same} == {name: given.get(name) for name in same}
    assert made["base_model_name_or_path"] == str(model)


@pytest.mark.later
def test_a_run_from_the_adapter_of_a_run_goes_on_from_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, data = make_model(tmp_path / "model"), json_lines(tmp_path / "data.jsonl", TEXTS)
    other = json_lines(tmp_path / "other.jsonl", OTHER_TEXTS)
    assert train(model, data, tmp_path / "first", "--lora", "4") == 0

    assert train(model, other, tmp_path / "second", "--init-adapter", str(tmp_path / "first")) == 0

    assert "is where training begins" in capsys.readouterr().out
    start = tmp_path / "first" / "model"
    plain = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model), start, is_trainable=True)
    assert losses_of(tmp_path / "second") == pytest.approx(plain_loop(plain.train(), model, other), rel=1e-5)
    assert train(model, other, tmp_path / "second", "--init-adapter", str(tmp_path / "first"), "--resume") == 0


@pytest.mark.slow
@pytest.mark.parametrize("place", ["run", "run/model"])
def test_a_whole_model_of_a_run_goes_on_with_other_data(tmp_path: Path, place: str) -> None:
    model, data = make_model(tmp_path / "model"), json_lines(tmp_path / "data.jsonl", TEXTS)
    other = json_lines(tmp_path / "other.jsonl", OTHER_TEXTS)
    assert train(model, data, tmp_path / "run") == 0

    assert train(tmp_path / place, other, tmp_path / "next") == 0

    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model").train()
    assert losses_of(tmp_path / "next") == pytest.approx(plain_loop(plain, model, other), rel=1e-5)


@pytest.mark.later
@pytest.mark.parametrize("kind", ["whole", "adapter"])
def test_a_checkpoint_of_transformers_trainer_gives_its_weights_alone(
    tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    model, data = make_model(tmp_path / "model"), json_lines(tmp_path / "data.jsonl", TEXTS)
    trained: Any = AutoModelForCausalLM.from_pretrained(model)
    if kind == "adapter":
        trained = get_peft_model(trained, KINDS["lora"]())
    arguments = TrainingArguments(
        str(tmp_path / "trainer"), max_steps=2, save_steps=2, learning_rate=1e-2, report_to=[], use_cpu=True
    )
    rows = [{"input_ids": [3, 20, 41, 7], "labels": [3, 20, 41, 7]} for _ in range(16)]
    Trainer(trained, arguments, train_dataset=rows).train()
    checkpoint = tmp_path / "trainer" / "checkpoint-2"
    assert (checkpoint / "optimizer.pt").is_file()
    capsys.readouterr()

    if kind == "adapter":
        assert train(model, data, tmp_path / "run", "--init-adapter", str(checkpoint)) == 0
    else:
        assert train(checkpoint, data, tmp_path / "run", "--tokenizer", str(model)) == 0

    told = capsys.readouterr().out
    assert "of a checkpoint of transformers' Trainer; its optimizer's state, schedule, random numbers" in told
    plain: Any = AutoModelForCausalLM.from_pretrained(checkpoint if kind == "whole" else model)
    if kind == "adapter":
        plain = PeftModel.from_pretrained(plain, checkpoint, is_trainable=True)
    assert losses_of(tmp_path / "run") == pytest.approx(plain_loop(plain.train(), model, data), rel=1e-5)


REFUSALS: list[tuple[list[str], str]] = [
    (
        ["--init-adapter", "ADAPTER", "--lora", "4"],
        "--init-adapter and --lora exclude each other; use one of them",
    ),
    (["--init-adapter", "ADAPTER", "--lora-alpha", "4"], "--lora-alpha needs --lora, the rank of the adapters"),
    (["--init-adapter", "ADAPTER", "--dora"], "--dora needs --lora"),
    (["--init-adapter", "MODEL"], "must hold an adapter, but there is no adapter_config.json in"),
    (["--init-adapter", "nowhere"], "--init-adapter must be a folder or a name on the hub"),
    (["--init-adapter", "OTHER"], "does not fit the model: "),
    (["--init-adapter", "PROMPT"], "is a PREFIX_TUNING, which learns a prompt; this command trains none"),
    (["--init-adapter", "CUT"], "does not fit the model: "),
    (["--model", "ADAPTER"], "name the model that it was trained for, and the adapter by --init-adapter"),
]


@pytest.mark.parametrize(("given", "told"), REFUSALS)
def test_what_cannot_be_gone_on_from_is_refused_in_a_line(
    given: list[str], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from safetensors.torch import load_file, save_file

    model, data = make_model(tmp_path / "model"), json_lines(tmp_path / "data.jsonl", TEXTS)
    other = make_model(tmp_path / "other-model", "gpt-neox")
    prompt = peft.PrefixTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM")
    of_other = LoraConfig(r=4, target_modules=["query_key_value"])
    places = {
        "MODEL": model,
        "ADAPTER": adapter_for(model, tmp_path / "adapter", KINDS["lora"]()),
        "OTHER": adapter_for(other, tmp_path / "other", of_other),
        "PROMPT": adapter_for(model, tmp_path / "prompt", prompt),
        "CUT": adapter_for(model, tmp_path / "cut", KINDS["lora"]()),
    }
    file = places["CUT"] / "adapter_model.safetensors"
    kept = load_file(file)
    kept.pop(next(iter(kept)))
    save_file(kept, file)
    words_given = [str(places.get(each, each)) for each in given]

    assert train(model, data, tmp_path / "run", *words_given) == 2

    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert told in error, error
