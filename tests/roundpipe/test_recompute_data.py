"""What a layer saves in its first forward comes back when it is recomputed: that layer's, that microbatch's."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any, Literal

import pytest
import roundpipe
import rp_batch
import torch
from plain import PLAN_NAMES, assert_near, batch, gradients, plans, square_error, train_call, twin
from roundpipe import (
    RoundPipe,
    RoundPipeError,
    RoundPipeRunConfig,
    Runtime,
    doing_recompute,
    get_recompute_data,
    save_for_recompute,
)
from torch import nn

Phase = Literal["first", "again"]
# What the layers below saw, in any order: a layer's own attributes are copied to the devices once.
SEEN: list[tuple[Phase, int, Any]] = []
LOCK = threading.Lock()


@pytest.fixture(autouse=True)
def nothing_seen() -> None:
    SEEN.clear()


def note(phase: Phase, place: int, what: Any) -> None:
    with LOCK:
        SEEN.append((phase, place, what))


class Counts:
    """Gives each first forward of each layer a number of its own; knows no microbatch."""

    def __init__(self) -> None:
        self.next = 0

    def __deepcopy__(self, memo: dict[int, object]) -> Counts:
        return self

    def draw(self) -> int:
        with LOCK:
            self.next += 1
            return self.next


class Marked(nn.Module):
    """Adds a number that only its first forward knows, times a parameter: gradients show which came back."""

    def __init__(self, place: int, numbers: Counts, width: int = 4) -> None:
        super().__init__()
        self.place = place
        self.numbers = numbers
        self.linear = nn.Linear(width, width)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.detach()[:, 0].cpu()
        if doing_recompute():
            data = get_recompute_data()
            assert isinstance(data, tuple)
            (mark,) = data
            assert mark.device == x.device
            note("again", self.place, (rows.tolist(), mark.item()))
        else:
            mark = torch.tensor(float(self.numbers.draw()), device=x.device)
            save_for_recompute(mark)
            note("first", self.place, (rows.tolist(), mark.item()))
            mark = mark.clone()
        return torch.tanh(self.linear(x)) + 0.01 * mark * self.scale * x


def marked(layers: int = 4) -> nn.Sequential:
    torch.manual_seed(0)
    numbers = Counts()
    return nn.Sequential(*(Marked(place, numbers) for place in range(layers)))


def seen(phase: Phase) -> set[tuple[int, tuple[float, ...], float]]:
    """Which mark each layer had for which rows."""
    return {(place, tuple(rows), mark) for found, place, (rows, mark) in SEEN if found == phase}


def loss_of(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return (outputs[:, :3] - labels).square().sum()


@pytest.mark.usefixtures("samples_first")
@pytest.mark.pairwise
@pytest.mark.parametrize("grain", ["stage", "layer"])
@pytest.mark.parametrize("plan_name", PLAN_NAMES)
@pytest.mark.parametrize("separate", [False, True])
def test_each_layer_gets_back_what_it_saved_for_this_microbatch(
    runtime: Runtime, plan_name: str, grain: Any, separate: bool
) -> None:
    config = RoundPipeRunConfig(num_microbatch=3, execute_plan=plans(4, 3)[plan_name], recompute_grain=grain)
    model = RoundPipe(marked(), runtime=runtime, model_run_config=config)
    x, y = batch(6)
    if separate:
        loss_of(model(x), y).backward()
    else:
        model.forward_backward(input_args=(x,), label=y, loss_fn=loss_of)
    model.synchronize()
    assert len(seen("first")) == 4 * 3
    assert seen("again") <= seen("first")
    if separate:
        assert seen("again") == seen("first")


class Routed(nn.Module):
    """Sorts what it finds in the rows by an order that recomputation does not find out again."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if doing_recompute():
            order, mask, nothing, word = get_recompute_data()
            assert nothing is None
            assert word == "top"
        else:
            order = x.detach().argsort(1)
            mask = order > 1
            save_for_recompute(order, mask, None, "top")
        return self.linear(x.gather(1, order)) * (1 + mask)


@pytest.mark.parametrize("plan_name", PLAN_NAMES)
def test_gradients_with_saved_decisions_are_those_of_plain_pytorch(runtime: Runtime, plan_name: str) -> None:
    torch.manual_seed(0)
    layers = nn.Sequential(Routed(), nn.Tanh(), Routed(), nn.Linear(4, 3))
    truth = twin(layers)
    for layer in (truth[0], truth[2]):
        layer.forward = _plain_routed.__get__(layer)
    config = RoundPipeRunConfig(num_microbatch=3, execute_plan=plans(4, 3)[plan_name])
    model = RoundPipe(layers, runtime=runtime, model_run_config=config)
    x, y = batch(6)
    for _ in range(2):
        loss = model.forward_backward(input_args=(x,), label=y, loss_fn=square_error)
        assert_near(loss, train_call(truth, x, y, microbatches=3), 1e-5)
        square_error(model(x), y).backward()
        train_call(truth, x, y, microbatches=3)
    model.synchronize()
    assert_near(gradients(layers), gradients(truth), 1e-5)


def _plain_routed(self: Routed, x: torch.Tensor) -> torch.Tensor:
    order = x.detach().argsort(1)
    return self.linear(x.gather(1, order)) * (1 + (order > 1))


class Spoiling(nn.Module):
    """Writes what it saved, after saving it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if doing_recompute():
            (factor,) = get_recompute_data()
        else:
            factor = torch.full((3,), 2.0, device=x.device)
            save_for_recompute(factor)
        out = self.linear(x) * factor.clone()
        factor.zero_()
        return out


def test_what_is_written_after_it_was_saved_comes_back_as_it_was(runtime: Runtime) -> None:
    layers = nn.Sequential(Spoiling(), nn.Linear(3, 3))
    truth = nn.Sequential(twin(layers[0].linear), twin(layers[1]))
    model = RoundPipe(layers, runtime=runtime, model_run_config=RoundPipeRunConfig(num_microbatch=2))
    x, y = batch(4)
    square_error(model(x), y).backward()
    model.synchronize()
    square_error(truth[1](2 * truth[0](x)), y).backward()
    assert_near(layers[0].linear.weight.grad, truth[0].weight.grad, 1e-5)


class Drawing(nn.Module):
    """Draws from a generator, so that it may be run twice, and saves only in the run that counts or in both."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        keep = (torch.rand(3) > 0.5).to(x.device)
        if doing_recompute():
            (saved,) = get_recompute_data()
            assert torch.equal(saved, keep)
        else:
            save_for_recompute(keep)
        return self.linear(x) * keep


def test_a_layer_that_is_tried_twice_saves_once(runtime: Runtime) -> None:
    model = RoundPipe(nn.Sequential(Drawing(), nn.Linear(3, 3)), runtime=runtime)
    x, y = batch(4)
    for _ in range(2):
        square_error(model(x), y).backward()
    model.synchronize()
    assert all(p.grad is not None for p in model.model.parameters())


# When nothing is kept


class Watched(nn.Module):
    """Notes how it is run, and saves a host object whose life can be watched."""

    saved: list[weakref.ref[Any]] = []  # noqa: RUF012  # the layers' copies share it

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if doing_recompute():
            note("again", 0, len(get_recompute_data()))
        else:
            note("first", 0, 0)
            thing = Counts()
            save_for_recompute(thing)
            with LOCK:
                self.saved.append(weakref.ref(thing))
        return self.linear(x)


def alive() -> int:
    gc.collect()
    return sum(ref() is not None for ref in Watched.saved)


@pytest.fixture
def watched(runtime: Runtime) -> RoundPipe:
    Watched.saved.clear()
    layers = nn.Sequential(Watched(), Watched(), nn.Linear(4, 3))
    model = RoundPipe(layers, runtime=runtime, model_run_config=RoundPipeRunConfig(num_microbatch=2))
    # In the first call each layer is recomputed once more, to compare.
    square_error(model(batch(4)[0]), batch(4)[1]).backward()
    settle(model)
    Watched.saved.clear()
    SEEN.clear()
    return model


def settle(model: RoundPipe) -> None:
    model.synchronize()
    model.zero_grad()


@pytest.mark.usefixtures("samples_first")
def test_nothing_is_kept_where_there_will_be_no_backward(watched: RoundPipe) -> None:
    x, _ = batch(4)
    with torch.no_grad():
        watched(x)
    watched.eval()(x, roundpipe_run_config=RoundPipeRunConfig(requires_grad=False))
    with torch.inference_mode():
        watched(x)
    settle(watched)
    assert len(Watched.saved) == 3 * 2 * 2
    assert alive() == 0


def test_nothing_is_kept_where_forward_and_backward_are_one(watched: RoundPipe) -> None:
    x, y = batch(4)
    config = RoundPipeRunConfig(execute_plan=plans(3, 2)["all fused"])
    watched.forward_backward(input_args=(x,), label=y, loss_fn=square_error, run_config=config)
    settle(watched)
    assert {phase for phase, _, _ in SEEN} == {"first"}
    assert alive() == 0


def test_what_was_saved_lives_until_it_was_used(watched: RoundPipe) -> None:
    x, y = batch(4)
    loss = square_error(watched(x), y)
    assert alive() == 4
    loss.backward()
    settle(watched)
    assert [what for phase, _, what in SEEN if phase == "again"] == [1] * 4
    assert alive() == 0


def test_what_was_saved_goes_with_the_outputs_that_nobody_propagates_through(watched: RoundPipe) -> None:
    x, _ = batch(4)
    outputs = watched(x)
    assert alive() == 4
    del outputs
    settle(watched)
    assert alive() == 0


def test_what_was_saved_goes_when_a_call_fails(watched: RoundPipe) -> None:
    x, y = batch(4)

    def fails(*_: torch.Tensor) -> torch.Tensor:
        raise LookupError

    config = RoundPipeRunConfig(execute_plan=plans(3, 2)["one stage"])
    with pytest.raises(LookupError) as caught:
        watched.forward_backward(input_args=(x,), label=y, loss_fn=fails, run_config=config)
    watched.reset()
    # The error, which is the caller's, holds the frames of the call.
    assert caught.value.__traceback__ is not None
    assert len(Watched.saved) > 0
    assert alive() == 0


# Misuse


class Misusing(nn.Module):
    """Does something to be refused."""

    def __init__(self, deed: Callable[[torch.Tensor], object]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.deed = deed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.linear(x)
        self.deed(out)
        return out


def _twice(_: torch.Tensor) -> None:
    save_for_recompute(1)
    save_for_recompute()


def _gets(_: torch.Tensor) -> None:
    get_recompute_data()


@pytest.mark.parametrize(
    ("deed", "error", "words"),
    [
        (_twice, RoundPipeError, "twice"),
        (_gets, RoundPipeError, "doing_recompute"),
        (lambda out: save_for_recompute(3, {"y": out}), ValueError, r"data\[1\]\['y'\] requires grad"),
    ],
)
@pytest.mark.parametrize("plan_name", ["all fused", "one stage"])
def test_misuse_in_a_layer_is_refused_under_any_plan(
    two: Runtime, deed: Callable[[torch.Tensor], object], error: type[Exception], words: str, plan_name: str
) -> None:
    layers = nn.Sequential(Misusing(deed), nn.Linear(3, 3), nn.Linear(3, 3))
    model = RoundPipe(layers, runtime=two)
    x, y = batch(4)
    config = RoundPipeRunConfig(num_microbatch=2, execute_plan=plans(3, 2)[plan_name])
    with pytest.raises(error, match=words) as caught:
        model.forward_backward(input_args=(x,), label=y, loss_fn=square_error, run_config=config)
    assert "in layer 0 (Misusing), forward, microbatch 0" in "".join(caught.value.__notes__)


@pytest.mark.parametrize("use", [lambda: save_for_recompute(1), get_recompute_data])
def test_outside_a_layer_there_is_nothing_to_save_for_and_nothing_to_get(use: Callable[[], object]) -> None:
    with pytest.raises(RoundPipeError):
        use()
    assert not doing_recompute()


def test_a_loss_function_is_no_layer(two: Runtime) -> None:
    model = RoundPipe(nn.Linear(4, 3), runtime=two)
    x, y = batch(4)

    def saving(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        save_for_recompute(labels)
        return square_error(outputs, labels)

    with pytest.raises(RoundPipeError, match="outside a layer"):
        model.forward_backward(input_args=(x,), label=y, loss_fn=saving)


class Silent(nn.Module):
    """Asks for what it never saved."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if doing_recompute():
            note("again", 0, get_recompute_data())
            save_for_recompute(x)
        return self.linear(x)


def test_a_layer_that_saved_nothing_gets_an_empty_tuple_and_saves_nothing_then(two: Runtime) -> None:
    model = RoundPipe(Silent(), runtime=two, model_run_config=RoundPipeRunConfig(num_microbatch=2))
    x, y = batch(4)
    x.requires_grad_()
    square_error(model(x), y).backward()
    model.synchronize()
    # Two microbatches, and one run to compare.
    assert [what for _, _, what in SEEN] == [(), (), ()]


def test_compiled_layers_save_too(two: Runtime) -> None:
    layers = nn.Sequential(Routed(), nn.Linear(4, 3))
    truth = twin(layers)
    truth[0].forward = _plain_routed.__get__(truth[0])
    layers[0].compile(backend="eager")
    model = RoundPipe(layers, runtime=two, model_run_config=RoundPipeRunConfig(num_microbatch=2))
    x, y = batch(4)
    square_error(model(x), y).backward()
    model.synchronize()
    square_error(truth(x), y).backward()
    assert_near(gradients(layers), gradients(truth), 1e-5)


def test_the_names_are_roundpipes_own() -> None:
    assert {"save_for_recompute", "get_recompute_data", "doing_recompute"} <= set(roundpipe.__all__)


# Layers with a second method


class Prepared(nn.Module):
    """Chooses in `prepare`, with random numbers and without gradients, what `forward` uses."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(4, 4)
        self.linear = nn.Linear(4, 4)

    def prepare(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        note("first", 0, doing_recompute())
        noise = torch.rand_like(x) * (1 if self.training else 0)
        return {"order": (self.router(x) + noise).argsort(1), "scores": self.router(x)}

    def forward(self, x: torch.Tensor, prepared: dict[str, torch.Tensor] | None = None) -> torch.Tensor:
        assert prepared is not None
        assert not prepared["scores"].requires_grad
        note("again" if doing_recompute() else "first", 1, prepared["order"].tolist())
        dropped = torch.nn.functional.dropout(x, 0.5, self.training)
        return self.linear(dropped.gather(1, prepared["order"])) * prepared["scores"]


@pytest.mark.usefixtures("samples_first")
@pytest.mark.parametrize("plan_name", PLAN_NAMES)
def test_what_a_layer_prepared_is_handed_back_and_not_prepared_again(runtime: Runtime, plan_name: str) -> None:
    torch.manual_seed(0)
    layers = nn.Sequential(Prepared(), nn.Tanh(), Prepared(), nn.Linear(4, 3)).eval()
    truth = twin(layers)
    for layer in (truth[0], truth[2]):
        layer.register_forward_pre_hook(
            lambda module, args: (*args, rp_batch.map_leaves(torch.detach, module.prepare(*args)))
        )
    config = RoundPipeRunConfig(num_microbatch=3, execute_plan=plans(4, 3)[plan_name])
    model = RoundPipe(layers, runtime=runtime, model_run_config=config)
    x, y = batch(6)
    model.forward_backward(input_args=(x,), label=y, loss_fn=square_error)
    square_error(model(x), y).backward()
    model.synchronize()
    chosen = [what for phase, place, what in SEEN if (phase, place) == ("first", 1)]
    again = [what for phase, place, what in SEEN if phase == "again"]
    assert len(chosen) == len([what for _, place, what in SEEN if place == 0]) == 2 * 2 * 3
    assert len(again) >= 2 * 3
    assert all(order in chosen for order in again)
    SEEN.clear()
    for _ in range(2):
        train_call(truth, x, y, microbatches=3)
    assert_near(gradients(layers), gradients(truth), 1e-5)


def test_a_layer_that_prepares_draws_the_same_numbers_when_it_is_recomputed(runtime: Runtime) -> None:
    def trained(plan_name: str) -> dict[str, torch.Tensor | None]:
        torch.manual_seed(0)
        layers = nn.Sequential(Prepared(), nn.Tanh(), Prepared(), nn.Linear(4, 3))
        config = RoundPipeRunConfig(num_microbatch=3, execute_plan=plans(4, 3)[plan_name])
        model = RoundPipe(layers, runtime=runtime, model_run_config=config)
        x, y = batch(6)
        for _ in range(2):
            model.forward_backward(input_args=(x,), label=y, loss_fn=square_error)
        model.synchronize()
        return gradients(layers)

    wanted = trained("all fused")
    for plan_name in ("one layer a stage", "forward in layers, backward whole"):
        assert_near(trained(plan_name), wanted, 1e-5)


class Preparing(nn.Module):
    """Has a method of that name that is about something else."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def prepare(self) -> None:
        raise AssertionError

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


def test_a_prepare_whose_result_forward_does_not_take_is_left_alone(two: Runtime) -> None:
    model = RoundPipe(Preparing(), runtime=two)
    x, _ = batch(4)
    assert_near(model(x), model.model(x))


class Remembering(nn.Module):
    """Writes a buffer where it may not."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.register_buffer("load", torch.zeros(3))

    def prepare(self, x: torch.Tensor) -> float:
        self.load.add_(1)
        return x.shape[0]

    def forward(self, x: torch.Tensor, prepared: float = 1.0) -> torch.Tensor:
        return self.linear(x) * prepared


def test_buffers_that_prepare_writes_are_refused(two: Runtime) -> None:
    model = RoundPipe(Remembering(), runtime=two)
    with pytest.raises(TypeError, match="prepare wrote a buffer"):
        model(batch(4)[0])
