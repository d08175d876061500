"""The examples of the pages run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import rp_trainer
from roundpipe import Runtime
from tiny import ARGUMENTS, causal_lm, padded, rows
from transformers import TrainingArguments

ROOT = Path(__file__).parents[2]


def blocks(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)


@pytest.fixture
def names(tmp_path, monkeypatch) -> Any:
    """What the examples take as given."""
    with Runtime("cpu:2") as runtime:
        monkeypatch.setattr("roundpipe.models.wrapped.options.default_runtime", lambda: runtime)
        args = TrainingArguments(str(tmp_path), **{**ARGUMENTS, "num_train_epochs": 1})
        found = {
            "model": causal_lm(),
            "dataset": rows(6),
            "collate": padded,
            "args": args,
            "folder": str(tmp_path),
        }
        yield {**found, "__name__": "script"}


@pytest.mark.nightly
def test_those_of_the_package(names, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    first, second, third, loop, fourth = blocks("packages/rp-trainer/README.md")
    exec(first, names)
    assert names["trainer"].state.global_step == 2
    exec(second, names)
    assert issubclass(names["SFTTrainer"], rp_trainer.RoundPipeMixin)
    names["model"] = causal_lm()
    exec(third, names)
    names["trainer"].train()
    names["model"], names["batches"] = causal_lm(), [padded(rows(4))]
    exec(loop, names)
    assert (tmp_path / "run" / "model" / "model.safetensors").is_file()
    pytest.importorskip("lightning")
    exec(fourth, names)
    assert names["trainer"].strategy.strategy_name == "roundpipe"


@pytest.mark.later
def test_those_of_the_page(names, tmp_path):
    script, classes, generating, serving, options, in_backward = blocks("docs/trainer.md")
    exec(script, names)
    assert (tmp_path / "model.safetensors").is_file()
    exec(classes, names)
    exec(generating, names)
    assert issubclass(names["GRPOTrainer"], rp_trainer.RoundPipeMixin)
    exec(serving, names)
    assert names["options"].server.url == "http://127.0.0.1:8000"
    exec(options, names)
    assert names["options"].asynchronous
    names["model"] = causal_lm().bfloat16()
    exec(in_backward, names)
    names["trainer"].train()
    assert names["trainer"].model_wrapped.engine.steps_in_backward


def test_that_of_the_readme(names):
    (script,) = [block for block in blocks("README.md") if "rp_trainer" in block]
    # Its dataset needs no collator of the user's own.
    names["dataset"] = [{**row, "labels": row["input_ids"]} for row in rows(2)][:1]
    exec(script, names)
    assert names["trainer"].state.global_step == 1
