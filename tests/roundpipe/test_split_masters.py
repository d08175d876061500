"""`master="split"`: the numbers of whole masters at 14 and 16 bytes, and what needs whole ones or is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from threading import Event
from typing import Any

import pytest
import roundpipe
import torch
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from plain import FailsLate, batch, mlp, plans, square_error, weights
from roundpipe import (
    GradScaler,
    HostMemoryShort,
    RoundPipe,
    RoundPipeRunConfig,
    Runtime,
    StepFailed,
    TrainingWarning,
)
from rp_optim import SplitMaster
from rp_sched import Plan
from rp_transfer import HostLimit
from torch import nn

pytestmark = pytest.mark.usefixtures("small_departures")

# Times a bf16 number it is no power of two, as 0.05 times 1.25 is: so first steps of SGD do not end on ties.
LR = 0.03
optim = roundpipe.optim
OPTIMIZERS: dict[str, Any] = {
    "AdamW": optim.AdamW,
    "AdamW in 8 bits": partial(optim.AdamW, state="8bit"),
    "SGD": partial(optim.SGD, momentum=0.9),
    "Lion": optim.Lion,
    "Adafactor": optim.Adafactor,
}
Losses = list[float]


def wrapped(
    runtime: Runtime, layers: nn.Module | None = None, *, master: Any = "split", **kwargs: Any
) -> RoundPipe:
    # One plan for all: a planned one follows the times that are measured, and the order of additions follows it.
    config = RoundPipeRunConfig(num_microbatch=2, execute_plan=plans(5, 2)["tail divided"])
    row = mlp().bfloat16() if layers is None else layers
    return RoundPipe(row, torch.float32, "m", config, runtime=runtime, master=master, **kwargs)


def call(model: RoundPipe, seed: int = 1) -> float:
    x, y = (tensor.to(next(model.model.parameters()).dtype) for tensor in batch(6, seed))
    return model.forward_backward((x,), None, y, square_error).item()


def train(model: RoundPipe, optimizer: torch.optim.Optimizer, *, is_async: bool, turns: int = 5) -> Losses:
    def update() -> None:
        optim.clip_grad_norm_(list(model.optim_parameters()), 5.0)
        optimizer.step()
        optimizer.zero_grad()

    found = []
    for turn in range(turns):
        found.append(call(model, turn))
        model.step(update, is_async=is_async)
    return found


def train_to_end(model: RoundPipe, optimizer: torch.optim.Optimizer, *, is_async: bool) -> None:
    train(model, optimizer, is_async=is_async)
    model.synchronize()


def masters(model: RoundPipe) -> list[torch.Tensor]:
    return [m.joined() if isinstance(m, SplitMaster) else m.detach().clone() for m in model.optim_parameters()]


def all_split(model: RoundPipe) -> bool:
    return all(isinstance(one, SplitMaster) and one.is_split for one in model.optim_parameters())


def same(found: Any, wanted: Any) -> bool:
    return len(found) == len(wanted) and all(map(torch.equal, found, wanted))


def are_rounded(model: RoundPipe) -> bool:
    """Whether the weights are the masters' upper halves, in the same memory."""
    pairs = zip(model.optim_parameters(), model.model.parameters(), strict=True)
    return all(master.upper.data_ptr() == weight.data_ptr() for master, weight in pairs)


# Numbers


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("is_async", "double_buffer"),
    [(False, None), (False, True), (True, None)],
    ids=["sync", "sync double", "async"],
)
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_masters_have_the_bits_of_whole_ones(make: Any, is_async: bool, double_buffer: bool | None) -> None:
    with Runtime("cpu:2") as runtime:
        found = []
        for master in ("whole", "split"):
            model = wrapped(runtime, master=master, double_buffer=double_buffer)
            optimizer = make(model.optim_parameters(), lr=LR)
            losses = train(model, optimizer, is_async=is_async)
            model.synchronize()
            found.append((losses, masters(model), list(weights(model.model).values())))
        assert all_split(model)
        assert are_rounded(model)
        assert found[0][0] == found[1][0]
        assert same(found[0][1], found[1][1])
        assert same(found[0][2], found[1][2])


def test_muon_takes_masters_in_halves(two: Runtime) -> None:
    found = []
    for master in ("whole", "split"):
        model = wrapped(two, master=master)
        groups = optim.muon_groups(model.named_model, model.optim_named_parameters(), lr=1e-2)
        train(model, optim.Muon(groups, lr=LR, ns_dtype=torch.float32), is_async=False)
        found.append(masters(model))
    assert all_split(model)
    assert same(*found)


@pytest.mark.slow
def test_synchronous_and_asynchronous_steps_may_follow_each_other(two: Runtime) -> None:
    found = []
    for master in ("whole", "split"):
        model = wrapped(two, master=master)
        optimizer = optim.AdamW(model.optim_parameters(), lr=LR)
        losses = [
            loss
            for is_async in (False, True, True, False, False, True)
            for loss in train(model, optimizer, is_async=is_async, turns=2)
        ]
        model.synchronize()
        found.append([torch.tensor(losses), *masters(model), *weights(model.model).values()])
    assert all_split(model)
    assert same(*found)


@pytest.mark.few(1)
@pytest.mark.parametrize("is_async", [False, True])
def test_a_step_that_the_scaler_skips_and_one_of_few_parameters_keep_the_others(
    two: Runtime, is_async: bool
) -> None:
    found = []
    for master in ("whole", "split"):
        model, scaler = wrapped(two, master=master), GradScaler(init_scale=2.0**127, runtime=two)
        every = optim.AdamW(model.optim_parameters(), lr=LR)
        few = optim.AdamW(list(model.optim_parameters())[2:4], lr=LR)
        for optimizer, next_scale in ((every, 8.0), (few, 8.0), (every, 8.0), (every, 8.0)):
            scaled_step(model, optimizer, scaler, is_async=is_async)
            scaler.update(next_scale, is_async=is_async)
        model.synchronize()
        assert every.state
        found.append([*masters(model), *weights(model.model).values()])
    assert all_split(model)
    assert same(*found)


def scaled_step(model: RoundPipe, optimizer: torch.optim.Optimizer, scaler: GradScaler, *, is_async: bool) -> None:
    x, y = (tensor.bfloat16() for tensor in batch(6))
    loss = lambda outputs, labels: scaler.scale(square_error(outputs.float(), labels.float()))  # noqa: E731
    model.forward_backward((x,), None, y, loss)
    model.step(lambda: (scaler.step(optimizer), optimizer.zero_grad()), is_async=is_async)


# Bytes


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "is_async", "double_buffer", "per_parameter"),
    [
        ("fp32", False, None, 14),
        ("fp32", True, None, 16),
        ("fp32", False, True, 16),
        ("bf16", False, None, 10),
        ("8bit", False, None, 8.125),
    ],
)
def test_a_trained_model_takes_so_many_bytes_a_parameter(
    kind: Any, is_async: bool, double_buffer: bool | None, per_parameter: float
) -> None:
    layers = nn.Sequential(*(nn.Linear(128, 128, bias=False) for _ in range(4))).bfloat16()
    numel, x = 4 * 128 * 128, torch.ones(2, 128, dtype=torch.bfloat16)
    with Runtime("cpu:1") as runtime:
        model = RoundPipe(layers, runtime=runtime, master="split", double_buffer=double_buffer)
        foreseen = model.memory_forecast().whole
        optimizer = optim.AdamW(model.optim_parameters(), lr=LR, state=kind)
        for _ in range(3):
            model.forward_backward((x,), loss_fn=lambda outputs, _: outputs.sum())
            model.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async=is_async)
        model.synchronize()
        report, forecast = model.memory_report(optimizer), model.memory_forecast(optimizer)
        counters = 4 * sum("step" in state for state in optimizer.state.values())
        held = report.host_bytes - report.activations_bytes - counters
        assert held == pytest.approx(per_parameter * numel, rel=1e-3)
        assert forecast.whole.total - report.activations_bytes - counters == held
        # Adam's fp32 state was assumed, and no second block yet that nobody has asked for.
        assert foreseen.total == (16 if double_buffer else 14) * numel
        # What is counted is what there is.
        real = [one.rest.values for one in model.optim_parameters()]
        assert sum(rest.untyped_storage().nbytes() for rest in real) == report.masters_bytes == 2 * numel


# Failed steps


def fails_after(optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()
    raise LookupError


def test_a_failed_step_in_place_tears_the_weights_and_says_so_until_a_state_is_loaded(two: Runtime) -> None:
    model = wrapped(two)
    optimizer = optim.AdamW(model.optim_parameters(), lr=LR)
    train(model, optimizer, is_async=False, turns=2)
    saved = {name: value.clone() for name, value in model.state_dict().items()}
    call(model)
    with pytest.raises(LookupError) as caught:
        model.step(lambda: fails_after(optimizer), is_async=False)
    assert sum("in place" in note and "torn" in note for note in caught.value.__notes__) == 1
    doings: list[Callable[[], object]] = [
        lambda: call(model),
        model.reset,
        model.state_dict,
        model.synchronize,
        lambda: model(torch.ones(2, 4, dtype=torch.bfloat16)),
        lambda: model.step(optimizer.step, is_async=False),
    ]
    for do in doings:
        with pytest.raises(StepFailed, match="some weights are of that step"):
            do()
    model.load_state_dict(saved)
    assert same(list(weights(model.model).values()), list(saved.values()))
    assert all(not one.rest.values.any() for one in model.optim_parameters())
    train(model, optimizer, is_async=False, turns=2)
    assert are_rounded(model)


def test_an_update_that_fails_between_two_parameters_tears_the_weights(
    two: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = wrapped(two)
    optimizer = optim.Adafactor(model.optim_parameters(), lr=0.5)
    updated, update = list[int](), optim.Adafactor._update_one

    def fails_at_second(*args: Any) -> None:
        if updated:
            raise MemoryError
        update(*args)
        updated.append(1)

    call(model)
    before = weights(model.model)
    monkeypatch.setattr(optim.Adafactor, "_update_one", fails_at_second)
    with pytest.raises(MemoryError) as caught:
        model.step(optimizer.step, is_async=False)
    assert any("torn" in note for note in caught.value.__notes__)
    with pytest.raises(StepFailed, match="some weights are of that step"):
        model.reset()
    model.load_state_dict(before)
    assert same(list(weights(model.model).values()), list(before.values()))


class HookedInBackward(nn.Module):
    """A layer that calls a function in its backward."""

    def __init__(self, hook: Callable[[object], None]) -> None:
        super().__init__()
        self.linear, self.hook = nn.Linear(4, 6, dtype=torch.bfloat16), hook

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outputs = self.linear(x)
        if outputs.requires_grad:
            outputs.register_hook(self.hook)
        return outputs


def test_a_call_that_fails_after_its_step_has_begun_tears_the_weights(two: Runtime) -> None:
    may_fail, row = Event(), mlp().bfloat16()

    def fail(_: object) -> None:
        assert may_fail.wait(30)
        raise LookupError

    row[0] = HookedInBackward(fail)
    config = RoundPipeRunConfig(num_microbatch=1, execute_plan=plans(5, 1)["one layer a stage"])
    model = RoundPipe(row, torch.float32, "m", config, runtime=two, master="split")
    first, *others = (optim.SGD([one], lr=0.1) for one in model.optim_parameters())

    def update() -> None:
        for optimizer in others[1:]:
            optimizer.step()
        may_fail.set()
        first.step()

    call(model)
    with pytest.raises(LookupError):
        model.step(update, is_async=False)
    for do in (model.reset, lambda: call(model)):
        with pytest.raises(StepFailed, match=r"failed half-way \(LookupError.*some weights are of that step"):
            do()


@pytest.mark.parametrize("is_async", [False, True])
def test_with_a_second_block_a_failed_step_leaves_the_weights_whole(two: Runtime, is_async: bool) -> None:
    model = wrapped(two, double_buffer=True)
    optimizer = optim.AdamW(model.optim_parameters(), lr=LR)
    train(model, optimizer, is_async=False, turns=2)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    call(model)
    with pytest.raises(LookupError):  # noqa: PT012 - one or the other
        model.step(lambda: fails_after(optimizer), is_async=is_async)
        model.synchronize()
    assert same(list(weights(model.model).values()), list(before.values()))
    with pytest.raises(StepFailed, match=r"reset\(\)"):
        call(model)
    model.reset()
    assert same(masters(model), [value.float() for value in before.values()])
    train(model, optimizer, is_async=is_async, turns=2)
    model.synchronize()
    assert are_rounded(model)


class Failing(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return FailsLate.apply(super().forward(x))


def test_a_call_that_fails_while_its_step_updates_in_place_tears_the_weights(two: Runtime) -> None:
    FailsLate.opened.clear()
    layers = nn.Sequential(Failing(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)).bfloat16()
    config = RoundPipeRunConfig(
        num_microbatch=1, execute_plan=Plan([range(1), range(1, 2)], range(2, 3), [range(1, 2), range(1)])
    )
    model = RoundPipe(layers, None, "m", config, runtime=two, master="split")
    *first, weight, bias = model.optim_parameters()
    last, others = optim.SGD([weight, bias], lr=1.0), optim.SGD(first, lr=1.0)
    call(model)

    def update() -> None:
        last.step()
        FailsLate.opened.set()
        others.step()

    with pytest.raises(KeyError) as caught:
        model.step(update, is_async=False)
    assert sum("weights of model 'm' in place" in note and "torn" in note for note in caught.value.__notes__) == 1
    with pytest.raises(StepFailed, match="some weights are of that step"):
        call(model)


def test_a_step_that_fails_before_it_updates_tears_nothing(two: Runtime) -> None:
    model = wrapped(two)
    before = weights(model.model)

    def fails() -> None:
        raise LookupError

    call(model)
    with pytest.raises(LookupError) as caught:
        model.step(fails, is_async=False)
    assert not any("torn" in note for note in caught.value.__notes__)
    model.reset()
    assert same(list(weights(model.model).values()), list(before.values()))
    train(model, optim.AdamW(model.optim_parameters(), lr=LR), is_async=False, turns=2)


# Waiting for readers


def test_a_step_in_place_waits_for_those_who_still_read_the_weights(two: Runtime) -> None:
    model = wrapped(two)
    optimizer = optim.SGD(model.optim_parameters(), lr=100.0)
    x, _ = (tensor.bfloat16() for tensor in batch(6))
    before = weights(model.model)
    for seed in range(3):
        call(model, seed)
        with torch.no_grad():
            wanted = torch.cat([copy.deepcopy(model.model)(part) for part in x.split(3)])
            # Calls return before their tasks are over.
            outputs = model(x, roundpipe_run_config=RoundPipeRunConfig(merge_output=False))
        model.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async=False)
        outputs.synchronize()
        assert torch.equal(torch.cat(list(outputs)), wanted)
    assert not same(list(weights(model.model).values()), list(before.values()))


# Whole ones


@pytest.mark.few(1)
@pytest.mark.parametrize("is_async", [False, True])
def test_torchs_optimizers_get_whole_masters_and_say_so(two: Runtime, is_async: bool) -> None:
    found = []
    for master in ("whole", "split"):
        model = wrapped(two, master=master)
        optimizer = torch.optim.AdamW(model.optim_parameters(), lr=LR)
        told = pytest.warns(TrainingWarning, match="masters of model 'm' are whole from now on")
        with nullcontext() if master == "whole" else told:
            train_to_end(model, optimizer, is_async=is_async)
        found.append([*masters(model), *weights(model.model).values()])
        report = model.memory_report(optimizer)
        assert report.masters_bytes == 4 * sum(one.numel() for one in model.optim_parameters())
        assert model.memory_forecast(optimizer).whole.masters == report.masters_bytes
    assert same(*found)


@pytest.mark.few(1)
@pytest.mark.parametrize("is_async", [False, True])
def test_who_reads_masters_gets_whole_ones_and_training_goes_on(two: Runtime, is_async: bool) -> None:
    found = []
    for master in ("whole", "split"):
        model = wrapped(two, master=master)
        optimizer = optim.AdamW(model.optim_parameters(), lr=LR)
        train(model, optimizer, is_async=is_async, turns=2)
        first, second, *_ = model.optim_parameters()
        if master == "split":
            with pytest.warns(TrainingWarning, match="because linalg_vector_norm reads"):
                torch.linalg.vector_norm(first)
            assert not first.is_split
            assert second.is_split
        train(model, optimizer, is_async=is_async, turns=3)
        model.synchronize()
        found.append([*masters(model), *weights(model.model).values()])
    assert same(*found)


def test_a_step_outside_of_a_step_function_leaves_the_weights_that_calls_read(two: Runtime) -> None:
    found = []
    for master in ("whole", "split"):
        model = wrapped(two, master=master)
        optimizer = optim.AdamW(model.optim_parameters(), lr=LR)
        train(model, optimizer, is_async=False, turns=2)
        before = weights(model.model)
        for one in model.optim_parameters():
            one.grad = torch.ones(one.shape)
        with nullcontext() if master == "whole" else pytest.warns(TrainingWarning, match="because a step outside"):
            optimizer.step()
        optimizer.zero_grad()
        assert same(list(weights(model.model).values()), list(before.values()))
        train(model, optimizer, is_async=False, turns=2)
        found.append([*masters(model), *weights(model.model).values()])
    assert same(*found)


def test_16_bit_weights_that_cannot_be_halves_keep_whole_masters_and_that_is_told(two: Runtime) -> None:
    model = wrapped(two, mlp().half())
    with pytest.warns(TrainingWarning, match="6 trained parameters of model 'm' keep whole fp32 masters.*float16"):
        optimizer = optim.AdamW(model.optim_parameters(), lr=LR)
    train(model, optimizer, is_async=False, turns=2)
    assert {one.dtype for one in model.optim_parameters()} == {torch.float32}
    assert model.memory_report().masters_bytes == 4 * sum(one.numel() for one in model.optim_parameters())


def test_fp32_parameters_beside_bf16_ones_have_whole_masters(two: Runtime) -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.scale = nn.Linear(4, 3).bfloat16(), nn.Parameter(torch.ones(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x) * self.scale.to(x.dtype)

    model = RoundPipe(Mixed(), runtime=two, master="split", model_run_config=RoundPipeRunConfig(num_microbatch=2))
    optimizer = optim.AdamW(model.optim_parameters(), lr=LR)
    x, y = (tensor.bfloat16() for tensor in batch(6))
    for is_async in (False, True, True):
        model.forward_backward((x,), None, y, square_error)
        model.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async=is_async)
    model.synchronize()
    kinds = {name: isinstance(one, SplitMaster) for name, one in model.optim_named_parameters()}
    assert kinds == {"scale": False, "linear.weight": True, "linear.bias": True}


# What changes outside


@pytest.mark.slow
def test_weights_that_others_write_freeze_and_replace_go_on_as_with_whole_masters(two: Runtime) -> None:
    found = []
    for master in ("whole", "split"):
        model = wrapped(two, master=master)
        optimizer = optim.AdamW(model.optim_parameters(), lr=LR)
        train(model, optimizer, is_async=True, turns=2)
        model.synchronize()
        with torch.no_grad():
            next(model.model.parameters()).mul_(2)
        train(model, optimizer, is_async=True, turns=2)
        # Calls return before their backward is over.
        model.synchronize()
        model.model[2].requires_grad_(False)
        train(model, optimizer, is_async=False, turns=2)
        model.model[2].requires_grad_(True)
        train(model, optimizer, is_async=True, turns=2)
        model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
        train(model, optimizer, is_async=False, turns=2)
        model.synchronize()
        found.append([*masters(model), *weights(model.model).values()])
    assert all_split(model)
    assert are_rounded(model)
    assert same(*found)


class Course:
    """A training, of which methods by these names are drawn.

    `is_whole`: with masters that were made whole at once, whose weights are rounded as halves are, also on ties.
    """

    def __init__(self, runtime: Runtime, double_buffer: bool | None, *, is_whole: bool) -> None:
        self.model = wrapped(runtime, double_buffer=double_buffer)
        for master in self.model.optim_parameters() if is_whole else ():
            assert isinstance(master, SplitMaster)
            master.make_whole()
        self.every = optim.AdamW(self.model.optim_parameters(), lr=LR)
        self.few = optim.SGD(list(self.model.optim_parameters())[1:4], lr=LR, momentum=0.9)
        self.losses: Losses = []

    def call(self) -> None:
        self.losses.append(call(self.model, len(self.losses)))

    def step(self) -> None:
        self.model.step(lambda: (self.every.step(), self.every.zero_grad()), is_async=False)

    def step_late(self) -> None:
        self.model.step(lambda: (self.every.step(), self.every.zero_grad()))

    def step_twice(self) -> None:
        self.model.step(lambda: (self.few.step(), self.every.step(), self.every.zero_grad()), is_async=False)

    def step_few(self) -> None:
        self.model.step(lambda: (self.few.step(), self.every.zero_grad()))

    def synchronize(self) -> None:
        self.model.synchronize()

    def write(self) -> None:
        self.model.synchronize()
        with torch.no_grad():
            next(self.model.model.parameters()).mul_(1.5)

    def load(self) -> None:
        self.model.load_state_dict({name: 2 * value for name, value in self.model.state_dict().items()})

    def read(self) -> None:
        self.model.synchronize()
        _, second, *_ = self.model.optim_parameters()
        second.sum()

    def freeze(self) -> None:
        self.model.synchronize()
        self.model.model[2].requires_grad_(not self.model.model[2].weight.requires_grad)

    def end(self) -> list[torch.Tensor]:
        self.model.synchronize()
        self.model.model.requires_grad_(True)
        return [torch.tensor(self.losses), *masters(self.model), *weights(self.model.model).values()]


DOINGS = (
    *("call", "call", "step", "step_late", "step_twice", "step_few"),
    *("synchronize", "write", "load", "read", "freeze"),
)


@pytest.mark.later
@pytest.mark.filterwarnings("ignore::roundpipe.TrainingWarning")
@given(doings=st.lists(st.sampled_from(DOINGS), max_size=14), double_buffer=st.sampled_from([None, True]))
@settings(max_examples=examples(80))
def test_any_course_of_a_training_is_that_of_whole_masters(doings: list[str], double_buffer: bool | None) -> None:
    with Runtime("cpu:2") as runtime:
        courses = [Course(runtime, double_buffer, is_whole=is_whole) for is_whole in (True, False)]
        for doing in doings:
            for course in courses:
                getattr(course, doing)()
        assert same(*(course.end() for course in courses))


@pytest.mark.parametrize("master", ["whole", "split"])
def test_weights_that_were_loaded_while_they_were_frozen_are_trained_on(two: Runtime, master: str) -> None:
    model = wrapped(two, master=master)
    optimizer = optim.SGD(model.optim_parameters(), lr=1e-6)
    train(model, optimizer, is_async=False, turns=2)
    model.model[2].requires_grad_(False)
    train(model, optimizer, is_async=False, turns=1)
    loaded = {name: torch.full_like(value, 0.25) for name, value in model.state_dict().items()}
    model.load_state_dict(loaded)
    # The frozen layer's masters are whole beside its weights.
    trained = sum(one.numel() for one in model.model.parameters() if one.requires_grad)
    frozen = sum(one.numel() for one in model.model[2].parameters())
    assert model.memory_report().masters_bytes == 4 * frozen + (2 if master == "split" else 4) * trained
    model.model[2].requires_grad_(True)
    train(model, optimizer, is_async=False, turns=1)
    assert same(list(weights(model.model).values()), list(loaded.values()))


# What is refused


@pytest.mark.parametrize(
    ("setting", "told"),
    [({"double_buffer": False}, "double_buffer is False"), ({"pin_model": "off"}, "pin_model")],
)
def test_asynchronous_steps_without_second_blocks_are_refused(
    two: Runtime, setting: dict[str, Any], told: str
) -> None:
    model = wrapped(two, **setting)
    optimizer = optim.AdamW(model.optim_parameters(), lr=LR)
    call(model)
    with pytest.raises(ValueError, match=f"needs second weight blocks.*{told}"):
        model.step(optimizer.step)
    model.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async=False)
    train(model, optimizer, is_async=False, turns=2)
    assert all_split(model)
    assert are_rounded(model)


def test_synchronous_steps_go_on_where_second_blocks_for_an_asynchronous_one_did_not_fit(
    two: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = wrapped(two)
    optimizer = optim.AdamW(model.optim_parameters(), lr=0.02)
    train(model, optimizer, is_async=False, turns=2)
    call(model)
    monkeypatch.setattr(two, "host_limit", lambda: HostLimit("the machine", 1 << 30, 0))
    told = r"double_buffer=False and synchronous steps \(is_async=False\): .* less"
    with pytest.raises(HostMemoryShort, match=told):
        model.step(optimizer.step)
    model.step(optimizer.step, is_async=False)
    assert are_rounded(model)
    assert model.memory_report().second_blocks_bytes == 0


def test_other_masters_are_refused(two: Runtime) -> None:
    with pytest.raises(ValueError, match=r"must be 'whole', 'split', 'disk:DIR.* but is 'halved'"):
        wrapped(two, master="halved")
    with pytest.raises(ValueError, match=r"optim_dtype is torch\.bfloat16"):
        RoundPipe(mlp().bfloat16(), torch.bfloat16, runtime=two, master="split")
