"""Random numbers do not depend on devices, plans or recomputation, and the caller's generator hardly moves."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from forking import Checkpointed, state_after_a_call, trained
from lull import pause
from plain import PATIENCE_S, PLAN_NAMES, assert_near, batch, gradients, plans, square_error, twin
from roundpipe import RoundPipe, RoundPipeRunConfig, Runtime
from rp_engine.errors import Busy
from rp_recompute.randomness import Randomness, RngConsumer
from rp_state.modules.habits import Habits
from torch import nn

CPU = torch.default_generator


class Noise(nn.Module):
    """Adds numbers from the CPU generator, always or only where the input says so."""

    def __init__(self, always: bool = True) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.always = always

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.linear(x)
        if self.always or x.detach().sum().item() > 0:
            h = h * torch.randn(h.shape).to(h.device)
        return h


def random_row() -> nn.Sequential:
    """Five layers, two of them random."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 4), Noise(), nn.Linear(4, 3))


def train(devices: str, plan_name: str, layers: nn.Sequential, separate: bool = False, **settings: Any) -> Any:
    """Loss, outputs and gradients of two calls on a device string."""
    config = RoundPipeRunConfig(num_microbatch=3, execute_plan=plans(len(layers), 3)[plan_name], **settings)
    x, y = batch(6)
    torch.manual_seed(7)
    with Runtime(devices) as runtime:
        model = RoundPipe(layers, runtime=runtime, model_run_config=config)
        results = []
        for _ in range(2):
            if separate:
                outputs = model(x)
                loss = square_error(outputs, y)
                loss.backward()
            else:
                loss, outputs = model.forward_backward((x,), None, y, square_error, return_outputs=True)
            results += [loss.detach(), outputs.detach()]
        model.synchronize()
        return results, gradients(layers)


@pytest.mark.usefixtures("samples_first")
@pytest.mark.pairwise
@pytest.mark.parametrize("grain", ["stage", "layer"])
@pytest.mark.parametrize("plan_name", PLAN_NAMES)
@pytest.mark.parametrize("devices", ["cpu:1", "cpu:2", "cpu:4"])
def test_random_layers_draw_the_same_on_any_devices_under_any_plan(
    devices: str, plan_name: str, grain: Any
) -> None:
    wanted, wanted_grads = train("cpu:1", "all fused", random_row())
    found, grads = train(devices, plan_name, random_row(), recompute_grain=grain)
    assert_near(found, wanted, 1e-5)
    assert_near(grads, wanted_grads, 1e-5)
    assert not torch.equal(found[0], found[2])


@pytest.mark.pairwise
@pytest.mark.parametrize("separate", [False, True])
@pytest.mark.parametrize("plan_name", ["one layer a stage", "cut differently"])
def test_recomputation_draws_what_the_forward_drew(devices: str, plan_name: str, separate: bool) -> None:
    layers = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 4), nn.Dropout(0.3), nn.Linear(4, 3))
    truth = twin(layers)
    wanted, wanted_grads = train(devices, "all fused", layers)
    found, grads = train(devices, plan_name, truth, separate)
    if not separate:
        assert_near(found, wanted, 1e-4)
        assert_near(grads, wanted_grads, 1e-4)
    else:
        assert_near(found[1], wanted[1], 1e-4)
        assert_near(grads, wanted_grads, 1e-4)


@pytest.mark.few(1)
@pytest.mark.usefixtures("samples_first")
@pytest.mark.parametrize("plan_name", ["one layer a stage", "microbatches divided"])
def test_a_layer_that_draws_only_sometimes_draws_the_same_everywhere(plan_name: str) -> None:
    def row() -> nn.Sequential:
        torch.manual_seed(3)
        return nn.Sequential(*(Noise(always=False) for _ in range(5)), nn.Linear(4, 3))

    wanted, wanted_grads = train("cpu:1", "all fused", row())
    for devices in ("cpu:2", "cpu:4"):
        found, grads = train(devices, plan_name, row())
        assert_near(found, wanted, 1e-5)
        assert_near(grads, wanted_grads, 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("always", [True, False])
def test_the_callers_generator_gives_one_number_to_each_training_call(runtime: Runtime, always: bool) -> None:
    torch.manual_seed(3)
    layers = nn.Sequential(*(Noise(always) for _ in range(5)), nn.Dropout(0.5), nn.Linear(4, 3))
    model = RoundPipe(layers, runtime=runtime, model_run_config=RoundPipeRunConfig(num_microbatch=3))
    for seed in range(8):
        x, y = batch(6, seed)
        torch.manual_seed(seed)
        torch.randint(1 << 62, ())
        wanted = torch.get_rng_state()
        torch.manual_seed(seed)
        if seed % 2:
            model.forward_backward(input_args=(x,), label=y, loss_fn=square_error)
            found = torch.get_rng_state()
            model.synchronize()
        else:
            square_error(model(x), y).backward()
            found = torch.get_rng_state()
        assert torch.equal(found, wanted), f"call {seed}"
        assert torch.equal(torch.get_rng_state(), wanted), f"call {seed}"


def test_evaluation_and_steps_leave_the_callers_generator_alone(runtime: Runtime) -> None:
    layers = random_row()[:3].eval()
    model = RoundPipe(layers, runtime=runtime)
    before = torch.get_rng_state()
    with torch.no_grad():
        model(batch(5)[0])
    model.step(lambda: None)
    model.synchronize()
    assert torch.equal(torch.get_rng_state(), before)


class DrawsAlways(Noise):
    """Draws from torch, Python and NumPy in every mode."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + random.random() + float(np.random.rand())


@pytest.mark.few(1)
@pytest.mark.usefixtures("samples_first")
@pytest.mark.parametrize("way", ["forward", "loss"])
def test_what_layers_draw_in_evaluation_does_not_depend_on_the_devices_and_advances_the_generator_once(
    way: str,
) -> None:
    def evaluated(devices: str) -> list[Any]:
        torch.manual_seed(0)
        row = nn.Sequential(*(DrawsAlways() for _ in range(4)), nn.Linear(4, 3)).eval()
        config = RoundPipeRunConfig(num_microbatch=4)
        found = []
        with Runtime(devices) as runtime, torch.no_grad():
            model, (x, y) = RoundPipe(row, runtime=runtime, model_run_config=config), batch(8)
            # The first call looks whether anything draws.
            for seed in (5, None, 5):
                if seed is not None:
                    torch.manual_seed(seed)
                found.append(model(x) if way == "forward" else model.loss((x,), None, y, square_error))
                found.append(torch.rand(()))
        return found

    wanted = evaluated("cpu:1")
    python, numpy = random.getstate(), np.random.get_state()[1].copy()

    for devices in ("cpu:2", "cpu:3"):
        assert_near(evaluated(devices), wanted, 1e-6)
    first, after_first, second, _, third, after_third = wanted
    assert torch.equal(first, third)
    assert not torch.equal(first, second)
    assert after_first == after_third
    assert random.getstate() == python
    assert (np.random.get_state()[1] == numpy).all()


@pytest.mark.usefixtures("samples_first")
def test_a_model_that_draws_in_evaluation_can_be_evaluated_inside_of_a_layer(two: Runtime) -> None:
    inner = RoundPipe(nn.Sequential(DrawsAlways()).eval(), runtime=Runtime("cpu"))
    # Not a submodule: devices have copies of these.
    teacher = [inner]

    class Student(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                told = teacher[0](x)
            return super().forward(x) + told

    with inner.runtime:
        model = RoundPipe(nn.Sequential(Student(4, 4)), runtime=two)
        model.forward_backward((batch(2)[0],), loss_fn=lambda out, _: out.sum())
        model.synchronize()


def test_the_callers_seed_decides(two: Runtime) -> None:
    model = RoundPipe(random_row(), runtime=two)
    x, _ = batch(6)
    outputs = []
    for seed in (1, 2, 1):
        torch.manual_seed(seed)
        outputs.append(model(x).detach())
    assert torch.equal(outputs[0], outputs[2])
    assert not torch.equal(outputs[0], outputs[1])


def test_microbatches_and_layers_draw_different_numbers(two: Runtime) -> None:
    layers = nn.Sequential(nn.Dropout(0.5), nn.Dropout(0.5))
    model = RoundPipe(layers, runtime=two, model_run_config=RoundPipeRunConfig(num_microbatch=4))
    outputs = model(torch.ones(4, 200))
    kept = [(row != 0) for row in outputs]
    assert all(not torch.equal(a, b) for i, a in enumerate(kept) for b in kept[:i])
    assert all(0.1 < row.float().mean() < 0.4 for row in kept)


def test_without_preserving_the_callers_generator_is_the_layers(two: Runtime) -> None:
    config = RoundPipeRunConfig(num_microbatch=2, preserve_rng_state=False)
    model = RoundPipe(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), runtime=two, model_run_config=config)
    before = torch.get_rng_state()
    model.forward_backward((batch(4)[0],), loss_fn=lambda out, _: out.sum())
    model.synchronize()
    assert torch.equal(torch.get_rng_state(), before)
    random = RoundPipe(nn.Dropout(0.5), runtime=two, model_run_config=config)
    random(torch.ones(2, 8))
    assert not torch.equal(torch.get_rng_state(), before)


def test_changing_between_training_and_evaluation_is_seen(runtime: Runtime) -> None:
    layers = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 3))
    model = RoundPipe(layers, runtime=runtime)
    x, _ = batch(8)
    wanted = twin(layers).eval()(x)
    for _ in range(2):
        assert not torch.allclose(model.train()(x).detach(), wanted)
        assert_near(model.eval()(x), wanted, 1e-5)
    layers[1].train()
    assert not torch.allclose(model(x).detach(), wanted)


@pytest.mark.usefixtures("samples_first")
@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_inside_a_layer_leaves_the_numbers_of_other_layers_alone(
    reentrant: bool, dropout: float
) -> None:
    wanted = trained("cpu:1", reentrant=reentrant, dropout=dropout, meet=False)
    found = trained("cpu:3", reentrant=reentrant, dropout=dropout, meet=True)
    assert_near(found, wanted, 1e-5)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_inside_a_layer_leaves_the_callers_generator_alone(devices: str, reentrant: bool) -> None:
    found = state_after_a_call(devices, reentrant=reentrant)
    torch.manual_seed(7)
    torch.randint(1 << 62, ())
    torch.rand(3)
    assert torch.equal(found, torch.get_rng_state())


@pytest.mark.parametrize("consumer", [RngConsumer("layer", 1), RngConsumer("loss")])
@pytest.mark.parametrize("draws", [False, True])
def test_what_reads_the_generators_state_has_its_backward_beside_others_unless_it_drew(
    draws: bool, consumer: RngConsumer
) -> None:
    randomness = Randomness(7, 2, Habits())

    def reads() -> None:
        torch.get_rng_state()
        if draws:
            torch.rand(1)

    for microbatch in (0, 1):
        randomness.run(CPU, consumer, microbatch, reads, recomputes=False)
    entered = threading.Event()

    def enter() -> None:
        with randomness.backward([1], 1, with_loss=True):
            entered.set()

    thread = threading.Thread(target=enter)
    with randomness.backward([0, 1], 0, with_loss=True):
        thread.start()
        if draws:
            pause()
            assert not entered.is_set()
        else:
            assert entered.wait(PATIENCE_S)
    thread.join()
    assert entered.is_set()


def test_a_backward_through_what_does_not_read_the_generators_state_takes_no_lock() -> None:
    randomness, draws, reads = Randomness(7, 3, Habits()), RngConsumer("layer", 0), RngConsumer("layer", 1)
    randomness.run(CPU, draws, 0, lambda: torch.rand(1), recomputes=False)
    randomness.run(CPU, reads, 0, torch.get_rng_state, recomputes=False)
    for layers, microbatch in (([0, 2], 0), ([0, 1], 1)):
        assert isinstance(randomness.backward(layers, microbatch, with_loss=True), nullcontext)


@pytest.mark.parametrize("again", [False, True])
def test_layers_that_fork_the_generator_in_forward_do_so_one_at_a_time(again: bool) -> None:
    randomness = Randomness(7, 2, Habits())
    forked, both, drawn = (threading.Event() for _ in range(3))

    def fork(seed: int, then: Callable[[], object]) -> torch.Tensor:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            then()
            return torch.rand(2)

    def first() -> torch.Tensor:
        found = fork(3, lambda: (forked.set(), pause(until=both)))
        drawn.set()
        return found

    def second() -> torch.Tensor:
        return fork(5, lambda: (both.set(), drawn.wait(PATIENCE_S)))

    both.set()
    wanted = randomness.run(CPU, RngConsumer("layer", 0), 0, first, recomputes=False)
    randomness.run(CPU, RngConsumer("layer", 1), 0, second, recomputes=False)
    for event in (forked, both, drawn):
        event.clear()
    with ThreadPoolExecutor() as other:
        found = other.submit(randomness.run, CPU, RngConsumer("layer", 0), 0, first, recomputes=again)
        assert forked.wait(PATIENCE_S)
        randomness.run(CPU, RngConsumer("layer", 1), 0, second, recomputes=again)
        assert torch.equal(found.result(), wanted)


def test_a_recomputation_reads_the_callers_state_though_another_layer_draws() -> None:
    randomness, draws, reads = Randomness(7, 2, Habits()), RngConsumer("layer", 0), RngConsumer("layer", 1)
    under_way, read = threading.Event(), threading.Event()

    def draw() -> None:
        torch.rand(1)
        under_way.set()
        pause(until=read)

    randomness.run(CPU, reads, 0, torch.get_rng_state, recomputes=False)
    callers = CPU.get_state()
    with ThreadPoolExecutor() as other:
        other.submit(randomness.run, CPU, draws, 0, draw, recomputes=False)
        assert under_way.wait(PATIENCE_S)
        found = randomness.run(CPU, reads, 0, torch.get_rng_state, recomputes=True)
        read.set()
    assert torch.equal(found, callers)


@pytest.mark.later
def test_functions_of_the_generators_state_count_their_calls_in_compiled_code() -> None:
    # Traced, they would count what was so when they were compiled.
    randomness = Randomness(7, 2, Habits())

    @torch.compile(backend="eager")
    def fork(x: torch.Tensor) -> torch.Tensor:
        torch.set_rng_state(torch.get_rng_state())
        return x + 1

    for microbatch in range(4):
        randomness.run(CPU, RngConsumer("layer", 0), microbatch, lambda: fork(torch.zeros(2)), recomputes=False)
    assert {(RngConsumer("layer", 0), microbatch) for microbatch in range(4)} <= randomness.read & randomness.drew


class _Forking(nn.Module):
    """Draws from a generator of its own for a while."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.seed = seed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            noise = torch.rand(64, 64)
            for _ in range(20):
                noise = noise + torch.rand(64, 64)
        return self.linear(x) + noise[0, :4]


@pytest.mark.slow
def test_compiled_layers_that_fork_the_generator_draw_the_same_on_any_number_of_devices() -> None:
    found: list[list[torch.Tensor]] = []
    for devices in ("cpu:1", "cpu:3"):
        torch.manual_seed(0)
        layers = nn.Sequential(*map(_Forking, range(6)))
        with Runtime(devices) as runtime:
            model = RoundPipe(layers, runtime=runtime, compile_layers={"backend": "eager"})
            config = RoundPipeRunConfig(num_microbatch=6)
            x = torch.linspace(0, 1, 48).view(12, 4)
            losses = [model.forward_backward((x,), None, None, lambda y, _: y.sum(), config) for _ in range(4)]
        found.append(losses)
    torch.testing.assert_close(*found, rtol=1e-5, atol=0)


@pytest.mark.parametrize("where", ["loss function", "hook"])
def test_a_model_that_trains_inside_another_ones_turn_with_the_generator_is_refused(where: str) -> None:
    layers = nn.Sequential(nn.Linear(4, 4), Checkpointed(reentrant=False, dropout=0.5))
    with Runtime("cpu:2") as students, Runtime("cpu:2") as teachers:
        student = RoundPipe(layers, runtime=students, model_run_config=RoundPipeRunConfig(num_microbatch=2))
        teacher = RoundPipe(nn.Linear(4, 4), runtime=teachers)

        def teach(*_: object) -> None:
            with torch.no_grad():
                teacher(torch.ones(3, 4))

        def loss(output: torch.Tensor, _: object) -> torch.Tensor:
            teach() if where == "loss function" else output.register_hook(teach)
            return output.sum()

        def train() -> None:
            student.forward_backward((torch.ones(4, 4),), None, None, loss)
            student.synchronize()

        with pytest.raises(Busy, match=r"inside a layer, loss function or hook.*model\.eval\(\)"):
            train()
        student.zero_grad()
        teacher.eval()
        train()
        assert None not in gradients(layers).values()


class GpuGenerator:
    """A seed and the offset of what was drawn, as a GPU's generator has them."""

    def __init__(self) -> None:
        self.seed, self.offset = 11, 8

    def initial_seed(self) -> int:
        return self.seed

    def get_offset(self) -> int:
        return self.offset

    def set_offset(self, offset: int) -> GpuGenerator:
        self.offset = offset
        return self

    def manual_seed(self, seed: int) -> GpuGenerator:
        self.seed, self.offset = seed, 0
        return self


def test_a_gpus_generator_is_seeded_for_each_layer_and_set_back() -> None:
    generator: Any = GpuGenerator()
    randomness, seen = Randomness(1, 3, Habits()), []

    def draw(count: int) -> None:
        seen.append((generator.seed, generator.offset))
        generator.offset += count

    def fail() -> None:
        generator.offset += 4
        raise KeyError

    for layer, body in enumerate([partial(draw, 0), partial(draw, 4), lambda: generator.manual_seed(5)]):
        for _ in range(2):
            randomness.run(generator, RngConsumer("layer", layer), 0, body, recomputes=False)
            assert (generator.seed, generator.offset) == (11, 8)
    assert randomness.drew_on_device == {(RngConsumer("layer", 1), 0), (RngConsumer("layer", 2), 0)}
    randomness.run(generator, RngConsumer("layer", 1), 0, partial(draw, 4), recomputes=True)
    assert len({seed for seed, _ in seen}) == 2
    assert seen[-1] == seen[-2] == (seen[-1][0], 0)
    with pytest.raises(KeyError):
        randomness.run(generator, RngConsumer("layer", 1), 0, fail, recomputes=True)
    assert (generator.seed, generator.offset) == (11, 8)
