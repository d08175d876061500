"""Weights travel to devices as a step publishes them, before the next call asks for them."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable

import pytest
import roundpipe
import torch
from plain import batch, mlp, plans, square_error
from roundpipe import RoundPipe, RoundPipeRunConfig, Runtime
from rp_engine.device.memory import weights_ahead
from rp_engine.device.memory.call_size import CallSize
from rp_engine.device.memory.weights_ahead import WeightsAhead
from rp_engine.runtime.tickets import taking_tickets
from rp_sched import Plan
from rp_state.block import Block
from rp_telemetry.tracing import SILENT
from rp_transfer import MemoryUse
from rp_transfer.cpu.backend import CpuDevice
from torch import nn

MICROBATCHES = 4
# In the first two a device begins with all weights, in the third with one layer's. Devices take turns.
PLANS = {
    "whole": Plan(fused=range(5)),
    "divided": Plan(fused=range(5), groups=[range(2), range(2, 4)]),
    "one layer a stage": plans(5, MICROBATCHES)["one layer a stage"],
    "planned": None,
}


def has_room(monkeypatch: pytest.MonkeyPatch, answer: bool) -> None:
    def room(self: WeightsAhead, nbytes: int) -> bool:
        del self, nbytes
        return answer

    monkeypatch.setattr(WeightsAhead, "_has_room", room)


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> list[Block]:
    """The blocks that calls found on their devices, which have room for them."""
    has_room(monkeypatch, True)
    blocks: list[Block] = []
    plain = WeightsAhead.find

    def find(self: WeightsAhead, block: Block) -> object:
        arriving = plain(self, block)
        if arriving is not None:
            blocks.append(block)
        return arriving

    monkeypatch.setattr(WeightsAhead, "find", find)
    return blocks


def nothing() -> None:
    """What a thread does to show that it has done all before."""


def travelled(runtime: Runtime) -> None:
    """Wait until steps have published, and what travels has begun to."""
    runtime.optimizer.submit(nothing).result(30)
    for lane in runtime.lanes:
        lane.inbox.submit(nothing).result(30)


def assert_same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert len(found) == len(expected)
    assert all(map(torch.equal, found, expected))


def wrapped(runtime: Runtime, layers: nn.Module, plan: str = "divided") -> RoundPipe:
    config = RoundPipeRunConfig(num_microbatch=MICROBATCHES, execute_plan=PLANS[plan])
    return RoundPipe(layers, runtime=runtime, model_run_config=config, optim_dtype=torch.float32)


def trained(
    layers: nn.Sequential,
    plan: str = "divided",
    *,
    is_async: bool = True,
    between: Callable[[int, nn.Sequential, RoundPipe], None] = lambda *_: None,
) -> list[torch.Tensor]:
    """Losses and what is trained at last. `between`: done between a step and the next call."""
    layers, losses = copy.deepcopy(layers), list[torch.Tensor]()
    with Runtime("cpu:2") as runtime:
        model = wrapped(runtime, layers, plan)
        optimizer = roundpipe.optim.Adam(model.optim_parameters(), lr=1e-2)

        def update() -> None:
            optimizer.step()
            optimizer.zero_grad()

        for number in range(12):
            x, y = batch(8, number)
            losses.append(model.forward_backward((x,), label=y, loss_fn=square_error).detach())
            model.step(update, is_async=is_async)
            travelled(runtime)
            between(number, layers, model)
        model.synchronize()
    return [*losses, *(parameter.detach() for parameter in layers.parameters())]


@pytest.mark.few(1)
@pytest.mark.parametrize("is_async", [True, False])
@pytest.mark.parametrize("plan", PLANS)
def test_calls_read_what_a_step_has_published(
    plan: str, is_async: bool, found: list[Block], monkeypatch: pytest.MonkeyPatch
) -> None:
    ahead = trained(mlp(), plan, is_async=is_async)
    # Elsewhere a device may still have tasks to begin when a step is launched, whose weights come first.
    assert found or plan not in ("whole", "divided")
    found.clear()
    has_room(monkeypatch, False)
    assert_same(ahead, trained(mlp(), plan, is_async=is_async))
    assert not found


@pytest.mark.filterwarnings("ignore:.*past torch's version counters")
def test_calls_read_what_was_written_after_a_step(found: list[Block], monkeypatch: pytest.MonkeyPatch) -> None:
    def between(number: int, layers: nn.Sequential, _: RoundPipe) -> None:
        if number % 3 == 1:
            with torch.no_grad():
                layers[0].weight.mul_(0.5)
        if number % 3 == 2:
            layers[2].weight.data.add_(1.0)

    ahead = trained(mlp(), is_async=False, between=between)
    assert found
    has_room(monkeypatch, False)
    assert_same(ahead, trained(mlp(), is_async=False, between=between))


def test_frozen_weights_may_be_written_at_any_time(found: list[Block], monkeypatch: pytest.MonkeyPatch) -> None:
    layers = mlp()
    layers[2].requires_grad_(False)

    def between(_: int, layers: nn.Sequential, __: RoundPipe) -> None:
        with torch.no_grad():
            layers[2].weight.mul_(0.9)

    ahead = trained(layers, is_async=False, between=between)
    assert found
    has_room(monkeypatch, False)
    assert_same(ahead, trained(layers, is_async=False, between=between))


@pytest.mark.later
@pytest.mark.filterwarnings("ignore:.*past torch's version counters")
@pytest.mark.usefixtures("found")
def test_calls_that_do_not_train_read_what_was_written(monkeypatch: pytest.MonkeyPatch) -> None:
    outputs: list[torch.Tensor] = []

    def between(number: int, layers: nn.Sequential, model: RoundPipe) -> None:
        layers[0].weight.data.add_(0.1)
        with torch.no_grad():
            outputs.append(model(batch(8, number)[0]))

    ahead = trained(mlp(), is_async=False, between=between)
    ahead += outputs
    outputs.clear()
    has_room(monkeypatch, False)
    expected = trained(mlp(), is_async=False, between=between)
    assert_same(ahead, expected + outputs)


@pytest.mark.later
def test_what_comes_between_two_calls_finds_or_frees_them(
    found: list[Block], monkeypatch: pytest.MonkeyPatch
) -> None:
    def between(number: int, layers: nn.Sequential, model: RoundPipe) -> None:
        x, _ = batch(8, number)
        with torch.no_grad():
            model(x)
        if number == 5:
            model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()})
        if number == 7:
            layers[0].weight.requires_grad_(False)
        if number == 9:
            model.synchronize()

    ahead = trained(mlp(), between=between)
    assert found
    has_room(monkeypatch, False)
    assert_same(ahead, trained(mlp(), between=between))


def test_memory_that_is_short_takes_theirs(found: list[Block]) -> None:
    def between(_: int, __: nn.Sequential, model: RoundPipe) -> None:
        for lane in model.runtime.lanes:
            for free in lane.reserves:
                lane.do(free).result(30)

    trained(mlp(), is_async=False, between=between)
    assert not found


@pytest.mark.usefixtures("found")
def test_none_are_left_when_all_work_is_waited_for() -> None:
    sent: list[bool] = []

    def between(_: int, __: nn.Sequential, model: RoundPipe) -> None:
        stores = [free.args[0]() for lane in model.runtime.lanes for free in lane.reserves]
        sent.append(any(store._begun for store in stores))
        model.synchronize()
        assert not any(store._begun or store._expected for store in stores)

    trained(mlp(), is_async=False, between=between)
    assert any(sent)


@pytest.mark.usefixtures("found")
@pytest.mark.parametrize("is_async", [True, False])
def test_a_step_that_fails_keeps_no_turn(is_async: bool) -> None:
    def fails() -> None:
        raise LookupError

    def step() -> None:
        model.step(fails, is_async=is_async)
        model.synchronize()

    x, y = batch(8)
    with Runtime("cpu:2") as runtime:
        model = wrapped(runtime, mlp())
        for _ in range(2):
            model.forward_backward((x,), label=y, loss_fn=square_error)
            with pytest.raises(LookupError):
                step()
            # Waits for all turns.
            model.reset()


def test_devices_without_memory_of_their_own_have_no_room() -> None:
    with Runtime("cpu:1") as runtime:
        assert not WeightsAhead(runtime.lanes[0])._has_room(0)


def test_their_own_part_of_a_peak_takes_no_room_of_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    peak = [10]

    def memory(self: CpuDevice) -> MemoryUse:
        return MemoryUse(self.name, 10, peak[0], 1000)

    monkeypatch.setattr(CpuDevice, "memory", memory)
    monkeypatch.setattr(CpuDevice, "obtainable_bytes", lambda _: 1000)
    with Runtime("cpu:1") as runtime:
        lane, blocks = runtime.lanes[0], wrapped(runtime, mlp()).engine.host.state.blocks
        ahead, nbytes = WeightsAhead(lane), sum(block.nbytes for block in blocks)
        assert ahead._has_room(910)
        assert not ahead._has_room(911)
        with taking_tickets() as take:
            ahead.expect(blocks, 0, take, SILENT)
        # Measured calls have a peak of their own.
        assert lane.has_raised_peak
        peak[0] += nbytes
        assert ahead._has_room(910)
        peak[0] += 1
        assert not ahead._has_room(910)
        ahead.clear()


def test_a_measured_call_has_a_peak_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    reset: list[str] = []
    monkeypatch.setattr(CpuDevice, "reset_peak_memory", lambda self: reset.append(self.name))
    x, _ = batch(8)
    with Runtime("cpu:2") as runtime:
        model = wrapped(runtime, mlp(), "planned")
        runtime.lanes[1].has_raised_peak = True
        model.engine.planner.records.watch("fused", CallSize.of([[x]]), (), is_planned=True)
        assert reset == ["cpu:1"]
        assert not runtime.lanes[1].has_raised_peak


def closed_after_a_step(layers: nn.Sequential) -> list[torch.Tensor]:
    x, y = batch(8)
    with Runtime("cpu:2") as runtime:
        model = wrapped(runtime, layers)
        optimizer = roundpipe.optim.Adam(model.optim_parameters(), lr=1e-2)
        for _ in range(4):
            model.forward_backward((x,), label=y, loss_fn=square_error)
            model.step(lambda: (optimizer.step(), optimizer.zero_grad()))
    return [parameter.detach().clone() for parameter in layers.parameters()]


@pytest.mark.usefixtures("found")
def test_a_runtime_that_closes_ends_the_last_step(monkeypatch: pytest.MonkeyPatch) -> None:
    ahead = closed_after_a_step(mlp())
    # What is freed now, long after, was copied.
    gc.collect()
    has_room(monkeypatch, False)
    assert_same(ahead, closed_after_a_step(mlp()))


@pytest.mark.usefixtures("found")
def test_an_upload_that_fails_leaves_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(weights_ahead, "upload_from_host", fails)
    x, y = batch(8)
    with Runtime("cpu:2") as runtime:
        model = wrapped(runtime, mlp())
        model.forward_backward((x,), label=y, loss_fn=square_error)
        model.step(nothing, is_async=False)
        travelled(runtime)
        # The call brings them by itself.
        model.forward_backward((x,), label=y, loss_fn=square_error)
        # Waits for all turns.
        model.synchronize()


@pytest.mark.usefixtures("found")
def test_a_model_may_go_while_its_weights_travel() -> None:
    x, y = batch(8)
    with Runtime("cpu:1") as runtime:
        for _ in range(3):
            model = wrapped(runtime, mlp(), "whole")
            model.forward_backward((x,), label=y, loss_fn=square_error)
            model.step(nothing, is_async=False)
            del model
            gc.collect()


def test_a_model_that_is_gone_leaves_nothing() -> None:
    with Runtime("cpu:1") as runtime:
        before = list(runtime.lanes[0].reserves)
        model = wrapped(runtime, mlp())
        assert len(runtime.lanes[0].reserves) == len(before) + 1
        del model
        gc.collect()
        assert runtime.lanes[0].reserves == before
