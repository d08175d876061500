"""`roundpipe train --model`: the same numbers as a plain loop of transformers, and results that load there."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import finetuning
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from rp_cli.main import main
from rp_data.batching.batches import Sequences, StepBatches
from rp_data.documents import Document
from rp_data.rows.documents import read_samples
from rp_data.tokens import Reader
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

pytestmark = pytest.mark.usefixtures("measured_once")

RECORDS = {"pairs": finetuning.pairs, "chat": finetuning.chats}
SIZE, BATCH, STEPS, RATE, DECAY = 40, 2, 2, 1e-2, 0.1
SETTINGS = ["--sequence", str(SIZE), "--batch", str(BATCH), "--steps", str(STEPS), "--lr", str(RATE), "--sync"]
SETTINGS += ["--weight-decay", str(DECAY), "--clip", "0.5", "--warm-up", "1", "--devices", "cpu:2"]
SETTINGS += ["--num-microbatch", "2"]


@pytest.fixture(scope="module")
def folders() -> dict[str, Path]:
    """Of the models that were made, by family."""
    return {}


def model_folder(folders: dict[str, Path], family: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if family not in folders:
        folders[family] = finetuning.make_model(tmp_path_factory.mktemp(family), family)
    return folders[family]


@pytest.mark.slow
@pytest.mark.pairwise
@pytest.mark.parametrize("family", finetuning.FAMILIES)
@pytest.mark.parametrize("lora", [None, 4])
@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("records", RECORDS)
@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_run_equals_a_plain_loop_over_documents_alone(
    family: str,
    lora: int | None,
    packing: bool,
    records: str,
    accumulation: int,
    tmp_path: Path,
    folders: dict[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = model_folder(folders, family, tmp_path_factory)
    data = finetuning.json_lines(tmp_path / "data.jsonl", RECORDS[records](14 * accumulation))
    chosen = [
        "--completions-only",
        *([] if packing else ["--no-packing"]),
        *([] if lora is None else ["--lora", str(lora), "--lora-targets", "all-linear"]),
    ]
    arguments = ["--model", str(folder), "--data", str(data), "--output", str(tmp_path / "run")]
    assert main(["train", *arguments, *SETTINGS, *chosen, "--accumulation", str(accumulation)]) == 0

    plain = plain_model(folder, lora)
    steps = steps_of(folder, data, packing=packing, accumulation=accumulation)
    losses = finetuning.plain_loop(plain, steps, count=STEPS, rate=RATE, decay=DECAY, clip=0.5)

    found = [line["loss"] for line in finetuning.lines(tmp_path / "run")]
    assert found == pytest.approx(losses, rel=1e-4)
    loaded: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model" if lora is None else folder)
    if lora is not None:
        loaded = PeftModel.from_pretrained(loaded, tmp_path / "run" / "model")
    theirs = plain.state_dict()
    start = plain_model(folder, lora).state_dict()
    for name, tensor in loaded.state_dict().items():
        moved = (theirs[name] - start[name]).norm()
        assert (tensor - theirs[name]).norm() <= 1e-2 * moved + 1e-6, name
    assert AutoTokenizer.from_pretrained(tmp_path / "run" / "model").chat_template == finetuning.CHATML


def plain_model(folder: Path, lora: int | None) -> nn.Module:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(folder)
    if lora is not None:
        settings = {"r": lora, "lora_alpha": 2 * lora, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
        model = get_peft_model(model, LoraConfig(**settings))
    return model.train()


def steps_of(folder: Path, data: Path, *, packing: bool, accumulation: int) -> Iterator[list[Document]]:
    """The documents of each step; what is learned of them is tested elsewhere."""
    reader = Reader(AutoTokenizer.from_pretrained(folder), sequence=SIZE, completions_only=True)
    sequences = Sequences(reader.read(read_samples("--data", [data])), size=SIZE, packing=packing, seed=0)
    StepBatches(sequences, batch=BATCH, accumulation=accumulation, pad=0)
    rows = BATCH * accumulation
    for step in range(STEPS):
        yield [document for row in range(step * rows, (step + 1) * rows) for document in sequences.at(row)]


@pytest.mark.later
def test_text_of_a_trained_model_ends_where_its_template_ends_replies(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = finetuning.make_model(tmp_path / "base")
    AutoModelForCausalLM.from_pretrained(folder).save_pretrained(folder)
    config = GenerationConfig(eos_token_id=0, pad_token_id=7)
    config.save_pretrained(folder)
    data = finetuning.json_lines(tmp_path / "data.jsonl", finetuning.chats(14))
    asked = ["train", "--model", str(folder), "--data", str(data), *SETTINGS, "--output"]

    assert main([*asked, str(tmp_path / "all")]) == 0
    told = capsys.readouterr().out
    assert main([*asked, str(tmp_path / "adapters"), "--lora", "4"]) == 0

    end = AutoTokenizer.from_pretrained(folder).convert_tokens_to_ids("<|im_end|>")
    found = GenerationConfig.from_pretrained(tmp_path / "all" / "model")
    assert (found.eos_token_id, found.pad_token_id) == ([0, end], 7)
    assert f"generation_config.json: text ends at <|im_end|> ({end}), too" in told
    assert "generation_config.json" not in capsys.readouterr().out
    assert GenerationConfig.from_pretrained(folder).eos_token_id == 0


@pytest.mark.later
def test_a_routers_loss_counts_once_a_step_in_however_many_calls(tmp_path: Path) -> None:
    folder = finetuning.make_model(tmp_path / "moe", "qwen3-moe")
    config = json.loads((folder / "config.json").read_text())
    added = {"output_router_logits": True, "router_aux_loss_coef": 0.5}
    (folder / "config.json").write_text(json.dumps(config | added))
    data = finetuning.json_lines(tmp_path / "data.jsonl", finetuning.texts(4))
    losses: list[float] = []
    for batch, microbatches, accumulation in ((4, 4, 1), (2, 2, 2), (1, 1, 4)):
        run = tmp_path / f"{accumulation}"
        given = ["--batch", str(batch), "--num-microbatch", str(microbatches), "--accumulation", str(accumulation)]
        files = ["--model", str(folder), "--data", str(data), "--output", str(run)]
        settings = ["--sequence", "32", "--steps", "1", "--no-packing", "--devices", "cpu:2"]
        assert main(["train", *files, *settings, *given]) == 0
        losses += [line["loss"] for line in finetuning.lines(run)]

    first, *others = losses
    assert others == pytest.approx([first, first], rel=1e-6)
