"""Tokens that were added to a tokenizer: the model gets embeddings for them, which are trained and saved."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import finetuning
import pytest
import torch
from peft import PeftModel
from rp_cli.main import main
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

pytestmark = pytest.mark.usefixtures("measured_once")
ADDED = ["<|think|>", "<|answer|>", "<|tool|>"]
GIVEN = [
    "train",
    "--model",
    "model",
    "--tokenizer",
    "more",
    "--data",
    "a.jsonl",
    "--sequence",
    "24",
    "--batch",
    "2",
]
GIVEN += ["--devices", "cpu:1", "--no-packing", "--lr", "1e-2", "--output", "run"]
RESIZED = [*GIVEN, "--resize-embeddings"]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    # A tied head, and one of its own.
    finetuning.make_model(folder / "tied", "qwen3")
    finetuning.make_model(folder / "untied", "llama")
    tokenizer = finetuning.tokenizer()
    # As many as the model has, and then more.
    tokenizer.add_tokens([f"<|{number}|>" for number in range(finetuning.VOCABULARY - len(tokenizer))])
    tokenizer.add_tokens(ADDED)
    tokenizer.save_pretrained(folder / "more")
    texts = [{"text": f"{ADDED[number % 3]} {finetuning.words(number, 6)}"} for number in range(6)]
    finetuning.json_lines(folder / "a.jsonl", texts)
    return folder


@pytest.fixture(params=["tied", "untied"])
def place(request: pytest.FixtureRequest, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    for name in ("more", "a.jsonl"):
        Path(name).symlink_to(made / name)
    shutil.copytree(made / request.param, "model")
    return request.param


@pytest.mark.slow
def test_embeddings_are_enlarged_trained_and_saved(place: str) -> None:
    assert main([*RESIZED, "--steps", "3", "--save-every", "1"]) == 0

    size = finetuning.VOCABULARY + len(ADDED)
    assert len(AutoTokenizer.from_pretrained("run/model")) == size
    base, model = (AutoModelForCausalLM.from_pretrained(name) for name in ("model", "run/model"))
    assert model.config.vocab_size == size
    assert len(model.get_input_embeddings().weight) == len(model.get_output_embeddings().weight) == size
    is_tied = model.get_input_embeddings().weight is model.get_output_embeddings().weight
    assert is_tied == (place == "tied")
    assert ("lm_head.weight" in load_file("run/model/model.safetensors")) == (place == "untied")

    # The first loss is that of transformers' own enlarged model.
    torch.manual_seed(0)
    base.resize_token_embeddings(size)
    begun = base.get_input_embeddings().weight.detach().clone()
    losses = [line["loss"] for line in finetuning.lines(Path("run")) if "loss" in line]
    assert losses[0] == pytest.approx(first_loss(base), abs=1e-5)
    trained = model.get_input_embeddings().weight[-len(ADDED) :]
    assert (trained - begun[-len(ADDED) :]).abs().amax(1).gt(1e-4).all()

    # It goes on as it was.
    assert main([*RESIZED, "--steps", "4", "--save-every", "1", "--resume"]) == 0
    again = [line["loss"] for line in finetuning.lines(Path("run")) if "loss" in line]
    assert again[:3] == losses


def first_loss(model: Any, size: int = 2) -> float:
    from rp_data.batching.batches import Sequences
    from rp_data.rows.documents import read_samples
    from rp_data.tokens import Reader

    reader = Reader(AutoTokenizer.from_pretrained("more"), sequence=24, completions_only=False)
    documents = reader.read(read_samples("--data", [Path("a.jsonl")]))
    batch = Sequences(documents, size=24, packing=False, seed=0).batch(0, size, pad=0)
    with torch.no_grad():
        return float(model.eval()(**batch).loss)


@pytest.mark.usefixtures("place", "no_model")
def test_without_the_option_added_tokens_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*GIVEN, "--steps", "1"]) == 2
    assert "or, if tokens were added to it, --resize-embeddings" in capsys.readouterr().err


@pytest.mark.later
def test_adapters_train_the_new_rows_or_are_refused(
    place: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = [*RESIZED, "--steps", "2", "--lora", "2", "--modules-to-save", "embed_tokens", "lm_head"]

    assert main([*RESIZED, "--steps", "2", "--lora", "2"]) == 2
    words = "is its embeddings" if place == "tied" else "add --modules-to-save embed_tokens lm_head"
    assert words in capsys.readouterr().err
    if place == "tied":
        assert main(saved) == 2
        return
    assert main(saved) == 0

    size = finetuning.VOCABULARY + len(ADDED)
    base = AutoModelForCausalLM.from_pretrained("model")
    base.resize_token_embeddings(size)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    model: Any = PeftModel.from_pretrained(base, "run/model")
    logits = model(torch.tensor([[size - 1, size - 2]])).logits
    assert logits.shape == (1, 2, size)
    assert logits.isfinite().all()
    capsys.readouterr()

    # Evaluated with all rows, as PEFT loads it onto the enlarged model.
    evaluated = ["--data", "a.jsonl", "--no-packing", "--batch", "6", "--devices", "cpu:1", "--json"]
    assert main(["eval", "run", *evaluated]) == 0
    expected = first_loss(model, 6)
    assert json.loads(capsys.readouterr().out)["loss"] == pytest.approx(expected, abs=1e-5)


@pytest.mark.usefixtures("place", "no_model")
def test_packed_weights_are_not_enlarged(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*RESIZED, "--lora", "2", "--pack", "nf4"]) == 2
    assert "--resize-embeddings enlarges weights that --pack nf4 packs" in capsys.readouterr().err
