"""Hooks and callbacks of Lightning scripts see and change what they do in plain Lightning."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from in_lightning import QUIET, Rows, assert_same_weights, numbers, strategy, trainer
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    Callback,
    EarlyStopping,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    LambdaCallback,
    ModelCheckpoint,
    StochasticWeightAveraging,
)
from rp_trainer import RoundPipeOptions
from torch import nn

pytestmark = QUIET


class Seen(Rows):
    """Writes down losses, and whatever a hook adds."""

    rate, momentum = 0.5, 0.9

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__(*layers)
        self.seen: list[float] = []

    def training_step(self, batch: Any, index: int) -> Any:
        loss = super().training_step(batch, index)
        self.seen.append(float(loss.detach()))
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        loss = super().training_step(batch, index)
        self.log("val", loss)
        self.seen.append(float(loss))

    def test_step(self, batch: Any, index: int) -> None:
        self.validation_step(batch, index)

    def see_gradients(self, parameters: Any = None) -> None:
        found = self.parameters() if parameters is None else parameters
        self.seen.append(float(sum(one.grad.norm() for one in found)))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.rate, momentum=self.momentum)


class GradientsAreRead(Seen):
    def on_after_backward(self) -> None:
        self.see_gradients()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.see_gradients([one for group in optimizer.param_groups for one in group["params"]])


class GradientsAreChanged(Seen):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        del optimizer
        for one in self.parameters():
            one.grad.mul_(0.1)


class ClippedByTorch(Seen):
    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        del optimizer
        nn.utils.clip_grad_norm_(self.parameters(), 0.05)


class EverySecondStep(Seen):
    """As Lightning's documentation has it: a closure alone drops the gradients of the one before."""

    def optimizer_step(self, epoch: int, index: int, optimizer: Any, closure: Any) -> None:
        del epoch
        if index % 2:
            optimizer.step(closure=closure)
        else:
            closure()


class Manual(Seen):
    automatic_optimization = False

    def training_step(self, batch: Any, index: int) -> None:
        optimizer = self.optimizers()
        self.manual_backward(super().training_step(batch, index))
        if index % 2:
            self.drop(optimizer)
            return
        self.seen.append(float(nn.utils.clip_grad_norm_(self.parameters(), 0.05)))
        optimizer.step()
        optimizer.zero_grad()

    def drop(self, optimizer: Any) -> None:
        optimizer.zero_grad()


class DroppedByModule(Manual):
    def drop(self, optimizer: Any) -> None:
        del optimizer
        self.zero_grad()


class DroppedBySubmodule(Manual):
    def drop(self, optimizer: Any) -> None:
        del optimizer
        self.net.zero_grad()


class TrainsNowAndThen(Seen):
    def __init__(self) -> None:
        super().__init__()
        self.net[0].requires_grad_(False)

    def on_train_epoch_start(self) -> None:
        self.net[0].requires_grad_(self.current_epoch % 2 == 1)


class WeightsAreClamped(Seen):
    def on_train_batch_end(self, *_: Any) -> None:
        with torch.no_grad():
            for one in self.parameters():
                one.clamp_(-0.3, 0.3)


class Modes(Seen):
    def training_step(self, batch: Any, index: int) -> Any:
        assert self.net.training
        return super().training_step(batch, index)

    def validation_step(self, batch: Any, index: int) -> None:
        assert not self.net.training
        super().validation_step(batch, index)


class SomeBatchesHaveNoLoss(Seen):
    def training_step(self, batch: Any, index: int) -> Any:
        loss = super().training_step(batch, index)
        return None if index == 2 else {"loss": loss, "other": batch}


SETTINGS: dict[type[Seen], dict[str, Any]] = {
    TrainsNowAndThen: {"max_epochs": 3},
    EverySecondStep: {},
    Manual: {},
    DroppedByModule: {},
    DroppedBySubmodule: {},
}
OTHERS = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5}


def both(kind: Any, path: Path, options: Any, **settings: Any) -> tuple[Any, Any]:
    """The script in plain Lightning, and with the strategy; `settings` of a trainer are made anew for each."""
    pair = []
    for given in (strategy(options), "auto"):
        module = kind()
        made = {name: value(module) if callable(value) else value for name, value in settings.items()}
        evaluated = numbers(6) if kind is Modes or "callbacks" in settings else None
        trainer(path, given, **{"max_epochs": 1, **made}).fit(module, numbers(), evaluated)
        pair.append(module)
    return pair[0], pair[1]


def assert_same(found: Any, wanted: Any) -> None:
    torch.testing.assert_close(found.seen, wanted.seen, rtol=1e-4, atol=2e-5)
    assert_same_weights(found, wanted)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "kind",
    [
        GradientsAreRead,
        GradientsAreChanged,
        ClippedByTorch,
        EverySecondStep,
        Manual,
        pytest.param(DroppedByModule, marks=pytest.mark.nightly),
        DroppedBySubmodule,
        TrainsNowAndThen,
        pytest.param(WeightsAreClamped, marks=pytest.mark.nightly),
        Modes,
        pytest.param(SomeBatchesHaveNoLoss, marks=pytest.mark.nightly),
    ],
)
def test_a_script_with_hooks_gives_what_plain_lightning_does(tmp_path, options, kind):
    assert_same(*both(kind, tmp_path, options, **SETTINGS.get(kind, OTHERS)))


class Thawed(BaseFinetuning):
    """Lightning's way to train a frozen part later."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.net[0])

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.net[0], optimizer, lr=0.1)


class PartlyFrozen(Seen):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([one for one in self.parameters() if one.requires_grad], lr=0.1)


@pytest.mark.later
@pytest.mark.parametrize(
    ("kind", "callbacks"),
    [
        (PartlyFrozen, lambda _: [Thawed()]),
        (Seen, lambda module: [LambdaCallback(on_after_backward=lambda *_: module.see_gradients())]),
        pytest.param(Seen, lambda _: [EMAWeightAveraging(decay=0.8)], marks=pytest.mark.nightly),
        pytest.param(
            Seen,
            lambda _: [StochasticWeightAveraging(0.1, swa_epoch_start=1, annealing_epochs=1)],
            marks=pytest.mark.nightly,
        ),
        pytest.param(Seen, lambda _: [GradientAccumulationScheduler({0: 1, 1: 3})], marks=pytest.mark.nightly),
    ],
    ids=["thawed", "lambda", "ema", "swa", "accumulation"],
)
def test_a_callback_does_what_it_does_in_plain_lightning(tmp_path, options, kind, callbacks):
    epochs = 2 if kind is PartlyFrozen else 3
    assert_same(*both(kind, tmp_path, options, callbacks=callbacks, max_epochs=epochs))


@pytest.mark.later
def test_the_best_is_found_loaded_and_trained_on(tmp_path, options):
    class Steep(Seen):
        rate = 3.0

    def run(path: Path, given: Any) -> Seen:
        module, best = Steep(), ModelCheckpoint(path, monitor="val")
        callbacks = [best, EarlyStopping("val", patience=1)]
        made = trainer(path, given, max_epochs=4, callbacks=callbacks, enable_checkpointing=True)
        made.fit(module, numbers(), numbers(6))
        made.test(module, numbers(9), ckpt_path="best", weights_only=False, verbose=False)
        module.seen += [float(made.current_epoch), float(best.best_model_score)]
        # Another trainer with the same strategy goes on from there.
        trainer(path, given, max_epochs=1).fit(module, numbers())
        return module

    assert_same(run(tmp_path / "ours", strategy(options)), run(tmp_path / "plain", "auto"))


def test_after_an_exception_training_goes_on(tmp_path, options):
    class Broken(Seen):
        is_broken = True

        def training_step(self, batch: Any, index: int) -> Any:
            loss = super().training_step(batch, index)
            if self.is_broken and index == 2:
                loss.backward()
                raise KeyError("mine")
            return loss

    def run(given: Any) -> Broken:
        module, made = Broken(), trainer(tmp_path, given)
        with pytest.raises(KeyError, match="mine"):
            made.fit(module, numbers())
        assert isinstance(module.net, nn.Sequential)
        module.is_broken = False
        module.zero_grad()
        made.fit(module, numbers())
        return module

    assert_same(run(strategy(options)), run("auto"))


def test_after_an_exception_parameters_have_the_result_of_the_last_step(tmp_path, two):
    class Interrupted(Seen):
        def training_step(self, batch: Any, index: int) -> Any:
            if index == 2:
                raise KeyError("mine")
            return super().training_step(batch, index)

    module = Interrupted()
    with pytest.raises(KeyError, match="mine"):
        trainer(tmp_path, strategy(RoundPipeOptions(runtime=two, asynchronous=True))).fit(module, numbers())
    before = {name: value.detach().clone() for name, value in module.net.named_parameters()}
    for name, value in module.net.state_dict().items():
        assert torch.equal(value, before[name])


def test_with_asynchronous_steps_hooks_see_gradients_and_drop_them(tmp_path, two):
    options = RoundPipeOptions(runtime=two, asynchronous=True)
    found: list[float] = []
    delays: list[int] = []

    class Read(Seen):
        """Drops what every second batch adds."""

        def optimizer_step(self, epoch: int, index: int, optimizer: Any, closure: Any) -> None:
            del epoch
            if index % 2:
                optimizer.step(closure=closure)
            else:
                closure()

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            del optimizer
            gradients = torch.cat([one.grad.flatten() for one in self.parameters()])
            found.append(float(gradients.norm()))

    class Watch(Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            delays.append(trainer.strategy.on_devices.engine.weights_delay)

    given = strategy(options)
    made = trainer(tmp_path, given, callbacks=[Watch()], gradient_clip_val=100.0, max_epochs=1)
    made.fit(Read(), numbers())
    # Two steps of four batches. A norm is told when the step is over: here that of the step before the last.
    assert delays == [0, 0, 1, 1]
    assert given.grad_norm == pytest.approx(found[0], rel=1e-4)


def test_forward_backward_runs_under_the_trainers_autocast(tmp_path, options):
    dtypes: list[torch.dtype] = []

    class InOneCall(Seen):
        automatic_optimization = False

        def training_step(self, batch: Any, index: int) -> None:
            del index

            def loss_fn(outputs: torch.Tensor, _: Any) -> torch.Tensor:
                dtypes.append(outputs.dtype)
                return outputs.float().square().mean()

            self.net.forward_backward((batch[0],), loss_fn=loss_fn)
            self.optimizers().step()

    trainer(tmp_path, strategy(options), precision="bf16-mixed", max_epochs=1).fit(InOneCall(), numbers())
    assert set(dtypes) == {torch.bfloat16}
