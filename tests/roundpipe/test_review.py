"""What once went wrong without a trace: gradients that came back, steps that vanished, generators moved late."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable

import pytest
import torch
from plain import batch, mlp, square_error, twin
from roundpipe import RoundPipe, RoundPipeRunConfig, Runtime
from rp_sched import Plan
from torch import nn


def call(model: RoundPipe, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return model.forward_backward((x,), label=y, loss_fn=square_error)


@pytest.mark.parametrize("inside", [True, False], ids=["in the step function", "after synchronize"])
def test_a_gradient_dropped_alone_does_not_come_back(runtime: Runtime, inside: bool) -> None:
    layers = nn.Sequential(nn.Linear(4, 3))
    truth = twin(layers)
    model = RoundPipe(layers, runtime=runtime, model_run_config=RoundPipeRunConfig(num_microbatch=2))
    x, y = batch(6)
    call(model, x, y)
    if inside:
        weight, _ = model.optim_parameters()
        model.step(lambda: setattr(weight, "grad", None))
    else:
        model.synchronize()
        layers[0].weight.grad = None
    call(model, x, y)
    model.synchronize()
    for _ in range(2):
        truth.zero_grad(set_to_none=True)
        square_error(truth(x), y).backward()
    torch.testing.assert_close(layers[0].weight.grad, truth[0].weight.grad)
    torch.testing.assert_close(layers[0].bias.grad, 2 * truth[0].bias.grad)


def test_gradients_may_change_places(two: Runtime) -> None:
    layers = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    both = nn.Sequential(layers)  # one layer, one block
    model = RoundPipe(both, runtime=two)
    x, y = torch.randn(6, 4), torch.randn(6, 4)
    call(model, x, y)
    model.synchronize()
    first, second = (layer.weight.grad.clone() for layer in layers)
    one, other = model.optim_parameters()

    def swap() -> None:
        one.grad, other.grad = other.grad, one.grad

    model.step(swap)
    model.synchronize()
    torch.testing.assert_close(layers[0].weight.grad, second)
    torch.testing.assert_close(layers[1].weight.grad, first)


class Sensitive(nn.Module):
    """Fails on negative inputs."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if bool((x < 0).any()):
            raise ValueError("negative")
        return x


def test_a_call_that_fails_later_takes_no_earlier_step_with_it(two: Runtime) -> None:
    layers = nn.Sequential(Sensitive(), nn.Linear(4, 3))
    model = RoundPipe(layers, runtime=two, model_run_config=RoundPipeRunConfig(num_microbatch=2))
    x, y = batch(6)
    ran: list[int] = []
    released = threading.Event()

    def late(number: int) -> None:
        released.wait(30)
        ran.append(number)

    call(model, x.abs(), y)
    model.step(late, True, 0)
    # The failing call reads the first weights, which no step is about to change: it fails before the step runs.
    with pytest.raises(ValueError, match="negative"):
        call(model, -x.abs(), y)
    released.set()
    model.zero_grad()
    model.synchronize()
    assert ran == [0]


class Normalizes(nn.Linear):
    """Writes its weight before it uses it."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.weight.div_(self.weight.norm())
        return super().forward(input)


@pytest.mark.parametrize("is_frozen", [False, True])
@pytest.mark.parametrize("shares", [False, True])
def test_a_parameter_written_in_forward_is_an_error_that_names_it(
    runtime: Runtime, *, is_frozen: bool, shares: bool
) -> None:
    writes, reads = Normalizes(4, 4), nn.Linear(4, 4)
    if shares:
        reads.weight = writes.weight
    writes.requires_grad_(not is_frozen)
    model = RoundPipe(nn.Sequential(nn.Linear(4, 4), nn.Sequential(writes), reads), runtime=runtime)
    for _ in range(2):
        with pytest.raises(TypeError, match=r"layer 1 wrote its parameter '0\.weight' in forward"):
            call(model, torch.randn(8, 4), torch.randn(8, 4))
        model.zero_grad()
    with pytest.raises(TypeError, match=r"layer 1 wrote"), torch.no_grad():
        model(torch.randn(8, 4))


def test_an_embedding_with_a_largest_norm_is_refused(runtime: Runtime) -> None:
    embedding = nn.Embedding(10, 4, max_norm=0.1)
    model = RoundPipe(nn.Sequential(embedding, nn.Linear(4, 4)), runtime=runtime)
    with pytest.raises(TypeError, match=r"layer 0 wrote its parameter 'weight'.*max_norm"):
        call(model, torch.arange(8), torch.randn(8, 4))


class Reassigns(nn.Module):
    """Replaces a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = self.seen + 1
        return x


def test_a_replaced_buffer_is_an_error_that_names_it(runtime: Runtime) -> None:
    model = RoundPipe(nn.Sequential(nn.Linear(4, 3), nn.Sequential(Reassigns())), runtime=runtime)
    with pytest.raises(TypeError, match=r"layer 1 replaced its buffer '0\.seen'.*in place"):
        model(batch(6)[0])


@pytest.mark.parametrize("after", [False, True])
def test_a_hook_on_a_parameter_is_refused_and_not_forgotten(two: Runtime, after: bool) -> None:
    layers = mlp()
    if after:
        model = RoundPipe(layers, runtime=two)
        model(batch(6)[0])
    layers[0].weight.register_hook(lambda grad: grad * 0)
    with pytest.raises(ValueError, match="hook on a parameter"):
        model(batch(6)[0]) if after else RoundPipe(layers, runtime=two)


class Island(nn.Module):
    """Multiplies in fp32 whatever the caller's autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(x.device.type, enabled=False):
            return self.linear(x.float())


def test_backward_runs_outside_the_callers_autocast(runtime: Runtime) -> None:
    torch.manual_seed(0)
    layers = nn.Sequential(Island())
    truth = twin(layers)
    device = runtime.lanes[0].device.torch_device.type
    model = RoundPipe(layers, runtime=runtime, model_run_config=RoundPipeRunConfig(num_microbatch=1))
    x, y = torch.randn(8, 32), torch.randn(8, 32)
    with torch.autocast(device, dtype=torch.bfloat16):
        call(model, x, y)
    model.synchronize()
    square_error(truth(x), y).backward()
    torch.testing.assert_close(layers[0].linear.weight.grad, truth[0].linear.weight.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.cuda
def test_the_devices_generator_is_the_callers_when_a_call_returns() -> None:
    layers = nn.Sequential(*[nn.Sequential(nn.Linear(256, 256), nn.Dropout(0.5)) for _ in range(6)])
    plan = Plan([range(0, 3)], range(3, 6), [range(0, 3)])
    with Runtime("cuda:0") as runtime:
        model = RoundPipe(layers, runtime=runtime, model_run_config=RoundPipeRunConfig(execute_plan=plan))
        x, y = torch.randn(64, 256), torch.randn(64, 256)
        for _ in range(5):
            call(model, x, y)
            torch.cuda.manual_seed(5)
            found = [torch.rand(1000, device="cuda:0") for _ in range(20)]
            model.synchronize()
            torch.cuda.manual_seed(5)
            for numbers in found:
                assert torch.equal(numbers, torch.rand(1000, device="cuda:0"))


def test_after_synchronize_the_devices_hold_nothing(devices: str) -> None:
    with Runtime(devices) as runtime:
        model = RoundPipe(nn.Sequential(nn.Linear(300, 300), nn.Tanh()), runtime=runtime)
        call(model, torch.randn(8, 300), torch.randn(8, 300))
        model.synchronize()
        assert all(len(lane.retainer) == 0 for lane in runtime.lanes)
        if devices != "cuda":
            assert [use.used_bytes for use in runtime.memory()] == [0] * len(runtime.lanes)


def test_synchronize_waits_until_delivered_gradients_are_let_go_of(monkeypatch: pytest.MonkeyPatch) -> None:
    over = threading.Event()
    with Runtime("cpu:1") as runtime:
        outbox = runtime.lanes[0].outbox
        submit = outbox.submit

        def late(job: Callable[..., None], *args: object) -> object:
            # The thread holds its job for a while after the job has left its turns.
            return submit(lambda: (job(*args), over.wait(0.3) if args else None)[0])

        monkeypatch.setattr(outbox, "submit", late)
        model = RoundPipe(nn.Sequential(nn.Linear(300, 300), nn.Tanh()), runtime=runtime)
        call(model, torch.randn(8, 300), torch.randn(8, 300))
        model.synchronize()
        assert runtime.memory()[0].used_bytes == 0
        over.set()


class Held:
    """Says when it is let go of."""

    def __init__(self, gone: Callable[[], None]) -> None:
        self.gone = gone

    def __call__(self) -> int:
        return 7

    def __del__(self) -> None:
        self.gone()


def test_a_porters_job_is_over_when_what_it_held_is_gone(two: Runtime) -> None:
    outbox = two.lanes[0].outbox
    held_up, let_go = threading.Event(), threading.Event()
    outbox.submit(held_up.wait, 30)
    was_over: list[bool] = []
    job = outbox.submit(Held(lambda: (was_over.append(job.done()), let_go.set())))
    held_up.set()
    assert job.result(30) == 7
    assert let_go.wait(30)
    assert was_over == [False]


def test_a_late_error_is_forgotten_with_what_it_broke(two: Runtime) -> None:
    class LateFailure(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
            del ctx
            return x.clone()

        @staticmethod
        def backward(ctx: object, grad: torch.Tensor) -> torch.Tensor:
            del ctx, grad
            assert returned.wait(30)
            raise ValueError("late")

    class Layer(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return LateFailure.apply(x) if FAILING else x

    global FAILING
    layers = nn.Sequential(nn.Linear(4, 3), Layer())
    model = RoundPipe(layers, runtime=two, model_run_config=RoundPipeRunConfig(num_microbatch=1))
    x, y = batch(6)
    returned = threading.Event()
    FAILING = True
    call(model, x, y)
    FAILING = False
    returned.set()
    model.reset()
    call(model, x, y)
    model.synchronize()


FAILING = False


def test_an_interrupted_launch_leaves_no_job_behind(two: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    model = RoundPipe(mlp(), runtime=two, model_run_config=RoundPipeRunConfig(num_microbatch=2))
    x, y = batch(6)
    call(model, x, y)
    worker = two.lanes[0]._worker
    submit = worker.submit

    def interrupted(*_: object) -> object:
        monkeypatch.setattr(worker, "submit", submit)
        raise KeyboardInterrupt

    monkeypatch.setattr(worker, "submit", interrupted)
    with pytest.raises(KeyboardInterrupt):
        call(model, x, y)
    model.reset()
    call(model, x, y)
    model.synchronize()
    gc.collect()


@pytest.mark.parametrize("wrapped_inside", [True, False])
def test_what_is_made_under_inference_mode_can_train(two: Runtime, wrapped_inside: bool) -> None:
    layers = mlp()
    with torch.inference_mode(wrapped_inside):
        model = RoundPipe(layers, runtime=two)
    with torch.inference_mode():
        model(batch(6)[0])
        layers[0].bias.requires_grad_(False)
        model(batch(6)[0])
    optimizer = torch.optim.SGD(model.optim_parameters(), lr=0.1)
    call(model, *batch(6))
    model.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async=False)


def test_a_gradient_is_shown_in_the_dtype_it_has(two: Runtime) -> None:
    layers = mlp().to(torch.bfloat16)
    model = RoundPipe(layers, runtime=two, model_run_config=RoundPipeRunConfig(num_microbatch=1))
    x, y = (tensor.to(torch.bfloat16) for tensor in batch(6))
    for _ in range(2):
        call(model, x, y)
    model.synchronize()
    assert layers[0].weight.grad.dtype == torch.float32
    model.zero_grad()
    layers[2].bias.requires_grad_(False)
    call(model, x, y)
    model.synchronize()
    assert layers[0].weight.grad is not None
