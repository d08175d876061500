"""A Lightning script with a `RoundPipeStrategy` gives what the unchanged one does."""

from __future__ import annotations

import csv
import inspect
from pathlib import Path
from typing import Any

import lightning
import pytest
import roundpipe
import torch
from in_lightning import QUIET, Rows, assert_same_weights, numbers, strategy, trainer
from lightning.pytorch.callbacks import Callback, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import Strategy
from roundpipe import RoundPipeRunConfig, wrap_model_to_roundpipe
from rp_trainer import RoundPipeOptions
from rp_trainer.lightning import RoundPipeStrategy
from rp_trainer.lightning.precision import HostPrecision
from tiny import causal_lm, padded, rows
from torch import nn
from torch.utils.data import DataLoader

pytestmark = QUIET


class Tuned(lightning.LightningModule):
    """What a user writes: a model, its loss, its optimizer and schedule."""

    def __init__(self) -> None:
        super().__init__()
        self.model = causal_lm()
        self.losses: list[float] = []

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        del index
        loss = self.model(**batch).loss
        self.log("loss", loss, on_step=True)
        self.losses.append(float(loss.detach()))
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        del index
        self.log("eval_loss", self.model(**batch).loss, batch_size=len(batch["input_ids"]))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def batches(count: int = 14, size: int = 3) -> DataLoader[Any]:
    return DataLoader(rows(count), batch_size=size, collate_fn=padded)  # type: ignore[arg-type]


def trained(kind: Any, path: Path, data: Any, strategy: Any = "auto", **settings: Any) -> Any:
    module = kind()
    trainer(path, strategy, **settings).fit(module, data, batches(5, 4) if kind is Tuned else None)
    return module


CLIPPED = {"gradient_clip_val": 0.5}


@pytest.mark.parametrize(
    "settings",
    [
        {**CLIPPED, "accumulate_grad_batches": 2},
        pytest.param(CLIPPED, marks=pytest.mark.nightly),
        pytest.param({}, marks=pytest.mark.nightly),
        pytest.param({"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}, marks=pytest.mark.nightly),
    ],
)
def test_losses_rates_metrics_and_weights_are_the_same(tmp_path, options, settings):
    # 14 rows in batches of 3: five batches an epoch, the last of two rows, so a step of one batch with two.
    def logged(name: str, given: Any) -> tuple[Any, Tuned]:
        logger = CSVLogger(tmp_path, name)
        watched = {"callbacks": [LearningRateMonitor("step")], "logger": logger, "log_every_n_steps": 1}
        module = trained(Tuned, tmp_path, batches(), given, **settings, **watched)
        with (Path(logger.log_dir) / "metrics.csv").open() as file:
            lines = [{key: float(value) for key, value in line.items() if value} for line in csv.DictReader(file)]
        return lines, module

    wanted, plain = logged("plain", "auto")
    found, module = logged("roundpipe", strategy(options))
    assert [line.keys() for line in found] == [line.keys() for line in wanted]
    assert {"loss", "eval_loss", "lr-AdamW"} <= {name for line in found for name in line}
    for here, there in zip(found, wanted, strict=True):
        torch.testing.assert_close(here, there, rtol=1e-4, atol=2e-5)
    torch.testing.assert_close(module.losses, plain.losses, rtol=1e-4, atol=2e-5)
    assert_same_weights(module, plain)
    assert not torch.equal(module.model.lm_head.weight, causal_lm().lm_head.weight)


@pytest.mark.nightly
def test_a_row_of_layers_with_a_loss_of_ones_own_trains_the_same(tmp_path, options):
    wanted = trained(Rows, tmp_path, numbers(), **CLIPPED)
    assert_same_weights(trained(Rows, tmp_path, numbers(), strategy(options), **CLIPPED), wanted)


@pytest.mark.few(1)
@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_gradients_are_clipped(tmp_path, options, algorithm):
    settings = {"gradient_clip_val": 0.02, "gradient_clip_algorithm": algorithm}
    wanted = trained(Rows, tmp_path, numbers(), **settings)
    given = strategy(options)
    assert_same_weights(trained(Rows, tmp_path, numbers(), given, **settings), wanted)
    assert algorithm == "value" or (given.grad_norm or 0) > 0.02
    free = trained(Rows, tmp_path, numbers())
    assert not torch.allclose(free.net[0].weight, wanted.net[0].weight, atol=1e-4)


def test_only_what_the_optimizer_has_counts_in_the_norm(tmp_path, options):
    class Partly(Rows):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.net[2].parameters(), lr=0.1)

    settings = {"gradient_clip_val": 0.02}
    wanted = trained(Partly, tmp_path, numbers(), **settings)
    assert_same_weights(trained(Partly, tmp_path, numbers(), strategy(options), **settings), wanted)


@pytest.mark.later
def test_frozen_parameters_may_be_among_those_of_the_optimizer(tmp_path, options):
    class Frozen(Rows):
        def __init__(self) -> None:
            super().__init__()
            self.net[0].requires_grad_(False)

    wanted = trained(Frozen, tmp_path, numbers())
    found = trained(Frozen, tmp_path, numbers(), strategy(options))
    assert_same_weights(found, wanted)
    assert torch.equal(found.net[0].weight, Rows().net[0].weight)


@pytest.mark.later
def test_a_second_training_goes_on_with_the_same_model(tmp_path, options):
    def twice(given: Any = "auto") -> Rows:
        module, made = Rows(), trainer(tmp_path, given)
        made.fit(module, numbers())
        made.fit_loop.max_epochs = 3
        made.fit(module, numbers())
        return module

    assert_same_weights(twice(strategy(options)), twice())


def test_manual_optimization_takes_loss_and_gradients_in_one_call(tmp_path, options):
    class Manual(Rows):
        automatic_optimization = False

        def training_step(self, batch: Any, _: int) -> None:
            (inputs,) = batch
            optimizer = self.optimizers()
            label = inputs.argmax(1) % 3
            self.net.forward_backward((inputs,), label=label, loss_fn=nn.functional.cross_entropy)
            self.clip_gradients(optimizer, 0.02, "norm")
            optimizer.step()

    data = numbers()
    wanted = trained(Rows, tmp_path, data, gradient_clip_val=0.02)
    given = RoundPipeOptions(runtime=options.runtime, model_run_config=RoundPipeRunConfig(num_microbatch=1))
    found = trained(Manual, tmp_path, data, strategy(given))
    assert_same_weights(found, wanted)


@pytest.mark.later
def test_a_module_that_is_taken_apart_trains_the_same(tmp_path, options):
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = nn.Linear(4, 1600), nn.Linear(1600, 3)

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return self.right(self.left(inputs).tanh() * (1 if inputs.sum() > 0 else 2))

    class Apart(Rows):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.net = Two()

    wanted = trained(Apart, tmp_path, numbers())
    given = strategy(options)
    assert_same_weights(trained(Apart, tmp_path, numbers(), given), wanted)
    assert isinstance(given.on_devices.engine, roundpipe.AutoRoundPipe)


def test_asynchronous_steps_are_one_late(tmp_path, two):
    given = RoundPipeOptions(runtime=two, asynchronous=True)
    delays: list[int] = []

    class Delays(Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            delays.append(trainer.strategy.on_devices.engine.weights_delay)

    late = trained(Rows, tmp_path, numbers(), strategy(given), callbacks=[Delays()], **CLIPPED)
    assert delays == [0, *[1] * 7]
    wanted = Rows()
    optimizer, held = torch.optim.SGD(wanted.parameters(), lr=0.1), None
    read = Rows()
    for batch in [*numbers(), *numbers()]:
        loss = read.training_step(batch, 0)
        gradients = torch.autograd.grad(loss, list(read.parameters()))
        held = {name: value.clone() for name, value in wanted.state_dict().items()}
        for parameter, gradient in zip(wanted.parameters(), gradients, strict=True):
            parameter.grad = gradient
        nn.utils.clip_grad_norm_(wanted.parameters(), 0.5)
        optimizer.step()
        read.load_state_dict(held)
    assert_same_weights(late, wanted)


@pytest.mark.few(1)
# The master kinds of the run that is saved and of the one that goes on.
@pytest.mark.filterwarnings("error:.*masters of model.*are whole from now on")
@pytest.mark.parametrize(
    ("dtype", "kinds"),
    [
        (torch.float32, ("whole", "whole")),
        (torch.bfloat16, ("whole", "whole")),
        (torch.bfloat16, ("split", "split")),
        pytest.param(torch.bfloat16, ("split", "whole"), marks=pytest.mark.slow),
        pytest.param(torch.bfloat16, ("whole", "split"), marks=pytest.mark.slow),
    ],
)
def test_a_run_that_is_resumed_equals_the_uninterrupted_one(tmp_path, two, dtype, kinds):
    # One microbatch: the sums of 16-bit gradients depend on the plan.
    config = RoundPipeRunConfig(num_microbatch=1)

    class Steady(Rows):
        def __init__(self) -> None:
            super().__init__()
            self.net.to(dtype)

        def training_step(self, batch: Any, index: int) -> Any:
            return super().training_step([batch[0].to(dtype)], index)

        def configure_optimizers(self) -> Any:
            optimizer = roundpipe.optim.AdamW(self.parameters(), lr=1e-2)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]

    def run(epochs: int, path: Path, resumed: Any = None, kind: str = kinds[0]) -> Rows:
        saving = {"callbacks": [ModelCheckpoint(path, "{epoch}", save_top_k=-1)], "enable_checkpointing": True}
        options = RoundPipeOptions(runtime=two, model_run_config=config, master=kind)
        module = Steady()
        made = trainer(path, strategy(options), max_epochs=epochs, **saving)
        made.fit(module, numbers(), ckpt_path=resumed, weights_only=False)
        return module

    whole = run(2, tmp_path / "whole")
    run(1, tmp_path / "first")
    resumed = run(2, tmp_path / "second", tmp_path / "first" / "epoch=0.ckpt", kinds[1])
    assert not torch.equal(whole.net[0].weight, Rows().net[0].weight.to(dtype))
    for name, value in whole.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[name]), name
    saved = torch.load(tmp_path / "whole" / "epoch=1.ckpt", weights_only=False)
    masters = saved.get("roundpipe_masters", {})
    assert {one.dtype for one in masters.values()} == ({torch.float32} if dtype == torch.bfloat16 else set())


@pytest.mark.later
def test_plain_lightning_and_this_one_resume_each_others_checkpoints(tmp_path, options):
    def run(path: Path, given: Any, epochs: int, resumed: Any = None) -> Rows:
        module = Rows()
        made = trainer(path, given, max_epochs=epochs)
        made.fit(module, numbers(), ckpt_path=resumed, weights_only=False)
        made.save_checkpoint(path / "last.ckpt")
        return module

    wanted = run(tmp_path / "plain", "auto", 2)
    run(tmp_path / "ours", strategy(options), 1)
    run(tmp_path / "theirs", "auto", 1)
    from_ours = run(tmp_path / "a", "auto", 2, tmp_path / "ours" / "last.ckpt")
    from_theirs = run(tmp_path / "b", strategy(options), 2, tmp_path / "theirs" / "last.ckpt")
    assert_same_weights(from_ours, wanted)
    assert_same_weights(from_theirs, wanted)
    loaded = Rows.load_from_checkpoint(tmp_path / "ours" / "last.ckpt", weights_only=False)
    assert loaded.net[0].weight.shape == (8, 4)


def test_validation_and_prediction_use_the_last_steps_result(tmp_path, two):
    given = RoundPipeOptions(runtime=two, asynchronous=True, model_run_config=RoundPipeRunConfig(num_microbatch=2))
    module = Rows()
    made = trainer(tmp_path, strategy(given))
    made.fit(module, numbers())
    with torch.no_grad():
        wanted = [module.net(inputs) for (inputs,) in numbers()]
    found = made.predict(module, numbers())
    assert made.strategy.on_devices.engine.named_model is module.net
    for here, there in zip(found, wanted, strict=True):
        torch.testing.assert_close(here, there, rtol=1e-4, atol=2e-5)


@pytest.mark.later
def test_a_validation_may_compute_the_loss_alone(tmp_path, options):
    class Validated(Tuned):
        def validation_step(self, batch: Any, index: int) -> None:
            del index
            whole = self.model(**batch).loss
            alone = self.model.loss(input_kwargs=batch)
            assert not alone.requires_grad
            torch.testing.assert_close(alone, whole.float(), rtol=1e-6, atol=1e-6)
            self.log("eval_loss", alone, batch_size=len(batch["input_ids"]))

    made = trainer(tmp_path, strategy(options))
    made.fit(Validated(), batches(), batches(6))

    assert made.callback_metrics["eval_loss"] > 0


@pytest.mark.later
def test_bf16_mixed_runs_layers_under_autocast(tmp_path, options):
    wanted = trained(Rows, tmp_path, numbers(), precision="bf16-mixed")
    found = trained(Rows, tmp_path, numbers(), strategy(options), precision="bf16-mixed")
    exact = trained(Rows, tmp_path, numbers())
    assert found.net[0].weight.dtype == torch.float32
    assert_same_weights(found, wanted, atol=5e-3)
    assert not torch.equal(found.net[0].weight, exact.net[0].weight)


# What is refused


@pytest.mark.parametrize("precision", ["16-mixed", "bf16-true", "64-true"])
def test_other_precisions_are_refused(tmp_path, options, precision):
    with pytest.raises(ValueError, match=f"precision must be 32-true or bf16-mixed .* but is {precision}"):
        trainer(tmp_path, strategy(options), precision=precision)


@pytest.mark.parametrize(("argument", "value"), [("devices", 2), ("num_nodes", 2)])
def test_other_numbers_of_devices_are_refused(tmp_path, options, argument, value):
    with pytest.raises(ValueError, match=rf"{argument} must be 1 .* but is 2"):
        trainer(tmp_path, strategy(options), **{argument: value})


def test_steps_during_backward_are_refused():
    with pytest.raises(ValueError, match="step_in_backward must be False with RoundPipeStrategy"):
        RoundPipeStrategy(options=RoundPipeOptions(step_in_backward=True))


def test_several_processes_are_refused(tmp_path, options, monkeypatch):
    given = trainer(tmp_path, strategy(options))
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="WORLD_SIZE is more than 1"):
        given.fit(Rows(), numbers())


def with_head(frozen: bool) -> Rows:
    module = Rows()
    module.head = nn.Linear(3, 3).requires_grad_(not frozen)
    return module


def test_it_is_said_which_module_should_be_named(tmp_path, options):
    with pytest.raises(ValueError, match=r"Rows has parameters in net, head; name the one that trains"):
        trainer(tmp_path, strategy(options)).fit(with_head(frozen=False), numbers())
    with pytest.raises(ValueError, match=r"head.weight of Rows trains outside of net"):
        trainer(tmp_path, strategy(options, "net")).fit(with_head(frozen=False), numbers())
    with pytest.raises(ValueError, match=r"Rows has no submodule 'nets'; it has net, head"):
        trainer(tmp_path, strategy(options, "nets")).fit(with_head(frozen=True), numbers())
    trainer(tmp_path, strategy(options, "net"), max_steps=1).fit(with_head(frozen=True), numbers())


@pytest.mark.filterwarnings("ignore:these are the model's own parameters")
def test_a_wrapped_model_is_refused(tmp_path, options):
    module = Rows()
    module.net = wrap_model_to_roundpipe(module.net, runtime=options.runtime)
    with pytest.raises(TypeError, match="wrapped already"):
        trainer(tmp_path, strategy(options)).fit(module, numbers())


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (lambda one: torch.optim.LBFGS(one.parameters()), "LBFGS"),
        (lambda one: [torch.optim.SGD([weight]) for weight in one.net[0].parameters()], "but returned 2"),
        (lambda _: torch.optim.SGD(Rows().parameters()), "not a trained one of the model"),
    ],
)
def test_optimizers_that_cannot_work_are_refused(tmp_path, options, made, words):
    class Other(Rows):
        automatic_optimization = False

        def configure_optimizers(self) -> Any:
            return made(self)

    with pytest.raises(ValueError, match=words):
        trainer(tmp_path, strategy(options)).fit(Other(), numbers())


def test_layers_that_are_called_past_the_attribute_train_on_the_host(tmp_path, options):
    class Past(Rows):
        def __init__(self) -> None:
            super().__init__()
            self.layers = [self.net[0], self.net[2]]

        def training_step(self, batch: Any, index: int) -> Any:
            penalty = sum(one.square().sum() for one in self.parameters())
            passed = self.layers[1](self.layers[0](batch[0]).tanh()).logsumexp(1).mean()
            return super().training_step(batch, index) + passed + penalty

    wanted = trained(Past, tmp_path, numbers(), **CLIPPED)
    assert_same_weights(trained(Past, tmp_path, numbers(), strategy(options), **CLIPPED), wanted)


def test_what_is_overridden_is_lightnings():
    own = {"grad_norm", "show_gradients", "on_devices", "parallel_devices", "num_nodes"}
    for kind, base in ((RoundPipeStrategy, Strategy), (HostPrecision, Precision)):
        names = {name for name in vars(kind) if not name.startswith("_")} - own
        assert names
        assert {name for name in names if not hasattr(base, name)} <= {"strategy_name"}
    assert list(inspect.signature(Precision.clip_grad_by_norm).parameters) == ["self", "optimizer", "clip_val"]


def test_the_model_is_wrapped_when_training_begins():
    with pytest.raises(RuntimeError, match=r"wrapped when Trainer\.fit"):
        _ = RoundPipeStrategy().on_devices
