"""What is interrupted while it waits, launches or carries leaves no turn taken and no memory in use."""

from __future__ import annotations

import gc
import random
import signal
import sys
import threading
import time
from typing import Any

import programs
import pytest
import rp_state.gradient
import torch
from plain import batch, mlp, square_error
from roundpipe import RoundPipe, RoundPipeRunConfig, Runtime
from rp_transfer import Turns
from torch import nn

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("small_departures")]


class _Held(torch.autograd.Function):
    """Backward waits for the layer's event."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, may_go: threading.Event) -> torch.Tensor:
        ctx.may_go = may_go
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        assert ctx.may_go.wait(30)
        return grads[0], None


MAY_GO = threading.Event()


class Held(nn.Module):
    """A linear layer whose backward waits for `MAY_GO`."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Held.apply(self.linear(x), MAY_GO)


def call(model: RoundPipe, width: int = 3) -> None:
    x, _ = batch(4)
    model.forward_backward((x,), None, torch.ones(4, width), square_error)


def goes_on(model: RoundPipe, width: int = 3) -> None:
    """Trains again after a reset."""
    model.reset()
    call(model, width)
    model.synchronize()


def interrupt_when_it_waits(runtime: Runtime) -> None:
    """Send the main thread a real signal, as soon as it launches something and then waits for another thread.

    One that is only pretended does not end a wait.
    """
    main = threading.main_thread().ident
    assert main is not None
    until, place, looks = time.monotonic() + 30, None, 0
    # It waits if it is found in one place again and again.
    while looks < 100 and time.monotonic() < until:
        before, frame = place, sys._current_frames()[main]
        place = (id(frame), frame.f_lasti)
        looks = looks + 1 if runtime._launch.locked() and place == before else 0
        del frame
        threading.Event().wait(0.001)
    signal.pthread_kill(main, signal.SIGINT)


@pytest.mark.parametrize("waiting", ["synchronize", "zero_grad", "reset"])
def test_ctrl_c_while_the_caller_waits_for_backward_leaves_no_turn_taken(two: Runtime, waiting: str) -> None:
    MAY_GO.clear()
    model = RoundPipe(
        nn.Sequential(Held(), Held()), runtime=two, model_run_config=RoundPipeRunConfig(num_microbatch=1)
    )
    call(model, 4)
    interrupter = threading.Thread(target=interrupt_when_it_waits, args=(two,))
    interrupter.start()
    with pytest.raises(KeyboardInterrupt):
        getattr(model, waiting)()
    interrupter.join(30)
    MAY_GO.set()
    goes_on(model, 4)


class Stuck(nn.Module):
    """A linear layer whose forward waits for `MAY_GO`."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert MAY_GO.wait(30)
        return self.linear(x)


def test_ctrl_c_reaches_the_user_at_once_though_a_layer_goes_on(two: Runtime) -> None:
    MAY_GO.clear()
    model = RoundPipe(nn.Sequential(Stuck(), Stuck()), runtime=two)
    pressed: list[float] = []

    def press() -> None:
        pressed.append(time.monotonic())
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    for way in (lambda: call(model, 4), model.synchronize, model.reset):
        threading.Timer(0.3, press).start()
        with pytest.raises(KeyboardInterrupt):
            way()
        # The layer gives up after 30 s.
        assert time.monotonic() - pressed.pop() < 20
    MAY_GO.set()
    goes_on(model, 4)


@pytest.mark.few(1)
@pytest.mark.parametrize("nth", [1, 2, 4])
@pytest.mark.parametrize("what", ["a call", "a step", "a synchronous step", "synchronize"])
def test_an_interrupt_while_turns_are_taken_gives_up_those_taken(
    two: Runtime, monkeypatch: pytest.MonkeyPatch, what: str, nth: int
) -> None:
    model = RoundPipe(mlp(depth=4), runtime=two)
    optimizer = torch.optim.SGD(model.optim_parameters(), lr=0.1)
    call(model)
    model.step(optimizer.step)
    ways = {
        "a call": lambda: call(model),
        "a step": lambda: model.step(optimizer.step),
        "a synchronous step": lambda: model.step(optimizer.step, is_async=False),
        "synchronize": model.synchronize,
    }
    taken, write = [0], Turns.write

    def interrupted(line: Turns) -> Any:
        taken[0] += 1
        if taken[0] == nth:
            raise KeyboardInterrupt
        return write(line)

    monkeypatch.setattr(Turns, "write", interrupted)
    with pytest.raises(KeyboardInterrupt):
        ways[what]()
    monkeypatch.undo()
    goes_on(model)


def test_a_step_that_cannot_be_launched_gives_up_its_turns(two: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    model = RoundPipe(mlp(), runtime=two)
    optimizer = torch.optim.SGD(model.optim_parameters(), lr=0.1)
    call(model)

    def refuse(*_: Any) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(two.optimizer, "submit", refuse)
    with pytest.raises(RuntimeError, match="new thread"):
        model.step(optimizer.step)
    monkeypatch.undo()
    goes_on(model)


class Bad(nn.Linear):
    """Fails in forward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise ValueError(f"as planned, with {len(x)}")


def test_host_memory_stays_until_the_uploads_of_a_failed_call_are_over() -> None:
    with Runtime("cpu:1") as runtime:
        good = RoundPipe(mlp(), runtime=runtime)
        bad = RoundPipe(nn.Sequential(Bad(4, 4), *(nn.Linear(4, 4) for _ in range(3))), runtime=runtime)
        with pytest.raises(ValueError, match="as planned"):
            call(bad, 4)
        del bad
        gc.collect()
        goes_on(good)


def test_gradients_stay_on_the_device_until_a_delivery_that_failed_is_over(
    two: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = RoundPipe(mlp(), runtime=two, model_run_config=RoundPipeRunConfig(num_microbatch=1))
    receive, received = rp_state.gradient.Gradient.receive, [0]

    def fail_second(self: Any, *arguments: Any) -> None:
        received[0] += 1
        if received[0] == 2:
            raise MemoryError("as planned")
        receive(self, *arguments)

    monkeypatch.setattr(rp_state.gradient.Gradient, "receive", fail_second)
    call(model)
    with pytest.raises(MemoryError, match="as planned"):
        model.synchronize()
    goes_on(model)


AT_THE_END = """
import torch, rp_state.gradient
from roundpipe import RoundPipe, Runtime
from torch import nn
receive = rp_state.gradient.Gradient.receive
def slowly(self, *arguments):
    receive(self, *arguments)
    room = torch.ones(200, 200)
    for _ in range(20000):
        room.add_(1)
rp_state.gradient.Gradient.receive = slowly
runtime = Runtime("cpu:1")
model = RoundPipe(nn.Sequential(nn.Linear(4, 4)), runtime=runtime)
model.forward_backward((torch.ones(2, 4),), None, torch.ones(2, 4), lambda out, label: (out - label).sum())
"""


@pytest.mark.timeout(120)
def test_a_runtime_that_nobody_closed_ends_with_the_process() -> None:
    status, _, complaints = programs.ended(AT_THE_END, whole_end=True)
    assert (status, complaints) == (0, "")


@pytest.mark.slow
@pytest.mark.untraced
def test_the_right_to_launch_is_free_wherever_an_interrupt_comes(two: Runtime) -> None:
    model = RoundPipe(mlp(), runtime=two)
    chance = random.Random(0)

    def interrupt(number: int, frame: object) -> None:
        del number, frame
        raise KeyboardInterrupt

    def launch(seconds: float) -> None:
        signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
        while True:
            two.launch(int)

    before = signal.signal(signal.SIGVTALRM, interrupt)
    try:
        for _ in range(300):
            # Though the error, and all frames that it came through, live on.
            with pytest.raises(KeyboardInterrupt) as caught:
                launch(chance.uniform(1e-5, 1e-3))
            assert two.launch(int) == 0
            assert caught.tb is not None
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
    x, y = batch(6)
    assert model.forward_backward((x,), None, y, square_error).isfinite()
