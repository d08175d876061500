"""Gradients that several tasks add to: their sum, its order, and what it takes in host memory."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import pytest
import roundpipe
import torch
from examples import examples
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from plain import assert_near, batch, plans, square_error
from roundpipe import GradScaler, RoundPipe, RoundPipeRunConfig, Runtime
from rp_optim import GradientPair
from rp_sched import Plan
from rp_state.gradient import Gradient
from rp_telemetry.transfer_times import Moving, Way
from rp_transfer import Conveyor, CpuBackend, Layout, Unordered
from torch import nn

pytestmark = pytest.mark.usefixtures("small_departures")

# Layers, all (rows, 4) to (rows, 4)


class Shared(nn.Module):
    """Multiplies by another layer's weight."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight.T


class Adapter(nn.Module):
    """A frozen layer and a low-rank addition."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(4, 4).requires_grad_(False)
        self.down, self.up = nn.Linear(4, 2, bias=False), nn.Linear(2, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


class Choosing(nn.Module):
    """Uses one of two experts, by the input, and a third never: tasks have gradients of either, or of both."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.experts[int(x[0, 0] > 0)](x)


def plain() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))


def frozen() -> nn.Sequential:
    layers = plain()
    layers[2].requires_grad_(False)
    layers[4].bias.requires_grad_(False)
    return layers


def tied() -> nn.Sequential:
    first = nn.Linear(4, 4)
    return nn.Sequential(first, nn.Tanh(), nn.Linear(4, 4), Shared(first.weight), nn.Linear(4, 3))


def choosing() -> nn.Sequential:
    return nn.Sequential(Choosing(), nn.Linear(4, 4), nn.Tanh(), Choosing(), nn.Linear(4, 3))


def adapted() -> nn.Sequential:
    return nn.Sequential(Adapter(), nn.Tanh(), Adapter(), nn.Tanh(), nn.Linear(4, 3))


MODELS = {"plain": plain, "frozen": frozen, "tied": tied, "choosing": choosing, "adapted": adapted}
MICROBATCHES = 4
PLANS = {
    "undivided": Plan(fused=range(5)),
    "in halves": Plan(fused=range(5), groups=[range(2), range(2, 4)]),
    "in quarters": plans(5, MICROBATCHES)["microbatches divided"],
    "staged, tail in quarters": plans(5, MICROBATCHES)["tail divided"],
}
OPTIMIZERS: dict[str, Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]] = {
    "adamw": lambda parameters: roundpipe.optim.AdamW(parameters, lr=1e-2),
    "sgd": lambda parameters: roundpipe.optim.SGD(parameters, lr=1e-2, momentum=0.9),
    "lion": lambda parameters: roundpipe.optim.Lion(parameters, lr=1e-2),
    "adafactor": lambda parameters: roundpipe.optim.Adafactor(parameters, lr=1e-2),
    "torch's": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
}


@dataclass
class Found:
    """The first step's gradients, where they were read, and the masters after both steps."""

    gradients: list[torch.Tensor | None]
    masters: list[torch.Tensor]


def train(
    devices: str, layers: nn.Sequential, plan: Plan, optimizer_name: str, calls: int, *, read: bool = False
) -> Found:
    """Two steps of `calls` calls each, scaled and clipped. `read`: the step function reads ``.grad`` first."""
    layers = copy.deepcopy(layers)
    config = RoundPipeRunConfig(num_microbatch=MICROBATCHES, execute_plan=plan)
    with Runtime(devices) as runtime:
        model = RoundPipe(layers, runtime=runtime, model_run_config=config, optim_dtype=torch.float32)
        masters = list(model.optim_parameters())
        optimizer = OPTIMIZERS[optimizer_name](masters)
        scaler = GradScaler(8.0, runtime=runtime)
        found: list[list[torch.Tensor | None]] = []

        def step() -> None:
            if read:
                found.append([None if p.grad is None else p.grad.clone() for p in masters])
            scaler.unscale_(optimizer)
            roundpipe.optim.clip_grad_norm_(masters, 0.5)
            scaler.step(optimizer)
            optimizer.zero_grad()

        for number in range(2):
            for call in range(calls):
                x, y = (tensor.bfloat16() for tensor in batch(8, seed=3 * number + call))
                model.forward_backward((x,), label=y, loss_fn=lambda out, y: scaler.scale(square_error(out, y)))
            model.step(step)
            scaler.update()
        model.synchronize()
        return Found(found[0] if read else [], [master.detach().clone() for master in masters])


@pytest.mark.slow
@pytest.mark.pairwise
@pytest.mark.usefixtures("samples_first")
@pytest.mark.parametrize("calls", [1, 2, 3])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("model", MODELS)
def test_16_bit_sums_do_not_depend_on_devices_readers_or_division(
    model: str, plan: str, optimizer: str, calls: int
) -> None:
    torch.manual_seed(0)
    layers = MODELS[model]().bfloat16()
    start = [parameter.float() for parameter in layers.parameters() if parameter.requires_grad]
    found = [train(devices, layers, PLANS[plan], optimizer, calls) for devices in ("cpu:1", "cpu:2", "cpu:8")]
    for other in found[1:]:
        assert all(map(torch.equal, other.masters, found[0].masters))
    # A step function that reads the gradients gets their sum, which is rounded once more by scaling and clipping.
    read = train("cpu:2", layers, PLANS[plan], optimizer, calls, read=True)
    updates, wanted = ([a - b for a, b in zip(each.masters, start, strict=True)] for each in (read, found[0]))
    if optimizer != "lion":
        assert_near(updates, wanted, 1e-3)
    # Undivided, a call's gradients are rounded to bf16 once, not once for each task.
    undivided = train("cpu:1", layers, PLANS["undivided"], optimizer, calls, read=True)
    assert_near(read.gradients, undivided.gradients, 1e-2)
    assert any(gradient is not None for gradient in read.gradients)


# What it takes


def wide(runtime: Runtime, plan: str) -> tuple[RoundPipe, int]:
    """A model of 16 bits, and its number of trained parameters."""
    layers = nn.Sequential(nn.Linear(4, 64), *(nn.Linear(64, 64) for _ in range(3)), nn.Linear(64, 3)).bfloat16()
    config = RoundPipeRunConfig(num_microbatch=MICROBATCHES, execute_plan=PLANS[plan])
    model = RoundPipe(layers, runtime=runtime, model_run_config=config, optim_dtype=torch.float32)
    return model, sum(parameter.numel() for parameter in layers.parameters())


def call(model: RoundPipe) -> None:
    x, y = (tensor.bfloat16() for tensor in batch(8))
    model.forward_backward((x,), label=y, loss_fn=square_error)


def drain(model: RoundPipe) -> None:
    """Wait for all gradients, without showing them as ``synchronize`` does."""
    model.step(lambda: None, is_async=False)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("plan", "calls", "bytes_each"),
    [("undivided", 1, 2), ("undivided", 2, 4), ("in halves", 1, 4), ("in quarters", 1, 4), ("in halves", 5, 4)],
)
def test_a_16_bit_gradient_takes_two_bytes_for_one_task_and_four_for_any_more(
    two: Runtime, plan: str, calls: int, bytes_each: int
) -> None:
    model, count = wide(two, plan)
    for _ in range(calls):
        call(model)
    drain(model)
    report = model.memory_report()
    # Up to 64 bytes for each parameter's alignment.
    assert bytes_each * count <= report.gradients_bytes <= bytes_each * count + 10 * 64 * 2
    used = two.host_memory().used_bytes
    assert report.weights_bytes + report.gradients_bytes + report.activations_bytes == used
    # Read, dropped, and added to again.
    model.synchronize()
    assert model.memory_report().gradients_bytes == report.gradients_bytes
    model.zero_grad()
    for _ in range(calls):
        call(model)
    drain(model)
    assert model.memory_report().gradients_bytes == report.gradients_bytes


def test_nothing_is_added_for_two_tasks(two: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    added: list[int] = []
    for name in ("add", "combine"):
        method = getattr(Conveyor, name)

        def counted(conveyor: Conveyor, *args: Any, method: Any = method) -> None:
            added.append(1)
            method(conveyor, *args)

        monkeypatch.setattr(Conveyor, name, counted)
    model, _ = wide(two, "in halves")
    optimizer = roundpipe.optim.AdamW(model.optim_parameters(), lr=1e-2)

    def optimizer_step() -> None:
        roundpipe.optim.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(3):
        call(model)
        model.step(optimizer_step)
    model.synchronize()
    assert not added
    for _ in range(2):
        # The third and fourth task, for each of five layers.
        call(model)
        call(model)
        drain(model)
        assert len(added) == 2 * 5
        added.clear()
        # Sums them in fp32 blocks, which are two of 16 bits again once their gradients are dropped.
        model.synchronize()
        model.zero_grad()


def test_what_is_added_is_measured_in_the_bytes_that_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    measured: Counter[Way] = Counter()

    end = Moving.end

    def noted(moving: Moving, way: Way, nbytes: int, **how: bool) -> None:
        measured[way] += nbytes
        end(moving, way, nbytes, **how)

    monkeypatch.setattr(Moving, "end", noted)
    # Calls are measured where devices have a limit.
    with Runtime("cpu:2", device_memory_bytes=1 << 30) as runtime:
        model, count = wide(runtime, "in halves")
        for added in (0, 2):
            measured.clear()
            call(model)
            drain(model)
            # The first call's two tasks fill a block each, the second call's are added to them, all in 16 bits.
            assert measured["add"] == pytest.approx(added * 2 * count, rel=0.05)
            assert measured["down"] == pytest.approx((2 - added) * 2 * count, rel=0.05)


# Any order of events


LAYOUT = Layout.of([torch.empty(3, 2).bfloat16(), torch.empty(5).bfloat16(), torch.empty(()).bfloat16()])
WHICH = st.sets(st.integers(0, len(LAYOUT.extents) - 1))
# Sums of small integers are exact in every form that a gradient has.
VALUES = st.integers(-200, 200)


class Events(RuleBasedStateMachine):
    """Tasks, users and steps, in any order, on one gradient block; a dict of numbers is the truth."""

    @initialize(dtype=st.sampled_from([torch.bfloat16, torch.float16, torch.float32, torch.float64]))
    def begin(self, dtype: torch.dtype) -> None:
        self.backend = CpuBackend(2)
        layout = Layout.of([torch.empty(span.shape, dtype=dtype) for span in LAYOUT.extents])
        self.gradient = Gradient(self.backend, layout)
        self.conveyors = [Conveyor(self.backend, d, d.gradients_out, slot_bytes=8) for d in self.backend.devices]
        self.truth: dict[int, int] = {}

    @rule(written=WHICH.filter(bool), value=VALUES, device=st.integers(0, 1))
    def a_task_ends(self, written: set[int], value: int, device: int) -> None:
        there, conveyor = self.backend.devices[device], self.conveyors[device]
        layout = self.gradient.layout
        dtype = torch.float64 if layout.dtype == torch.float64 else torch.float32
        sums = there.empty((layout.numel,), dtype, stream=there.gradients_out)
        sums.zero_()
        for index in written:
            layout.extents[index].of(sums).fill_(value + index)
        there.gradients_out.touch(write=[sums])
        assert self.gradient.arriving_nbytes in (layout.numel * 2, layout.numel * 4, layout.numel * 8)
        self.gradient.receive(sums, written, conveyor)
        conveyor.drain()
        for index in written:
            self.truth[index] = self.truth.get(index, 0) + value + index

    @rule(which=WHICH)
    def some_are_dropped(self, which: set[int]) -> None:
        self.gradient.drop(which)
        self.truth = {index: value for index, value in self.truth.items() if index not in which}

    @rule()
    def all_are_dropped(self) -> None:
        self.gradient.drop()
        self.truth = {}

    @rule(index=st.integers(0, len(LAYOUT.extents) - 1), value=VALUES)
    def one_is_replaced(self, index: int, value: int) -> None:
        self.gradient.put(index, torch.full(LAYOUT.extents[index].shape, float(value)))
        self.truth[index] = value

    @rule(which=WHICH, value=VALUES)
    def some_come_from_outside(self, which: set[int], value: int) -> None:
        parameters = [nn.Parameter(torch.zeros(span.shape)) for span in LAYOUT.extents]
        for index in which:
            parameters[index].grad = torch.full(LAYOUT.extents[index].shape, float(value))
            self.truth[index] = self.truth.get(index, 0) + value
        self.gradient.collect(sorted(which), parameters)
        assert all(parameter.grad is None for parameter in parameters)

    @rule()
    def they_are_shown(self) -> None:
        for index, value in self.truth.items():
            view = self.gradient.view(index)
            assert bool((view == value).all())
            assert view.shape == LAYOUT.extents[index].shape
        assert len(self.gradient.blocks()) == bool(self.truth)

    @invariant()
    def they_are_the_sums(self) -> None:
        self.backend.host_touch(read=self.gradient.blocks())
        assert self.gradient.written == set(self.truth)
        for index in range(len(LAYOUT.extents)):
            source = self.gradient.source(index)
            if isinstance(source, GradientPair):
                source = source.sum()
            assert (source is None) == (index not in self.truth)
            assert source is None or bool((source == self.truth[index]).all())

    @invariant()
    def they_take_no_more_than_their_sum_in_fp32(self) -> None:
        layout = self.gradient.layout
        assert self.gradient.nbytes <= layout.numel * max(layout.dtype.itemsize, 4)


TestEvents = Events.TestCase
TestEvents.settings = settings(max_examples=examples(200), deadline=None)


def send(backend: CpuBackend, gradient: Gradient, values: dict[int, float]) -> Callable[[], object]:
    """Send a task's gradients from the first device; they are on their way until the result is called."""
    (device, *_), layout = backend.devices, gradient.layout
    there = device.empty((layout.numel,), torch.float32, stream=device.gradients_out)
    there.zero_()
    for index, value in values.items():
        layout.extents[index].of(there).fill_(value)
    device.gradients_out.touch(write=[there])
    conveyor = Conveyor(backend, device, device.gradients_out)
    gradient.receive(there, set(values), conveyor)
    # The sums must live until then.
    return lambda: (conveyor.drain(), there)


@pytest.mark.parametrize("more", [[], [{0: 4.0}]], ids=["summed by a reader", "summed by a third task"])
def test_what_was_dropped_is_not_part_of_a_later_sum(more: list[dict[int, float]]) -> None:
    backend = CpuBackend(1)
    gradient = Gradient(backend, LAYOUT)
    send(backend, gradient, {0: 1.0, 1: 2.0})()
    gradient.drop([1])
    for task in [{0: 4.0, 1: 8.0}, *more]:
        send(backend, gradient, task)()
    assert bool((gradient.view(0) == 5 + 4 * len(more)).all())
    assert bool((gradient.view(1) == 8).all())


@pytest.mark.parametrize("tasks", [1, 2])
def test_a_sum_that_is_made_before_its_parts_have_come_is_noticed(tasks: int) -> None:
    backend = CpuBackend(1)
    gradient = Gradient(backend, LAYOUT)
    on_the_way = [send(backend, gradient, dict.fromkeys(range(3), 1.0)) for _ in range(tasks)]
    with pytest.raises(Unordered):
        gradient.widen()
    for finish in on_the_way:
        finish()


def test_a_step_that_reads_a_second_block_too_early_is_noticed() -> None:
    backend = CpuBackend(1)
    gradient = Gradient(backend, LAYOUT)
    send(backend, gradient, {0: 1.0})()
    late = send(backend, gradient, {0: 1.0})
    assert len(gradient.blocks()) == 2
    # As `LinkedBlock.arrive` does, which a step calls first.
    with pytest.raises(Unordered):
        backend.host_touch(read=gradient.blocks())
    late()
    backend.host_touch(read=gradient.blocks())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_tasks_may_arrive_in_any_order(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    tasks = [torch.randn(500, generator=generator) * 10.0 ** -(index % 3) for index in range(4)]
    orders = [[0, 1, 2, 3], [3, 2, 1, 0], [2, 0, 3, 1], [1, 3, 0, 2]]
    for count in (2, 3, 4):
        sums = []
        for order in orders:
            backend = CpuBackend(4)
            gradient = Gradient(backend, Layout.of([torch.empty(500, dtype=dtype)]))
            for task in [task for task in order if task < count]:
                device = backend.devices[task]
                there = device.empty((500,), torch.float32, stream=device.gradients_out)
                there.copy_(tasks[task])
                device.gradients_out.touch(write=[there])
                conveyor = Conveyor(backend, device, device.gradients_out)
                gradient.receive(there, {0}, conveyor)
                conveyor.drain()
            source = gradient.source(0)
            assert isinstance(source, GradientPair)
            sums.append(source.sum())
        exact = sum(task.to(dtype).double() for task in tasks[:count])
        for each in sums:
            assert torch.equal(each, sums[0]) or count > 2
            assert_near(each, exact, 2**-16)
