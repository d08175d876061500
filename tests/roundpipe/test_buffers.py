"""Buffers are written as by plain PyTorch that runs microbatch by microbatch, once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import rp_batch
import torch
from plain import PLAN_NAMES, assert_near, batch, gradients, mlp, plans, square_error, train_call, twin, weights
from roundpipe import RoundPipe, RoundPipeError, RoundPipeRunConfig, Runtime, wrap_model_to_roundpipe
from rp_sched import Plan
from torch import nn

pytestmark = pytest.mark.usefixtures("small_departures")


@pytest.fixture(autouse=True)
def fp64() -> Iterator[None]:
    """A bias before a batch norm has no gradient but rounding errors; here those are small."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


# Microbatches of a layer that writes buffers are never divided.
WHOLE_PLANS = [name for name in PLAN_NAMES if "divided" not in name]


class Counter(nn.Module):
    """Counts its calls, and what it gives depends on the count; only for some inputs if `picky`."""

    def __init__(self, picky: bool = False) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("constant", torch.tensor([1.0, 2.0, 3.0, 4.0]))
        self.register_buffer("flags", torch.zeros(2, dtype=torch.bool))
        self.linear = nn.Linear(4, 4)
        self.picky = picky

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.picky or x.detach()[0, 0].item() > 0:
            self.calls += 1
            self.flags[self.calls % 2] = True
        return self.linear(x) * self.constant * (1 + self.calls)


def buffered_row(picky: bool = False) -> nn.Sequential:
    """Five layers, three of them with buffers."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(4, 4), nn.BatchNorm1d(4), Counter(picky), nn.BatchNorm1d(4, momentum=None), nn.Linear(4, 3)
    )


@pytest.mark.usefixtures("samples_first")
@pytest.mark.pairwise
@pytest.mark.parametrize("picky", [False, True])
@pytest.mark.parametrize("grain", ["stage", "layer"])
@pytest.mark.parametrize("plan_name", WHOLE_PLANS)
def test_buffers_and_gradients_are_those_of_plain_pytorch(
    runtime: Runtime, plan_name: str, grain: Any, picky: bool
) -> None:
    layers = buffered_row(picky)
    truth = twin(layers)
    config = RoundPipeRunConfig(num_microbatch=3, execute_plan=plans(5, 3)[plan_name], recompute_grain=grain)
    model = RoundPipe(layers, runtime=runtime, model_run_config=config)
    for seed in range(3):
        x, y = batch(9, seed)
        loss = model.forward_backward(input_args=(x,), label=y, loss_fn=square_error)
        assert_near(loss, train_call(truth, x, y, microbatches=3), 1e-4)
    model.synchronize()
    assert_near(weights(layers), weights(truth), 1e-4)
    assert_near(gradients(layers), gradients(truth), 1e-3)


@pytest.mark.slow
@pytest.mark.pairwise
@pytest.mark.usefixtures("samples_first")
@pytest.mark.parametrize("picky", [False, True])
@pytest.mark.parametrize("grain", ["stage", "layer"])
@pytest.mark.parametrize("plan_name", WHOLE_PLANS)
def test_recomputation_starts_from_each_microbatchs_own_buffers(
    runtime: Runtime, plan_name: str, grain: Any, picky: bool
) -> None:
    layers = buffered_row(picky)
    truth = twin(layers)
    config = RoundPipeRunConfig(num_microbatch=3, execute_plan=plans(5, 3)[plan_name], recompute_grain=grain)
    model = RoundPipe(layers, runtime=runtime, model_run_config=config)
    (x, y), (z, _) = batch(9), batch(9, seed=5)
    # A second forward between the first and its backward, as with real and generated inputs.
    first, second = model(x), model(z)
    (square_error(first, y) + second.square().sum()).backward()
    model.synchronize()
    first_true = torch.cat([truth(part) for part in x.split(3)])
    second_true = torch.cat([truth(part) for part in z.split(3)])
    (square_error(first_true, y) + second_true.square().sum()).backward()
    assert_near(first, first_true, 1e-4)
    assert_near(second, second_true, 1e-4)
    assert_near(weights(layers), weights(truth), 1e-4)
    assert_near(gradients(layers), gradients(truth), 1e-3)


def test_evaluation_writes_no_running_statistics(runtime: Runtime) -> None:
    layers = buffered_row()[:2]
    model = RoundPipe(layers, runtime=runtime)
    before = weights(layers)
    wanted = twin(layers).eval()(x := batch(6)[0])
    model.eval()
    assert_near(model(x), wanted, 1e-5)
    model.synchronize()
    assert_near(weights(layers), before, 0)


@pytest.mark.usefixtures("samples_first")
def test_without_gradients_buffers_are_written_in_training_mode(runtime: Runtime) -> None:
    layers = buffered_row()
    truth = twin(layers)
    plan = Plan((range(1), range(1, 3), range(3, 5)))
    config = RoundPipeRunConfig(num_microbatch=3, execute_plan=plan)
    model = RoundPipe(layers, runtime=runtime)
    x, _ = batch(9)
    with torch.no_grad():
        found = model(x, roundpipe_run_config=config)
        wanted = torch.cat([truth(part) for part in x.split(3)])
    model.synchronize()
    assert_near(found, wanted, 1e-4)
    assert_near(weights(layers), weights(truth), 1e-5)


def test_buffers_written_by_the_user_are_read_by_the_next_call(runtime: Runtime) -> None:
    layers = buffered_row()
    model = RoundPipe(layers, runtime=runtime, model_run_config=RoundPipeRunConfig(num_microbatch=1))
    model.eval()
    x, _ = batch(6)
    model(x)
    model.synchronize()
    layers[1].running_mean.fill_(3.0)
    layers[2].constant = torch.tensor([4.0, 3.0, 2.0, 1.0])
    wanted = twin(layers)(x)
    assert_near(model(x), wanted, 1e-5)


@pytest.mark.usefixtures("samples_first")
@pytest.mark.parametrize("name", ["all fused", "one layer a stage"])
def test_a_call_returns_once_its_layers_buffers_are_there_to_read_and_to_write(
    runtime: Runtime, name: str
) -> None:
    row = buffered_row()
    config = RoundPipeRunConfig(num_microbatch=2, execute_plan=plans(5, 2)[name])
    model = RoundPipe(row, runtime=runtime, model_run_config=config)
    inputs, labels = batch(6)
    found: list[float] = []

    for _ in range(2):
        model.forward_backward((inputs,), label=labels, loss_fn=square_error)
        found.append(row[2].calls.item())
        row[2].calls.zero_()
        with torch.no_grad():
            model(inputs)
        found.append(row[2].calls.item())
        row[2].calls.add_(5)
        model(inputs).sum().backward()
        found.append(row[2].calls.item())
        row[2].calls.zero_()
    model.synchronize()

    assert found == [2, 2, 9, 2, 2, 9]
    assert row[2].calls == 0


@pytest.mark.usefixtures("samples_first")
def test_a_batch_norm_that_was_first_evaluated_writes_its_statistics_when_it_trains(runtime: Runtime) -> None:
    layers = buffered_row()
    truth = twin(layers)
    plan = plans(5, 3)["one layer a stage"]
    config = RoundPipeRunConfig(num_microbatch=3, execute_plan=plan)
    model = RoundPipe(layers, runtime=runtime, model_run_config=config)
    x, y = batch(9)
    for train in (False, True, False, True):
        model.train(train)
        truth.train(train)
        loss = model.forward_backward(input_args=(x,), label=y, loss_fn=square_error)
        assert_near(loss, train_call(truth, x, y, microbatches=3), 1e-4)
    model.synchronize()
    assert_near(weights(layers), weights(truth), 1e-4)
    assert_near(gradients(layers), gradients(truth), 1e-3)


class LeavesOut(nn.Module):
    """A batch norm that single samples do not go through: torch refuses them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        return self.norm(x) if len(x) > 1 else x


@pytest.mark.parametrize("plan_name", ["planned", "one layer a stage"])
def test_a_batch_norm_that_the_first_batch_leaves_out_writes_its_statistics_once(
    two: Runtime, plan_name: str
) -> None:
    torch.manual_seed(0)
    layers = nn.Sequential(LeavesOut(), LeavesOut(), nn.Linear(4, 3))
    truth = twin(layers)
    config = RoundPipeRunConfig(num_microbatch=1, execute_plan=plans(3, 1)[plan_name])
    model = RoundPipe(layers, runtime=two, model_run_config=config)

    for rows in (1, 5, 6):
        x, y = batch(rows)
        model.forward_backward(input_args=(x,), label=y, loss_fn=square_error)
        train_call(truth, x, y, microbatches=1)
    model.synchronize()

    assert_near(weights(layers), weights(truth))
    assert_near(gradients(layers), gradients(truth), 1e-4)


def test_a_model_may_go_while_its_buffers_are_on_their_way_home(runtime: Runtime) -> None:
    for _ in range(3):
        RoundPipe(buffered_row(), runtime=runtime)(batch(12)[0])
    layers = mlp()
    found = RoundPipe(layers, runtime=runtime)(batch(6)[0])
    assert_near(found, layers(batch(6)[0]), 1e-5)


# Buffers that several layers share


def same_norm_twice() -> nn.Sequential:
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(4)
    return nn.Sequential(nn.Linear(4, 4), norm, nn.Linear(4, 4), norm, nn.Linear(4, 3))


class Reader(nn.Module):
    """Scales by a buffer, which another layer may write."""

    def __init__(self, scale: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("scale", scale)
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * (1 + self.scale)


def norm_between_readers() -> nn.Sequential:
    """The tensor that batch norm writes, past its version counter, is a buffer of layers before and after it."""
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(4)
    mean = norm.running_mean
    assert mean is not None
    return nn.Sequential(Reader(mean), norm, Reader(mean), nn.Linear(4, 3))


SHARING = [same_norm_twice, norm_between_readers]


@pytest.mark.pairwise
@pytest.mark.parametrize("make", SHARING)
@pytest.mark.parametrize("plan_name", ["planned", "one layer a stage", "tail divided"])
def test_a_written_buffer_of_several_layers_is_refused_where_stages_would_reorder_its_writes(
    runtime: Runtime, make: Callable[[], nn.Sequential], plan_name: str
) -> None:
    layers = make()
    before = weights(layers)
    config = RoundPipeRunConfig(num_microbatch=3, execute_plan=plans(len(layers), 3)[plan_name])
    model = RoundPipe(layers, runtime=runtime, model_run_config=config)
    x, y = batch(9)
    with pytest.raises(ValueError, match=r"share a buffer .* make layers \d to \d one layer of the"):
        model.forward_backward((x,), None, y, square_error)
    model.reset()
    with pytest.raises(ValueError, match="share a buffer"), torch.no_grad():
        model(x)
    model.reset()
    assert_near(weights(layers), before, 0)


@pytest.mark.pairwise
@pytest.mark.parametrize("make", SHARING)
@pytest.mark.parametrize(
    ("plan_name", "microbatches"),
    [("one stage", 3), ("all fused", 3), ("forward whole, backward in layers", 3), ("one layer a stage", 1)],
)
def test_a_written_buffer_of_several_layers_is_plain_pytorchs_where_its_writes_keep_their_order(
    runtime: Runtime, make: Callable[[], nn.Sequential], plan_name: str, microbatches: int
) -> None:
    layers = make()
    truth = twin(layers)
    config = RoundPipeRunConfig(
        num_microbatch=microbatches, execute_plan=plans(len(layers), microbatches)[plan_name]
    )
    model = RoundPipe(layers, runtime=runtime, model_run_config=config)
    for seed in range(3):
        x, y = batch(9, seed)
        loss = model.forward_backward((x,), None, y, square_error)
        assert_near(loss, train_call(truth, x, y, microbatches=microbatches), 1e-4)
    model.synchronize()
    assert_near(weights(layers), weights(truth), 1e-4)
    assert_near(gradients(layers), gradients(truth), 1e-3)


@pytest.mark.pairwise
@pytest.mark.parametrize("make", SHARING)
@pytest.mark.parametrize("plan_name", WHOLE_PLANS)
def test_a_buffer_of_several_layers_that_is_not_written_is_served_by_any_plan(
    runtime: Runtime, make: Callable[[], nn.Sequential], plan_name: str
) -> None:
    layers = make().eval()
    truth = twin(layers)
    config = RoundPipeRunConfig(num_microbatch=3, execute_plan=plans(len(layers), 3)[plan_name])
    model = RoundPipe(layers, runtime=runtime, model_run_config=config)
    for seed in range(2):
        x, y = batch(9, seed)
        loss = model.forward_backward((x,), None, y, square_error)
        assert_near(loss, train_call(truth, x, y, microbatches=3), 1e-4)
    model.synchronize()
    assert_near(gradients(layers), gradients(truth), 1e-3)


# Tasks of several devices

DIVIDED = Plan(fused=range(2), groups=(range(2), range(2, 4)))
# What the layers below do: a layer's own attributes are copied to the devices once.
ON_FORWARD: list[Callable[[], None]] = []


class Scale(nn.Module):
    """Multiplies by a buffer that it does not write, as rotary positions do."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.tensor([1.0, 2.0, 3.0, 4.0]), persistent=False)
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for act in ON_FORWARD:
            act()
        return self.linear(x) * self.scale


@pytest.fixture
def on_forward() -> Iterator[list[Callable[[], None]]]:
    """The list, emptied afterwards."""
    yield ON_FORWARD
    ON_FORWARD.clear()


def test_divided_tasks_that_only_read_a_buffer_run_at_the_same_time(on_forward: list[Callable[[], None]]) -> None:
    layers = nn.Sequential(Scale(), nn.Linear(4, 3))
    truth = twin(layers)
    config = RoundPipeRunConfig(num_microbatch=4, execute_plan=DIVIDED)
    (x, y), both = batch(8), threading.Barrier(2)
    for _ in range(2):
        train_call(truth, x, y, microbatches=4)
    with Runtime("cpu:2") as runtime:
        model = RoundPipe(layers, runtime=runtime, model_run_config=config)
        for _ in range(2):
            model.forward_backward((x,), None, y, square_error)
            # Whether the layer writes is known from the first call on.
            on_forward[:] = [lambda: both.wait(20) and None]
        model.synchronize()
    assert_near(gradients(layers), gradients(truth), 1e-3)


def test_a_recomputation_does_not_hold_up_the_next_calls_forward(on_forward: list[Callable[[], None]]) -> None:
    layers = nn.Sequential(Scale(), nn.Linear(4, 4), nn.Linear(4, 3))
    plan = Plan(forward=[range(1)], fused=range(1, 3), backward=[range(1)])
    config = RoundPipeRunConfig(num_microbatch=2, execute_plan=plan)
    runs, both = iter(range(100)), threading.Barrier(2)

    def meet() -> None:
        # After the first of the two calls has run its two microbatches forward.
        if next(runs) in (2, 3):
            both.wait(20)

    x, y = batch(8)
    with Runtime("cpu:2") as runtime:
        model = RoundPipe(layers, runtime=runtime, model_run_config=config)
        model.forward_backward((x,), None, y, square_error)
        model.synchronize()
        on_forward[:] = [meet]
        for _ in range(2):
            model.forward_backward((x,), None, y, square_error)
        model.synchronize()
    assert next(runs) == 8


class Growing(nn.Module):
    """Writes a buffer for some inputs only, which is not persistent, as for sequences longer than before."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("length", torch.ones(()), persistent=False)
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.detach()[0, 0].item() > 0:
            self.length += 1
        return self.linear(x) * self.length


def quiet_batch() -> tuple[torch.Tensor, torch.Tensor]:
    """A batch for which neither `Counter` nor `Growing` writes."""
    x, y = batch(8)
    x[:, 0] = -x[:, 0].abs()
    return x, y


def test_a_first_write_where_tasks_share_a_buffer_is_refused_and_later_calls_are_plain_pytorchs() -> None:
    layers = nn.Sequential(Growing(), nn.Linear(4, 3))
    truth = twin(layers)
    config = RoundPipeRunConfig(num_microbatch=4, execute_plan=DIVIDED)
    x, y = quiet_batch()
    with Runtime("cpu:2") as runtime:
        model = RoundPipe(layers, runtime=runtime, model_run_config=config)
        for _ in range(2):
            model.forward_backward((x,), None, y, square_error)
            train_call(truth, x, y, microbatches=4)
        model.synchronize()
        x[4:6, 0] = 1.0
        with pytest.raises(RoundPipeError, match=r"wrote a buffer .* drop this call's gradients"):
            model.forward_backward((x,), None, y, square_error)
        model.synchronize()
        assert layers[0].length == 1
        # The model's: that of its layers drops no gradients of a failed call, which may have left some.
        model.zero_grad()
        truth.zero_grad()
        for _ in range(3):
            # What is known of a layer is forgotten when the mode changes, but not that it writes at times.
            model.eval().train()
            x[4:6, 0] = -x[4:6, 0]
            loss = model.forward_backward((x,), None, y, square_error)
            assert_near(loss, train_call(truth, x, y, microbatches=4), 1e-4)
        model.synchronize()
    assert layers[0].length == truth[0].length == 2
    assert_near(gradients(layers), gradients(truth), 1e-3)


def test_a_late_write_of_a_layers_state_is_plain_pytorchs_in_divided_tasks_too() -> None:
    layers = nn.Sequential(Counter(picky=True), nn.Linear(4, 3))
    truth = twin(layers)
    # Declared: what it writes depends on the microbatch, which a trial would notice.
    declared = ((rp_batch.Split(),), {})
    config = RoundPipeRunConfig(num_microbatch=4, execute_plan=DIVIDED, split_input=declared)
    x, y = quiet_batch()
    with Runtime("cpu:2") as runtime:
        model = RoundPipe(layers, runtime=runtime, model_run_config=config)
        for _ in range(4):
            loss = model.forward_backward((x,), None, y, square_error)
            assert_near(loss, train_call(truth, x, y, microbatches=4), 1e-4)
            x[4:6, 0] = -x[4:6, 0]
        model.synchronize()
    assert layers[0].calls == truth[0].calls == 2
    assert_near(weights(layers), weights(truth), 1e-4)
    assert_near(gradients(layers), gradients(truth), 1e-3)


class Initialized(nn.Module):
    """Writes a buffer for its first input of some kind; memory runs out once after that."""

    fails: Iterator[bool] = iter(())

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("length", torch.ones(()), persistent=False)
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.detach()[0, 0].item() > 0 and self.length == 1:
            self.length += 1
            if next(Initialized.fails, False):
                raise torch.OutOfMemoryError("as arranged")
        return self.linear(x) * self.length


def test_what_a_layer_wrote_before_memory_ran_out_is_not_what_it_runs_again_from() -> None:
    layers = nn.Sequential(Initialized(), nn.Linear(4, 3))
    config = RoundPipeRunConfig(num_microbatch=4, execute_plan=DIVIDED)
    x, y = quiet_batch()
    Initialized.fails = iter([True])
    with Runtime("cpu:2", device_memory_bytes=1 << 30) as runtime:
        model = RoundPipe(layers, runtime=runtime, model_run_config=config)
        for _ in range(2):
            model.forward_backward((x,), None, y, square_error)
        x[0, 0] = 1.0
        with pytest.raises(RoundPipeError, match="wrote a buffer"):
            model.forward_backward((x,), None, y, square_error)
        model.synchronize()
    assert next(Initialized.fails, None) is None
    assert layers[0].length == 1


def test_a_model_of_transformers_may_be_divided_once_it_has_run() -> None:
    from transformers import AutoModelForCausalLM, Qwen3Config

    torch.set_default_dtype(torch.float32)
    config = Qwen3Config(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16,
    )  # fmt: skip
    with Runtime("cpu:2") as runtime:
        model = wrap_model_to_roundpipe(
            AutoModelForCausalLM.from_config(config), use_sequential_preset=True, runtime=runtime
        )
        tokens = torch.arange(32).reshape(4, 8)
        assert any(cost.writes_buffers for cost in model.layer_costs())
        model.forward_backward(input_kwargs={"input_ids": tokens, "labels": tokens})
        model.synchronize()
        assert not any(cost.writes_buffers for cost in model.layer_costs())
