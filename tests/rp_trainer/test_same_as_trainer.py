"""A `Trainer` script with one line changed gives what the unchanged one does."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import roundpipe
import torch
from roundpipe import RoundPipe, RoundPipeRunConfig, Runtime, wrap_model_to_roundpipe
from rp_optim import SplitMaster
from rp_trainer import RoundPipeMixin, RoundPipeOptions, RoundPipeTrainer, SteppedByEngine
from tiny import ARGUMENTS, assert_same, causal_lm, logs, padded, rows, weights
from torch import nn
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainerCallback, TrainingArguments

DATA = rows()


def script(kind: type[Trainer], path: Path, settings: dict[str, Any], **given: Any) -> Trainer:
    """What a user writes."""
    args = TrainingArguments(str(path), **{**ARGUMENTS, **settings})
    given = {"model": causal_lm(), "data_collator": padded, "eval_dataset": DATA[:5], **given}
    trainer = kind(args=args, train_dataset=DATA, **given)
    trainer.train()
    return trainer


EVALUATED = {"eval_strategy": "steps", "eval_steps": 2}


@pytest.mark.parametrize("accumulated", [pytest.param(1, marks=pytest.mark.nightly), 4])
def test_losses_rates_norms_and_weights_are_the_same(tmp_path, options, accumulated):
    # 22 ragged rows in batches of 3: the last batch, and the last step of each epoch, are shorter.
    settings = {**EVALUATED, "gradient_accumulation_steps": accumulated}
    wanted = script(Trainer, tmp_path, settings)
    found = script(RoundPipeTrainer, tmp_path, settings, roundpipe=options)
    assert_same(found, wanted)
    assert all("grad_norm" in line for line in logs(found) if "loss" in line)
    assert any(line.get("grad_norm", 0) > 0.5 for line in logs(found))
    start = causal_lm().state_dict()
    assert all(not torch.equal(value, start[name]) for name, value in weights(found).items())


def in_tensorboard(folder: Path) -> dict[tuple[str, int], float]:
    """The numbers of all files of events, by their names and steps."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found: dict[tuple[str, int], float] = {}
    for file in folder.rglob("events.out.*"):
        events = EventAccumulator(str(file))
        events.Reload()
        for name in events.Tags()["scalars"]:
            found |= {(name, event.step): event.value for event in events.Scalars(name)}
    return found


@pytest.mark.later
def test_tensorboard_has_each_number_of_each_row_and_those_of_the_unchanged_trainer(
    tmp_path, options, monkeypatch
):
    pytest.importorskip("tensorboard")
    settings = {**EVALUATED, "report_to": ["tensorboard"], "include_num_input_tokens_seen": "all"}
    files: list[dict[tuple[str, int], float]] = []
    for kind, given in ((Trainer, {}), (RoundPipeTrainer, {"roundpipe": options})):
        monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / kind.__name__))
        found = script(kind, tmp_path, {**settings, "num_train_epochs": 1}, **given)
        files.append(in_tensorboard(tmp_path / kind.__name__))
        rows = {
            (f"eval/{name[5:]}" if name.startswith("eval_") else f"train/{name}", line["step"]): value
            for line in found.state.log_history
            for name, value in line.items()
            if name != "step"
        }
        # TensorBoard's numbers have 32 bits.
        assert files[-1] == pytest.approx(rows, rel=1e-6)

    wanted, ours = files
    assert wanted.keys() == ours.keys()
    told = {"train/loss", "train/grad_norm", "train/learning_rate", "train/epoch", "eval/loss"}
    assert told | {"train/num_input_tokens_seen"} <= {name for name, _ in ours}
    same = [place for place in ours if not place[0].endswith(("runtime", "per_second"))]
    assert {place: ours[place] for place in same} == pytest.approx(
        {place: wanted[place] for place in same}, rel=1e-4
    )


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The arguments of all calls of a training so far."""
    found: list[dict[str, Any]] = []
    plain = RoundPipe.forward_backward

    def noted(self: RoundPipe, *args: Any, **kwargs: Any) -> Any:
        found.append(kwargs)
        return plain(self, *args, **kwargs)

    monkeypatch.setattr(RoundPipe, "forward_backward", noted)
    return found


def test_one_call_takes_all_batches_that_a_step_accumulates(tmp_path, options, calls):
    script(
        RoundPipeTrainer, tmp_path, {"gradient_accumulation_steps": 4, "num_train_epochs": 1}, roundpipe=options
    )
    assert [call["run_config"].num_microbatch for call in calls] == [4, 4]


IN_BACKWARD = {**EVALUATED, "max_grad_norm": 0}


@pytest.mark.parametrize("accumulated", [pytest.param(1, marks=pytest.mark.nightly), 4])
def test_so_are_those_of_steps_during_backward(tmp_path, options, calls, accumulated):
    settings = {**IN_BACKWARD, "gradient_accumulation_steps": accumulated, "weight_decay": 0.1}
    wanted = script(Trainer, tmp_path, settings)
    found = script(RoundPipeTrainer, tmp_path, settings, roundpipe=replace(options, step_in_backward=True))
    assert_same(found, wanted, ("loss", "learning_rate", "eval_loss"))
    assert len(calls) == found.state.global_step
    assert all(isinstance(call["optimizer"], roundpipe.optim.AdamW) for call in calls)
    # No step has known it.
    assert not any("grad_norm" in line for line in logs(found))


@pytest.mark.later
def test_steps_during_backward_train_what_was_wrapped_so_and_is_unfrozen_later(tmp_path, two):
    def trained(kind: type[Trainer], make: type[torch.optim.Optimizer], **given: Any) -> Trainer:
        model = causal_lm()
        model.model.embed_tokens.requires_grad_(False)
        optimizer = make(model.parameters(), lr=1e-3)
        wrapped = wrap_model_to_roundpipe(model, **given) if given else model
        settings = {"num_train_epochs": 1, "max_grad_norm": 0, "gradient_accumulation_steps": 2}
        return script(
            kind, tmp_path, settings, model=wrapped, optimizers=(optimizer, None), callbacks=[Unfreezing()]
        )

    found = trained(RoundPipeTrainer, roundpipe.optim.AdamW, runtime=two, step_in_backward=True)
    wanted = trained(Trainer, torch.optim.AdamW)
    assert_same(found, wanted, ("loss", "learning_rate"))
    assert not torch.equal(found.model.model.embed_tokens.weight, causal_lm().model.embed_tokens.weight)


def test_gradients_of_steps_during_backward_cannot_be_dropped(tmp_path, options):
    options = replace(options, step_in_backward=True)
    with pytest.raises(RuntimeError, match=r"zero_grad\(\) before the step cannot drop its gradients"):
        script(RoundPipeTrainer, tmp_path, IN_BACKWARD, callbacks=[Dropping()], roundpipe=options)


@pytest.mark.nightly
@pytest.mark.parametrize("settings", [{"max_grad_norm": 0}, {"optim": "sgd"}, {"optim": "adafactor"}])
def test_so_are_those_of_other_settings(tmp_path, options, settings):
    settings = {**settings, "num_train_epochs": 1}
    wanted = script(Trainer, tmp_path, settings)
    assert_same(script(RoundPipeTrainer, tmp_path, settings, roundpipe=options), wanted)


@pytest.mark.nightly
def test_the_users_own_optimizer_and_scheduler_train_the_same(tmp_path, options):
    def trained(kind: type[Trainer], **given: Any) -> Trainer:
        model = causal_lm()
        optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.1)
        once = {"num_train_epochs": 1}
        return script(kind, tmp_path, once, model=model, optimizers=(optimizer, scheduler), **given)

    assert_same(trained(RoundPipeTrainer, roundpipe=options), trained(Trainer))


@pytest.mark.later
def test_gradients_are_clipped_and_dropped_of_all_that_train_not_only_of_what_the_optimizer_has(tmp_path, options):
    def trained(kind: type[Trainer], **given: Any) -> Trainer:
        model = causal_lm()
        optimizer = torch.optim.SGD(model.lm_head.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.1)
        once = {"num_train_epochs": 1}
        return script(kind, tmp_path, once, model=model, optimizers=(optimizer, scheduler), **given)

    assert_same(trained(RoundPipeTrainer, roundpipe=options), trained(Trainer))


@pytest.mark.later
def test_so_does_an_optimizer_that_a_subclass_makes(tmp_path, options):
    class Own:
        def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
            del model
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)  # type: ignore[attr-defined]
            return self.optimizer

    class Plain(Own, Trainer):
        pass

    class Above(Own, RoundPipeTrainer):
        pass

    settings = {"num_train_epochs": 1}
    assert_same(script(Above, tmp_path, settings, roundpipe=options), script(Plain, tmp_path, settings))


def test_parameters_of_another_model_are_refused(tmp_path, options):
    optimizer = torch.optim.SGD(causal_lm(1).parameters(), lr=1e-3)
    with pytest.raises(ValueError, match=r"parameter of shape \(48, 16\) that is not a trained one"):
        script(RoundPipeTrainer, tmp_path, {}, optimizers=(optimizer, None), roundpipe=options)


@pytest.mark.nightly
def test_bf16_runs_layers_under_autocast(tmp_path, options):
    settings = {"bf16": True, "num_train_epochs": 1}
    wanted = script(Trainer, tmp_path, settings)
    found = script(RoundPipeTrainer, tmp_path, settings, roundpipe=options)
    exact = script(RoundPipeTrainer, tmp_path, {"num_train_epochs": 1}, roundpipe=options)
    assert found.model.dtype == torch.float32
    assert logs(found, ("loss",)) != logs(exact, ("loss",))
    for here, there in zip(logs(found), logs(wanted), strict=True):
        torch.testing.assert_close(here, there, rtol=0.02, atol=0.02)


@pytest.mark.nightly
def test_so_it_is_where_the_environment_asks_for_bf16(tmp_path, options, monkeypatch):
    settings = {"num_train_epochs": 1}
    exact = script(RoundPipeTrainer, tmp_path, settings, roundpipe=options)
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    found = script(RoundPipeTrainer, tmp_path, settings, roundpipe=options)
    assert logs(found, ("loss",)) != logs(exact, ("loss",))


@pytest.mark.nightly
def test_a_loss_that_is_a_mean_over_rows_is_scaled_by_the_accumulation(tmp_path, options):
    def classifier() -> nn.Module:
        torch.manual_seed(0)
        sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
        none = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        model = BertForSequenceClassification(BertConfig(vocab_size=48, num_labels=3, **sizes, **none))
        # As models say whose loss is not divided by `num_items_in_batch`.
        model.accepts_loss_kwargs = False
        return model

    def labelled(batch: list[Any]) -> dict[str, torch.Tensor]:
        return {**padded(batch), "labels": torch.tensor([int(row["input_ids"][0]) % 3 for row in batch])}

    settings = {"gradient_accumulation_steps": 3}
    given = {"data_collator": labelled}
    wanted = script(Trainer, tmp_path, settings, model=classifier(), **given)
    assert_same(
        script(RoundPipeTrainer, tmp_path, settings, model=classifier(), roundpipe=options, **given), wanted
    )


@pytest.mark.later
def test_a_wrapped_model_is_taken_as_it_is(tmp_path, two):
    model = causal_lm()
    engine = wrap_model_to_roundpipe(model, runtime=two, model_run_config=RoundPipeRunConfig(num_microbatch=3))
    once = {"num_train_epochs": 1}
    found = script(RoundPipeTrainer, tmp_path, once, model=engine)
    assert found.model is model
    assert found.model_wrapped.engine is engine
    assert_same(found, script(Trainer, tmp_path, once))


@pytest.mark.slow
@pytest.mark.filterwarnings("error:.*masters of model.*are whole from now on")
def test_masters_may_be_halves(tmp_path, two):
    settings = {"num_train_epochs": 1, "save_strategy": "epoch", "max_grad_norm": 0}
    found = []
    one = RoundPipeOptions(runtime=two, model_run_config=RoundPipeRunConfig(num_microbatch=1))
    for kind, in_backward in (("whole", False), ("split", False), ("split", True)):
        options = replace(one, master=kind, step_in_backward=in_backward)
        model = causal_lm().bfloat16()
        trainer = script(RoundPipeTrainer, tmp_path / kind, settings, model=model, roundpipe=options)
        halves = [isinstance(one, SplitMaster) for one in trainer.model_wrapped.engine.optim_parameters()]
        assert set(halves) == {kind == "split"}
        found.append(trainer)
    # Weights on a tie are rounded to the other neighbour.
    torch.testing.assert_close(weights(found[1]), weights(found[0]), rtol=2**-7, atol=2e-3)
    torch.testing.assert_close(weights(found[2]), weights(found[1]), rtol=0, atol=0)


@pytest.mark.later
def test_a_model_that_is_taken_apart_trains_too(tmp_path, options):
    class Odd(nn.Module):
        """Layers, one of which runs twice."""

        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.embedding = nn.Embedding(48, 64)
            self.layers = nn.ModuleList([nn.Linear(64, 64), nn.Linear(64, 64)])
            self.head = nn.Linear(64, 48)

        def forward(self, input_ids: Any, attention_mask: Any = None, labels: Any = None) -> dict[str, Any]:
            del attention_mask
            hidden = self.embedding(input_ids)
            for layer in (*self.layers, self.layers[0]):
                hidden = layer(hidden).tanh()
            logits = self.head(hidden)
            if labels is None:
                return {"logits": logits}
            return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}

    settings = {"gradient_accumulation_steps": 2, "num_train_epochs": 1}
    wanted = script(Trainer, tmp_path, settings, model=Odd())
    assert_same(script(RoundPipeTrainer, tmp_path, settings, model=Odd(), roundpipe=options), wanted)


@pytest.mark.nightly
def test_predictions_and_metrics_are_the_same(tmp_path, options):
    def trained(kind: type[Trainer], **given: Any) -> Trainer:
        metrics = {"compute_metrics": lambda found: {"mean": float(found.predictions.mean())}}
        return script(kind, tmp_path, {**EVALUATED, "num_train_epochs": 1}, **metrics, **given)

    wanted, found = trained(Trainer), trained(RoundPipeTrainer, roundpipe=options)
    assert_same(found, wanted, ("loss", "eval_loss", "eval_mean"))
    here, there = found.predict(DATA[:7]), wanted.predict(DATA[:7])
    torch.testing.assert_close(
        torch.tensor(here.predictions), torch.tensor(there.predictions), rtol=1e-4, atol=1e-4
    )


def test_an_evaluation_for_the_loss_alone_leaves_logits_on_the_devices(tmp_path, options, monkeypatch):
    made: list[str] = []
    for name in ("loss", "forward"):
        monkeypatch.setattr(RoundPipe, name, noting(made, name, getattr(RoundPipe, name)))
    args = TrainingArguments(str(tmp_path), **ARGUMENTS)
    given = {"eval_dataset": DATA[:5]}
    plain = RoundPipeTrainer(causal_lm(), args, padded, roundpipe=options, **given)
    wanted = Trainer(causal_lm(), args, padded, **given).evaluate()["eval_loss"]

    found = plain.evaluate()["eval_loss"]
    alone = made.copy()
    plain.predict(DATA[:5])
    predicted = made[len(alone) :]

    assert found == pytest.approx(wanted, rel=1e-5)
    assert alone == ["loss", "loss"]
    assert predicted == ["forward", "forward"]


def test_a_prediction_step_of_another_class_finds_the_logits(tmp_path, options):
    class Reading(Trainer):
        def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
            del prediction_loss_only, ignore_keys
            with torch.no_grad():
                outputs = model(**inputs)
            return outputs.logits.square().mean(), None, None

    class Both(RoundPipeMixin, Reading):
        pass

    args = TrainingArguments(str(tmp_path), **ARGUMENTS)
    wanted = Reading(causal_lm(), args, padded, eval_dataset=DATA[:5]).evaluate()["eval_loss"]

    found = Both(causal_lm(), args, padded, eval_dataset=DATA[:5], roundpipe=options).evaluate()["eval_loss"]

    assert found == pytest.approx(wanted, rel=1e-5)


def noting(made: list[str], name: str, method: Any) -> Any:
    def noted(self: RoundPipe, *args: Any, **kwargs: Any) -> Any:
        made.append(name)
        return method(self, *args, **kwargs)

    return noted


def test_a_model_can_be_evaluated_and_generate_without_training(tmp_path, options):
    args = TrainingArguments(str(tmp_path), **ARGUMENTS)
    found = RoundPipeTrainer(causal_lm(), args, padded, eval_dataset=DATA[:5], roundpipe=options)
    wanted = Trainer(causal_lm(), args, padded, eval_dataset=DATA[:5])
    assert found.evaluate()["eval_loss"] == pytest.approx(wanted.evaluate()["eval_loss"], rel=1e-5)
    prompt = DATA[0]["input_ids"][None]
    tokens = [one.generate(prompt, max_new_tokens=4, do_sample=False) for one in (found.model, wanted.model)]
    assert torch.equal(*tokens)


@pytest.mark.nightly
def test_each_training_may_begin_with_a_new_model(tmp_path, options):
    args = TrainingArguments(str(tmp_path), **ARGUMENTS)
    trainer = RoundPipeTrainer(
        model_init=lambda: causal_lm(), args=args, data_collator=padded, train_dataset=DATA, roundpipe=options
    )
    trainer.train()
    first, engine = weights(trainer), trainer.model_wrapped.engine
    trainer.train()
    assert trainer.model_wrapped.engine is not engine
    for name, value in weights(trainer).items():
        torch.testing.assert_close(value, first[name])


@pytest.mark.nightly
def test_a_second_training_goes_on_with_the_same_optimizer(tmp_path, options):
    def twice(kind: type[Trainer], **given: Any) -> Trainer:
        trainer = script(kind, tmp_path, {"num_train_epochs": 1}, **given)
        trainer.train()
        return trainer

    assert_same(twice(RoundPipeTrainer, roundpipe=options), twice(Trainer))


@pytest.mark.nightly
def test_the_optimizers_state_survives_a_reload(two):
    # Accelerate loads the state of an optimizer that it prepares anew, moved to its device.
    model = causal_lm()
    engine = wrap_model_to_roundpipe(model, runtime=two)
    steps = SteppedByEngine(engine, torch.optim.AdamW(model.parameters(), lr=1e-3))
    engine.forward_backward(input_kwargs=padded(DATA[:3]))
    norm = steps.clip_at_next_step(1.0)
    steps.step()
    assert norm is not None
    assert norm > 0
    before = steps.state_dict()
    clones = {at: {name: value.clone() for name, value in state.items()} for at, state in before["state"].items()}
    steps.load_state_dict({**before, "state": clones})
    for at, state in steps.state_dict()["state"].items():
        torch.testing.assert_close(state, clones[at])
    assert {id(one) for one in steps.state} == {id(one) for one in engine.optim_parameters()}
    with pytest.raises(TypeError, match="closure"):
        steps.step(lambda: 0.0)


@pytest.mark.nightly
def test_callbacks_see_the_users_model_and_every_event(tmp_path, options):
    from transformers import TrainerCallback

    class Noting(TrainerCallback):
        def __init__(self) -> None:
            self.events: list[str] = []

        def __getattribute__(self, name: str) -> Any:
            if name.startswith("on_"):
                super().__getattribute__("events").append(name)
            return super().__getattribute__(name)

    def events(kind: type[Trainer], **given: Any) -> list[str]:
        noting = Noting()
        trainer = script(
            kind, tmp_path, {**EVALUATED, "gradient_accumulation_steps": 2}, callbacks=[noting], **given
        )
        assert trainer.callback_handler.model is trainer.model
        return noting.events

    assert events(RoundPipeTrainer, roundpipe=options) == events(Trainer)


@pytest.mark.nightly
def test_devices_are_those_of_the_environment_if_none_are_given(tmp_path, monkeypatch):
    with Runtime("cpu:1") as runtime:
        monkeypatch.setattr("roundpipe.models.wrapped.options.default_runtime", lambda: runtime)
        trainer = script(RoundPipeTrainer, tmp_path, {"num_train_epochs": 1}, roundpipe=RoundPipeOptions())
        assert trainer.model_wrapped.engine.runtime is runtime


class Dropping(TrainerCallback):
    """Leaves the gradients of one step out."""

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        del args, control
        if state.global_step == 1:
            kwargs["optimizer"].zero_grad()


@pytest.mark.later
@pytest.mark.parametrize("accumulated", [1, 2])
def test_gradients_that_a_callback_drops_are_not_used(tmp_path, options, accumulated):
    settings = {"gradient_accumulation_steps": accumulated, "num_train_epochs": 1, "max_grad_norm": 0}
    runs = [
        script(kind, tmp_path, settings, callbacks=[Dropping()], **given)
        for kind, given in ((RoundPipeTrainer, {"roundpipe": options}), (Trainer, {}))
    ]
    assert_same(*runs, names=("loss", "learning_rate"))


class Unfreezing(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        del args, control
        if state.global_step == 2:
            kwargs["model"].model.embed_tokens.requires_grad_(True)


@pytest.mark.later
def test_an_optimizer_may_have_parameters_that_are_frozen_for_a_while(tmp_path, options):
    def run(kind: type[Trainer], **given: Any) -> Trainer:
        model = causal_lm()
        model.model.embed_tokens.requires_grad_(False)
        made = torch.optim.AdamW(model.parameters(), lr=1e-2)
        settings = {"num_train_epochs": 1, "gradient_accumulation_steps": 2}
        given["callbacks"] = [Unfreezing()]
        return script(kind, tmp_path, settings, model=model, optimizers=(made, None), **given)

    found = run(RoundPipeTrainer, roundpipe=options)
    assert_same(found, run(Trainer))
    assert not torch.equal(weights(found)["model.embed_tokens.weight"], weights_of(causal_lm()))


def weights_of(model: nn.Module) -> torch.Tensor:
    return model.state_dict()["model.embed_tokens.weight"]
