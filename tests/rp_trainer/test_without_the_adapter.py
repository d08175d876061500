"""A wrapped model that meets a framework without the adapter: harmless, or an error that says what to use."""

from __future__ import annotations

import pytest
import torch
import trl
from datasets import Dataset
from roundpipe import TrainsNothing, wrap_model_to_roundpipe
from tiny import ARGUMENTS, causal_lm, padded, rows, sentences, tokenizer
from torch import nn
from transformers import Trainer, TrainingArguments


@pytest.fixture
def wrapped(two):
    return wrap_model_to_roundpipe(causal_lm(), runtime=two)


def test_moving_it_to_where_it_is_does_nothing(wrapped):
    before = [one.data_ptr() for one in wrapped.model.parameters()]
    assert wrapped.to("cpu") is wrapped
    assert wrapped.to(torch.float32) is wrapped
    assert wrapped.to(torch.device("cpu"), torch.float32, non_blocking=True) is wrapped
    assert wrapped.to(torch.zeros(1)) is wrapped
    assert wrapped.cpu() is wrapped
    assert [one.data_ptr() for one in wrapped.model.parameters()] == before


@pytest.mark.parametrize("target", ["meta", torch.bfloat16])
def test_moving_it_elsewhere_is_refused(wrapped, target):
    with pytest.raises(RuntimeError, match=rf"stays on the host .* asked to move to {target}") as error:
        wrapped.to(target)
    assert "called" not in str(error.value)
    with pytest.raises(RuntimeError, match="stays on the host"):
        wrapped.half()


@pytest.mark.parametrize(
    ("package", "words"),
    [
        ("accelerate", r"Accelerate called: leave the model out of accelerator\.prepare"),
        ("lightning", r"Lightning called: use rp_trainer: Trainer\(strategy=RoundPipeStrategy"),
        ("deepspeed", "DeepSpeed called"),
    ],
)
def test_other_frameworks_are_named(wrapped, package, words):
    with pytest.raises(RuntimeError, match=words):
        exec("model.to('meta')", {"__name__": f"{package}.anything", "model": wrapped})


def test_trainer_is_named_where_it_would_move_the_model(wrapped, tmp_path):
    args = TrainingArguments(str(tmp_path), **ARGUMENTS)
    vars(args)["_setup_devices"] = torch.device("meta")
    with pytest.raises(RuntimeError, match="transformers' Trainer called: use rp_trainer: from rp_trainer import"):
        Trainer(wrapped, args, padded, rows())


@pytest.mark.filterwarnings("ignore:these are the model's own parameters")
def test_trainer_is_named_where_it_would_train_nothing(wrapped, tmp_path):
    args = TrainingArguments(str(tmp_path), **ARGUMENTS, remove_unused_columns=False)
    trainer = Trainer(wrapped, args, padded, rows())
    with pytest.raises(TrainsNothing, match="transformers' Trainer called: use rp_trainer"):
        trainer.train()


@pytest.mark.filterwarnings("ignore:these are the model's own parameters")
def test_trl_is_named(wrapped, tmp_path):
    args = trl.SFTConfig(
        str(tmp_path), **{**ARGUMENTS, "num_train_epochs": 1}, bf16=False, gradient_checkpointing=False
    )
    data = Dataset.from_dict({"text": sentences(6)})
    vars(args)["_setup_devices"] = torch.device("meta")
    with pytest.raises(RuntimeError, match="TRL called: use rp_trainer: class Trainer"):
        trl.SFTTrainer(wrapped, args, train_dataset=data, processing_class=tokenizer())


def test_parts_of_a_model_in_which_it_lies_are_refused_likewise(wrapped):
    outer = nn.ModuleDict({"inner": wrapped})
    with pytest.raises(RuntimeError, match="stays on the host"):
        outer.to("cpu")
