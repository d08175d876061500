"""Any model, plan, number of microbatches and devices trains as plain PyTorch does: many, drawn at random."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import pytest
import rp_batch
import torch
from examples import dear, examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from plain import assert_near, batch, gradients, square_error, twin, weights
from roundpipe import RoundPipe, RoundPipeRunConfig, Runtime
from roundpipe.optim import AdamW
from rp_recompute.randomness import draw_seed, mix
from rp_sched import Plan
from rp_state.options import MasterKind
from torch import nn

pytestmark = pytest.mark.usefixtures("small_departures")

EXAMPLES = dear(500)
CALLS = 2
LR = 1e-2

# Models


class Tied(nn.Module):
    """Multiplies by another layer's weight."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight.T


class InPlace(nn.Module):
    """Writes its input."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mul_(0.5)


class Centred(nn.Module):
    """Subtracts a running mean, a buffer that it writes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        centred = x - self.mean
        self.mean.lerp_(x.detach().mean(0), 0.5)
        return centred


class Unused(nn.Module):
    """Has a parameter that no loss depends on, and passes an integer tensor on."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.unused = nn.Linear(4, 4), nn.Parameter(torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


MAKE = {
    "linear": lambda: nn.Linear(4, 4),
    "tanh": nn.Tanh,
    "norm": lambda: nn.LayerNorm(4),
    "frozen": lambda: nn.Linear(4, 4).requires_grad_(False),
    "dropout": lambda: nn.Dropout(0.5),
    "centred": Centred,
    "unused": Unused,
}


@st.composite
def models(draw: st.DrawFn) -> nn.Sequential:
    """3 to 9 layers, (batch, 4) to (batch, 3)."""
    torch.manual_seed(draw(st.integers(0, 99)))
    layers: list[nn.Module] = [nn.Linear(4, 4)]
    for kind in draw(st.lists(st.sampled_from([*MAKE, "tied", "same", "in place"]), min_size=1, max_size=6)):
        match kind:
            case "tied":
                layers.append(Tied(layers[0].weight))
            case "same":
                # Buffers that two layers share are not to be written.
                layers.append(MAKE["linear"]() if isinstance(layers[-1], Centred) else layers[-1])
            case "in place":
                layers += [nn.Linear(4, 4), InPlace()]
            case _:
                layers.append(MAKE[kind]())
    return nn.Sequential(*layers, nn.Linear(4, 3))


# Plans


@st.composite
def cuts(draw: st.DrawFn, first: int, last: int) -> tuple[range, ...]:
    """The range cut anywhere."""
    inner = draw(st.sets(st.integers(first + 1, last - 1))) if last - first > 1 else set()
    edges = [first, *sorted(inner), last]
    return tuple(range(a, b) for a, b in pairwise(edges) if b > a)


@st.composite
def any_plan(draw: st.DrawFn, layers: int, microbatches: int) -> Plan:
    """Forward and backward cut anywhere, microbatches divided anyhow, tasks to devices in turn or not."""
    top = draw(st.integers(0, layers - 1))
    groups = [draw(cuts(0, microbatches)) if draw(st.booleans()) else () for _ in range(3)]
    forward, backward = draw(cuts(0, top)), draw(cuts(0, top))[::-1]
    return Plan(forward, range(top, layers), backward, *groups, in_turn=draw(st.booleans()))


@dataclass(frozen=True)
class Training:
    """What is trained, and how."""

    layers: nn.Sequential
    plan: Plan | None
    microbatches: int
    size: int
    devices: int
    grain: str
    dtype: torch.dtype
    separate: bool
    is_async: bool
    double_buffer: bool

    def is_large(self) -> bool:
        """Three or more layers, stages and devices."""
        stages = 0 if self.plan is None else len(self.plan.forward) + 1 + len(self.plan.backward)
        return min(len(self.layers), stages, self.devices) >= 3


@st.composite
def trainings(draw: st.DrawFn) -> Training:
    layers, microbatches = draw(models()), draw(st.integers(1, 6))
    separate = draw(st.booleans())
    plan = draw(any_plan(len(layers), microbatches)) if draw(st.integers(0, 9)) else None
    if plan is not None and separate:
        # Forward and backward passes that are apart have no stage that is fused.
        plan = Plan(
            (*plan.forward, plan.fused),
            None,
            (plan.fused, *plan.backward),
            forward_groups=plan.forward_groups,
            backward_groups=plan.backward_groups,
            in_turn=plan.in_turn,
        )
    return Training(
        layers=layers,
        plan=plan,
        microbatches=microbatches,
        size=draw(st.integers(microbatches, 9)),
        devices=draw(st.sampled_from([1, 2, 3, 4, 8])),
        grain=draw(st.sampled_from(["stage", "layer"])),
        dtype=draw(st.sampled_from([torch.float32, torch.float64, torch.bfloat16])),
        separate=separate,
        is_async=draw(st.booleans()),
        double_buffer=draw(st.booleans()),
    )


# Both ways

Found = tuple[
    list[torch.Tensor], dict[str, torch.Tensor | None], torch.Tensor | None, dict[str, torch.Tensor | None]
]


def split_of(layers: nn.Module) -> Any:
    """How the input is split: said where a microbatch changes a buffer that the next one reads."""
    is_said = any(isinstance(layer, Centred) for layer in layers.modules())
    return ((rp_batch.Split(),), None) if is_said else None


def ours(training: Training, x: torch.Tensor, y: torch.Tensor) -> Found:
    """Losses, gradients, the input's gradient, and the weights after a step."""
    config = RoundPipeRunConfig(
        num_microbatch=training.microbatches,
        execute_plan=training.plan,
        recompute_grain=training.grain,
        split_input=split_of(training.layers),
    )
    with Runtime(f"cpu:{training.devices}") as runtime:
        model = RoundPipe(
            training.layers, runtime=runtime, model_run_config=config, double_buffer=training.double_buffer
        )
        optimizer = torch.optim.SGD(model.optim_parameters(), lr=LR)
        losses = []
        for call in range(CALLS):
            torch.manual_seed(call)
            if training.separate:
                loss = square_error(model(x), y)
                loss.backward()
            else:
                loss = model.forward_backward((x,), None, y, square_error)
            losses.append(loss.detach())
        model.synchronize()
        found = gradients(training.layers)
        model.step(optimizer.step, is_async=training.is_async)
        model.synchronize()
        return losses, found, x.grad, weights(training.layers)


def plain(training: Training, layers: nn.Sequential, x: torch.Tensor, y: torch.Tensor) -> Found:
    """The same in plain PyTorch, microbatch by microbatch, each layer with the seed that the engine gives it."""
    losses = []
    for call in range(CALLS):
        torch.manual_seed(call)
        seed = draw_seed()
        parts = rp_batch.split(((x, y), {}), training.microbatches)
        total = torch.zeros((), dtype=torch.float64)
        for m, ((part, label), _) in enumerate(parts):
            h = part
            for index, layer in enumerate(layers):
                torch.manual_seed(mix(seed, index, m))
                h = layer(h)
            loss = square_error(h, label)
            loss.backward()
            total += loss.detach()
        losses.append(total)
    found = gradients(layers)
    torch.optim.SGD(layers.parameters(), lr=LR).step()
    return losses, found, x.grad, weights(layers)


def check(training: Training) -> None:
    """Both ways agree; in 16 bits within what they round."""
    truth = twin(training.layers).double()
    training.layers.to(training.dtype)
    truth.load_state_dict(training.layers.state_dict())
    x, y = (tensor.to(training.dtype) for tensor in batch(training.size))
    x.requires_grad_()
    x_true = x.detach().double().requires_grad_()
    found, wanted = ours(training, x, y), plain(training, truth, x_true, y.double())
    tolerance = {torch.float32: 1e-4, torch.float64: 1e-11, torch.bfloat16: 0.25}[training.dtype]
    for part, true_part in zip(found, wanted, strict=True):
        assert_near(part, true_part, tolerance)


def stepped(training: Training, *, during: bool, master: MasterKind) -> list[torch.Tensor]:
    """Losses and weights, if the optimizer steps during each call or after it."""
    config = RoundPipeRunConfig(
        num_microbatch=training.microbatches,
        execute_plan=training.plan,
        recompute_grain=training.grain,
        split_input=split_of(training.layers),
    )
    x, y = (tensor.to(training.dtype) for tensor in batch(training.size))
    with Runtime(f"cpu:{training.devices}") as runtime:
        model = RoundPipe(
            twin(training.layers).to(training.dtype),
            runtime=runtime,
            model_run_config=config,
            double_buffer=training.double_buffer,
            master=master,
            step_in_backward=during,
        )
        optimizer = AdamW(model.optim_parameters(), lr=LR)
        losses = []
        for call in range(CALLS):
            torch.manual_seed(call)
            losses.append(
                model.forward_backward((x,), None, y, square_error, optimizer=optimizer if during else None)
            )
            if not during:
                model.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async=False)
        return [*losses, *(one.detach().clone() for one in model.model.state_dict().values())]


def _is_norm(layer: nn.Module) -> bool:
    return isinstance(layer, nn.LayerNorm)


@pytest.mark.later
@pytest.mark.filterwarnings("ignore::roundpipe.TrainingWarning")
@settings(max_examples=examples(60), suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(
    # Torch's layer norm sums its bias's gradient by as many threads as there are when it runs.
    training=trainings().filter(
        lambda one: not one.separate and one.plan is not None and not any(map(_is_norm, one.layers))
    ),
    master=st.sampled_from(["whole", "split"]),
)
def test_any_training_has_the_same_bits_if_the_optimizer_steps_during_its_calls(
    training: Training, master: MasterKind
) -> None:
    if training.dtype == torch.float64 and master == "split":
        training = replace(training, dtype=torch.bfloat16)
    found, wanted = (stepped(training, during=during, master=master) for during in (True, False))
    assert all(map(torch.equal, found, wanted))


@pytest.mark.timeout(600)
def test_any_training_agrees_with_plain_pytorch() -> None:
    seen: Counter[str] = Counter()

    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    @given(training=trainings())
    def any_training(training: Training) -> None:
        seen.update(["all", *["large"] * training.is_large()])
        check(training)

    any_training()
    assert seen["all"] >= EXAMPLES
    assert seen["large"] >= seen["all"] // 4
