"""Copies, allocations and the optimizer's thread may fail at any point: the same error, a note, and on it goes."""

from __future__ import annotations

import gc
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import gt
from pathlib import Path
from typing import Any

import pytest
import torch
from plain import assert_near, batch, gradients, mlp, plans, square_error, train_call, twin
from roundpipe import GradientsIncomplete, RoundPipe, RoundPipeRunConfig, Runtime, StepFailed
from rp_sched import Plan
from torch import nn

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("small_departures")]
MICROBATCHES = 3
IDLE_BYTES = 1024
PATIENCE_S = 30.0
PLANS = ("planned", "one layer a stage", "microbatches divided")
PLACES = (
    "weights on their way in",
    "activations on their way in",
    "results on their way out",
    "gradients on their way out",
    "memory on the device",
    "memory on the host",
)


class Boom(Exception):
    """What the tests throw."""


class Trap:
    """Lets the nth use of a function fail, and counts the uses."""

    def __init__(self) -> None:
        self.error = Boom("as planned")
        self.nth = 0
        self._lock = threading.Lock()

    def around(self, function: Callable[..., Any], counts: Callable[[Any], bool]) -> Callable[..., Any]:
        """`function`, which fails at the nth use that counts; `counts` looks at whose it is."""

        def trapped(owner: Any, *args: Any, **kwargs: Any) -> Any:
            if counts(owner) and self._is_nth():
                raise self.error
            return function(owner, *args, **kwargs)

        return trapped

    def _is_nth(self) -> bool:
        with self._lock:
            self.nth -= 1
            return self.nth == 0


def set_trap(monkeypatch: pytest.MonkeyPatch, runtime: Runtime, place: str) -> Trap:
    """A trap at one place of all the runtime's devices, not yet armed."""
    trap, device = Trap(), runtime.lanes[0].device
    streams = {"weights": "weights_in", "activations": "activations_in", "results": "results_out"}
    stream = streams.get(place.split()[0], "gradients_out")
    if place == "memory on the device":
        owner, name = type(device), "empty"
    elif place == "memory on the host":
        owner, name = type(runtime.backend), "host_empty"
    else:
        # Blocks go in parts.
        owner, name = type(device.compute), "copy_part" if stream in ("weights_in", "gradients_out") else "copy"

    def counts(used: Any) -> bool:
        return place.startswith("memory") or used.name.endswith(f"/{stream}")

    monkeypatch.setattr(owner, name, trap.around(getattr(owner, name), counts))
    return trap


@contextmanager
def within(seconds: float = 50.0) -> Iterator[None]:
    """What is done here must not hang; on a loaded machine it may take its time."""
    start = time.monotonic()
    yield
    assert time.monotonic() - start < seconds


def wrap(runtime: Runtime, plan_name: str) -> RoundPipe:
    plan = plans(5, MICROBATCHES)[plan_name]
    config = RoundPipeRunConfig(num_microbatch=MICROBATCHES, execute_plan=plan)
    return RoundPipe(mlp(), name="victim", runtime=runtime, model_run_config=config)


def train(model: RoundPipe) -> None:
    """A training call, and the end of its backward."""
    x, y = batch(6)
    model.forward_backward((x,), None, y, square_error)
    model.synchronize()


def assert_trains(model: RoundPipe) -> None:
    """A call's gradients are plain PyTorch's."""
    truth = twin(model.model)
    truth.zero_grad()
    train(model)
    train_call(truth, *batch(6), microbatches=MICROBATCHES)
    assert_near(gradients(model.model), gradients(truth), 1e-5)
    model.zero_grad()


def held(runtime: Runtime) -> tuple[list[int], int, int]:
    """Bytes on the devices and on the host, and threads, while nothing runs."""
    for lane in runtime.lanes:
        lane.device.synchronize()
        lane.settle()
    gc.collect()
    used = [use.used_bytes for use in runtime.memory()]
    return used, runtime.host_memory().used_bytes, threading.active_count()


def failure(model: RoundPipe, monkeypatch: pytest.MonkeyPatch, place: str, nth: int) -> bool:
    """Whether the nth use of a place came and failed in a call; if so, the caller was told as it should be."""
    with monkeypatch.context() as patch:
        trap = set_trap(patch, model.runtime, place)
        trap.nth = nth
        caught: Boom | None = None
        with within():
            try:
                train(model)
            except Boom as error:
                caught = error
    model.reset()
    assert (caught is not None) == (trap.nth <= 0), "what failed must be told"
    if caught is None:
        return False
    assert caught is trap.error
    assert [note.startswith("RoundPipe: in model 'victim'") for note in caught.__notes__] == [True]
    return True


@pytest.mark.usefixtures("samples_first")
@pytest.mark.pairwise
@pytest.mark.parametrize("plan_name", PLANS)
@pytest.mark.parametrize("place", PLACES)
def test_a_copy_or_allocation_that_fails_arrives_as_itself_and_leaves_nothing(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch, place: str, plan_name: str
) -> None:
    model = wrap(runtime, plan_name)
    # Twice a device, so that each has what it keeps for good.
    for _ in range(2 * len(runtime.lanes)):
        assert_trains(model)
    before = held(runtime)
    failures = [failure(model, monkeypatch, place, nth) for nth in (1, 3, 8)]
    assert sum(failures) >= 2
    assert_trains(model)
    devices, host, threads = held(runtime)
    # A thread that has told of its failure lets go of what it held a moment later.
    until = time.monotonic() + PATIENCE_S
    while (any(map(gt, devices, before[0])) or threads != before[2]) and time.monotonic() < until:
        devices, host, threads = held(runtime)
    # What was still on its way before may have gone since.
    assert not any(map(gt, devices, before[0])), (devices, before[0])
    assert threads == before[2]
    # On a GPU results may still be on their way when the next ones leave: one more idle buffer each.
    assert host <= before[1] + (IDLE_BYTES if runtime.lanes[0].device.torch_device.type == "cuda" else 0)


class Forking(nn.Module):
    """Takes one tensor or two and hands two on, so that one may be under way as the other one fails."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor | tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        one, other = x if isinstance(x, tuple) else (x, x)
        return self.inner(one) + other, one * 2


class Joining(nn.Linear):
    """Takes two tensors."""

    def forward(self, x: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return super().forward(x[0] + x[1])


@pytest.mark.slow
@pytest.mark.usefixtures("samples_first")
@pytest.mark.parametrize("place", ["memory on the device", "memory on the host"])
def test_what_was_under_way_beside_what_failed_lives_until_it_is_there(
    monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    layers = nn.Sequential(Forking(), Forking(), Joining(4, 3))
    config = RoundPipeRunConfig(
        num_microbatch=MICROBATCHES, execute_plan=plans(3, MICROBATCHES)["one layer a stage"]
    )
    with Runtime("cpu:1") as runtime:
        model = RoundPipe(layers, name="victim", runtime=runtime, model_run_config=config)
        assert_trains(model)
        nth = 1
        while failure(model, monkeypatch, place, nth):
            # The frames that held it are gone.
            gc.collect()
            train(model)
            model.zero_grad()
            nth += 1
        assert_trains(model)
    assert nth > 20


@pytest.mark.pairwise
@pytest.mark.parametrize("is_async", [True, False])
@pytest.mark.parametrize("plan_name", PLANS)
def test_an_optimizers_thread_that_fails_tells_and_goes_on_after_a_reset(
    runtime: Runtime, plan_name: str, is_async: bool
) -> None:
    model = wrap(runtime, plan_name)
    assert_trains(model)
    # The thread starts with the first step.
    model.step(lambda: None, is_async=False)
    threads = threading.active_count()
    x, y = batch(6)
    error = Boom("as planned")

    def fail() -> None:
        raise error

    model.forward_backward((x,), None, y, square_error)

    def step() -> None:
        model.step(fail, is_async=is_async)
        model.synchronize()

    with within(), pytest.raises(Boom) as caught:
        step()
    assert caught.value is error
    assert len(error.__notes__) == 1
    assert "'victim'" in error.__notes__[0]
    with pytest.raises((StepFailed, GradientsIncomplete)):
        train(model)
    model.reset()
    assert_trains(model)
    assert threading.active_count() == threads


def test_what_runs_out_of_memory_says_where(two: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    model = wrap(two, "one layer a stage")
    full = torch.OutOfMemoryError("as planned")

    def refuse(*_: Any, **__: Any) -> torch.Tensor:
        raise full

    with monkeypatch.context() as patch:
        patch.setattr(type(two.lanes[0].device), "empty", refuse)
        with within(), pytest.raises(torch.OutOfMemoryError) as caught:
            train(model)
    assert caught.value is full
    assert "on cpu:" in full.__notes__[0]
    assert "1. more microbatches" in full.__notes__[1]
    # Whoever keeps the error does not keep the device full.
    frames = [
        frame
        for frame, _ in traceback.walk_tb(caught.tb)
        if Path(frame.f_code.co_filename).parts[-3:-1] == ("execution", "stage")
    ]
    assert frames
    assert not any(frame.f_locals for frame in frames)
    model.reset()
    assert_trains(model)


class Cornered(nn.Linear):
    """Runs out of memory twice, the second time since the first."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        try:
            return self._fast(x)
        except torch.OutOfMemoryError as error:
            raise torch.OutOfMemoryError("in the slow way") from error

    def _fast(self, x: torch.Tensor) -> torch.Tensor:
        large = super().forward(x)
        raise torch.OutOfMemoryError(f"in the fast way, with {large.nbytes} bytes")


def test_memory_that_ran_out_before_is_let_go_of_too(two: Runtime) -> None:
    model = RoundPipe(nn.Sequential(Cornered(4, 3)), runtime=two)
    with within(), pytest.raises(torch.OutOfMemoryError, match="slow") as caught:
        train(model)
    model.reset()
    before = caught.value.__cause__
    assert isinstance(before, torch.OutOfMemoryError)
    frames = [frame for frame, _ in traceback.walk_tb(before.__traceback__)]
    assert [frame.f_code.co_name for frame in frames] == ["forward", "_fast"]
    assert not any(frame.f_locals for frame in frames)


@pytest.mark.cuda
def test_a_gpu_that_runs_out_of_memory_says_what_helps_and_goes_on_with_more_microbatches() -> None:
    layers = nn.Sequential(
        *(nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512)) for _ in range(4))
    )
    total = torch.cuda.get_device_properties(0).total_memory
    x = torch.ones(1 << 18, 512)
    with Runtime("cuda:0") as runtime:
        model = RoundPipe(layers, runtime=runtime)
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_allocated(0) + (3 << 30)) / total, 0)
        try:
            for microbatches in (1, 64):
                config = RoundPipeRunConfig(num_microbatch=microbatches, execute_plan=Plan(fused=range(4)))
                if microbatches == 1:
                    with pytest.raises(torch.OutOfMemoryError) as caught:
                        model.forward_backward((x,), None, x, square_error, run_config=config)
                    model.reset()
                else:
                    assert model.forward_backward((x,), None, x, square_error, run_config=config).isfinite()
                    model.synchronize()
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0, 0)
    notes = caught.value.__notes__
    assert "on cuda:0" in notes[0]
    assert "1. more microbatches (num_microbatch=2 instead of 1)" in notes[1]
    assert "3. stages of fewer layers in your execute_plan" in notes[1]
