"""Weights with a second block: the numbers of a single one, and what changes places stays what it was."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import roundpipe
import torch
from plain import FailsLate, assert_near, batch, mlp, plans, square_error, weights
from roundpipe import RoundPipe, RoundPipeRunConfig, Runtime, StepFailed
from rp_sched import Plan
from rp_state.modules.signature import signature, walk
from torch import nn

pytestmark = pytest.mark.usefixtures("small_departures")

Optimizer = Callable[..., torch.optim.Optimizer]
OPTIMIZERS = {"roundpipe": roundpipe.optim.AdamW, "torch": torch.optim.AdamW}


def wrapped(
    runtime: Runtime, layers: nn.Module, *, double_buffer: bool | None = True, plan: Plan | None = None
) -> RoundPipe:
    config = RoundPipeRunConfig(num_microbatch=2, execute_plan=plan)
    return RoundPipe(layers, torch.float32, "m", config, runtime=runtime, double_buffer=double_buffer)


def masters(model: RoundPipe) -> dict[str, torch.Tensor]:
    return {name: master.detach().clone() for name, master in model.optim_named_parameters()}


def losses_of(model: RoundPipe, make: Optimizer, turns: int = 6) -> list[float]:
    optimizer = make(model.optim_parameters(), lr=0.05)
    dtype = next(model.model.parameters()).dtype
    x, y = (tensor.to(dtype) for tensor in batch(6))
    found = []
    for turn in range(turns):
        found.append(model.forward_backward((x,), None, y, square_error).item())
        model.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async=turn % 3 != 2)
    model.synchronize()
    return found


@pytest.mark.few(1)
@pytest.mark.pairwise
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_steps_give_the_numbers_of_a_single_block(runtime: Runtime, make: Optimizer, dtype: torch.dtype) -> None:
    one, two = mlp().to(dtype), mlp().to(dtype)
    # One plan for both: a planned one follows the times that are measured, and the order of additions follows it.
    plan = plans(5, 2)["tail divided"]
    wanted = losses_of(wrapped(runtime, one, double_buffer=False, plan=plan), make)
    assert losses_of(wrapped(runtime, two, plan=plan), make) == wanted
    assert all(torch.equal(weights(one)[name], weight) for name, weight in weights(two).items())


def test_parameters_that_a_step_leaves_out_are_published_as_they_are(two: Runtime) -> None:
    layers = mlp()
    model = wrapped(two, layers)
    parameters = list(model.optim_parameters())
    x, y = batch(6)
    for chosen in (parameters[:1], parameters[2:], parameters[1:3], parameters):
        optimizer = roundpipe.optim.SGD(chosen, lr=0.05)
        model.forward_backward((x,), None, y, square_error)
        model.step(optimizer.step, is_async=False)
        model.zero_grad()
        assert_near(weights(layers), masters(model), 0)


def test_masters_that_change_after_the_optimizer_count(two: Runtime) -> None:
    layers = mlp()
    model = wrapped(two, layers)
    optimizer = roundpipe.optim.SGD(model.optim_parameters(), lr=0.05)
    x, y = batch(6)

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            next(iter(model.parameters())).fill_(3)

    for _ in range(3):
        model.forward_backward((x,), None, y, square_error)
        model.step(update)
    model.synchronize()
    assert set(next(layers.parameters()).flatten().tolist()) == {3.0}
    assert_near(weights(layers), masters(model), 0)


def test_a_step_that_fails_leaves_the_weights_whole(two: Runtime) -> None:
    layers = mlp()
    model = wrapped(two, layers)
    wanted = losses_of(model, roundpipe.optim.SGD)[-1:]
    before = weights(layers)
    optimizer = roundpipe.optim.SGD(model.optim_parameters(), lr=0.05)
    x, y = batch(6)

    def fails() -> None:
        optimizer.step()
        raise LookupError

    model.forward_backward((x,), None, y, square_error)
    with pytest.raises(LookupError):
        model.step(fails, is_async=False)
    assert all(torch.equal(weights(layers)[name], weight) for name, weight in before.items())
    with pytest.raises(StepFailed):
        model.forward_backward((x,), None, y, square_error)
    model.reset()
    assert wanted
    losses_of(model, roundpipe.optim.SGD, turns=3)
    assert_near(weights(layers), masters(model), 0)


class Waiting(nn.Linear):
    fails = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return FailsLate.apply(super().forward(x)) if Waiting.fails else super().forward(x)


def test_what_a_failed_step_has_written_is_not_taken_for_a_later_steps(two: Runtime) -> None:
    Waiting.fails = False
    FailsLate.opened.clear()
    config = RoundPipeRunConfig(num_microbatch=1, execute_plan=plans(2, 2)["all fused"])
    layers = nn.Sequential(Waiting(4, 4), nn.Linear(4, 4))
    model = RoundPipe(layers, runtime=two, model_run_config=config, double_buffer=True)
    parameters = list(model.optim_parameters())
    optimizer = roundpipe.optim.SGD(parameters, lr=0.05)
    # Of the layer whose gradients are missing when the last layer's have left.
    first = roundpipe.optim.SGD(parameters[:2], lr=0.05)
    x = torch.ones(2, 4)

    def fails() -> None:
        optimizer.step()
        raise LookupError

    model.forward_backward((x,), None, x, square_error)
    with pytest.raises(LookupError):
        model.step(fails, is_async=False)
    model.reset()
    Waiting.fails = True
    model.forward_backward((x,), None, x, square_error)
    model.step(first.step)
    FailsLate.opened.set()
    with pytest.raises(KeyError):
        model.synchronize()
    Waiting.fails = False
    model.zero_grad()
    # That step has changed nothing: there is nothing to go back to.
    model.forward_backward((x,), None, x, square_error)
    model.step(optimizer.step, is_async=False)
    assert_near(weights(layers), masters(model), 0)


def test_masters_that_are_written_past_their_version_counters_count(two: Runtime) -> None:
    layers = mlp()
    model = wrapped(two, layers)
    optimizer = roundpipe.optim.SGD(model.optim_parameters(), lr=0.05)
    x, y = batch(6)

    def update() -> None:
        optimizer.step()
        for parameter in model.optim_parameters():
            parameter.data.clamp_(-0.01, 0.01)

    model.forward_backward((x,), None, y, square_error)
    model.step(update, is_async=False)
    assert max(p.abs().max().item() for p in layers.parameters()) <= 0.01
    assert_near(weights(layers), masters(model), 0)


def test_channels_last_weights_train_as_with_a_single_block(two: Runtime) -> None:
    x, y = torch.ones(4, 4, 4, 4), torch.ones(4, 2)
    found = []
    for double_buffer in (False, True):
        torch.manual_seed(0)
        layers = nn.Sequential(nn.Conv2d(4, 4, 3), nn.Flatten(), nn.Linear(16, 2))
        model = wrapped(two, layers.to(memory_format=torch.channels_last), double_buffer=double_buffer)
        optimizer = roundpipe.optim.AdamW(model.optim_parameters(), lr=0.05)
        for _ in range(3):
            model.forward_backward((x,), None, y, square_error)
            model.step(lambda stepped=optimizer: (stepped.step(), stepped.zero_grad()))
        model.synchronize()
        found.append(weights(layers))
    assert not found[0]["0.weight"].is_contiguous()
    assert all(torch.equal(found[0][name], weight) for name, weight in found[1].items())


def test_a_dtype_that_was_chosen_before_the_publication_stays(two: Runtime) -> None:
    layers = mlp()
    model = wrapped(two, layers)
    optimizer = roundpipe.optim.SGD(model.optim_parameters(), lr=0.05)
    x, y = batch(6)
    model.forward_backward((x,), None, y, square_error)
    model.step(optimizer.step)
    layers.double()
    model.synchronize()
    assert {p.dtype for p in layers.parameters()} == {torch.float64}


def test_each_weight_has_a_storage_of_its_own_after_any_number_of_steps(two: Runtime) -> None:
    layers = mlp()
    model = wrapped(two, layers)
    for _ in range(3):
        losses_of(model, roundpipe.optim.SGD, turns=1)
        assert all(p.untyped_storage().nbytes() == p.nbytes for p in layers.parameters())


def test_changing_places_is_no_change_of_the_model(two: Runtime) -> None:
    layers = mlp()
    model = wrapped(two, layers)
    losses_of(model, roundpipe.optim.SGD, turns=1)
    blocks, version = model.engine.host.state.blocks, model.engine.host.state.version
    losses_of(model, roundpipe.optim.SGD, turns=6)
    assert model.engine.host.state.blocks is blocks
    assert model.engine.host.state.version > version


def test_weights_that_are_written_or_loaded_between_steps_count(two: Runtime) -> None:
    layers = mlp()
    model = wrapped(two, layers)
    losses_of(model, roundpipe.optim.SGD, turns=2)
    with torch.no_grad():
        next(layers.parameters()).fill_(0.5)
    losses_of(model, lambda parameters, lr: roundpipe.optim.SGD(parameters, lr=0.0 * lr), turns=3)
    assert set(next(layers.parameters()).flatten().tolist()) == {0.5}
    state = mlp(seed=7).state_dict()
    model.load_state_dict({f"model.{name}": value for name, value in state.items()})
    assert_near(weights(layers), state, 0)
    losses_of(model, roundpipe.optim.SGD, turns=3)
    assert_near(weights(layers), masters(model), 0)


def test_it_is_taken_where_it_is_little_and_counted(two: Runtime) -> None:
    layers = mlp()
    nbytes = sum(p.nbytes for p in layers.parameters())
    for double_buffer, copies in ((False, 1), (True, 2), (None, 2)):
        model = wrapped(two, mlp(), double_buffer=double_buffer)
        losses_of(model, roundpipe.optim.SGD, turns=1)
        assert nbytes * copies <= model.memory_report().weights_bytes <= nbytes * copies * 1.5 + 1024


def test_weights_that_stay_where_they_are_have_none(two: Runtime) -> None:
    layers = mlp()
    model = RoundPipe(layers, runtime=two, pin_model="off", double_buffer=True)
    addresses = [p.data_ptr() for p in layers.parameters()]
    losses_of(model, roundpipe.optim.SGD, turns=4)
    assert [p.data_ptr() for p in layers.parameters()] == addresses


def test_other_values_are_refused(two: Runtime) -> None:
    with pytest.raises(ValueError, match="double_buffer must be True, False or None"):
        RoundPipe(mlp(), runtime=two, double_buffer="yes")  # type: ignore[arg-type]


FRONT, BACK = 64, 128


class Exchanged(nn.Parameter):
    """Once it is `moving`, lies elsewhere each time somebody looks, as if a step were published in between."""

    moving = False
    looks = 0

    def data_ptr(self) -> int:
        self.looks += self.moving
        return BACK if self.looks % 2 == 0 and self.moving else FRONT


def test_a_parameter_that_changes_places_while_one_looks_has_not_changed() -> None:
    # Else the next call would take the model for another one, and publish a result before its time.
    layer = nn.Linear(2, 2, bias=False)
    layer.weight = weight = Exchanged(torch.ones(2, 2))
    walked, places = walk([layer]), {BACK: FRONT}
    resting = signature(walked, places)
    weight.moving = True
    assert [signature(walked, places) for _ in range(3)] == [resting] * 3
