"""Errors arrive as they are, say where they happened, and leave everything else working."""

from __future__ import annotations

import copy
import gc
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import pytest
import rp_batch
import rp_sched
import rp_state.gradient
import torch
from plain import assert_near, batch, gradients, mlp, plans, square_error, train_call, twin, weights
from roundpipe import AutoRoundPipe, GradientsIncomplete, RoundPipe, RoundPipeRunConfig, Runtime, StepFailed
from rp_engine.optimizer import steps
from rp_sched import Plan
from torch import nn

pytestmark = pytest.mark.timeout(60)

Phase = Literal["forward", "recomputation", "backward"]
MICROBATCHES = 3


class Boom(Exception):
    """What the tests throw."""


class Fault:
    """When a layer fails: in one phase of one microbatch. One object, also in the copies of its layer.

    Microbatches come in order, but the recomputation of one may come before the forward of another: an input that
    was seen before tells it.
    """

    def __init__(self) -> None:
        self.error: BaseException | None = None
        self.before_backward: threading.Event | None = None
        self.forward_at = self.recomputation_at = self.backward_at = -1
        self._seen: list[float] = []
        self._backward = 0
        self._lock = threading.Lock()

    def __deepcopy__(self, memo: dict[int, Any]) -> Fault:
        return self

    def arm(self, phase: Phase, microbatch: int, kind: type[BaseException] = Boom) -> None:
        """Fail in one phase of one microbatch, from now on counted."""
        self.error = kind("as planned")
        self._seen, self._backward = [], 0
        self.disarm()
        setattr(self, f"{phase}_at", microbatch)

    def disarm(self) -> None:
        """Never fail."""
        self.forward_at = self.recomputation_at = self.backward_at = -1

    def forward_call(self, x: torch.Tensor) -> None:
        """Note a forward call, and fail if it is the one."""
        mark = round(x.sum().item(), 3)
        with self._lock:
            again = mark in self._seen
            if not again:
                self._seen.append(mark)
            microbatch = self._seen.index(mark)
        self._raise_if(microbatch == (self.recomputation_at if again else self.forward_at))

    def backward_call(self) -> None:
        """Count a backward call, and fail if it is the one."""
        with self._lock:
            now, self._backward = self._backward, self._backward + 1
        if now == self.backward_at and self.before_backward is not None:
            assert self.before_backward.wait(30)
        self._raise_if(now == self.backward_at)

    def _raise_if(self, failing: bool) -> None:
        if failing:
            assert self.error is not None
            raise self.error


class _Watch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, fault: Fault) -> torch.Tensor:
        ctx.fault = fault
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.fault.backward_call()
        return grads[0], None


class Faulty(nn.Module):
    """A linear layer that may fail."""

    def __init__(self, wide: int, narrow: int) -> None:
        super().__init__()
        self.linear = nn.Linear(wide, narrow)
        self.fault = Fault()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.fault.forward_call(x)
        return _Watch.apply(self.linear(x), self.fault)


def faulty_row() -> nn.Sequential:
    """Four layers, (batch, 4) to (batch, 3)."""
    torch.manual_seed(0)
    return nn.Sequential(Faulty(4, 4), Faulty(4, 4), Faulty(4, 4), Faulty(4, 3))


ROW_PLANS = plans(4, MICROBATCHES)


@contextmanager
def within(seconds: float = 50.0) -> Iterator[None]:
    """What is done here must not hang; on a loaded machine it may take its time."""
    start = time.monotonic()
    yield
    assert time.monotonic() - start < seconds


@pytest.fixture(autouse=True)
def quiet_and_whole(capfd: pytest.CaptureFixture[str], request: pytest.FixtureRequest) -> Iterator[None]:
    """After every test here nothing was printed, and every thread of the runtime that ran lives on."""
    names = [name for name in ("runtime", "two") if name in request.fixturenames]
    runtime = request.getfixturevalue(names[0]) if names else None
    yield
    if runtime is not None:
        assert all(lane.is_current() is False for lane in runtime.lanes)
        assert runtime.optimizer.submit(int).result(10) == 0
    assert capfd.readouterr() == ("", "")


def wrap(layers: nn.Module, runtime: Runtime, plan: Plan | None = None, **more: Any) -> RoundPipe:
    """A model with the settings that these tests count on."""
    config = RoundPipeRunConfig(num_microbatch=MICROBATCHES, execute_plan=plan)
    return RoundPipe(layers, name="victim", runtime=runtime, model_run_config=config, **more)


def fused_call(model: RoundPipe, **more: Any) -> Any:
    """A training call, and the end of its backward."""
    x, y = batch(6)
    loss = model.forward_backward(**{"input_args": (x,), "label": y, "loss_fn": square_error, **more})
    model.synchronize()
    return loss


def assert_trains(model: RoundPipe) -> None:
    """A call's gradients are plain PyTorch's."""
    truth = twin(model.model)
    truth.zero_grad()
    loss = fused_call(model)
    x, y = batch(6)
    assert_near(loss, train_call(truth, x, y, microbatches=1), 1e-5)
    assert_near(gradients(model.model), gradients(truth), 1e-5)
    model.zero_grad()


def assert_noted(error: BaseException, *words: str) -> None:
    """One note tells everything."""
    notes = getattr(error, "__notes__", [])
    assert len(notes) == 1, notes
    for word in ("RoundPipe", "'victim'", *words):
        assert word in notes[0], f"{word!r} should be in {notes[0]!r}"


def assert_says_what_is_left(model: RoundPipe, phase: Phase) -> None:
    """After a failed call gradients that were touched are refused, and others are those of before."""
    try:
        model.step(lambda: None)
    except GradientsIncomplete:
        assert phase != "forward"
        with pytest.raises(GradientsIncomplete, match="zero_grad"):
            fused_call(model)
    else:
        model.synchronize()
        assert set(gradients(model.model).values()) == {None}


# A layer


@pytest.mark.usefixtures("samples_first")
@pytest.mark.pairwise
@pytest.mark.parametrize("microbatch", [0, 2])
@pytest.mark.parametrize(
    ("layer", "phase"),
    [
        *[(layer, phase) for layer in (0, 2, 3) for phase in ("forward", "backward")],
        (0, "recomputation"),
        (2, "recomputation"),
    ],
)
@pytest.mark.parametrize("plan_name", ["one layer a stage", "cut differently", "all fused"])
def test_a_layers_error_arrives_as_itself_and_says_where(
    runtime: Runtime, devices: str, plan_name: str, layer: int, phase: Phase, microbatch: int
) -> None:
    if plan_name == "all fused" and phase == "recomputation":
        phase = "forward"
    layers = faulty_row()
    model = wrap(layers, runtime, ROW_PLANS[plan_name])
    other = RoundPipe(mlp(), runtime=runtime)
    fault = layers[layer].fault
    fault.arm(phase, microbatch)
    with within(), pytest.raises(Boom) as caught:
        fused_call(model)
    assert caught.value is fault.error
    kind = devices.split(":")[0]
    assert_noted(caught.value, f"layer {layer}", "Faulty", phase, f"microbatch {microbatch}", f"on {kind}:")

    fault.disarm()
    assert_trains(other)
    assert_says_what_is_left(model, phase)
    (model.zero_grad if microbatch else model.reset)()
    assert_trains(model)


@pytest.mark.usefixtures("samples_first")
@pytest.mark.pairwise
@pytest.mark.parametrize("phase", ["forward", "recomputation", "backward"])
@pytest.mark.parametrize("layer", [0, 3])
def test_separate_calls_raise_a_layers_error_where_it_belongs(runtime: Runtime, layer: int, phase: Phase) -> None:
    layers = faulty_row()
    model = wrap(layers, runtime, ROW_PLANS["one layer a stage"])
    x, y = batch(6)
    fault = layers[layer].fault
    fault.arm(phase, 1)
    with within():
        if phase == "forward":
            with pytest.raises(Boom) as caught:
                model(x)
        else:
            loss = square_error(model(x), y)
            with pytest.raises(Boom) as caught:
                loss.backward()
    assert caught.value is fault.error
    assert_noted(caught.value, f"layer {layer}", phase, "microbatch 1")
    fault.disarm()
    assert_says_what_is_left(model, phase)
    model.zero_grad()
    assert_trains(model)


def gradients_come(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """An event that is set once gradients have come to the host."""
    receive, received = rp_state.gradient.Gradient.receive, threading.Event()

    def receive_and_tell(*arguments: Any) -> bool:
        is_added = receive(*arguments)
        received.set()
        return is_added

    monkeypatch.setattr(rp_state.gradient.Gradient, "receive", receive_and_tell)
    return received


@pytest.mark.parametrize("phase", ["forward", "backward", "a later backward"])
def test_gradients_are_incomplete_only_once_one_was_touched(
    two: Runtime, monkeypatch: pytest.MonkeyPatch, phase: str
) -> None:
    layers = faulty_row()
    model = wrap(layers, two, ROW_PLANS["one layer a stage"])
    truth = twin(layers)
    x, y = batch(6)
    fused_call(model)
    before = gradients(layers)
    # The lowest layer's backward is the last one: it fails when others' gradients have come.
    layer = layers[0 if phase == "a later backward" else 3]
    layer.fault.arm("forward" if phase == "forward" else "backward", 2)
    if phase == "a later backward":
        layer.fault.before_backward = gradients_come(monkeypatch)
    with within(), pytest.raises(Boom):
        fused_call(model)
    layer.fault.disarm()
    if phase == "a later backward":
        for call in (lambda: fused_call(model), lambda: model.step(lambda: None)):
            with pytest.raises(GradientsIncomplete, match=r"failed \(Boom\('as planned'\)\)"):
                call()
        model.reset()
    else:
        model.synchronize()
        assert_near(gradients(layers), before, 0)
        train_call(truth, x, y, microbatches=1)
    fused_call(model)
    train_call(truth, x, y, microbatches=1)
    assert_near(gradients(layers), gradients(truth), 1e-5)


def test_a_step_behind_a_call_that_touched_no_gradient_uses_those_of_before(two: Runtime) -> None:
    layers = faulty_row()
    model = wrap(layers, two, ROW_PLANS["one layer a stage"])
    optimizer = torch.optim.SGD(model.optim_parameters(), lr=0.1)
    truth = twin(layers)
    x, y = batch(6)
    fused_call(model)
    fault = layers[3].fault
    fault.arm("backward", 2)
    fault.before_backward = launched = threading.Event()
    model.forward_backward((x,), None, y, square_error)
    model.step(lambda: (optimizer.step(), optimizer.zero_grad()))
    launched.set()
    with within(), pytest.raises(Boom):
        model.synchronize()
    fault.disarm()
    model.synchronize()
    train_call(truth, x, y, microbatches=1)
    torch.optim.SGD(truth.parameters(), lr=0.1).step()
    assert_near(weights(layers), weights(truth), 1e-5)
    assert_trains(model)


def test_a_part_that_failed_before_its_gradients_is_incomplete_where_others_may_have_theirs(two: Runtime) -> None:
    whole = nn.ModuleDict({"first": faulty_row(), "last": nn.Linear(3, 3)})
    for name in list(whole):
        whole[name] = RoundPipe(whole[name], name=name, runtime=two)
    whole.forward = lambda x: whole["last"](whole["first"](x))
    model = AutoRoundPipe(whole, name="whole")
    fault = whole["first"].model[3].fault
    fault.arm("backward", 0)
    x, y = batch(6)
    loss = square_error(model(x), y)
    with within(), pytest.raises(Boom):
        loss.backward()
    fault.disarm()
    with pytest.raises(GradientsIncomplete, match="'first'"):
        model.step(lambda: None)
    model.reset()
    square_error(model(x), y).backward()
    model.step(lambda: None)
    model.synchronize()


@pytest.mark.usefixtures("samples_first")
@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, GeneratorExit, StopIteration])
def test_even_exceptions_that_end_threads_only_travel(runtime: Runtime, kind: type[BaseException]) -> None:
    layers = faulty_row()
    model = wrap(layers, runtime, ROW_PLANS["one layer a stage"])
    layers[1].fault.arm("forward", 1, kind)
    with within(), pytest.raises(kind) as caught:
        fused_call(model)
    assert caught.value is layers[1].fault.error
    layers[1].fault.disarm()
    model.reset()
    assert_trains(model)


@pytest.mark.usefixtures("samples_first")
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_an_error_in_a_module_hook_arrives(runtime: Runtime, where: str) -> None:
    layers = mlp()
    model = wrap(layers, runtime)
    error = Boom("in a hook")

    def fail(*_: Any) -> None:
        raise error

    register = layers[2].register_forward_hook if where == "forward" else layers[2].register_full_backward_hook
    handle = register(fail)
    with within(), pytest.raises(Boom) as caught:
        fused_call(model)
    assert caught.value is error
    assert_noted(error, "layer")
    handle.remove()
    model.zero_grad()
    assert_trains(model)


@pytest.mark.slow
@pytest.mark.usefixtures("samples_first")
def test_many_failures_in_a_row_leave_nothing_behind(runtime: Runtime) -> None:
    layers = faulty_row()
    model = wrap(layers, runtime, ROW_PLANS["one layer a stage"])
    threads = threading.active_count()
    for turn in range(24):
        fault = layers[turn % 4].fault
        phase: Phase = "backward" if turn % 2 else "forward"
        fault.arm(phase, turn % MICROBATCHES)
        with within(), pytest.raises(Boom):
            fused_call(model)
        fault.disarm()
        model.zero_grad()
        if turn % 6 == 0:
            assert_trains(model)
    assert threading.active_count() <= threads + 1  # the optimizer's thread may have begun
    assert_trains(model)


def test_an_error_after_the_call_returned_is_raised_by_the_next_one(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers = faulty_row()
    model = wrap(layers, runtime, ROW_PLANS["one layer a stage"])
    layers[0].fault.arm("backward", 2)
    # Had none come, the step would use those of before: there are none.
    layers[0].fault.before_backward = gradients_come(monkeypatch)
    x, y = batch(6)
    raised: list[BaseException] = []
    updates: list[int] = []

    def step() -> None:
        # A step begins with the layers whose gradients have come; the norm of all of them never does.
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        updates.append(1)

    with within():
        try:
            model.forward_backward(input_args=(x,), label=y, loss_fn=square_error)
            model.step(step)
            model.synchronize()
        except Boom as error:
            raised.append(error)
    assert raised == [layers[0].fault.error]
    assert updates == []
    layers[0].fault.disarm()
    model.zero_grad()
    assert_trains(model)


# Other places


@pytest.mark.parametrize("microbatch", [0, 2])
def test_an_error_in_the_loss_function_arrives_as_itself(runtime: Runtime, microbatch: int) -> None:
    layers = mlp()
    model = wrap(layers, runtime, plans(5, MICROBATCHES)["one layer a stage"])
    fault = Fault()
    fault.arm("forward", microbatch)

    def loss_fn(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        fault.forward_call(outputs)
        return square_error(outputs, labels)

    with within(), pytest.raises(Boom) as caught:
        fused_call(model, loss_fn=loss_fn)
    assert caught.value is fault.error
    assert_noted(caught.value, "loss function", f"microbatch {microbatch}")
    model.zero_grad()
    assert_trains(model)


def test_calls_are_told_why_a_step_fails_also_while_it_is_failing(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = wrap(mlp(), runtime)
    told: list[str] = []

    def abandon(_: object) -> None:
        with pytest.raises(StepFailed) as refused:
            model.engine.host.state.health.refuse_failed_step()
        told.append(str(refused.value))

    monkeypatch.setattr(steps, "abandon", abandon)
    fused_call(model)

    def fail() -> None:
        raise Boom("in the step")

    with pytest.raises(Boom):
        model.step(fail, is_async=False)
    assert [("Boom('in the step')" in each) for each in told] == [True]
    model.reset()


@pytest.mark.pairwise
@pytest.mark.parametrize("is_async", [True, False])
@pytest.mark.parametrize("cure", ["reset", "load"])
def test_a_failed_step_leaves_the_published_weights_whole(runtime: Runtime, is_async: bool, cure: str) -> None:
    layers = mlp()
    model = wrap(layers, runtime)
    optimizer = torch.optim.SGD(model.optim_parameters(), lr=0.1)
    fused_call(model)
    model.step(lambda: (optimizer.step(), optimizer.zero_grad()))
    fused_call(model)
    before = weights(layers)
    error = Boom("half-way")

    def half() -> None:
        with torch.no_grad():
            next(iter(model.optim_parameters())).fill_(100.0)
        raise error

    def fail() -> None:
        model.step(half, is_async)
        model.synchronize()

    with within(), pytest.raises(Boom) as caught:
        fail()
    assert caught.value is error
    assert_noted(error, "step function")
    assert_near(weights(layers), before, 0)
    for refused in (lambda: fused_call(model), lambda: model.step(lambda: None)):
        with pytest.raises(StepFailed, match="reset"):
            refused()
    with torch.no_grad():
        assert_near(model(batch(3)[0]), layers(batch(3)[0]), 1e-5)
    if cure == "reset":
        model.reset()
    else:
        model.zero_grad()
        model.load_state_dict(model.state_dict())
    assert_near(weights(layers), before, 0)
    assert_trains(model)
    truth = twin(layers)
    fused_call(model)
    model.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async=False)
    model.synchronize()
    x, y = batch(6)
    train_call(truth, x, y, microbatches=1)
    torch.optim.SGD(truth.parameters(), lr=0.1).step()
    assert_near(weights(layers), weights(truth), 1e-5)


def test_reset_after_a_failed_call_keeps_the_last_steps_result(runtime: Runtime) -> None:
    layers = faulty_row()
    model = wrap(layers, runtime)
    optimizer = torch.optim.SGD(model.optim_parameters(), lr=0.1)
    fused_call(model)
    model.step(lambda: (optimizer.step(), optimizer.zero_grad()))
    layers[1].fault.arm("forward", 0)
    with pytest.raises(Boom):
        fused_call(model)
    layers[1].fault.disarm()
    model.reset()
    model.synchronize()
    for weight, master in zip(layers.parameters(), model.optim_parameters(), strict=True):
        assert torch.equal(weight, master)
    assert any(not torch.equal(a, b) for a, b in zip(layers.parameters(), faulty_row().parameters(), strict=True))


def test_a_layer_that_cannot_be_copied_is_an_error_that_blocks_nothing(runtime: Runtime) -> None:
    layers = mlp()
    layers[2].lock = threading.Lock()
    model = wrap(layers, runtime, plans(5, MICROBATCHES)["one layer a stage"])
    for _ in range(2):
        with within(), pytest.raises(TypeError):
            fused_call(model)
    del layers[2].lock
    with within():
        model.zero_grad()
        assert_trains(model)


def test_an_input_that_cannot_travel_is_an_error_that_blocks_nothing(runtime: Runtime) -> None:
    model = wrap(mlp(), runtime)
    x, _ = batch(6)
    with within(), pytest.raises(TypeError, match="dense"):
        model(x.to_sparse(), roundpipe_run_config=RoundPipeRunConfig(split_input=lambda a, k, n: [(a, k)] * n))
    with within(), pytest.raises(TypeError, match="dense"):
        fused_call(model, label=None, loss_fn=lambda out, _: out.sum(), input_kwargs={"y": x[:1].to_sparse()})
    assert_trains(model)


def test_an_output_that_cannot_travel_is_an_error_that_blocks_nothing(runtime: Runtime) -> None:
    class ToSparse(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.relu().to_sparse()

    model = wrap(nn.Sequential(nn.Linear(4, 4), ToSparse()), runtime)
    with within(), pytest.raises(Exception, match=r".") as caught:
        model(batch(6)[0])
    assert_noted(caught.value)
    assert_trains(RoundPipe(mlp(), runtime=runtime))


def test_ctrl_c_while_a_call_waits_is_raised_there_and_the_model_trains_on(runtime: Runtime) -> None:
    class Interrupts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fault = Fault()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            try:
                self.fault.forward_call(x)
            except Boom:
                os.kill(os.getpid(), signal.SIGINT)
                seen.wait(40)
            return x

    seen = threading.Event()
    layers = nn.Sequential(nn.Linear(4, 4), Interrupts(), nn.Linear(4, 3))
    model = wrap(layers, runtime)

    def note(number: int, frame: Any) -> None:
        del number, frame
        seen.set()
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, note)
    try:
        layers[1].fault.arm("forward", 1)
        with within(), pytest.raises(KeyboardInterrupt):
            fused_call(model)
    finally:
        signal.signal(signal.SIGINT, before)
    model.reset()
    assert_trains(model)


# Misuse


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        ({"num_microbatch": 0}, ValueError, "at least 1"),
        ({"num_microbatch": -3}, ValueError, "at least 1"),
        ({"num_microbatch": 1.5}, TypeError, "int"),
        ({"num_microbatch": True}, TypeError, "int"),
        ({"recompute_grain": "block"}, ValueError, "'stage' or 'layer'"),
        ({"requires_grad": "yes"}, TypeError, "bool"),
        ({"preserve_rng_state": 1}, TypeError, "bool"),
        ({"execute_plan": "auto"}, TypeError, "Plan"),
        ({"output_device": object()}, TypeError, "device"),
    ],
)
def test_a_setting_that_no_call_could_use_is_refused(
    settings: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        RoundPipeRunConfig(**settings)


def _with_buffer() -> nn.Module:
    module = nn.Linear(2, 2)
    module.register_buffer("state", torch.ones(2, requires_grad=True))
    return module


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"model": "gpt"}, TypeError, "nn.Module"),
        ({"model": nn.Sequential()}, ValueError, "no layers"),
        ({"pin_model": "always"}, ValueError, "'alloc', 'register' or 'off'"),
        ({"optim_dtype": "float32"}, TypeError, "optim_dtype"),
        ({"optim_dtype": torch.int8}, TypeError, "optim_dtype"),
        ({"model": nn.Linear(2, 2, device="meta")}, ValueError, "CPU"),
        ({"model": _with_buffer()}, ValueError, "requires grad"),
    ],
)
def test_a_model_that_cannot_be_wrapped_is_refused(
    two: Runtime, arguments: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        RoundPipe(**{"model": nn.Linear(2, 2), "runtime": two, **arguments})


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "plan",
    [
        Plan(fused=range(4)),
        Plan(fused=range(6)),
        Plan((range(2),), range(3, 5), (range(3),)),
        Plan((range(4),), range(4, 5), ()),
        Plan((range(5),), None, (range(5),)),
        Plan(fused=range(5), groups=(range(2),)),
    ],
)
def test_a_plan_that_does_not_fit_is_refused_and_the_model_goes_on(two: Runtime, plan: Plan) -> None:
    model = wrap(mlp(), two)
    state = torch.get_rng_state()
    with pytest.raises(rp_sched.InvalidPlan):
        fused_call(model, run_config=RoundPipeRunConfig(execute_plan=plan))
    assert torch.equal(state, torch.get_rng_state())
    assert_trains(model)


def _misuses() -> dict[str, tuple[Callable[[RoundPipe, torch.Tensor], Any], type[Exception], str]]:
    def off(call: Callable[[RoundPipe, torch.Tensor], Any]) -> Callable[[RoundPipe, torch.Tensor], Any]:
        def under_no_grad(model: RoundPipe, x: torch.Tensor) -> Any:
            with torch.no_grad():
                return call(model, x)

        return under_no_grad

    with_grad = RoundPipeRunConfig(requires_grad=True)
    return {
        "a list of inputs": (lambda m, x: m.forward_backward(input_args=[x]), TypeError, "tuple"),
        "a bare input": (lambda m, x: m.forward_backward(x), TypeError, "tuple"),
        "fused, gradients off": (off(lambda m, x: m.forward_backward((x,))), RuntimeError, "grad mode"),
        "forward, gradients off": (
            off(lambda m, x: m(x, roundpipe_run_config=with_grad)),
            RuntimeError,
            "grad mode",
        ),
        "no step function": (lambda m, _: m.step(None), TypeError, "callable"),
        "a loss of many elements": (lambda m, x: m.forward_backward((x,)), TypeError, "one element"),
        "no loss": (lambda m, x: m.forward_backward((x,), loss_fn=lambda *_: None), TypeError, "NoneType"),
        "a number for a loss": (
            lambda m, x: m.forward_backward((x,), loss_fn=lambda *_: 1.0),
            TypeError,
            "float",
        ),
        "labels of another size": (
            lambda m, x: m.forward_backward((x,), label=x[:4], loss_fn=square_error),
            rp_batch.BatchError,
            "label",
        ),
        "to another dtype": (lambda m, _: m.half(), RuntimeError, "before wrapping"),
        "to another device": (lambda m, _: m.to("meta"), RuntimeError, "before wrapping"),
        "an argument too many": (lambda m, x: m(x, x), TypeError, "argument"),
        "an attribute that nobody has": (lambda m, _: m.nonesuch, AttributeError, "nonesuch"),
    }


@pytest.mark.parametrize("name", list(_misuses()))
def test_misuse_is_refused_in_words_and_the_model_goes_on(two: Runtime, name: str) -> None:
    call, error, words = _misuses()[name]
    model = wrap(mlp(), two)
    with within(), pytest.raises(error, match=words):
        call(model, batch(6)[0])
    model.zero_grad()
    assert_trains(model)


@pytest.mark.parametrize("retain", [True, False])
def test_backward_through_one_forward_works_once(two: Runtime, retain: bool) -> None:
    model = wrap(mlp(), two)
    x, y = batch(6)
    loss = square_error(model(x), y)
    loss.backward(retain_graph=retain)
    with within(), pytest.raises(RuntimeError, match="second time"):
        loss.backward()
    model.zero_grad()
    assert_trains(model)


def test_gradients_of_gradients_are_refused(two: Runtime) -> None:
    model = wrap(mlp(), two)
    x, y = batch(6)
    x.requires_grad_()
    (grad,) = torch.autograd.grad(square_error(model(x), y), x, create_graph=True)
    with within(), pytest.raises(RuntimeError, match="must not be differentiated"):
        grad.sum().backward()
    model.zero_grad()
    assert_trains(model)


def _replaces_a_module(layer: nn.Module) -> None:
    # One that is where the layer is, and takes no random numbers to make: neither is what is refused.
    layer.inner = copy.deepcopy(layer.inner)


def _replaces_a_parameter(layer: nn.Module) -> None:
    layer.inner.weight = nn.Parameter(torch.zeros(4, 4))


def _adds_a_buffer(layer: nn.Module) -> None:
    layer.register_buffer("seen", torch.zeros(()))


def _removes_a_parameter(layer: nn.Module) -> None:
    layer.inner.bias = None


def _adds_to_another_table(layer: nn.Module) -> None:
    layer._parameters = {**layer._parameters, "scale": nn.Parameter(torch.ones(()))}


def _puts_back(layer: nn.Module) -> None:
    weight = layer.inner.weight
    del layer.inner.weight
    layer.inner.weight = weight


def test_a_layer_may_take_a_parameter_out_and_put_it_back(runtime: Runtime) -> None:
    layers = nn.Sequential(nn.Linear(4, 4), Changing(_puts_back), nn.Linear(4, 3))
    model = wrap(layers, runtime)
    layers[1].fault.arm("forward", 0)
    fused_call(model)
    model.synchronize()
    layers[1].fault.disarm()
    model.zero_grad()
    assert_trains(model)


class Shuffling(nn.Module):
    """Takes its dropout out and puts it back, behind another module with a flag of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.drop, self.inner = nn.Dropout(0.5), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        drop = self.drop
        del self.drop
        self.drop = drop
        return self.inner(self.drop(x))


def test_training_flags_find_their_modules_after_forward_has_put_them_in_another_order(runtime: Runtime) -> None:
    layer = Shuffling()
    model = wrap(nn.Sequential(layer), runtime)
    x = torch.ones(6, 4)
    with torch.no_grad():
        model(x)
        layer.drop.eval()
        assert torch.equal(model(x), layer.inner(x))


class Changing(nn.Module):
    """Changes its structure in forward, at its nth call."""

    def __init__(self, change: Callable[[nn.Module], None]) -> None:
        super().__init__()
        self.inner, self.change, self.fault = nn.Linear(4, 4), change, Fault()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.inner(x)
        try:
            self.fault.forward_call(x)
        except Boom:
            self.change(self)
        return found


@pytest.mark.pairwise
@pytest.mark.parametrize("microbatch", [0, 2])
@pytest.mark.parametrize("plan_name", ["planned", "one layer a stage", "microbatches divided"])
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_replaces_a_module, "layer 1 .*module 'inner'"),
        (_replaces_a_parameter, "layer 1 .*parameter 'inner.weight'"),
        (_adds_a_buffer, "layer 1 .*buffer 'seen'"),
        (_removes_a_parameter, "layer 1 .*parameter 'inner.bias'"),
        (_adds_to_another_table, "layer 1 .*parameter 'scale'"),
    ],
)
def test_a_layer_that_changes_its_structure_in_forward_is_refused_and_made_anew(
    runtime: Runtime, change: Callable[[nn.Module], None], words: str, plan_name: str, microbatch: int
) -> None:
    layers = nn.Sequential(nn.Linear(4, 4), Changing(change), nn.Linear(4, 3))
    model = wrap(layers, runtime, plans(3, MICROBATCHES)[plan_name])
    assert_trains(model)
    layers[1].fault.arm("forward", microbatch)
    with within(), pytest.raises(TypeError, match=words) as caught:
        fused_call(model)
    assert_noted(caught.value, "layer 1 (Changing)")
    layers[1].fault.disarm()
    model.reset()
    for _ in range(len(runtime.lanes)):
        assert_trains(model)


class Sparse(nn.Module):
    """Returns what cannot travel."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.to_sparse()


def test_layers_that_hand_on_sparse_tensors_are_told_so(two: Runtime) -> None:
    model = wrap(nn.Sequential(nn.Linear(4, 3), Sparse(), nn.Linear(3, 3)), two, plans(3, 2)["one layer a stage"])
    with within(), pytest.raises(TypeError, match=r"must be dense tensors, but one has layout torch\.sparse_coo"):
        fused_call(model)
    model.reset()


@pytest.mark.parametrize("layer", range(1, 4))
def test_a_model_may_be_dropped_as_soon_as_its_call_has_failed(runtime: Runtime, layer: int) -> None:
    def fail() -> None:
        layers = faulty_row()
        layers[layer].fault.arm("forward", 0)
        # With more microbatches a worker waits for its device now and then.
        config = RoundPipeRunConfig(num_microbatch=1, execute_plan=plans(4, 1)["one layer a stage"])
        model = RoundPipe(layers, runtime=runtime, model_run_config=config)
        with within(), torch.no_grad(), pytest.raises(Boom):
            model(batch(6)[0])

    fail()
    gc.collect()
    # The next use of the runtime tells what was freed while a device still read it.
    assert_trains(RoundPipe(mlp(), runtime=runtime))
