"""A training that goes on from a checkpoint is the one that did not stop, to the last bit, on any devices."""

from __future__ import annotations

import json
import random
import shutil
import threading
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import roundpipe
import torch
from checkpointing import PLAN, Job, equal, job, with_dropout
from plain import assert_near, batch, mlp, square_error
from roundpipe import (
    AutoRoundPipe,
    CheckpointError,
    CheckpointManager,
    CheckpointMismatch,
    CheckpointWarning,
    RoundPipe,
    Runtime,
    StepFailed,
    load_checkpoint,
    save_checkpoint,
)
from rp_checkpoint.files.writer import FileWriter
from rp_sched import Plan
from rp_transfer import HostLimit
from safetensors.torch import load_file, load_model
from torch import nn

HALF = {"dtype": torch.bfloat16}


def saved(own: Job, path: Path, step: int = 3, **kwargs: Any) -> Path:
    return save_checkpoint(path, own.model, own.optimizer, step=step, **own.parts, **kwargs).wait()


def loaded(own: Job, path: Path, **kwargs: Any) -> Any:
    return load_checkpoint(path, own.model, own.optimizer, **own.parts, **kwargs)


# Going on as if nothing had been


@pytest.mark.few(1)
@pytest.mark.pairwise
@pytest.mark.parametrize("is_async", [True, False], ids=["async", "sync"])
@pytest.mark.parametrize("second", [True, False], ids=["second block", "one block"])
@pytest.mark.parametrize("scaler", [True, False], ids=["scaler", "unscaled"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("waits", [True, False], ids=["waits", "goes on"])
@pytest.mark.parametrize(
    "optimizer",
    [
        roundpipe.optim.AdamW,
        roundpipe.optim.Lion,
        roundpipe.optim.Adafactor,
        torch.optim.AdamW,
        torch.optim.Adagrad,
    ],
    ids=lambda made: f"{made.__module__.partition('.')[0]} {made.__name__}",
)
def test_a_resumed_training_is_the_same_to_the_last_bit(
    tmp_path: Path, is_async: bool, second: bool, scaler: bool, dtype: torch.dtype, waits: bool, optimizer: Any
) -> None:
    how = {"is_async": is_async, "scaler": scaler, "dtype": dtype, "optimizer": optimizer}
    torch.manual_seed(3)
    with Runtime("cpu:2") as runtime:
        own = job(runtime, double_buffer=second, **how)
        own.train(0, 4)
        saving = save_checkpoint(
            tmp_path / "c", own.model, own.optimizer, step=4, data={"at": 4}, wait=waits, **own.parts
        )
        wanted = own.train(4, 7)
        weights = own.weights()
        assert saving.wait() == tmp_path / "c"
    torch.manual_seed(11)
    with Runtime("cpu:2") as runtime:
        # Made anew, with other weights, and the other kind of blocks.
        other = job(runtime, layers=with_dropout(5), double_buffer=not second, **how)
        found = loaded(other, tmp_path / "c")
        assert (found.step, found.data, found.notes) == (4, {"at": 4}, ())
        assert other.train(4, 7) == wanted
        assert equal(other.weights(), weights)


def test_a_checkpoint_after_an_asynchronous_step_has_both_results(tmp_path: Path, two: Runtime) -> None:
    own = job(two, **HALF)
    own.train(0, 2)
    path = saved(own, tmp_path / "c")
    earlier = job(two, **HALF)
    earlier.train(0, 1)
    before = {name: value for name, value in earlier.weights().items() if "master" not in name}
    published = load_file(path / "roundpipe/published.safetensors")
    exported = load_file(path / "model.safetensors")
    for name, value in before.items():
        assert torch.equal(published[f"published/{name}"], value)
        assert not torch.equal(exported[name], value)


@pytest.mark.few(1)
@pytest.mark.parametrize("is_async", [True, False], ids=["async", "sync"])
@pytest.mark.parametrize("second", [True, False], ids=["second block", "one block"])
def test_what_is_saved_while_training_goes_on_is_the_model_after_its_step(
    tmp_path: Path, two: Runtime, is_async: bool, second: bool
) -> None:
    after: list[dict[str, torch.Tensor]] = []
    for step in range(5):
        # `synchronize` would change what later asynchronous steps read: each step has a training of its own.
        truth = job(two, is_async=is_async, double_buffer=second, **HALF)
        truth.train(0, step + 1)
        after.append(truth.weights())
    own = job(two, is_async=is_async, double_buffer=second, **HALF)
    savings = []
    for step in range(5):
        own.train(step, step + 1)
        savings.append(
            save_checkpoint(tmp_path / f"{step}", own.model, own.optimizer, step=step, wait=False, buffer_bytes=1)
        )
    for step, saving in enumerate(savings):
        found = load_file(saving.wait() / "model.safetensors")
        assert equal(found, {name: after[step][name] for name in found}), step


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("devices", "other"), [("cpu:1", "cpu:4"), ("cpu:4", "cpu:1")], ids=["one to four", "four to one"]
)
def test_it_loads_on_other_devices_and_with_other_settings(tmp_path: Path, devices: str, other: str) -> None:
    with Runtime(devices) as runtime:
        own = job(runtime, layers=mlp(), num_microbatch=2)
        own.train(0, 3)
        path = saved(own, tmp_path / "c")
        wanted = own.train(3, 5)
        weights = own.weights()
    for pin in ("alloc", "register", "off"):
        with Runtime(other) as runtime:
            there = job(runtime, layers=mlp(seed=4), num_microbatch=4, plan=None, pin_model=pin)
            loaded(there, path)
            assert_near(torch.tensor(there.train(3, 5)), torch.tensor(wanted))
            assert_near(there.weights(), weights, 1e-4)


def test_batch_norm_and_extra_buffers_come_back(tmp_path: Path, two: Runtime) -> None:
    def row() -> nn.Sequential:
        return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 5), nn.Linear(5, 3))

    own = job(two, layers=row())
    own.train(0, 3)
    path = saved(own, tmp_path / "c")
    wanted, weights = own.train(3, 5), own.weights()
    other = job(two, layers=row())
    loaded(other, path)
    assert other.train(3, 5) == wanted
    assert equal(other.weights(), weights)


def test_frozen_and_tied_parameters_are_saved_once_and_come_back(tmp_path: Path, two: Runtime) -> None:
    def row() -> nn.Sequential:
        made = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))
        made[2].weight = made[1].weight
        made[0].requires_grad_(False)
        return made

    own = job(two, layers=row())
    own.train(0, 2)
    path = saved(own, tmp_path / "c")
    wanted = own.train(2, 4)
    other = job(two, layers=row())
    loaded(other, path)
    assert other.train(2, 4) == wanted
    assert "2.weight" not in load_file(path / "model.safetensors")
    plain = row()
    load_model(plain, path / "model.safetensors")
    assert plain[2].weight is plain[1].weight


def test_a_model_in_parts_goes_on_too(tmp_path: Path, two: Runtime) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.inner, self.scale = nn.Linear(4, 4), nn.Parameter(torch.ones(4))
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen += 1
            return x + self.scale * self.inner(x)

    def made() -> tuple[AutoRoundPipe, torch.optim.Optimizer]:
        net = Net()
        net.inner = RoundPipe(net.inner, runtime=two)
        model = AutoRoundPipe(net)
        return model, torch.optim.AdamW(model.optim_parameters(), lr=0.1)

    def train(model: AutoRoundPipe, optimizer: torch.optim.Optimizer, first: int, last: int) -> list[float]:
        losses = []
        for step in range(first, last):
            loss = model(batch(4, step)[0]).square().sum()
            loss.backward()
            model.step(lambda: (optimizer.step(), optimizer.zero_grad()))
            losses.append(loss.item())
        return losses

    model, optimizer = made()
    train(model, optimizer, 0, 3)
    path = save_checkpoint(tmp_path / "c", model, optimizer).path
    wanted = train(model, optimizer, 3, 6)
    other, another = made()
    load_checkpoint(path, other, another)
    assert train(other, another, 3, 6) == wanted
    assert other.model.seen == 6


def test_plans_are_saved_and_can_be_used_again(tmp_path: Path, two: Runtime) -> None:
    own = job(two)
    own.train(0, 1)
    path = saved(own, tmp_path / "c")
    found = loaded(job(two), path)
    assert found.plans == {("", "fused", 2): PLAN}
    assert found.num_microbatch == {"": 2}
    divided = Plan(fused=range(5), groups=[range(1), range(1, 2)], in_turn=False, devices=2)
    own = job(two, plan=divided)
    own.train(0, 1)
    assert loaded(job(two), saved(own, tmp_path / "d")).plans == {("", "fused", 2): divided}


def test_random_numbers_go_on(tmp_path: Path, two: Runtime) -> None:
    own = job(two)
    torch.manual_seed(1)
    random.seed(2)
    np.random.seed(3)
    path = saved(own, tmp_path / "c")
    wanted = torch.rand(3), random.random(), np.random.rand()
    loaded(own, path)
    found = torch.rand(3), random.random(), np.random.rand()
    assert torch.equal(found[0], wanted[0])
    assert found[1:] == wanted[1:]
    torch.manual_seed(5)
    wanted_now = torch.get_rng_state()
    loaded(own, path, random=False)
    assert torch.equal(torch.get_rng_state(), wanted_now)


def test_several_files_are_named_as_transformers_names_them(tmp_path: Path, two: Runtime) -> None:
    own = job(two)
    own.train(0, 2)
    path = saved(own, tmp_path / "c", shard_bytes=100)
    index = json.loads((path / "model.safetensors.index.json").read_text())
    every = {name: load_file(path / file)[name] for name, file in index["weight_map"].items()}
    assert len(set(index["weight_map"].values())) > 2
    assert sorted(every) == sorted(name for name, _ in own.model.model.named_parameters())
    wanted = own.train(2, 4)
    other = job(two)
    loaded(other, path)
    assert other.train(2, 4) == wanted


# What does not fit is told


def test_other_masters_and_frozen_parameters_are_told(tmp_path: Path, two: Runtime) -> None:
    own = job(two, **HALF)
    own.train(0, 2)
    path = saved(own, tmp_path / "c")
    other = job(two, optim_dtype=torch.bfloat16, **HALF)
    with pytest.warns(CheckpointWarning, match="masters were torch.float32 and are torch.bfloat16 now"):
        found = loaded(other, path)
    assert any("optimizer's state" in note for note in found.notes)
    other.train(2, 3)
    frozen = job(two, **HALF)
    frozen.model.model[0].requires_grad_(False)
    again = roundpipe.optim.AdamW(frozen.model.optim_parameters(), lr=0.1)
    with pytest.raises(CheckpointMismatch, match=r"the optimizer do not have the same tensors.*0\.bias"):
        load_checkpoint(path, frozen.model, again)
    with pytest.warns(CheckpointWarning, match="are frozen now"):
        load_checkpoint(path, frozen.model)
    assert equal(
        {"0.weight": frozen.model.state_dict()["0.weight"]},
        {"0.weight": load_file(path / "model.safetensors")["0.weight"]},
    )


def test_another_model_or_optimizer_is_refused_and_nothing_changed(tmp_path: Path, two: Runtime) -> None:
    own = job(two)
    own.train(0, 2)
    path = saved(own, tmp_path / "c")
    wider = job(two, layers=mlp(width=7))
    before = wider.weights()
    with pytest.raises(CheckpointMismatch, match=r"0.weight has shape \(6, 4\).*\(7, 4\) in the model"):
        loaded(wider, path)
    deeper = job(two, layers=mlp(depth=4), plan=None)
    with pytest.raises(CheckpointMismatch, match=r"none only in the checkpoint, 6\.bias, 6\.weight only here"):
        loaded(deeper, path)
    own_before = own.weights()
    with pytest.raises(CheckpointMismatch, match="1 optimizers, but 2 were given"):
        load_checkpoint(path, own.model, [own.optimizer, own.optimizer])
    grouped = roundpipe.optim.AdamW([{"params": [one]} for one in own.model.optim_parameters()])
    with pytest.raises(CheckpointMismatch, match="has 1 groups of parameters, but the optimizer 6"):
        load_checkpoint(path, own.model, grouped)
    assert equal(own.weights(), own_before)
    assert equal(wider.weights(), before)
    own.train(2, 3)
    wider.train(2, 3)


def test_arguments_are_checked_at_the_call(tmp_path: Path, two: Runtime) -> None:
    own = job(two)
    with pytest.raises(TypeError, match="must be a RoundPipe or AutoRoundPipe, but is a Linear"):
        save_checkpoint(tmp_path / "c", nn.Linear(1, 1))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="must be a RoundPipe"):
        load_checkpoint(tmp_path / "c", nn.Linear(1, 1))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"optimizer must be a torch.optim.Optimizer or several, but is a str"):
        save_checkpoint(tmp_path / "c", own.model, "Adam")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="step must be a whole number"):
        save_checkpoint(tmp_path / "c", own.model, step=-1)
    with pytest.raises(
        CheckpointError, match=r"^data\.f must be made of numbers, .* but its type is function; omit"
    ):
        save_checkpoint(tmp_path / "c", own.model, data={"f": print and (lambda: 1)})
    with pytest.raises(CheckpointError, match=r"^data\.rows must be .* type is ndarray; .*torch\.from_numpy"):
        save_checkpoint(tmp_path / "c", own.model, data={"rows": torch.arange(3).numpy()})
    stranger = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    for wait in (True, False):
        with pytest.raises(CheckpointError, match=r"parameter 0 of optimizer 0.* is not one of the model's"):
            save_checkpoint(tmp_path / "c", own.model, stranger, wait=wait)
    manager = CheckpointManager(tmp_path / "run")
    with pytest.raises(CheckpointError, match="is not one of the model's"):
        manager.save(own.model, stranger, step=1)
    manager.wait()
    assert [list(path.iterdir()) for path in tmp_path.iterdir()] == [[]]
    path = saved(own, tmp_path / "c")
    for wrong, told in (
        ({"optimizer": "Adam"}, "optimizer must be a torch.optim.Optimizer or several, but is a str"),
        ({"schedulers": own.optimizer}, "schedulers must be a learning-rate scheduler or several, but one is a"),
        ({"scaler": 2.0**16}, "scaler must be a GradScaler or None, but is a float"),
    ):
        with pytest.raises(TypeError, match=told):
            load_checkpoint(path, own.model, **wrong)
        with pytest.raises(TypeError, match=told):
            save_checkpoint(tmp_path / "d", own.model, **wrong)
    with pytest.raises(CheckpointError, match="exists already and is not replaced"):
        saved(own, path)


def test_schedulers_and_a_scaler_that_are_left_out_beside_their_optimizer_are_told(
    tmp_path: Path, two: Runtime
) -> None:
    own = job(two)
    schedule = torch.optim.lr_scheduler.StepLR(own.optimizer, 1)
    scaler = roundpipe.GradScaler(runtime=two)
    own.train(0, 1)
    path = save_checkpoint(tmp_path / "c", own.model, own.optimizer, schedulers=schedule, scaler=scaler).path
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_checkpoint(path, own.model)
        load_checkpoint(path, own.model, own.optimizer, schedulers=schedule, scaler=scaler)
    with pytest.warns(CheckpointWarning) as told:
        loaded = load_checkpoint(path, own.model, own.optimizer)
    assert ["schedulers=... to go on" in note or "scaler=... to go on" in note for note in loaded.notes] == [
        True
    ] * 2
    assert [str(one.message) for one in told] == list(loaded.notes)


def test_gradients_that_are_not_saved_are_told(tmp_path: Path, two: Runtime) -> None:
    own = job(two)
    inputs, labels = batch(8)
    own.model.forward_backward(input_args=(inputs,), label=labels, loss_fn=square_error)
    with pytest.warns(CheckpointWarning, match="gradients of calls since the last step"):
        saved(own, tmp_path / "c")


@pytest.mark.parametrize("change", ["frozen", "unfrozen", "replaced"])
def test_gradients_that_moved_into_new_blocks_are_not_forgotten(tmp_path: Path, two: Runtime, change: str) -> None:
    layers = mlp()
    layers[4].bias.requires_grad_(change != "unfrozen")
    model = RoundPipe(layers, runtime=two)
    inputs, label = batch(4)

    model.forward_backward((inputs,), label=label, loss_fn=square_error)
    if change == "replaced":
        layers[0] = nn.Linear(4, 6)
    else:
        layers[4].bias.requires_grad_(change == "unfrozen")
    with torch.no_grad():
        model(inputs)

    with pytest.warns(CheckpointWarning, match="gradients of calls since the last step"):
        save_checkpoint(tmp_path / "there", model)
    model.zero_grad()
    with warnings.catch_warnings():
        warnings.simplefilter("error", CheckpointWarning)
        save_checkpoint(tmp_path / "again", model)


def test_a_failed_step_has_nothing_to_save(tmp_path: Path, two: Runtime) -> None:
    own = job(two)
    own.train(0, 1)

    def fail() -> None:
        raise ZeroDivisionError

    own.model.step(fail)
    with pytest.raises((StepFailed, ZeroDivisionError)):
        saved(own, tmp_path / "c")
    with pytest.raises((StepFailed, ZeroDivisionError)):
        saved(own, tmp_path / "c")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("second", [True, False], ids=["second block", "one block"])
def test_loading_goes_on_after_a_step_that_failed_half_way(tmp_path: Path, two: Runtime, second: bool) -> None:
    own = job(two, double_buffer=second)
    own.train(0, 2)
    path = saved(own, tmp_path / "c")
    wanted = own.train(2, 4)

    def fail() -> None:
        own.optimizer.step()
        raise ZeroDivisionError

    inputs, labels = batch(8)
    own.model.forward_backward(input_args=(inputs,), label=labels, loss_fn=square_error)
    with pytest.raises(ZeroDivisionError):
        own.model.step(fail, is_async=False)
    loaded(own, path)
    assert own.train(2, 4) == wanted


# Other threads


@pytest.mark.parametrize(("free", "wanted"), [(1 << 40, 200 << 20), (1 << 28, 1 << 27)])
def test_the_buffer_takes_half_of_what_is_free_at_most(
    tmp_path: Path, two: Runtime, monkeypatch: pytest.MonkeyPatch, free: int, wanted: int
) -> None:
    taken: list[int] = []

    def writer(folder: Path, buffer_bytes: int) -> FileWriter:
        taken.append(buffer_bytes)
        return FileWriter(folder, buffer_bytes)

    monkeypatch.setattr("rp_checkpoint.saving.saving.FileWriter", writer)
    two.host_limit = lambda: HostLimit("the machine", 1 << 40, free)  # type: ignore[method-assign]
    saved(job(two), tmp_path / "c", buffer_bytes=200 << 20)
    assert taken == [wanted]


@pytest.mark.later
def test_a_thread_that_saves_is_never_in_the_way_of_training(tmp_path: Path, two: Runtime) -> None:
    truth = job(two, **HALF)
    wanted = truth.train(0, 12)
    own = job(two, **HALF)
    errors: list[BaseException] = []
    over = threading.Event()

    def save_all_along() -> None:
        number = 0
        while not over.is_set():
            try:
                save_checkpoint(tmp_path / f"{number}", own.model, own.optimizer, buffer_bytes=1)
            except BaseException as error:
                errors.append(error)
            number += 1

    with pytest.MonkeyPatch.context() as patch:
        # Between its calls and its steps the other thread finds gradients.
        patch.setattr("warnings.warn", lambda *_, **__: None)
        saver = threading.Thread(target=save_all_along)
        saver.start()
        found = own.train(0, 12)
        over.set()
        saver.join()
    assert errors == []
    assert found == wanted
    assert equal(own.weights(), truth.weights())
    for path in tmp_path.iterdir():
        fresh = job(two, **HALF)
        load_checkpoint(path, fresh.model, fresh.optimizer)


# The checkpoints of a run


def test_the_last_and_the_best_are_kept(tmp_path: Path, two: Runtime) -> None:
    own = job(two)
    manager = CheckpointManager(tmp_path, keep_last=2, best="min")
    for step, metric in enumerate([3.0, 1.0, 2.0, float("nan"), 5.0, 4.0]):
        manager.save(own.model, own.optimizer, step=step, metric=metric)
    manager.wait()
    assert [path.name for path in manager.checkpoints()] == ["step-00000001", "step-00000004", "step-00000005"]
    assert manager.best() == tmp_path / "step-00000001"
    found = manager.load_latest(own.model, own.optimizer)
    assert found is not None
    assert (found.step, found.metric) == (5, 4.0)
    manager.save(own.model, own.optimizer, step=5, metric=0.5, wait=True)
    assert manager.checkpoints()[-1].name == "step-00000005-1"
    assert manager.best() == manager.checkpoints()[-1]
    assert CheckpointManager(tmp_path / "empty").load_latest(own.model) is None


def test_a_metric_may_be_a_tensor_and_must_be_a_number(tmp_path: Path, two: Runtime) -> None:
    own = job(two)
    manager = CheckpointManager(tmp_path, keep_last=1, best="min")
    for step, metric in enumerate([3.0, 1.0, 2.0]):
        manager.save(own.model, own.optimizer, step=step, metric=torch.tensor(metric))
    manager.wait()
    assert manager.best() == tmp_path / "step-00000001"
    for wrong in ("low", torch.ones(2)):
        with pytest.raises(TypeError, match="metric must be a number"):
            manager.save(own.model, own.optimizer, step=4, metric=wrong)


def test_later_steps_of_another_run_are_told_and_do_not_cost_a_new_run_its_checkpoints(
    tmp_path: Path, two: Runtime
) -> None:
    own = job(two)
    before = CheckpointManager(tmp_path, keep_last=2)
    for step in (100, 200):
        before.save(own.model, own.optimizer, step=step, wait=True)
    again = CheckpointManager(tmp_path, keep_last=2)
    with pytest.warns(CheckpointWarning, match="step-00000200 is of a later step than 10"):
        again.save(own.model, own.optimizer, step=10)
    for step in (20, 30):
        again.save(own.model, own.optimizer, step=step)
    again.wait()
    kept = [20, 30, 100, 200]
    assert [path.name for path in again.checkpoints()] == [f"step-{step:08}" for step in kept]


def test_an_optimizer_of_another_class_is_refused_or_told(tmp_path: Path, two: Runtime) -> None:
    own = job(two)
    own.optimizer = roundpipe.optim.AdamW(own.model.optim_parameters(), lr=0.1)
    own.train(0, 1)
    saved = save_checkpoint(tmp_path / "one", own.model, own.optimizer, step=1)
    other = job(two)
    wanted = other.weights()
    with pytest.raises(CheckpointMismatch, match="the state of AdamW, but the optimizer is SGD"):
        load_checkpoint(saved.path, other.model, torch.optim.SGD(other.model.optim_parameters(), lr=0.1))
    assert equal(other.weights(), wanted)
    with pytest.warns(CheckpointWarning, match="the optimizer was AdamW and is Lion now"):
        load_checkpoint(saved.path, other.model, roundpipe.optim.Lion(other.model.optim_parameters(), lr=0.1))


def test_a_damaged_one_is_told_and_the_one_before_it_is_loaded(tmp_path: Path, two: Runtime) -> None:
    own = job(two)
    manager = CheckpointManager(tmp_path, keep_last=None)
    for step in range(2):
        manager.save(own.model, own.optimizer, step=step)
    manager.wait()
    file = tmp_path / "step-00000001/roundpipe/optimizers.safetensors"
    if not file.exists():
        file = tmp_path / "step-00000001/model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.warns(CheckpointWarning, match=r"the previous one is tried: .*safetensors must have"):
        found = manager.load_latest(own.model, own.optimizer)
    assert found is not None
    assert found.step == 0


def test_one_that_another_process_removes_for_a_newer_one_is_passed_by_for_that(
    tmp_path: Path, two: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, reader = job(two), job(two)
    writing = CheckpointManager(tmp_path, keep_last=1)
    writing.save(own.model, own.optimizer, step=1, wait=True)
    own.train(0, 1)
    real = load_checkpoint
    to_do: list[Any] = [lambda: writing.save(own.model, own.optimizer, step=2, wait=True)]

    def meanwhile(path: Path, *args: Any, **kwargs: Any) -> Any:
        while to_do:
            to_do.pop()()
        return real(path, *args, **kwargs)

    monkeypatch.setattr("rp_checkpoint.manager.load_checkpoint", meanwhile)
    found = CheckpointManager(tmp_path).load_latest(reader.model, reader.optimizer)
    assert found is not None
    assert found.step == 2
    assert equal(reader.weights(), own.weights())

    # With no newer one, a training does not begin anew in silence.
    to_do.append(lambda: shutil.rmtree(found.path))
    with pytest.raises(CheckpointError, match="step-00000002"):
        writing.load_latest(reader.model, reader.optimizer)
