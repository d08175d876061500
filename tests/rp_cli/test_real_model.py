"""A real chat model and real conversations, fine-tuned by the commands of the README, beside a plain loop.

`ROUNDPIPE_REAL_CHATS` names a folder with ``model``, whose template is ChatML, and ``chats.jsonl``.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import finetuning
import pytest
import torch
from peft import LoraConfig, get_peft_model
from rp_cli.main import main
from rp_data.batching.batches import Sequences
from rp_data.documents import Document
from rp_data.rows.documents import read_samples
from rp_data.tokens import Reader
from transformers import AutoModelForCausalLM, AutoTokenizer

PLACE = Path(os.environ.get("ROUNDPIPE_REAL_CHATS", ""))
MODEL, CHATS = PLACE / "model", PLACE / "chats.jsonl"
pytestmark = [
    pytest.mark.nightly,
    pytest.mark.timeout(1800),
    pytest.mark.usefixtures("measured_once"),
    pytest.mark.skipif(not CHATS.is_file(), reason="ROUNDPIPE_REAL_CHATS names no folder with a model and chats"),
]
SIZE, BATCH, STEPS, RATE = 64, 2, 3, 1e-4
GIVEN = ["--sequence", str(SIZE), "--batch", str(BATCH), "--steps", str(STEPS), "--lr", str(RATE)]
GIVEN += ["--weight-decay", "0.1", "--clip", "0.5", "--devices", "cpu:2", "--num-microbatch", "2"]
GIVEN += ["--warm-up", "1", "--save-every", "1"]
KINDS = {
    "all weights": [],
    "adapters": ["--lora", "8", "--lora-targets", "q_proj", "v_proj"],
    "completions only": ["--completions-only"],
    "each alone": ["--completions-only", "--no-packing"],
}
SAID = re.compile(r"(?<=<\|im_start\|>assistant\n).*?<\|im_end\|>\n", re.DOTALL)


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first conversations."""
    path = tmp_path_factory.mktemp("few") / "chats.jsonl"
    path.write_text("".join(CHATS.read_text().splitlines(keepends=True)[:40]))
    return path


def documents(path: Path, *, only: bool) -> Any:
    reader = Reader(AutoTokenizer.from_pretrained(MODEL), sequence=SIZE, completions_only=only)
    return reader.read(read_samples("--data", [path]))


def test_what_is_learned_of_all_conversations_is_what_the_assistant_says() -> None:
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    rows = [json.loads(line) for line in CHATS.read_text().splitlines()]
    reader = Reader(tokenizer, sequence=10**6, completions_only=True)

    found = reader.read(read_samples("--data", [CHATS])).all

    assert len(found) == len(rows) > 2000
    for row, document in zip(rows, found, strict=True):
        text = tokenizer.apply_chat_template(row["messages"], tokenize=False)
        whole = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        spans = [match.span() for match in SAID.finditer(text)]
        learned = [any(a < end and b > start for start, end in spans) for a, b in whole["offset_mapping"]]
        assert list(document.tokens) == whole["input_ids"]
        assert list(map(bool, document.learned)) == learned, text


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_has_the_losses_of_a_plain_loop_and_goes_on(kind: str, few: Path, tmp_path: Path) -> None:
    run, given = tmp_path / "run", ["train", "--model", str(MODEL), "--data", str(few), *GIVEN, *KINDS[kind]]

    assert main([*given, "--output", str(run)]) == 0

    found = [line["loss"] for line in finetuning.lines(run)]
    steps = steps_of(few, only="--completions-only" in given, packing="--no-packing" not in given)
    plain = plain_model(KINDS[kind])
    losses = finetuning.plain_loop(plain, steps, count=STEPS, rate=RATE, decay=0.1, clip=0.5)
    assert found == pytest.approx(losses, rel=1e-4)

    # As if it had been killed after its second checkpoint.
    shutil.rmtree(run / "model")
    shutil.rmtree(run / "checkpoints" / "step-00000002")
    assert main([*given, "--output", str(run), "--resume"]) == 0
    assert [line["loss"] for line in finetuning.lines(run)] == found
    assert (run / "model" / "tokenizer.json").is_file()


def steps_of(path: Path, *, only: bool, packing: bool) -> Iterator[list[Document]]:
    sequences = Sequences(documents(path, only=only), size=SIZE, packing=packing, seed=0)
    for step in range(STEPS):
        yield [one for row in range(step * BATCH, (step + 1) * BATCH) for one in sequences.at(row)]


def plain_model(kind: list[str]) -> Any:
    model: Any = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    torch.manual_seed(0)
    if "--lora" in kind:
        adapters = LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
        model = get_peft_model(model, adapters)
    return model.train()
