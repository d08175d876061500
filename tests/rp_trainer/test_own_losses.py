"""A loss of the user's own, or of TRL, runs as it is: forward and backward on the devices, never bypassed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from rp_trainer import OnDevices, RoundPipeMixin, RoundPipeTrainer
from tiny import ARGUMENTS, assert_same, causal_lm, padded, rows
from torch import nn
from transformers import BertConfig, BertForQuestionAnswering, Trainer, TrainingArguments
from transformers.modeling_outputs import CausalLMOutput

NIGHTLY = pytest.mark.nightly
DATA = rows(12)


def script(kind: type[Trainer], path: Path, settings: dict[str, Any] | None = None, **given: Any) -> Trainer:
    once = {"gradient_accumulation_steps": 2, "num_train_epochs": 1, "eval_strategy": "steps", "eval_steps": 2}
    args = TrainingArguments(str(path), **{**ARGUMENTS, **once, **(settings or {})})
    given = {"model": causal_lm(), "data_collator": padded, "eval_dataset": DATA[:4], **given}
    trainer = kind(args=args, train_dataset=DATA, **given)
    trainer.train()
    return trainer


@pytest.mark.nightly
def test_label_smoothing(tmp_path, options):
    settings = {"label_smoothing_factor": 0.2}
    wanted = script(Trainer, tmp_path, settings)
    assert_same(script(RoundPipeTrainer, tmp_path, settings, roundpipe=options), wanted)


@pytest.mark.later
def test_a_loss_function(tmp_path, options):
    calls: list[type[object]] = []

    def squares(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
        calls.append(type(outputs))
        return (outputs.logits.square().sum(-1) * (labels != -100)).sum() / num_items_in_batch

    wanted = script(Trainer, tmp_path, compute_loss_func=squares)
    plain = len(calls)
    found = script(RoundPipeTrainer, tmp_path, compute_loss_func=squares, roundpipe=options)
    assert_same(found, wanted)
    assert len(calls) == 2 * plain > 0


class Entropy:
    """A `compute_loss` as users write it."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **rest: Any) -> Any:
        assert rest.keys() <= {"num_items_in_batch"}
        vars(self).setdefault("seen", []).append(type(model))
        outputs = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"])
        loss = -torch.distributions.Categorical(logits=outputs.logits).entropy()
        loss = (loss * inputs["attention_mask"]).sum() / inputs["attention_mask"].sum()
        return (loss, outputs) if return_outputs else loss


@pytest.mark.parametrize(
    "order", ["below the mixin", pytest.param("above the trainer", marks=pytest.mark.nightly)]
)
def test_a_method_of_a_subclass(tmp_path, options, order):
    class Plain(Entropy, Trainer):
        pass

    class Below(RoundPipeMixin, Plain):
        pass

    class Above(Entropy, RoundPipeTrainer):
        pass

    kind = Below if order == "below the mixin" else Above
    wanted, found = script(Plain, tmp_path), script(kind, tmp_path, roundpipe=options)
    assert_same(found, wanted)
    assert len(vars(found)["seen"]) == len(vars(wanted)["seen"])
    assert set(vars(found)["seen"]) == {OnDevices}


@pytest.mark.parametrize("order", ["below the mixin", pytest.param("above the trainer", marks=NIGHTLY)])
def test_a_step_of_a_subclass_is_called_for_each_batch_and_may_change_it(tmp_path, options, order):
    class Halved:
        def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
            vars(self)["calls"] = vars(self).get("calls", 0) + 1
            inputs["labels"] = inputs["labels"].masked_fill(inputs["labels"] % 2 == 0, -100)
            return super().training_step(model, inputs, num_items_in_batch)  # type: ignore[misc]

    class Plain(Halved, Trainer):
        pass

    class Below(RoundPipeMixin, Plain):
        pass

    class Above(Halved, RoundPipeTrainer):
        pass

    kind = Below if order == "below the mixin" else Above
    wanted, found = script(Plain, tmp_path), script(kind, tmp_path, roundpipe=options)
    assert vars(found)["calls"] == vars(wanted)["calls"] == 4
    assert_same(found, wanted)


class Single(nn.Module):
    """A model without layers, whose loss is a mean over all tokens."""

    def __init__(self, returned: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.returned = returned
        self.embedding, self.head = nn.Embedding(48, 16), nn.Linear(16, 48)

    def forward(self, input_ids: Any, attention_mask: Any = None, labels: Any = None) -> Any:
        del attention_mask
        logits = self.head(self.embedding(input_ids).tanh())
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        if self.returned == "tuple":
            return loss, logits
        return {"loss": loss, "logits": logits} if self.returned == "dict" else CausalLMOutput(loss, logits)


@pytest.mark.parametrize("returned", ["dict", *(pytest.param(one, marks=NIGHTLY) for one in ("tuple", "output"))])
@pytest.mark.parametrize("accumulated", [1, pytest.param(2, marks=NIGHTLY)])
def test_batches_stay_whole_where_it_is_unknown_how_a_loss_divides(tmp_path, options, returned, accumulated):
    settings = {"gradient_accumulation_steps": accumulated}
    wanted = script(Trainer, tmp_path, settings, model=Single(returned))
    assert_same(script(RoundPipeTrainer, tmp_path, settings, model=Single(returned), roundpipe=options), wanted)


@pytest.mark.later
def test_so_do_batches_whose_labels_have_other_names(tmp_path, options):
    def model() -> nn.Module:
        torch.manual_seed(0)
        sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
        none = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        return BertForQuestionAnswering(BertConfig(vocab_size=48, **sizes, **none))

    def answers(batch: list[Any]) -> dict[str, torch.Tensor]:
        inputs = {name: value for name, value in padded(batch).items() if name != "labels"}
        place = torch.arange(len(batch)) % 3
        return {**inputs, "start_positions": place, "end_positions": place}

    given = {"data_collator": answers}
    # Not Adam, which makes steps of the noise where gradients would be zero.
    settings = {"gradient_accumulation_steps": 1, "optim": "sgd"}
    wanted = script(Trainer, tmp_path, settings, model=model(), **given)
    assert_same(script(RoundPipeTrainer, tmp_path, settings, model=model(), roundpipe=options, **given), wanted)


@pytest.mark.nightly
def test_calls_of_the_trainers_model_itself_run_on_the_devices(tmp_path, options, monkeypatch):
    calls: list[torch.Size] = []
    plain = OnDevices.forward

    def noted(self: OnDevices, *args: Any, **kwargs: Any) -> Any:
        calls.append(kwargs["input_ids"].shape)
        return plain(self, *args, **kwargs)

    class Direct(Trainer):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **rest: Any) -> Any:
            del model, rest
            outputs = self.model(**inputs)
            return (outputs.loss, outputs) if return_outputs else outputs.loss

    class Both(RoundPipeMixin, Direct):
        pass

    monkeypatch.setattr(OnDevices, "forward", noted)
    found = script(Both, tmp_path, roundpipe=options)
    assert len(calls) == 5  # four batches, and one of evaluation
    assert "forward" not in vars(found.model)
    assert_same(found, script(Direct, tmp_path))
