"""`step_in_backward`: a synchronous step's numbers at 12 bytes a parameter, and what needs gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import roundpipe
import rp_batch
import torch
from checkpointing import Job, job, with_dropout
from paired import on_both
from plain import FailsLate, batch, plans, square_error, weights
from roundpipe import (
    AloneOnly,
    AutoRoundPipe,
    DeviceMemoryWarning,
    GradScaler,
    RoundPipe,
    RoundPipeError,
    RoundPipeRunConfig,
    Runtime,
    StepFailed,
    TrainingWarning,
    TrainsNothing,
    load_checkpoint,
    save_checkpoint,
    wrap_model_to_roundpipe,
)
from rp_cli.finetune.forecast import foretold
from rp_cli.finetune.options import FineTuning
from rp_cli.options.declared import GivenOptions, read
from rp_engine.device.transfers import Delivery
from rp_sched import Plan
from rp_state.gradient import Gradient
from rp_trainer.errors import Refused
from shortages import PLENTY, Trap, trapped
from sometimes import one_in
from torch import nn

pytestmark = pytest.mark.usefixtures("small_departures")

LR = 0.03
DEPTH = 11
optim = roundpipe.optim


def row(depth: int = DEPTH, seed: int = 0) -> nn.Sequential:
    """Layers of which all but the first and the last have one size: (batch, 4) to (batch, 3)."""
    torch.manual_seed(seed)
    middle = [nn.Linear(6, 6) for _ in range(depth - 2)]
    return nn.Sequential(nn.Linear(4, 6), *middle, nn.Linear(6, 3)).bfloat16()


PLANS = plans(DEPTH, 3)


def wrapped(
    runtime: Runtime,
    layers: nn.Module | None = None,
    *,
    plan: Plan | None = PLANS["cut differently"],
    microbatches: int = 3,
    master: Any = "split",
    during: bool = True,
    **kwargs: Any,
) -> RoundPipe:
    # Experts are chosen by each microbatch, so the batch in one piece gives something else.
    split = ((rp_batch.Split(),), {})
    config = RoundPipeRunConfig(num_microbatch=microbatches, execute_plan=plan, split_input=split)
    model = row() if layers is None else layers
    return RoundPipe(
        model, torch.float32, "m", config, runtime=runtime, master=master, step_in_backward=during, **kwargs
    )


def call(model: RoundPipe, optimizer: torch.optim.Optimizer | None, seed: int = 1) -> float:
    x, y = (tensor.bfloat16() for tensor in batch(6, seed))
    return model.forward_backward((x,), None, y, square_error, optimizer=optimizer).item()


def turn(model: RoundPipe, optimizer: torch.optim.Optimizer, seed: int, *, during: bool) -> float:
    """A call and its synchronous step."""
    loss = call(model, optimizer if during else None, seed)
    if not during:
        model.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async=False)
    return loss


Made = Callable[[RoundPipe], torch.optim.Optimizer]
Found = tuple[list[float], list[torch.Tensor], list[torch.Tensor]]


def trained(model: RoundPipe, make: Made, *, during: bool, turns: int = 3) -> Found:
    """Losses, weights and the optimizer's state."""
    optimizer = make(model)
    losses = [turn(model, optimizer, seed, during=during) for seed in range(turns)]
    model.synchronize()
    members = [one for group in optimizer.param_groups for one in group["params"]]
    state = [value for one in members for value in optimizer.state.get(one, {}).values()]
    return losses, list(weights(model.model).values()), [one for one in state if isinstance(one, torch.Tensor)]


def same(found: Found, wanted: Found) -> bool:
    alike = [len(a) == len(b) and all(map(torch.equal, a, b)) for a, b in zip(found[1:], wanted[1:], strict=True)]
    return found[0] == wanted[0] and all(alike)


def over(kind: Callable[..., torch.optim.Optimizer], **kwargs: Any) -> Made:
    return lambda model: kind(model.optim_parameters(), lr=LR, **kwargs)


ADAM = over(optim.AdamW)
OPTIMIZERS: dict[str, Made] = {
    "AdamW": ADAM,
    "AdamW in 8 bits": over(optim.AdamW, state="8bit"),
    "AdamW in bf16": over(optim.AdamW, state="bf16"),
    "SGD": over(optim.SGD, momentum=0.9),
    "Lion": over(optim.Lion),
    "Adafactor": over(optim.Adafactor),
    "Muon": lambda model: optim.Muon(
        optim.muon_groups(model.named_model, model.optim_named_parameters(), lr=1e-2),
        lr=LR,
        ns_dtype=torch.float32,
    ),
}


def both(runtime: Runtime, make: Made = ADAM, layers: Callable[[], nn.Module] = row, **kwargs: Any) -> bool:
    """Whether steps during and after calls lead to the same numbers."""
    found = [
        trained(wrapped(runtime, layers(), during=during, **kwargs), make, during=during)
        for during in (True, False)
    ]
    return same(*found)


# Numbers


@pytest.mark.parametrize("make", one_in(4, OPTIMIZERS.values()), ids=OPTIMIZERS)
def test_every_optimizer_has_the_numbers_of_a_step_after_the_call(two: Runtime, make: Made) -> None:
    assert both(two, make)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "how",
    [
        {"master": "whole"},
        {"master": "whole", "double_buffer": False},
        {"double_buffer": True},
        {"pin_model": "off"},
    ],
    ids=str,
)
def test_every_kind_of_master_and_block_has_those_numbers(two: Runtime, how: dict[str, Any]) -> None:
    assert both(two, **how)


class Expert(nn.Module):
    """A linear layer of two, by whether the batch begins with a positive number; a parameter is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other, self.unused = nn.Linear(6, 6), nn.Linear(6, 6), nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.one(x) if x[0, 0] > 0 else self.other(x)


class Reads(nn.Module):
    """Multiplies by another layer's weight."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight.T


class Adapted(nn.Linear):
    """A frozen linear layer beside two small trained matrices, as LoRA has them."""

    def __init__(self) -> None:
        super().__init__(6, 6)
        self.requires_grad_(False)
        self.low, self.high = nn.Parameter(torch.randn(2, 6)), nn.Parameter(torch.randn(6, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + x @ self.low.T @ self.high.T


def tied() -> nn.Sequential:
    layers = row()
    layers[-2] = Reads(layers[1].weight)
    layers[6] = layers[5]
    return layers


def experts() -> nn.Sequential:
    layers = row()
    torch.manual_seed(0)
    for index in range(1, DEPTH - 1, 2):
        layers[index] = Expert().bfloat16()
    return layers


def frozen() -> nn.Sequential:
    layers = row()
    for index in (0, 1, 4, 5):
        layers[index].requires_grad_(False)
    return layers


def adapted() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(4, 6).requires_grad_(False), *(Adapted() for _ in range(9)), nn.Linear(6, 3)
    ).bfloat16()


@pytest.mark.few(1)
@pytest.mark.parametrize("layers", [tied, experts, frozen, adapted])
@pytest.mark.parametrize("plan", ["one stage", "microbatches divided"])
def test_shared_unused_and_frozen_weights_have_those_numbers(
    two: Runtime, layers: Callable[[], nn.Module], plan: str
) -> None:
    assert both(two, layers=layers, plan=PLANS[plan])


@pytest.mark.pairwise
@pytest.mark.slow
@pytest.mark.parametrize("layers", [row, tied, experts, frozen, adapted])
@pytest.mark.parametrize("plan", [name for name in PLANS if name != "planned"])
def test_all_devices_have_those_numbers(runtime: Runtime, layers: Callable[[], nn.Module], plan: str) -> None:
    assert both(runtime, layers=layers, plan=PLANS[plan])


@pytest.mark.few(1)
@pytest.mark.parametrize("plan", ["all fused", "cut differently"])
def test_any_number_of_devices_has_those_numbers(runtime: Runtime, plan: str) -> None:
    assert both(runtime, plan=PLANS[plan])


@pytest.mark.slow
def test_layers_that_are_frozen_and_thawed_meanwhile_have_those_numbers(two: Runtime) -> None:
    found = []
    for during in (True, False):
        model = wrapped(two, during=during)
        optimizer = ADAM(model)
        for seed, is_trained in enumerate((True, False, False, True, True)):
            model.model[3].requires_grad_(is_trained)
            turn(model, optimizer, seed, during=during)
        model.synchronize()
        found.append(([0.0], list(weights(model.model).values()), list[torch.Tensor]()))
    assert same(*found)


def test_a_schedule_steps_between_the_calls_without_a_warning(two: Runtime) -> None:
    found = []
    for during in (True, False):
        model = wrapped(two, during=during)
        optimizer = ADAM(model)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=3)
        for seed in range(3):
            turn(model, optimizer, seed, during=during)
            schedule.step()
        found.append(([], list(weights(model.model).values()), list[torch.Tensor]()))
    assert same(*found)


def test_inputs_that_require_grad_get_theirs_and_outputs_come_back(two: Runtime) -> None:
    x, y = (tensor.bfloat16() for tensor in batch(6))
    found = []
    for during in (True, False):
        model, inputs = wrapped(two, during=during), x.clone().requires_grad_()
        optimizer = ADAM(model)
        loss, outputs = model.forward_backward(
            (inputs,), None, y, square_error, return_outputs=True, optimizer=optimizer if during else None
        )
        found.append([loss, outputs, inputs.grad])
    assert all(map(torch.equal, *found))


def test_the_next_call_reads_the_result_and_inference_goes_on(two: Runtime) -> None:
    model = wrapped(two)
    optimizer = ADAM(model)
    x = batch(6)[0].bfloat16()
    for seed in range(2):
        call(model, optimizer, seed)
        assert model.weights_delay == 0
        wanted = torch.cat([model.model(part) for part in x.split(2)])
        assert torch.equal(model(x), wanted)


# Bytes


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "per_parameter"), [("fp32", 12), ("bf16", 8), ("8bit", 6.125)])
def test_a_trained_model_takes_so_many_bytes_a_parameter(kind: Any, per_parameter: float) -> None:
    count, width = 32, 128
    layers = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(count))).bfloat16()
    numel, x = count * width * width, torch.ones(3, width, dtype=torch.bfloat16)
    with Runtime("cpu:2") as runtime:
        model = RoundPipe(layers, runtime=runtime, master="split", step_in_backward=True)
        foreseen = model.memory_forecast().whole
        optimizer = optim.AdamW(model.optim_parameters(), lr=LR, state=kind)
        for _ in range(2):
            model.forward_backward((x,), loss_fn=lambda outputs, _: outputs.sum(), optimizer=optimizer)
        report, forecast = model.memory_report(optimizer), model.memory_forecast(optimizer)
        # Three layers of 32 have gradients at once.
        passed_on = 3 * width * width * 2
        assert report.gradients_bytes == forecast.whole.gradients == foreseen.gradients == passed_on
        counters = 4 * sum("step" in state for state in optimizer.state.values())
        held = report.host_bytes - report.activations_bytes - counters
        assert held == pytest.approx(per_parameter * numel + passed_on, rel=1e-3)
        assert foreseen.total == 12 * numel + passed_on
        # What is counted is what there is.
        gradients = [block.gradient for block in model.engine.host.state.trainable]
        memories = {
            one.data_ptr(): one.untyped_storage() for each in gradients if each for one in each_memory(each)
        }
        assert sum(memory.nbytes() for memory in memories.values()) == passed_on


def each_memory(gradient: Gradient) -> list[torch.Tensor]:
    return [summand.block for summand in gradient._summands]


def test_gradients_that_several_tasks_add_to_have_memory_of_their_own(two: Runtime) -> None:
    model = wrapped(two, plan=PLANS["microbatches divided"])
    optimizer = ADAM(model)
    nbytes = model.memory_report().weights_bytes
    assert model.memory_forecast().whole.gradients < nbytes / 2
    for seed in range(2):
        call(model, optimizer, seed)
    assert model.memory_report().gradients_bytes == 2 * nbytes


def test_plans_divide_no_microbatches(runtime: Runtime) -> None:
    model = wrapped(runtime, plan=None)
    optimizer = ADAM(model)
    for seed in range(3):
        call(model, optimizer, seed)
    assert model.memory_report().gradients_bytes == model.memory_forecast(optimizer).whole.gradients


# What is refused


def test_an_optimizer_and_the_setting_need_each_other(two: Runtime) -> None:
    model = wrapped(two)
    with pytest.raises(ValueError, match="cannot be accumulated: give forward_backward the optimizer"):
        call(model, None)
    other = wrapped(two, during=False)
    with pytest.raises(ValueError, match="model 'm' keeps its gradients: wrap it with step_in_backward=True"):
        call(other, ADAM(other))
    with pytest.raises(TypeError, match="step_in_backward must be a bool, but is 1"):
        wrapped(two, during=1)  # type: ignore[arg-type]  # that is the point


@pytest.mark.parametrize("make", [torch.optim.AdamW, GradScaler])
def test_other_optimizers_and_scalers_are_refused(two: Runtime, make: Any) -> None:
    model = wrapped(two)
    optimizer = GradScaler(runtime=two) if make is GradScaler else make(model.optim_parameters())
    with pytest.raises(TypeError, match=rf"one of roundpipe\.optim.* but is a {make.__name__}"):
        call(model, optimizer)


def test_an_optimizer_that_leaves_parameters_out_is_refused(two: Runtime) -> None:
    model = wrapped(two)
    optimizer = optim.AdamW(list(model.optim_parameters())[1:], lr=LR)
    with pytest.raises(ValueError, match="1 of the 22 trained parameters of model 'm' are not the optimizer's"):
        call(model, optimizer)
    model.model[0].weight.requires_grad_(False)
    call(model, optimizer)


def test_there_is_nothing_left_to_step_or_to_accumulate(two: Runtime) -> None:
    model = wrapped(two)
    optimizer = ADAM(model)
    call(model, optimizer)
    with pytest.raises(RoundPipeError, match="has stepped already and no gradients are left to step"):
        model.step(optimizer.step)
    x, y = (tensor.bfloat16() for tensor in batch(6))
    loss = square_error(model(x), y)
    with pytest.raises(RoundPipeError, match=r"backward\(\) of a forward has no step"):
        loss.backward()
    call(model, optimizer)


def test_a_frozen_model_gives_gradients_of_inputs_without_an_optimizer(two: Runtime) -> None:
    layers = row()
    model = wrapped(two, layers)
    optimizer = ADAM(model)
    call(model, optimizer)
    model.requires_grad_(False)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    x, y = (tensor.bfloat16() for tensor in batch(6))
    x.requires_grad_()

    def grads(compute: Callable[[], object]) -> torch.Tensor:
        x.grad = None
        compute()
        assert x.grad is not None
        return x.grad

    wanted = grads(lambda: square_error(layers(x), y).backward())
    for given in (None, optimizer):
        found = grads(partial(model.forward_backward, (x,), None, y, square_error, optimizer=given))
        torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(grads(lambda: square_error(model(x), y).backward()), wanted)
    with pytest.raises(RoundPipeError, match="has no trainable parameter, and no input requires grad"):
        call(model, None)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    model.requires_grad_(True)
    with pytest.raises(ValueError, match="give forward_backward the optimizer that steps"):
        call(model, None)
    call(model, optimizer)


def test_there_is_no_grad_to_read_and_that_is_told_once(two: Runtime) -> None:
    model = wrapped(two)
    optimizer = ADAM(model)
    call(model, optimizer)
    model.synchronize()
    assert all(one.grad is None for one in model.model.parameters())
    with pytest.warns(TrainingWarning, match=r"consumed as they arrive.*step_in_backward=True, so \.grad is None"):
        assert all(one.grad is None for one in model.optim_parameters())


@pytest.mark.parametrize("master", ["split", "whole"])
def test_a_step_by_hand_trains_nothing_and_says_so(two: Runtime, master: str) -> None:
    model = wrapped(two, master=master)
    optimizer = ADAM(model)
    call(model, optimizer)
    with pytest.raises(TrainsNothing, match="with step_in_backward=True, omit the step"):
        optimizer.step()
    call(model, optimizer)
    # No optimizer reads this.
    with pytest.warns(TrainingWarning, match="consumed as they arrive"):
        assert next(iter(model.optim_parameters())).grad is None


@pytest.mark.parametrize("does", ["steps", "reads"])
def test_a_loss_function_that_would_wait_for_its_own_call_is_refused(two: Runtime, does: str) -> None:
    model = wrapped(two)
    optimizer = ADAM(model)
    before = weights(model.model)
    x, y = (tensor.bfloat16() for tensor in batch(6))
    lent = Event()

    def loss_fn(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        assert lent.wait(20)
        _ = optimizer.step() if does == "steps" else next(iter(model.optim_parameters())).grad
        return square_error(outputs, labels)

    # Masters have gradients to wait for from then on.
    handle = optimizer.register_step_pre_hook(lambda *_: lent.set())
    with pytest.raises(RoundPipeError, match=r"requested while forward_backward\(optimizer=\.\.\.\) steps"):
        model.forward_backward((x,), None, y, loss_fn, optimizer=optimizer)
    handle.remove()
    assert all(torch.equal(value, before[name]) for name, value in weights(model.model).items())
    call(model, optimizer)


def test_gradients_that_are_dropped_unread_are_an_error(two: Runtime) -> None:
    model = wrapped(two)
    optimizer = ADAM(model)
    handle = optimizer.register_step_pre_hook(lambda *_: optimizer.zero_grad())
    with pytest.raises(RoundPipeError, match=r"has not read 2 of the gradients of .*omit zero_grad\(\)"):
        call(model, optimizer)
    handle.remove()
    model.reset()
    handle = optimizer.register_step_post_hook(lambda *_: optimizer.zero_grad())
    call(model, optimizer)


@pytest.mark.filterwarnings("error")
def test_one_optimizer_may_be_over_two_models(two: Runtime) -> None:
    models = [wrapped(two, row(seed=seed)) for seed in range(2)]
    optimizer = optim.AdamW([one for model in models for one in model.optim_parameters()], lr=LR)
    losses = [[call(model, optimizer) for model in models] for _ in range(2)]
    for number, seed in enumerate(range(2)):
        alone = wrapped(two, row(seed=seed))
        own = ADAM(alone)
        assert [call(alone, own) for _ in range(2)] == [each[number] for each in losses]


def test_a_loss_that_a_scaler_has_multiplied_is_refused(two: Runtime) -> None:
    model, scaler = wrapped(two), GradScaler(init_scale=8.0, runtime=two)
    optimizer = ADAM(model)
    before = weights(model.model)
    x, y = (tensor.bfloat16() for tensor in batch(6))

    def scaled(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return scaler.scale(square_error(outputs, labels))

    with pytest.raises(
        RoundPipeError, match="a GradScaler's scale was requested in a call in which the optimizer"
    ):
        model.forward_backward((x,), None, y, scaled, optimizer=optimizer)
    assert not optimizer.state
    assert all(
        torch.equal(before[name], value) for name, value in weights(model.model).items() if value is not None
    )
    call(model, optimizer)


def test_clipping_in_a_hook_of_the_optimizer_is_refused(two: Runtime) -> None:
    model = wrapped(two)
    optimizer = ADAM(model)
    handle = optimizer.register_step_pre_hook(
        lambda *_: optim.clip_grad_norm_(list(model.optim_parameters()), 1.0) and None
    )
    with pytest.raises(
        RoundPipeError, match=r"were requested before those of later layers were consumed.*cannot be clipped"
    ):
        call(model, optimizer)
    handle.remove()
    model.reset()
    call(model, optimizer)


def test_gradients_from_code_outside_are_refused(two: Runtime) -> None:
    model = wrapped(two)
    optimizer = ADAM(model)
    model.model[2].weight.square().sum().backward()
    with pytest.raises(RoundPipeError, match=r"layer 2 of model 'm' has a \.grad from code outside"):
        call(model, optimizer)
    model.model[2].weight.grad = None
    call(model, optimizer)


def test_several_machines_are_refused() -> None:
    def wrap(runtime: Runtime) -> str:
        with pytest.raises(AloneOnly) as refused:
            wrapped(runtime, master="whole")
        return str(refused.value)

    assert all("step_in_backward=True is for one machine, but there are 2" in told for told in on_both(wrap))


def test_the_command_refuses_several_machines_before_it_makes_a_model() -> None:
    given: dict[str, Any] = {"model": "m", "data": ["d.jsonl"], "output": "run", "clip": "0"}
    options = read(FineTuning, GivenOptions(**given, step_in_backward=True))

    def foretell(runtime: Runtime) -> str:
        with pytest.raises(Refused) as refused:
            foretold(options, runtime, 9)
        return str(refused.value)

    assert on_both(foretell) == ["--step-in-backward is for one machine, but there are 2; omit it"] * 2


def test_models_that_are_taken_apart_are_refused(two: Runtime) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.head = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), nn.Linear(4, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.inner(x) + x)

    with pytest.raises(ValueError, match="step_in_backward=True needs a sequence of layers"):
        wrap_model_to_roundpipe(Net(), runtime=two, step_in_backward=True, lower_threshold=0, upper_threshold=100)
    net = Net()
    net.inner = wrapped(two, net.inner.bfloat16())
    with pytest.raises(ValueError, match="step_in_backward=True needs a sequence of layers"):
        AutoRoundPipe(net)
    model = wrap_model_to_roundpipe(row(), runtime=two, step_in_backward=True, master="split")
    assert isinstance(model, RoundPipe)
    call(model, ADAM(model))


# Failures


def test_a_step_that_fails_midway_tears_weights_in_halves(two: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    model = wrapped(two)
    optimizer = optim.Adafactor(model.optim_parameters(), lr=LR)
    call(model, optimizer)
    saved = {name: value.clone() for name, value in model.state_dict().items()}
    with fails_at(monkeypatch, 9), pytest.raises(MemoryError) as caught:
        call(model, optimizer)
    assert any("torn" in note for note in caught.value.__notes__)
    for do in (lambda: call(model, optimizer), model.reset, model.state_dict, model.synchronize):
        with pytest.raises(StepFailed, match="some weights are of that step"):
            do()
    model.load_state_dict(saved)
    found = [trained(model, ADAM, during=True)]
    other = wrapped(two)
    other.load_state_dict(saved)
    assert same(found[0], trained(other, ADAM, during=True))


@contextmanager
def fails_at(monkeypatch: pytest.MonkeyPatch, nth: int) -> Iterator[None]:
    """The update of the nth parameter fails."""
    updated, update = list[int](), optim.Adafactor._update_one

    def fails(*args: Any) -> None:
        updated.append(1)
        if len(updated) == nth:
            raise MemoryError
        update(*args)

    with monkeypatch.context() as patched:
        patched.setattr(optim.Adafactor, "_update_one", fails)
        yield


@pytest.mark.parametrize("how", [{"master": "whole"}, {"double_buffer": True}], ids=str)
def test_whole_masters_and_second_blocks_leave_the_weights_as_they_were(
    two: Runtime, monkeypatch: pytest.MonkeyPatch, how: dict[str, Any]
) -> None:
    model = wrapped(two, **how)
    optimizer = optim.Adafactor(model.optim_parameters(), lr=LR)
    call(model, optimizer)
    before = weights(model.model)
    with fails_at(monkeypatch, 9), pytest.raises(MemoryError):
        call(model, optimizer)
    with pytest.raises(StepFailed, match=r"reset\(\)"):
        call(model, optimizer)
    model.reset()
    assert all(torch.equal(value, before[name]) for name, value in weights(model.model).items())
    call(model, optimizer)


class Failing(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return FailsLate.apply(super().forward(x))


@pytest.mark.parametrize("master", ["split", "whole"])
def test_a_call_that_fails_while_it_steps_says_what_has_become_of_the_weights(two: Runtime, master: str) -> None:
    FailsLate.opened.clear()
    layers = row()
    torch.manual_seed(0)
    layers[0] = Failing(4, 6, dtype=torch.bfloat16)
    model = wrapped(two, layers, plan=plans(DEPTH, 1)["one layer a stage"], microbatches=1, master=master)
    optimizer = ADAM(model)
    halves = master == "split"
    begun = Event()
    update = optimizer._update_some
    optimizer._update_some = lambda taken: (update(taken), begun.set(), FailsLate.opened.set())  # type: ignore[method-assign]
    with pytest.raises(KeyError) as caught:
        call(model, optimizer)
    assert begun.is_set()
    told = "in place" if halves else "half-way; the weights of model 'm' are those before it: go back to them with"
    assert sum(told in note for note in caught.value.__notes__) == 1
    for do in (model.reset,) if halves else ():
        with pytest.raises(StepFailed, match="some weights are of that step"):
            do()
    with pytest.raises(StepFailed, match="failed half-way"):
        call(model, optimizer)


@pytest.mark.few(1)
@pytest.mark.parametrize("master", ["split", "whole"])
def test_a_hook_that_fails_before_the_optimizer_steps_leaves_the_weights_to_go_back_to(
    two: Runtime, master: str
) -> None:
    model, other = wrapped(two, master=master), wrapped(two, master=master)
    optimizer = ADAM(model)

    def fails(*_: object) -> None:
        raise LookupError

    hook = optimizer.register_step_pre_hook(fails)
    for _ in range(2):
        with pytest.raises(LookupError) as caught:
            call(model, optimizer)
        assert sum("go back to them with reset()" in note for note in caught.value.__notes__) == 1
        with pytest.raises(StepFailed, match=r"reset\(\)"):
            call(model, optimizer)
        model.reset()
    hook.remove()
    assert same(trained(model, lambda _: optimizer, during=True), trained(other, ADAM, during=True))


@pytest.mark.parametrize("master", ["split", "whole"])
def test_a_hook_that_fails_after_the_optimizer_has_stepped_says_what_has_become_of_the_weights(
    two: Runtime, master: str
) -> None:
    model = wrapped(two, master=master)
    optimizer = ADAM(model)
    saved = {name: value.clone() for name, value in model.state_dict().items()}

    def fails(*_: object) -> None:
        raise LookupError

    hook = optimizer.register_step_post_hook(fails)
    with pytest.raises(LookupError) as caught:
        call(model, optimizer)
    told = "are torn" if master == "split" else "go back to them with reset()"
    assert sum(told in note for note in caught.value.__notes__) == 1
    hook.remove()
    model.load_state_dict(saved) if master == "split" else model.reset()
    assert all(torch.equal(value, saved[name]) for name, value in model.state_dict().items())
    call(model, optimizer)


def test_weights_may_be_written_as_soon_as_a_step_has_failed(
    two: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = wrapped(two)
    optimizer = ADAM(model)
    saved = {name: value.clone() for name, value in model.state_dict().items()}
    is_written, run = Event(), Delivery.run

    def slow(delivery: Delivery) -> None:
        run(delivery)
        # The last one is held up when the step may read its gradients.
        assert all(0 not in block.users for block, *_ in delivery.sums) or is_written.wait(60)

    def fails(*_: object) -> None:
        raise LookupError

    monkeypatch.setattr(Delivery, "run", slow)
    optimizer.register_step_post_hook(fails)
    with pytest.raises(LookupError):
        call(model, optimizer)
    model.load_state_dict(saved)
    is_written.set()
    model.synchronize()

    assert all(torch.equal(value, saved[name]) for name, value in model.state_dict().items())


def test_a_call_that_fails_before_it_steps_leaves_nothing(two: Runtime) -> None:
    model = wrapped(two)
    optimizer = ADAM(model)
    x, y = (tensor.bfloat16() for tensor in batch(6))

    def fails(*_: torch.Tensor) -> torch.Tensor:
        raise LookupError

    for _ in range(2):
        with pytest.raises(LookupError):
            model.forward_backward((x,), None, y, fails, optimizer=optimizer)
    other = wrapped(two)
    assert same(trained(model, lambda _: optimizer, during=True), trained(other, ADAM, during=True))


class Interrupting(nn.Linear):
    """Sends Ctrl-C to the caller in its backward, once."""

    armed = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outputs = super().forward(x)
        if outputs.requires_grad and Interrupting.armed:
            outputs.register_hook(self.interrupt)
        return outputs

    @staticmethod
    def interrupt(_: object) -> None:
        import _thread

        if Interrupting.armed:
            Interrupting.armed = False
            _thread.interrupt_main()


def test_an_interrupted_call_is_torn_or_whole_and_says_which(two: Runtime) -> None:
    layers = row()
    torch.manual_seed(0)
    layers[3] = Interrupting(6, 6, dtype=torch.bfloat16)
    model = wrapped(two, layers)
    optimizer = ADAM(model)
    call(model, optimizer)
    saved = {name: value.clone() for name, value in model.state_dict().items()}
    Interrupting.armed = True
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012 - it may come after the call
        for seed in range(100):
            call(model, optimizer, seed)
    try:
        model.synchronize()
        is_torn = False
    except StepFailed as error:
        is_torn = "some weights are of that step" in str(error)
        assert is_torn
    if is_torn:
        model.load_state_dict(saved)
    else:
        model.reset()
    call(model, optimizer)


@pytest.mark.slow
@pytest.mark.usefixtures("samples_first")
@pytest.mark.parametrize(
    ("plan", "nth"), [("all fused", 2), ("all fused", 40), ("one stage", 25), ("one stage", 60)]
)
def test_tasks_that_run_again_in_parts_have_those_numbers(
    monkeypatch: pytest.MonkeyPatch, plan: str, nth: int
) -> None:
    found = []
    for during in (True, False):
        with Runtime("cpu:2", device_memory_bytes=PLENTY) as runtime:
            model = wrapped(runtime, plan=PLANS[plan], during=during)
            optimizer = ADAM(model)
            # Issued by the end of the call, or later.
            with trapped(monkeypatch, Trap(nth)), pytest.warns(DeviceMemoryWarning):  # noqa: PT031
                turn(model, optimizer, 1, during=during)
                model.synchronize()
            turn(model, optimizer, 2, during=during)
            found.append(([], list(weights(model.model).values()), list[torch.Tensor]()))
    assert same(*found)


# Checkpoints


class During(Job):
    """Its optimizer steps during its calls."""

    def step(self, step: int) -> float:
        inputs, labels = batch(8, step)
        loss = self.model.forward_backward(
            (inputs.to(self.dtype),), None, labels.to(self.dtype), self.loss, optimizer=self.optimizer
        )
        self.scheduler.step()
        return loss.item()


def during(runtime: Runtime, **kwargs: Any) -> During:
    made = job(runtime, dtype=torch.bfloat16, master="split", step_in_backward=True, **kwargs)
    return During(made.model, made.optimizer, scheduler=made.scheduler, dtype=made.dtype)


after = partial(job, dtype=torch.bfloat16, master="split", is_async=False)


@pytest.mark.slow
@pytest.mark.parametrize(("before", "then"), [(during, during), (during, after), (after, during)])
def test_a_resumed_training_is_the_same_to_the_last_bit(tmp_path: Path, before: Any, then: Any) -> None:
    torch.manual_seed(3)
    with Runtime("cpu:2") as runtime:
        own = before(runtime)
        own.train(0, 4)
        save_checkpoint(tmp_path / "c", own.model, own.optimizer, step=4, **own.parts).wait()
        wanted, last = own.train(4, 7), {name: value.clone() for name, value in own.model.state_dict().items()}
        other = then(runtime, layers=with_dropout(5))
        assert load_checkpoint(tmp_path / "c", other.model, other.optimizer, **other.parts).notes == ()
        assert other.train(4, 7) == wanted
        assert all(torch.equal(value, last[name]) for name, value in other.model.state_dict().items())


def test_a_checkpoint_between_asynchronous_steps_goes_on_from_their_result(tmp_path: Path) -> None:
    with Runtime("cpu:2") as runtime:
        own = job(runtime, dtype=torch.bfloat16, master="split")
        own.train(0, 3)
        save_checkpoint(tmp_path / "c", own.model, own.optimizer, step=3, **own.parts).wait()
        own.model.synchronize()
        wanted = {name: value.clone() for name, value in own.model.state_dict().items()}
        other = during(runtime, layers=with_dropout(5))
        load_checkpoint(tmp_path / "c", other.model, other.optimizer, **other.parts)
        other.model.synchronize()
        assert all(torch.equal(value, wanted[name]) for name, value in other.model.state_dict().items())
        other.train(3, 5)
