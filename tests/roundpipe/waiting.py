"""Small trainings that together lean on every wait of the engine; run as a program by test_waits.py.

Each compares with plain PyTorch, on CPU devices that check the order of every memory access. Ends with exit code 0
if all is right, otherwise with a traceback.
"""

from __future__ import annotations

import copy
import gc
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count
from typing import Any
from unittest import mock

import pytest
import rp_batch
import torch
from forking import state_after_a_call, trained
from lull import LIMIT_S, later, pause
from paired import Meeting, on_both
from roundpipe import RoundPipe, RoundPipeRunConfig, Runtime, save_checkpoint
from roundpipe.optim import SGD
from rp_engine.device import transfers
from rp_engine.device.memory.weights_ahead import WeightsAhead
from rp_engine.engine.model_read import ModelBetweenSteps
from rp_engine.execution.stage import backpropagation
from rp_recompute.randomness import Randomness, RngConsumer
from rp_sched import Plan
from rp_state.modules.habits import Habits
from rp_transfer import Conveyor
from rp_transfer.cpu.backend import CpuDevice
from safetensors.torch import load_file
from torch import nn

STAGED = Plan([range(0, 1), range(1, 3)], range(3, 5), [range(2, 3), range(0, 2)])
DIVIDED = Plan(fused=range(0, 5), groups=[range(0, 2), range(2, 4)])
# What the layers below are told to do; a layer's own attributes are copied to the devices once.
DELAYS: list[threading.Event] = []
FAILS: list[int] = []
LATE_CALLS: list[int] = []


class Widen(nn.Module):
    """Hands a mask on beside what it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 6)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.linear(x), (x[:, :1] > 0).to(x.dtype)


class Masked(nn.Module):
    """Uses the mask and hands it on."""

    def __init__(self, *inner: nn.Module) -> None:
        super().__init__()
        self.inner = nn.Sequential(*inner)

    def forward(self, pair: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        x, mask = pair
        return self.inner(x) * (1 + mask), mask


class Last(nn.Module):
    """Lets the mask go."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 2)

    def forward(self, pair: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return self.linear(pair[0] + pair[1])


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        Widen(), Masked(nn.Linear(6, 6), nn.BatchNorm1d(6)), Masked(nn.Tanh()), Masked(nn.Linear(6, 6)), Last()
    )


def data(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(8, 4, generator=generator), torch.randn(8, 2, generator=generator)


def loss_fn(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return (outputs - labels).square().sum()


def plain(model: nn.Module, seed: int, parts: int = 4) -> torch.Tensor:
    """One accumulating call, microbatch by microbatch."""
    x, y = data(seed)
    losses = [loss_fn(model(a), b) for a, b in zip(x.chunk(parts), y.chunk(parts), strict=True)]
    total = torch.stack(losses).sum()
    total.backward()
    return total.detach()


def same(left: torch.Tensor, right: torch.Tensor) -> None:
    torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-5)


def same_weights(left: nn.Module, right: nn.Module) -> None:
    for (name, one), other in zip(left.state_dict().items(), right.state_dict().values(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")


def same_gradients(left: nn.Module, right: nn.Module) -> None:
    for one, other in zip(left.parameters(), right.parameters(), strict=True):
        same(one.grad, other.grad)


# Said, so that no trial of it comes before a call.
SPLIT: Any = {"split_input": ((rp_batch.Split(),), {}), "split_label": rp_batch.Split()}


def wrap(
    model: nn.Sequential, runtime: Runtime, plan: Plan, parts: int = 4, *, double_buffer: bool = False, **more: Any
) -> RoundPipe:
    config = RoundPipeRunConfig(num_microbatch=parts, execute_plan=plan, **more)
    return RoundPipe(model, runtime=runtime, name="waiting", model_run_config=config, double_buffer=double_buffer)


def call(model: RoundPipe, seed: int) -> torch.Tensor:
    x, y = data(seed)
    return model.forward_backward(input_args=(x,), label=y, loss_fn=loss_fn)


def delayed_training(plan: Plan, *, double_buffer: bool = False) -> None:
    """Asynchronous steps under a plan equal plain steps whose result is read one call late."""
    ours, current = layers(), layers()
    with Runtime("cpu:2") as runtime:
        model = wrap(ours, runtime, plan, double_buffer=double_buffer)
        optimizer = torch.optim.SGD(model.optim_parameters(), lr=0.02)
        masters = copy.deepcopy(current)
        reference = torch.optim.SGD(masters.parameters(), lr=0.02)
        for step in range(5):
            same(call(model, step), plain(current, step))
            model.step(lambda: (optimizer.step(), optimizer.zero_grad()))
            delayed = copy.deepcopy(masters.state_dict())
            for master, weight in zip(masters.parameters(), current.parameters(), strict=True):
                master.grad, weight.grad = weight.grad, None
            reference.step()
            with torch.no_grad():
                for name, weight in current.named_parameters():
                    weight.copy_(delayed[name])
        model.synchronize()
        for ours_weight, master in zip(ours.parameters(), masters.parameters(), strict=True):
            same(ours_weight, master)
        for ours_buffer, buffer in zip(ours.buffers(), current.buffers(), strict=True):
            same(ours_buffer, buffer)


def accumulation(plan: Plan) -> None:
    """Gradients of several calls add up."""
    ours, theirs = layers(), layers()
    with Runtime("cpu:2") as runtime:
        model = wrap(ours, runtime, plan)
        for seed in range(3):
            same(call(model, seed), plain(theirs, seed))
        model.synchronize()
        same_gradients(ours, theirs)


def two_tasks_in_16_bits() -> None:
    """A step reads what both tasks have brought home, each in its own block; the next call waits for the step."""
    generator = torch.Generator().manual_seed(0)

    def whole(low: int, high: int, *shape: int) -> torch.Tensor:
        # Sums of small whole numbers are exact.
        return torch.randint(low, high, shape, generator=generator).bfloat16()

    ours = nn.Sequential(*(nn.Linear(2, 2, bias=False, dtype=torch.bfloat16) for _ in range(2)))
    for layer in ours:
        layer.weight.data = whole(-2, 3, 2, 2)
    theirs = copy.deepcopy(ours)
    found: list[list[torch.Tensor]] = []
    wanted: list[list[torch.Tensor]] = []
    with Runtime("cpu:2") as runtime:
        model = wrap(ours, runtime, Plan(fused=range(2), groups=[range(2), range(2, 4)]))
        released = threading.Event()

        def late() -> None:
            assert released.wait(LIMIT_S)
            found.append([master.grad.clone() for master in model.parameters()])
            for master in model.parameters():
                master.grad = None

        for call_number in range(4):
            x = whole(-3, 4, 8, 2)
            model.forward_backward((x,), loss_fn=lambda out, _: out.sum())
            model.step(late)
            if call_number == 0:
                # The second call's gradients are ready before the first step has read those of the first.
                later(released.set)
            theirs.zero_grad()
            theirs(x).sum().backward()
            wanted.append([parameter.grad.clone() for parameter in theirs.parameters()])
        model.synchronize()
    for mine, plain_ones in zip(found, wanted, strict=True):
        assert all(map(torch.equal, mine, plain_ones)), (mine, plain_ones)


def separate_backward() -> None:
    """Forward and backward by themselves; a forward whose backward never comes leaves no trace."""
    ours, theirs = layers(), layers()
    with Runtime("cpu:2") as runtime:
        model = wrap(ours, runtime, STAGED)
        x, y = data(0)
        loss = loss_fn(model(x), y)
        loss.backward()
        same(loss, plain(theirs, 0))
        for _ in range(8):
            model(x)
        gc.collect()
        model.synchronize()
        same_gradients(ours, theirs)
        model.eval()
        with torch.no_grad():
            model(x)
        model.synchronize()
        nothing_piles_up(runtime)


def publication_waits_for_the_step_before() -> None:
    """A call's weights are those of the step before the last, however late that one is."""
    ours, theirs = layers(), layers()
    with Runtime("cpu:1") as runtime:
        model = wrap(ours, runtime, DIVIDED)
        optimizer = torch.optim.SGD(model.optim_parameters(), lr=0.02)
        reference = torch.optim.SGD(theirs.parameters(), lr=0.02)
        released = threading.Event()

        def late() -> None:
            released.wait(LIMIT_S)
            optimizer.step()
            optimizer.zero_grad()

        same(call(model, 0), plain(theirs, 0))
        model.step(late)
        model.step(lambda: None)
        reference.step()
        later(released.set)
        same(call(model, 1), plain(theirs, 1))
        model.synchronize()


class Late(nn.Module):
    """Hands on what it gets; the backward pass of a call's last microbatch is late if told to be."""

    def forward(self, pair: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        x, mask = pair
        x = x * 1.0
        LATE_CALLS.append(1)
        if x.requires_grad and DELAYS and len(LATE_CALLS) % 4 == 0:
            x.register_hook(lambda grad, event=DELAYS[0]: (event.wait(LIMIT_S), grad)[1])
        return x, mask


def backward_reads_the_weights_of_its_forward() -> None:
    """New weights are not published, nor gradients taken, before the last task of the call is done with them."""
    ours, theirs = layers(), layers()
    ours[3] = nn.Sequential(ours[3], Late())
    with Runtime("cpu:1") as runtime:
        model = wrap(ours, runtime, STAGED)
        optimizer = torch.optim.SGD(model.optim_parameters(), lr=0.02)
        reference = torch.optim.SGD(theirs.parameters(), lr=0.02)
        same(call(model, 0), plain(theirs, 0))
        model.step(lambda: (optimizer.step(), optimizer.zero_grad()))
        masters = copy.deepcopy(theirs)
        reference = torch.optim.SGD(masters.parameters(), lr=0.02)
        for master, weight in zip(masters.parameters(), theirs.parameters(), strict=True):
            master.grad, weight.grad = weight.grad, None
        reference.step()
        # The second call's backward is held up in its fused stage while its step, with a publication, is launched:
        # one device has fetched the weights of the stage after that by then, but not those of the last one.
        released = threading.Event()
        DELAYS[:] = [released]
        LATE_CALLS.clear()
        same(call(model, 1), plain(theirs, 1))
        model.step(lambda: (optimizer.step(), optimizer.zero_grad()))
        later(released.set)
        model.synchronize()
        DELAYS.clear()
        for master, weight in zip(masters.parameters(), theirs.parameters(), strict=True):
            master.grad = weight.grad
        reference.step()
        for weight, master in zip(ours.parameters(), masters.parameters(), strict=True):
            same(weight, master)


def called_once(model: RoundPipe) -> None:
    """A call that leaves nothing: layers run once more in a model's first, to be examined."""
    call(model, 3)
    model.zero_grad()


def hold_up(model: RoundPipe) -> None:
    """A call whose backward goes on for a while after it has returned; not the model's first (`called_once`)."""
    released = threading.Event()
    DELAYS[:] = [released]
    LATE_CALLS.clear()
    call(model, 3)
    DELAYS.clear()
    later(released.set)


def between_calls() -> None:
    """Synchronous steps, dropped gradients and loaded weights take effect at once, whatever is still running."""
    ours, theirs = layers(), layers()
    ours[3] = nn.Sequential(ours[3], Late())
    with Runtime("cpu:2") as runtime:
        model = wrap(ours, runtime, STAGED)
        optimizer = torch.optim.SGD(model.optim_parameters(), lr=0.02)
        before = copy.deepcopy(model.state_dict())
        called_once(model)
        hold_up(model)
        model.zero_grad()
        hold_up(model)
        model.load_state_dict(before)
        model.zero_grad()
        reference = torch.optim.SGD(theirs.parameters(), lr=0.02)
        for seed in range(2):
            same(call(model, seed), plain(theirs, seed))
            model.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async=False)
            reference.step()
            reference.zero_grad()
            for weight, other in zip(ours.parameters(), theirs.parameters(), strict=True):
                same(weight, other)
        hold_up(model)
        plain(theirs, 3)
        model.synchronize()
        same_gradients(ours, theirs)
        done: list[int] = []

        def slow() -> None:
            pause()
            done.append(1)

        model.step(slow)
        model.synchronize()
        assert done == [1]


class Fragile(nn.Module):
    """Fails when told to, and after what it is told to wait for."""

    def forward(self, pair: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        if FAILS:
            FAILS[0] -= 1
            if FAILS[0] < 0:
                for event in DELAYS:
                    event.wait(LIMIT_S)
                raise ValueError("told to")
        return pair


def after_errors(devices: str, layer: int) -> None:
    """A failed call leaves nothing behind that the next one, or the end, would trip over."""
    ours = layers()
    ours[layer] = nn.Sequential(ours[layer], Fragile())
    with Runtime(devices) as runtime:
        model = wrap(ours, runtime, STAGED)
        before = copy.deepcopy(model.state_dict())
        for countdown in (0, 1, 2, 3) * 3:
            FAILS[:] = [countdown]
            with pytest.raises(ValueError, match="told to"):
                call(model, 0)
            FAILS.clear()
            model.zero_grad()
            model.load_state_dict(before)
            theirs = layers()
            same(call(model, 1), plain(theirs, 1))
            model.synchronize()
            same_gradients(ours[:2], theirs[:2])
            model.zero_grad()
        nothing_piles_up(runtime)


def dropped_after_an_error(runtime: Runtime, ours: nn.Sequential, plan: Plan) -> None:
    """A model that fails where it is told to, and that nobody has when this returns."""
    # With more microbatches a worker waits for its device now and then.
    model = wrap(ours, runtime, plan, parts=1)
    FAILS[:] = [0]
    with torch.no_grad(), pytest.raises(ValueError, match="told to"):
        model(data(0)[0])
    FAILS.clear()
    DELAYS.clear()


def goes_on(runtime: Runtime) -> None:
    """The next model trains; what was freed while a device still used it is told by now."""
    gc.collect()
    ours, theirs = layers(), layers()
    model = wrap(ours, runtime, STAGED)
    same(call(model, 1), plain(theirs, 1))
    model.synchronize()
    same_gradients(ours, theirs)


def an_error_waits_for_what_tasks_have_queued() -> None:
    """A model may be dropped when its call has failed: no device reads what the tasks before sent it."""
    one_each = Plan([range(index, index + 1) for index in range(3)])
    with Runtime("cpu:1") as runtime:
        dropped_after_an_error(runtime, nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), Fragile()), one_each)
        goes_on(runtime)


@contextmanager
def the_first_upload_takes_a_while() -> Iterator[threading.Event]:
    """An event that is set when a porter begins to upload a block, which it is long about."""
    begun, upload = threading.Event(), Conveyor.upload

    def slow(conveyor: Conveyor, destination: torch.Tensor, source: torch.Tensor) -> None:
        if not begun.is_set():
            begun.set()
            pause(2)
        upload(conveyor, destination, source)

    with mock.patch.object(Conveyor, "upload", slow):
        yield begun


def an_error_waits_for_uploads_under_way() -> None:
    """A model may be dropped when its call has failed: no porter is about to read its weights."""
    with Runtime("cpu:1") as runtime:
        with the_first_upload_takes_a_while() as begun:
            DELAYS[:] = [begun]
            dropped_after_an_error(runtime, nn.Sequential(Fragile(), nn.Linear(4, 2)), Plan([range(2)]))
            # Where the error did not wait, what it left under way is queued now.
            runtime.lanes[0].inbox.submit(int).wait()
        goes_on(runtime)


@contextmanager
def memory_runs_out_once(ready: Callable[[], object]) -> Iterator[None]:
    """The second allocation of device memory fails, once it is `ready`; the first is for a layer's first block."""
    take, numbers = CpuDevice._count_new, count(1)

    def limited(device: CpuDevice, nbytes: int) -> None:
        if next(numbers) == 2:
            ready()
            raise torch.OutOfMemoryError("as arranged")
        take(device, nbytes)

    with mock.patch.object(CpuDevice, "_count_new", limited), warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        yield
    assert any("ran out of device memory" in str(one.message) for one in told)


def a_second_run_waits_for_uploads_of_the_first() -> None:
    """Memory runs out while buffers are on their way to a device: they have come before their place is freed."""
    ours = nn.Sequential(nn.BatchNorm1d(4, affine=False), nn.Linear(4, 2))
    theirs = copy.deepcopy(ours)
    with Runtime("cpu:1", device_memory_bytes=1 << 30) as runtime, the_first_upload_takes_a_while() as begun:
        model = wrap(ours, runtime, Plan(fused=range(2)))
        with memory_runs_out_once(lambda: begun.wait(LIMIT_S)):
            same(call(model, 0), plain(theirs, 0))
            model.synchronize()
        same_gradients(ours, theirs)
        same_weights(ours, theirs)


def what_a_second_run_writes_to_buffers_is_waited_for() -> None:
    """A state dict comes after the buffers of a task that memory ran out for, which may still be on their way."""
    ours = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    theirs = copy.deepcopy(ours)
    with Runtime("cpu:1", device_memory_bytes=1 << 30) as runtime:
        model = wrap(ours, runtime, Plan([range(2)]))
        with memory_runs_out_once(lambda: None):
            forward_only(model, theirs)
            same_weights(model, theirs)


def a_step_waits_for_the_gradients_of_a_second_run() -> None:
    """A step reads the gradients of a task that memory ran out for, though they come late."""
    ours = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 2))
    theirs, deliver = copy.deepcopy(ours), transfers.Delivery.run
    found: list[torch.Tensor | None] = []

    def late(delivery: transfers.Delivery) -> None:
        pause()
        deliver(delivery)

    def step() -> None:
        found.extend(None if master.grad is None else master.grad.clone() for master in model.optim_parameters())
        for master in model.optim_parameters():
            master.grad = None

    with (
        Runtime("cpu:1", device_memory_bytes=1 << 30) as runtime,
        mock.patch.object(transfers.Delivery, "run", late),
    ):
        model = wrap(ours, runtime, Plan(fused=range(2)))
        with memory_runs_out_once(lambda: None):
            same(call(model, 0), plain(theirs, 0))
            model.step(step)
            wanted = [parameter.grad for parameter in theirs.parameters()]
            theirs.zero_grad()
            same(call(model, 1), plain(theirs, 1))
            model.synchronize()
        for one, other in zip(found, wanted, strict=True):
            assert one is not None
            same(one, other)
        same_gradients(ours, theirs)
        same_weights(ours, theirs)


class Slow(nn.Module):
    """Takes its time with microbatches of ones, and fails with others as soon as one of those is under way."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not bool((x == 1).all()):
            DELAYS[0].wait(LIMIT_S)
            raise ValueError("told to")
        DELAYS[0].set()
        pause()
        FAILS.append(1)
        return x


def an_error_arrives_when_all_is_quiet() -> None:
    """Work of other devices has ended when an error reaches the caller."""
    plan = Plan(fused=range(0, 2), groups=[range(0, 1), range(1, 2)])
    with Runtime("cpu:2") as runtime:
        model = wrap(nn.Sequential(Slow(), nn.Linear(1, 1)), runtime, plan, parts=2)
        x = torch.ones(4, 1)
        DELAYS[:] = [threading.Event()]
        model.forward_backward((x,), label=x, loss_fn=loss_fn)
        DELAYS[:] = [threading.Event()]
        FAILS.clear()
        x[2:] = 2
        with pytest.raises(ValueError, match="told to"):
            model.forward_backward((x,), label=x, loss_fn=loss_fn)
        assert FAILS == [1], "the other device was still at work"
        FAILS.clear()
        DELAYS.clear()


def nothing_piles_up(runtime: Runtime) -> None:
    """What the devices keep until later is what a call or two need."""
    kept = [len(lane.retainer) for lane in runtime.lanes]
    assert max(kept) < 40, kept


class Drawing(nn.Module):
    """Draws; when it runs again for backward of the last microbatch, it waits for the caller in between."""

    def forward(self, pair: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        x, mask = pair
        first = torch.rand(x.shape)
        LATE_CALLS.append(1)
        # The fourth recomputation, after four runs forward: all losses are on the host by then. Before, the layers
        # that compute them would wait, since no other layer runs while one draws.
        if DELAYS and len(LATE_CALLS) == 8:
            under_way, drawn = DELAYS
            under_way.set()
            pause(until=drawn)
        return x + first + torch.rand(x.shape), mask


def the_callers_random_numbers() -> None:
    """A call draws one number of the caller's generator, and is done with it when it returns."""
    model_layers = layers()
    model_layers[1] = nn.Sequential(model_layers[1], Drawing())
    with Runtime("cpu:2") as runtime:
        model = wrap(model_layers, runtime, STAGED)
        call(model, 0)
        model.synchronize()
        under_way, drawn = threading.Event(), threading.Event()
        DELAYS[:] = [under_way, drawn]
        LATE_CALLS.clear()
        torch.manual_seed(7)
        call(model, 3)
        # Where the call does not wait for its layers, one of them is using the generator now.
        assert under_way.wait(LIMIT_S)
        mine = torch.rand(1000)
        drawn.set()
        model.synchronize()
        DELAYS.clear()
        torch.manual_seed(7)
        torch.randint(1 << 62, ())
        assert torch.equal(mine, torch.rand(1000))


def a_step_over_nothing() -> None:
    """A step is waited for even if no parameter is trained."""
    frozen = layers().requires_grad_(False)
    done: list[int] = []

    def slow() -> None:
        pause()
        done.append(1)

    with Runtime("cpu:1") as runtime:
        model = wrap(frozen, runtime, STAGED)
        model.step(slow)
        model.synchronize()
        assert done == [1]


def beside(
    randomness: Randomness,
    first: RngConsumer,
    draws: Callable[[], None],
    under_way: threading.Event,
    second: RngConsumer,
    body: Callable[[], None],
) -> None:
    """Run `body` as a layer while another thread runs `draws` as one, which has set `under_way` by then."""
    thread = threading.Thread(target=lambda: randomness.forward(torch.default_generator, first, 0, draws))
    thread.start()
    assert under_way.wait(LIMIT_S)
    randomness.forward(torch.default_generator, second, 0, body)
    thread.join()


def layers_that_draw_run_alone() -> None:
    """A layer that draws gets its own numbers, though another one is about to draw meanwhile."""
    noisy, other = RngConsumer("layer", 0), RngConsumer("layer", 1)
    randomness = Randomness(7, 2, Habits())
    under_way, entered, drawn = threading.Event(), threading.Event(), threading.Event()
    numbers: list[torch.Tensor] = []

    def draws() -> None:
        numbers.append(torch.rand(4))
        under_way.set()
        pause(until=entered)
        numbers.append(torch.rand(4))
        drawn.set()

    def draws_too() -> None:
        torch.rand(4)
        entered.set()
        drawn.wait(LIMIT_S)

    beside(randomness, noisy, draws, under_way, other, draws_too)
    entered.set()
    randomness.forward(torch.default_generator, noisy, 0, draws)
    same(numbers[:2], numbers[2:])


def a_layer_runs_once_beside_one_that_draws() -> None:
    """A layer that draws nothing is not run again because another one drew meanwhile."""
    noisy, calm = RngConsumer("layer", 0), RngConsumer("layer", 1)
    randomness = Randomness(7, 2, Habits(not_drawing={calm}))
    under_way, entered, drawn = threading.Event(), threading.Event(), threading.Event()
    runs: list[int] = []

    def draws() -> None:
        torch.rand(1)
        under_way.set()
        pause(until=entered)
        torch.rand(1)
        drawn.set()

    def draws_nothing() -> None:
        runs.append(1)
        entered.set()
        drawn.wait(LIMIT_S)

    beside(randomness, noisy, draws, under_way, calm, draws_nothing)
    assert len(runs) == 1


def checkpoints_leave_numbers_alone() -> None:
    """A checkpoint sets the generator's state in backward, while a layer on another device draws."""
    for reentrant in (True, False):
        wanted = trained("cpu:1", reentrant=reentrant, dropout=0.5, meet=False)
        found = trained("cpu:3", reentrant=reentrant, dropout=0.5, meet=True)
        same(found, wanted)
        state = state_after_a_call("cpu:1", reentrant=reentrant)
        torch.manual_seed(7)
        torch.randint(1 << 62, ())
        torch.rand(3)
        assert torch.equal(state, torch.get_rng_state())


class SlowlyCopied(torch.Tensor):
    """Values whose copy into a weight is counted only after the optimizer's thread has done what it had to."""

    runtime: Runtime

    @classmethod
    def of(cls, values: torch.Tensor, runtime: Runtime) -> SlowlyCopied:
        """These values."""
        made = values.as_subclass(cls)
        made.runtime = runtime
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Copy as a slow copy does; all else as usual."""
        if func is not torch.Tensor.copy_:
            return super().__torch_function__(func, types, args, kwargs or {})
        weight, values = args
        weight.data.copy_(values.as_subclass(torch.Tensor))
        assert values.runtime.optimizer.submit(lambda: None).wait(LIMIT_S)
        torch.autograd.graph.increment_version(weight)
        return weight


def what_users_write_comes_after_the_step() -> None:
    """Weights that the user writes, or loads, are not overwritten by a step from before."""
    ours = layers()
    with Runtime("cpu:2") as runtime:
        model = wrap(ours, runtime, STAGED)
        optimizer = torch.optim.SGD(model.optim_parameters(), lr=0.02)
        released = threading.Event()
        call(model, 0)
        model.step(lambda: (released.wait(LIMIT_S), optimizer.step(), optimizer.zero_grad()))
        with torch.no_grad():
            ours[4].linear.bias.fill_(0.25)
        later(released.set)
        call(model, 1)
        model.synchronize()
        assert bool((ours[4].linear.bias == 0.25).all())
        before = copy.deepcopy(model.state_dict())
        model.step(lambda: optimizer.step())
        # The optimizer's thread has something else to do before it can publish.
        held = threading.Event()
        runtime.optimizer.submit(held.wait, LIMIT_S)
        later(held.set)
        first = next(iter(before))
        model.load_state_dict({**before, first: SlowlyCopied.of(before[first], runtime)})
        model.synchronize()
        for (name, weight), wanted in zip(model.state_dict().items(), before.values(), strict=True):
            assert torch.equal(weight, wanted), name


def weights_that_travel_in_vain_live_until_they_are_there() -> None:
    """Weights that were written after a step are brought anew; what had begun to travel is freed in its time."""
    ours, theirs = layers(), layers()
    with Runtime("cpu:1") as runtime, mock.patch.object(WeightsAhead, "_has_room", return_value=True):
        model = wrap(ours, runtime, Plan(fused=range(5)))
        optimizer = torch.optim.SGD(model.optim_parameters(), lr=0.002)
        reference = torch.optim.SGD(theirs.parameters(), lr=0.002)
        for seed in range(14):
            same(call(model, seed), plain(theirs, seed))
            model.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async=False)
            reference.step()
            reference.zero_grad()
            runtime.lanes[0].inbox.submit(lambda: None).result()
            with torch.no_grad():
                ours[4].linear.weight.mul_(0.9)
                theirs[4].linear.weight.mul_(0.9)


def changes_wait_for_the_call() -> None:
    """Freezing a parameter, or dropping gradients, while a backward goes on."""
    ours, theirs = layers(), layers()
    ours[3] = nn.Sequential(ours[3], Late())
    with Runtime("cpu:2") as runtime:
        model = wrap(ours, runtime, STAGED)
        called_once(model)
        hold_up(model)
        model.zero_grad()
        model.synchronize()
        assert all(parameter.grad is None for parameter in ours.parameters())
        hold_up(model)
        ours[4].linear.bias.requires_grad_(False)
        model.step(lambda: None)
        model.synchronize()
        plain(theirs, 3)
        theirs.zero_grad()
        plain(theirs, 3)
        same_gradients(ours[0], theirs[0])


def replaced_parameters_wait_for_the_call() -> None:
    """Replacing a parameter while a backward goes on, which still reads the old one."""
    ours, theirs = layers(), layers()
    ours[3] = nn.Sequential(ours[3], Late())
    with Runtime("cpu:2") as runtime:
        model = wrap(ours, runtime, STAGED)
        called_once(model)
        hold_up(model)
        ours[4].linear.bias = nn.Parameter(ours[4].linear.bias.detach().clone())
        model.step(lambda: None)
        model.synchronize()
        plain(theirs, 3)
        same_gradients(ours[0], theirs[0])


def pace() -> None:
    """A stage of many microbatches takes the memory of a few."""
    peaks: list[int] = []
    for parts in (4, 32):
        model_layers = nn.Sequential(nn.Linear(64, 64), nn.Tanh())
        with Runtime("cpu:1") as runtime:
            config = RoundPipeRunConfig(num_microbatch=parts, execute_plan=Plan([range(0, 2)]))
            model = RoundPipe(model_layers, runtime=runtime, model_run_config=config)
            with torch.no_grad():
                model(torch.randn(parts * 256, 64))
            peaks.append(runtime.memory()[0].peak_bytes)
    assert peaks[1] < 1.5 * peaks[0], peaks


def gradients_do_not_pile_up() -> None:
    """The gradients of no more than two tasks are on the device, also while a step keeps the gradient blocks."""
    ours = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))
    one_each = [range(index, index + 1) for index in range(8)]
    released = threading.Event()
    with Runtime("cpu:1") as runtime:
        plan = Plan(one_each[:7], one_each[7], one_each[6::-1])
        config = RoundPipeRunConfig(num_microbatch=4, execute_plan=plan)
        model = RoundPipe(ours, runtime=runtime, model_run_config=config)
        x = torch.randn(4, 64)
        peaks: list[int] = []
        for late in (False, True):
            model.forward_backward(input_args=(x,), loss_fn=lambda out, _: out.sum())
            model.synchronize()
            runtime.lanes[0].device.reset_peak_memory()
            if late:
                model.step(lambda: released.wait(LIMIT_S))
                later(released.set)
            model.forward_backward(input_args=(x,), loss_fn=lambda out, _: out.sum())
            model.synchronize()
            peaks.append(runtime.memory()[0].peak_bytes)
    # The gradients of two layers, and the weights of these and of one that is let go of late; without the wait
    # there is room for ten.
    assert max(peaks) < 6 * ours[0].weight.nbytes, peaks


@contextmanager
def a_delivery_begins() -> Iterator[threading.Event]:
    """An event that is set when a porter begins to bring gradients home."""
    begun, run = threading.Event(), transfers.Delivery.run

    def told(delivery: transfers.Delivery) -> None:
        if delivery.sums:
            begun.set()
        run(delivery)

    with mock.patch.object(transfers.Delivery, "run", told):
        yield begun


def an_error_waits_for_gradients_on_their_way() -> None:
    """What a porter has begun to bring home before the error is there when the error reaches the caller."""
    ours = layers()
    ours[1] = nn.Sequential(ours[1], Fragile())
    released = threading.Event()
    with Runtime("cpu:2") as runtime:
        model = wrap(ours, runtime, STAGED)
        x, y = data(0)
        loss = loss_fn(model(x.requires_grad_()), y)
        model.step(lambda: released.wait(LIMIT_S))
        FAILS[:] = [0]
        later(released.set)
        with a_delivery_begins() as begun:
            DELAYS[:] = [begun]
            with pytest.raises(ValueError, match="told to"):
                loss.backward()
        FAILS.clear()
        DELAYS.clear()
        assert released.is_set(), "gradients were still on their way"


def packed_outputs_are_read_when_they_have_come() -> None:
    """Of two models, the second of which takes what the first has not finished sending."""
    first, second = layers().eval(), nn.Sequential(nn.Linear(2, 2))
    x, _ = data(0)
    wanted = second(first(x))
    config = RoundPipeRunConfig(num_microbatch=4, merge_output=False)
    with Runtime("cpu:2") as runtime, torch.no_grad():
        below = RoundPipe(first, runtime=runtime, model_run_config=config)
        above = RoundPipe(second, runtime=runtime, model_run_config=config)
        packed = above(below(x))
        packed.synchronize()
        same(torch.cat(list(packed)), wanted)


def steps_in_place_come_after_those_who_read() -> None:
    """Weights that are halves of their masters are overwritten by the step itself."""
    torch.manual_seed(0)
    ours = nn.Sequential(*(nn.Linear(2, 2) for _ in range(5))).bfloat16()
    x = torch.ones(8, 2, dtype=torch.bfloat16)
    packed = RoundPipeRunConfig(merge_output=False)
    with Runtime("cpu:2") as runtime:
        plan = Plan([range(0, 1), range(1, 2)], range(2, 5), [range(0, 2)], [range(0, 1), range(1, 2)])
        config = RoundPipeRunConfig(num_microbatch=2, execute_plan=plan)
        model = RoundPipe(ours, runtime=runtime, model_run_config=config, master="split")
        optimizer = SGD(model.optim_parameters(), lr=10.0)
        for _ in range(3):
            model.forward_backward((x,), loss_fn=lambda outputs, _: outputs.float().sum())
            with torch.no_grad():
                wanted = torch.cat([copy.deepcopy(ours)(part) for part in x.split(4)])
                outputs = model(x, roundpipe_run_config=packed)
            model.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async=False)
            outputs.synchronize()
            same(torch.cat(list(outputs)), wanted)


def stepped(*, during: bool) -> list[torch.Tensor]:
    """Weights, after an optimizer has stepped during two calls or after them."""
    torch.manual_seed(0)
    ours, x = nn.Sequential(*(nn.Linear(2, 2) for _ in range(5))), torch.ones(8, 2)
    config = RoundPipeRunConfig(num_microbatch=2, execute_plan=STAGED)
    with Runtime("cpu:2") as runtime:
        model = RoundPipe(ours, runtime=runtime, model_run_config=config, step_in_backward=during)
        optimizer = SGD(model.optim_parameters(), lr=0.1)
        for _ in range(2):
            model.forward_backward(
                (x,), loss_fn=lambda outputs, _: outputs.sum(), optimizer=optimizer if during else None
            )
            if not during:
                model.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async=False)
        model.synchronize()
    return [one.detach() for one in ours.parameters()]


def layers_pass_the_memory_of_gradients_on() -> None:
    """An optimizer that steps during backward has read a layer's gradients before others take their place."""
    for one, other in zip(stepped(during=True), stepped(during=False), strict=True):
        same(one, other)


def syncing_waits_for_steps() -> None:
    """Weights are read after `sync_optim_param`, though the step took its time."""
    ours = layers()
    with Runtime("cpu:2") as runtime:
        model = wrap(ours, runtime, STAGED)
        released = threading.Event()

        def fill() -> None:
            released.wait(LIMIT_S)
            with torch.no_grad():
                for master in model.parameters():
                    master.fill_(0.5)

        model.step(fill)
        later(released.set)
        model.sync_optim_param()
        assert all(bool((weight == 0.5).all()) for weight in ours.parameters())


def norm_in_the_middle() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def memory_that_runs_out(
    plan: Plan, make: Callable[[], nn.Sequential] = layers, each: Iterable[int] = range(2, 200, 11)
) -> None:
    """A task whose allocations fail runs again in parts, which leave gradients and buffers as one task does.

    `each`: which allocation fails, one after another.
    """
    take = CpuDevice._count_new
    for nth in each:
        ours, theirs = make(), make()
        numbers = count(1)

        def limited(device: CpuDevice, nbytes: int, numbers: Iterator[int] = numbers, nth: int = nth) -> None:
            if next(numbers) == nth:
                raise torch.OutOfMemoryError("as arranged")
            take(device, nbytes)

        with Runtime("cpu:2", device_memory_bytes=1 << 30) as runtime:
            model = wrap(ours, runtime, plan, **SPLIT)
            with mock.patch.object(CpuDevice, "_count_new", limited), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                same(call(model, 0), plain(theirs, 0))
                model.synchronize()
            same_gradients(ours, theirs)
            same_weights(ours, theirs)


def forward_only(ours: RoundPipe, theirs: nn.Module) -> None:
    """Run both forward; returns before what our layers have written has come."""
    with torch.no_grad():
        ours(data(0)[0], roundpipe_run_config=RoundPipeRunConfig(merge_output=False))
        for part in data(0)[0].chunk(4):
            theirs(part)


def what_is_saved_has_the_buffers_of_the_calls_before() -> None:
    """A checkpoint has what layers have written to their buffers, which may still be on its way."""
    ours, theirs = layers(), layers()
    with Runtime("cpu:2") as runtime, tempfile.TemporaryDirectory() as folder:
        model = wrap(ours, runtime, STAGED)
        forward_only(model, theirs)
        path = save_checkpoint(f"{folder}/c", model).path
        found = load_file(path / "model.safetensors")
        for name, value in theirs.state_dict().items():
            same(found[name], value)


def buffers_are_read_once_a_call_has_returned() -> None:
    """Code reads buffers that a call's layers have written."""
    ours, theirs = layers(), layers()
    with Runtime("cpu:2") as runtime:
        call(wrap(ours, runtime, Plan(fused=range(0, 5))), 0)
        plain(theirs, 0)
        for mine, other in zip(ours.buffers(), theirs.buffers(), strict=True):
            same(mine, other)


def state_dicts_have_the_buffers_of_the_calls_before() -> None:
    """A state dict has what layers have written to their buffers, which may still be on its way."""
    ours, theirs = layers(), layers()
    with Runtime("cpu:2") as runtime:
        model = wrap(ours, runtime, STAGED)
        forward_only(model, theirs)
        for name, value in model.state_dict().items():
            same(value, theirs.state_dict()[name])


# Several machines


def _dawdle(_: torch.Tensor) -> None:
    pause(1 / 4)


class Dawdles(nn.Module):
    """Its backward takes a while, after the call has returned."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * 1.0
        if x.requires_grad:
            x.register_hook(_dawdle)
        return x


def divided(runtime: Runtime, *, double_buffer: bool) -> tuple[nn.Sequential, RoundPipe, torch.optim.Optimizer]:
    """A model whose microbatches several machines divide."""
    with MODELS:
        torch.manual_seed(0)
        row = nn.Sequential(nn.Linear(4, 6), Dawdles(), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 2))
    config = RoundPipeRunConfig(num_microbatch=4, preserve_rng_state=False)
    model = RoundPipe(row, runtime=runtime, name="m", model_run_config=config, double_buffer=double_buffer)
    return row, model, torch.optim.SGD(model.optim_parameters(), lr=0.02)


# Both machines share the process's generator.
MODELS = threading.Lock()
# A step of that model has six transfers of gradients, and six of results: of three layers, each in two segments.
# Their numbers in the first step and in the second.
FIRST_SUMS, SECOND_SUMS, FIRST_RESULTS = range(1, 7), range(7, 13), range(6)


def train_divided(runtime: Runtime, *, double_buffer: bool, is_async: bool) -> list[torch.Tensor]:
    row, model, optimizer = divided(runtime, double_buffer=double_buffer)
    for step in range(3):
        call(model, step)
        model.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async=is_async)
    model.synchronize()
    return [parameter.detach().clone() for parameter in row.parameters()]


def machines_wait_for_each_other(*, double_buffer: bool, is_async: bool) -> None:
    """Two machines end with the weights of one."""
    body = partial(train_divided, double_buffer=double_buffer, is_async=is_async)
    with Runtime("cpu:1") as alone:
        truth = body(alone)
    for found in on_both(body, lambda *_: 1 / 8):
        for one, other in zip(found, truth, strict=True):
            same(one, other)


def train_by_backward(runtime: Runtime) -> list[torch.Tensor]:
    row, model, optimizer = divided(runtime, double_buffer=False)
    x = torch.linspace(-1, 1, 32).view(8, 4).requires_grad_()
    for _ in range(2):
        model(x).square().sum().backward()
        model.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async=False)
    assert x.grad is not None
    return [x.grad, *(parameter.detach().clone() for parameter in row.parameters())]


def what_is_passed_on_is_waited_for() -> None:
    """Outputs, and gradients of inputs, are those of all machines."""
    with Runtime("cpu:1") as alone:
        truth = train_by_backward(alone)
    for found in on_both(train_by_backward, lambda *_: 1 / 8):
        for one, other in zip(found, truth, strict=True):
            same(one, other)


def fail_and_go_on(runtime: Runtime, meeting: Meeting | None = None) -> list[torch.Tensor]:
    row, model, optimizer = divided(runtime, double_buffer=False)

    def fail() -> None:
        if meeting is not None:
            meeting.wait_for_posts("reduce", FIRST_SUMS)
        raise ZeroDivisionError

    def step() -> None:
        if meeting is not None:
            for work in meeting.wait_for_posts("reduce", SECOND_SUMS):
                work.wait()
            # Where the step that failed has waited for them, they have come long ago.
            for tag in FIRST_SUMS:
                meeting.let_go("reduce", tag)
        optimizer.step()
        optimizer.zero_grad()

    call(model, 0)
    with pytest.raises(ZeroDivisionError):
        model.step(fail, is_async=False)
    model.reset()
    call(model, 1)
    model.step(step, is_async=False)
    return [parameter.detach().clone() for parameter in row.parameters()]


def a_failed_step_waits_for_its_transfers() -> None:
    """What is left of a failed step does not come into the next one's gradients."""
    with Runtime("cpu:1") as alone:
        truth = fail_and_go_on(alone)
    meeting = Meeting(is_held=lambda kind, tag: kind == "reduce" and tag in FIRST_SUMS)
    for found in on_both(partial(fail_and_go_on, meeting=meeting), meeting=meeting):
        for one, other in zip(found, truth, strict=True):
            same(one, other)


def fail_and_read_late(runtime: Runtime) -> list[torch.Tensor]:
    row, model, optimizer = divided(runtime, double_buffer=True)
    call(model, 0)
    with pytest.raises(ZeroDivisionError):
        model.step(lambda: 1 / 0, is_async=False)
    model.reset()
    call(model, 1)
    model.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async=False)
    pause(4)
    return [parameter.detach().clone() for parameter in row.parameters()]


def a_failed_step_waits_for_results_that_nobody_uses() -> None:
    """What machines expected of a failed step does not come into the next one's weights."""
    with Runtime("cpu:1") as alone:
        truth = fail_and_read_late(alone)
    for found in on_both(fail_and_read_late, lambda kind, tag: 3 * (kind == "gather" and tag in FIRST_RESULTS)):
        for one, other in zip(found, truth, strict=True):
            same(one, other)


def change_after_the_optimizer(runtime: Runtime) -> list[torch.Tensor]:
    row, model, _ = divided(runtime, double_buffer=True)
    optimizer = SGD(model.optim_parameters(), lr=0.02)

    def step() -> None:
        optimizer.step()
        with torch.no_grad():
            for parameter in model.optim_parameters():
                parameter.mul_(0.5)
        optimizer.zero_grad()

    for number in range(2):
        call(model, number)
        model.step(step, is_async=False)
    return [parameter.detach().clone() for parameter in row.parameters()]


def what_is_sent_again_comes_after_what_was_sent() -> None:
    """Results that a step function changes later replace those that were on their way."""
    with Runtime("cpu:1") as alone:
        truth = change_after_the_optimizer(alone)
    slow = on_both(change_after_the_optimizer, lambda kind, tag: 2 * (kind == "gather" and tag in FIRST_RESULTS))
    for found in slow:
        for one, other in zip(found, truth, strict=True):
            same(one, other)


def write_between(runtime: Runtime) -> list[torch.Tensor]:
    row, model, optimizer = divided(runtime, double_buffer=True)
    call(model, 0)
    model.step(lambda: (optimizer.step(), optimizer.zero_grad()))
    runtime.optimizer.wait()
    with torch.no_grad():
        for parameter in row.parameters():
            parameter.fill_(0.1)
    for step in (1, 2):
        call(model, step)
        model.step(lambda: (optimizer.step(), optimizer.zero_grad()))
    model.synchronize()
    return [parameter.detach().clone() for parameter in row.parameters()]


def what_users_write_comes_after_other_machines_results() -> None:
    """Weights that are written while a result is on its way from another machine stay written."""
    with Runtime("cpu:1") as alone:
        truth = write_between(alone)
    for found in on_both(write_between, lambda kind, tag: kind == "gather" and tag in FIRST_RESULTS):
        for one, other in zip(found, truth, strict=True):
            same(one, other)


def capture_behind(runtime: Runtime) -> None:
    row, model, optimizer = divided(runtime, double_buffer=True)
    call(model, 0)
    model.step(lambda: (optimizer.step(), optimizer.zero_grad()))
    found: dict[int, torch.Tensor] = {}

    def read(capture: Callable[[], ModelBetweenSteps]) -> None:
        found.update((id(held.tensor), held.result.clone()) for held in capture().held)

    model.whole.capture(read, lambda _: None).result()
    model.synchronize()
    for parameter in row.parameters():
        same(found[id(parameter)], parameter.detach())


def what_is_saved_has_other_machines_results() -> None:
    """A checkpoint has the last step's result, also what is on its way from another machine."""
    on_both(capture_behind, lambda *_: 1 / 2)


SCENARIOS: list[Callable[[], None]] = [
    lambda: delayed_training(STAGED),
    lambda: delayed_training(DIVIDED),
    lambda: delayed_training(STAGED, double_buffer=True),
    lambda: delayed_training(DIVIDED, double_buffer=True),
    lambda: accumulation(STAGED),
    lambda: accumulation(DIVIDED),
    two_tasks_in_16_bits,
    separate_backward,
    publication_waits_for_the_step_before,
    backward_reads_the_weights_of_its_forward,
    between_calls,
    lambda: after_errors("cpu:2", 2),
    lambda: after_errors("cpu:4", 3),
    an_error_waits_for_what_tasks_have_queued,
    an_error_waits_for_uploads_under_way,
    a_second_run_waits_for_uploads_of_the_first,
    what_a_second_run_writes_to_buffers_is_waited_for,
    a_step_waits_for_the_gradients_of_a_second_run,
    an_error_arrives_when_all_is_quiet,
    the_callers_random_numbers,
    a_step_over_nothing,
    layers_that_draw_run_alone,
    a_layer_runs_once_beside_one_that_draws,
    checkpoints_leave_numbers_alone,
    what_users_write_comes_after_the_step,
    weights_that_travel_in_vain_live_until_they_are_there,
    changes_wait_for_the_call,
    replaced_parameters_wait_for_the_call,
    pace,
    gradients_do_not_pile_up,
    an_error_waits_for_gradients_on_their_way,
    packed_outputs_are_read_when_they_have_come,
    steps_in_place_come_after_those_who_read,
    layers_pass_the_memory_of_gradients_on,
    syncing_waits_for_steps,
    what_is_saved_has_the_buffers_of_the_calls_before,
    buffers_are_read_once_a_call_has_returned,
    state_dicts_have_the_buffers_of_the_calls_before,
    lambda: machines_wait_for_each_other(double_buffer=False, is_async=False),
    lambda: machines_wait_for_each_other(double_buffer=True, is_async=True),
    what_is_passed_on_is_waited_for,
    a_failed_step_waits_for_its_transfers,
    a_failed_step_waits_for_results_that_nobody_uses,
    what_is_sent_again_comes_after_what_was_sent,
    what_users_write_comes_after_other_machines_results,
    what_is_saved_has_other_machines_results,
    # Last, since they take longer than all others.
    lambda: memory_that_runs_out(STAGED),
    lambda: memory_that_runs_out(Plan(fused=range(0, 5))),
    lambda: memory_that_runs_out(
        Plan([range(2)], range(2, 3), [range(2)]), norm_in_the_middle, range(112, 202, 5)
    ),
]


def main() -> None:
    """All of them, in fp64: what remains of a difference is a mistake. Small gradients leave as large ones do."""
    torch.set_default_dtype(torch.float64)
    backpropagation._DEPARTURE_BYTES = 1
    # As rows of rp_presets: a first call does not try how it can be split, so that it is the one that is held up.
    nn.Module.main_arguments = ("samples",)
    for scenario in SCENARIOS:
        scenario()


if __name__ == "__main__":
    main()
