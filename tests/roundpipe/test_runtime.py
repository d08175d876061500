"""The runtime starts nothing early, refuses what would deadlock, and keeps nothing."""

from __future__ import annotations

import doctest
import gc
import importlib
import pkgutil
import signal
import threading
import warnings
from collections.abc import Callable, Generator
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import roundpipe
import torch
from plain import assert_near, batch, gradients, mlp, plans, square_error, train_call, twin
from programs import TORCH, ended
from roundpipe import Busy, RoundPipe, RoundPipeRunConfig, Runtime, TrainingWarning
from rp_engine.runtime import runtime as runtime_module
from rp_transfer import Closed, CpuBackend, PinningWarning
from torch import nn

pytestmark = pytest.mark.timeout(100)


def test_importing_starts_no_thread_opens_no_device_and_imports_no_cupy() -> None:
    code = """
import sys, threading
import torch
before = threading.active_count()
import roundpipe
assert threading.active_count() == before
assert not torch.cuda.is_initialized()
roundpipe.from_pretrained
assert "cupy" not in sys.modules and "transformers" not in sys.modules
from rp_engine.runtime import runtime
assert not runtime._default
"""
    assert ended(code, imports=TORCH) == (0, "", "")


def test_the_default_runtime_opens_what_the_environment_names_and_ends_with_the_process() -> None:
    code = """
import torch, roundpipe
from torch import nn
one, two = (roundpipe.RoundPipe(nn.Linear(2, 2)) for _ in range(2))
assert one.runtime is two.runtime
one.forward_backward((torch.ones(4, 2),), loss_fn=lambda out, _: out.sum())
one.step(lambda: None)
print([use.name for use in one.runtime.memory()])
"""
    names = "['cpu:0', 'cpu:1', 'cpu:2']\n"
    assert ended(code, ROUNDPIPE_DEVICES="cpu:3") == (0, names, "")


@pytest.mark.parametrize(
    "changed",
    [{}, {"LOCAL_RANK": "1"}, {"LOCAL_WORLD_SIZE": "1"}, {"LOCAL_WORLD_SIZE": "8"}, {"OMP_NUM_THREADS": "3"}],
)
def test_the_one_thread_that_torchrun_leaves_to_several_processes_is_told(
    monkeypatch: pytest.MonkeyPatch, changed: dict[str, str]
) -> None:
    set_by_torchrun = {"LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": "0", "OMP_NUM_THREADS": "1"}
    for name, value in (set_by_torchrun | changed).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(runtime_module, "num_cores", lambda: 8)

    def told(count: int) -> list[str]:
        with threads(count), warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            Runtime("cpu:1", machines=False).close()
        return [str(one.message) for one in found if issubclass(one.category, TrainingWarning)]

    (words,) = told(1) or [""]
    assert ("each of the 2 processes on this machine has one thread" in words) == (not changed)
    assert not told(2)


@contextmanager
def threads(count: int) -> Generator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def test_two_runtimes_live_side_by_side(devices: str) -> None:
    x, y = batch(6)
    with Runtime(devices) as first, Runtime("cpu:2") as second:
        for runtime in (first, second, first):
            layers = mlp()
            truth = twin(layers)
            model = RoundPipe(layers, runtime=runtime)
            model.forward_backward(input_args=(x,), label=y, loss_fn=square_error)
            model.synchronize()
            train_call(truth, x, y, microbatches=1)
            assert_near(gradients(layers), gradients(truth), 1e-4)
        first.close()
        model = RoundPipe(mlp(), runtime=second)
        model(x)


def test_a_closed_runtime_says_so_and_may_be_closed_again(devices: str) -> None:
    with Runtime(devices) as runtime:
        model = RoundPipe(mlp(), runtime=runtime)
        model(batch(3)[0])
    runtime.close()
    for call in (lambda: model(batch(3)[0]), lambda: model.step(lambda: None), model.synchronize, model.zero_grad):
        with pytest.raises(Closed):
            call()


def test_closing_ends_the_threads_and_finishes_what_was_launched(devices: str) -> None:
    before = set(threading.enumerate())
    runtime = Runtime(devices)
    layers = mlp()
    model = RoundPipe(layers, runtime=runtime)
    x, y = batch(6)
    ran: list[int] = []
    model.forward_backward(input_args=(x,), label=y, loss_fn=square_error)
    model.step(lambda: ran.append(1))
    runtime.close()
    assert ran == [1]
    assert set(threading.enumerate()) - before == set()


# One call at a time


def test_a_second_thread_is_refused_while_a_call_is_launched(runtime: Runtime) -> None:
    class Slow(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            inside.set()
            assert go_on.wait(30)
            return x

    inside, go_on = threading.Event(), threading.Event()
    model = RoundPipe(nn.Sequential(nn.Linear(4, 4), Slow()), runtime=runtime)
    other = RoundPipe(mlp(), runtime=runtime)
    x, _ = batch(3)
    found: Future[torch.Tensor] = Future()
    thread = threading.Thread(target=lambda: found.set_result(model(x)))
    thread.start()
    assert inside.wait(30)
    calls: list[Callable[[], Any]] = [
        lambda: other(x),
        lambda: model(x),
        lambda: other.step(print),
        other.synchronize,
        other.zero_grad,
    ]
    for call in calls:
        with pytest.raises(Busy, match="one thread"):
            call()
    go_on.set()
    assert found.result(30).shape == (3, 4)
    thread.join(30)
    other(x)


def test_a_signals_handler_reads_the_model_after_the_call_that_it_interrupts(two: Runtime) -> None:
    class Signalled(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not handling.is_set():
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)
                assert handling.wait(30)
            return x

    def handle(*_: object) -> None:
        handling.set()
        found.append(model.state_dict())
        with pytest.raises(Busy, match="one thread"):
            model(x)

    handling, found = threading.Event(), list[Any]()
    config = RoundPipeRunConfig(num_microbatch=1)
    model = RoundPipe(nn.Sequential(nn.Linear(4, 4), Signalled()), runtime=two, model_run_config=config)
    x, _ = batch(3)
    before = signal.signal(signal.SIGUSR1, handle)
    try:
        assert model(x).shape == (3, 4)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert list(found[0]) == ["0.weight", "0.bias"]
    model(x)


@pytest.mark.usefixtures("samples_first")
@pytest.mark.parametrize("what", ["forward", "fused", "step", "synchronize", "zero_grad"])
@pytest.mark.parametrize("place", ["layer", "loss", "step", "async step"])
def test_calls_from_the_engines_own_threads_are_refused(two: Runtime, place: str, what: str) -> None:
    other = RoundPipe(mlp(), runtime=two)
    x, y = batch(6)

    def nested() -> None:
        match what:
            case "forward":
                other(x)
            case "fused":
                other.forward_backward((x,), None, y, square_error)
            case "step":
                other.step(print)
            case "synchronize":
                other.synchronize()
            case _:
                other.zero_grad()

    class Nested(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if place == "layer":
                nested()
            return x

    def loss_fn(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if place == "loss":
            nested()
        return square_error(outputs, labels)

    model = RoundPipe(nn.Sequential(nn.Linear(4, 3), Nested()), runtime=two)

    def call() -> None:
        model.forward_backward((x,), None, y, loss_fn)
        if "step" in place:
            model.step(nested, is_async=place == "async step")
        model.synchronize()

    with pytest.raises(Busy):
        call()
    other(x)


def test_a_step_function_is_refused_even_while_no_call_runs(two: Runtime) -> None:
    model, other = RoundPipe(mlp(), runtime=two), RoundPipe(mlp(), runtime=two)
    started, over = threading.Event(), threading.Event()
    refused: list[Busy] = []

    def nested() -> None:
        assert started.wait(30)
        for call in (lambda: other(batch(6)[0]), model.zero_grad, lambda: other.step(print)):
            with pytest.raises(Busy, match="step function") as caught:
                call()
            refused.append(caught.value)
        over.set()

    model.step(nested)
    started.set()
    assert over.wait(30)
    assert len(refused) == 3
    model.synchronize()


def test_calls_may_come_from_one_thread_after_another(two: Runtime) -> None:
    layers = mlp()
    truth = twin(layers)
    model = RoundPipe(layers, runtime=two)
    x, y = batch(6)
    for _ in range(3):
        thread = threading.Thread(target=lambda: model.forward_backward((x,), None, y, square_error))
        thread.start()
        thread.join(30)
        train_call(truth, x, y, microbatches=1)
    model.synchronize()
    assert_near(gradients(layers), gradients(truth), 1e-5)


# Nothing grows


def _tensors() -> int:
    # Not isinstance: it would ask lazy modules for their class, which warns.
    return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_nothing_grows_over_many_calls(runtime: Runtime) -> None:
    layers = nn.Sequential(*mlp(), nn.BatchNorm1d(3), nn.Dropout(0.1))
    model = RoundPipe(layers, runtime=runtime, model_run_config=RoundPipeRunConfig(num_microbatch=2))
    optimizer = roundpipe.optim.AdamW(model.optim_parameters(), lr=1e-3)
    x, y = batch(6)
    ways = [name for name in plans(7, 2) if "divided" not in name]

    def work(calls: int) -> tuple[int, int, int, list[int]]:
        for turn in range(calls):
            config = RoundPipeRunConfig(execute_plan=plans(7, 2)[ways[turn % len(ways)]])
            if turn % 3:
                model.forward_backward((x,), None, y, square_error, run_config=config)
            else:
                square_error(model(x, roundpipe_run_config=config), y).backward()
            model.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async=turn % 2 == 0)
            if turn % 10 == 0:
                model(x)  # a graph that is never gone through
        model.synchronize()
        for lane in runtime.lanes:
            lane.device.synchronize()
            lane.retainer.flush()
        gc.collect()
        used = [use.used_bytes for use in runtime.memory()]
        return _tensors(), threading.active_count(), runtime.host_memory().used_bytes, used

    work(20)
    tensors, threads, host, used = work(20)
    tensors_later, threads_later, host_later, used_later = work(120 if len(runtime.lanes) == 2 else 20)
    assert tensors_later <= tensors + 8
    assert threads_later == threads
    assert host_later <= host * 1.05 + 4096
    assert all(after <= before + 65536 for before, after in zip(used, used_later, strict=True))


def test_training_is_the_same_where_pinning_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def limited(devices: str | None, *, strict: bool, memory_bytes: int | None) -> CpuBackend:
        del devices, memory_bytes
        return CpuBackend(2, strict=strict, pin_limit_bytes=100)

    monkeypatch.setattr("rp_engine.runtime.runtime.open_backend", limited)
    losses: list[list[torch.Tensor]] = []
    for refused in (True, False):
        with Runtime("cpu:2") as runtime, pytest.warns(PinningWarning) if refused else nullcontext():
            model = RoundPipe(mlp(), runtime=runtime)
            optimizer = torch.optim.SGD(model.optim_parameters(), lr=0.1)
            found = []
            for seed in range(4):
                x, y = batch(6, seed)
                found.append(model.forward_backward((x,), None, y, square_error))
                if seed % 2:
                    model.step(lambda optimizer=optimizer: (optimizer.step(), optimizer.zero_grad()))
            losses.append(found)
        monkeypatch.undo()
    assert losses[0] == losses[1]


@pytest.mark.slow
def test_a_forgotten_model_gives_its_memory_back(runtime: Runtime) -> None:
    x, y = batch(6)

    def use_one() -> None:
        model = RoundPipe(mlp(width=64), runtime=runtime)
        model.forward_backward((x,), None, y, square_error)
        model.step(lambda: None)
        model.synchronize()

    def used() -> int:
        for lane in runtime.lanes:
            lane.device.synchronize()
            lane.retainer.flush()
        gc.collect()
        return runtime.host_memory().used_bytes

    # Each device's ring is made when the device first needs it, and stays.
    for _ in range(2 * len(runtime.lanes)):
        use_one()
    before = used()
    for _ in range(10):
        use_one()
    assert used() <= before + 65536


# Attributes


def test_attributes_of_the_wrapped_model_are_found(two: Runtime) -> None:
    layers = mlp()
    layers.config = {"width": 6}
    model = RoundPipe(layers, runtime=two)
    assert model.config == {"width": 6}
    assert not hasattr(model, "nonesuch")
    assert model.name.startswith("test_runtime.py:")


# Documentation


@pytest.mark.parametrize("name", [found.name for found in pkgutil.walk_packages(roundpipe.__path__, "roundpipe.")])
def test_the_examples_in_the_documentation_are_true(name: str) -> None:
    if name.endswith("__main__"):
        pytest.skip("it runs the command line")
    failed, _ = doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS)
    assert failed == 0
