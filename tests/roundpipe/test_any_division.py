"""Parts that get the batch in any dimension, or mix it, train as in plain PyTorch: many, drawn at random."""

from __future__ import annotations

import copy
import warnings
from dataclasses import dataclass

import pytest
import torch
from examples import examples
from hypothesis import HealthCheck, event, example, given, settings
from hypothesis import strategies as st
from roundpipe import RoundPipeRunConfig, TrainingWarning
from roundpipe import wrap_model_to_roundpipe as wrap
from torch import nn

WIDTH = 4
# How a part gets (samples, steps, width).
LAYOUTS = ("samples first", "time first", "samples outer", "samples inner", "transposed")
# What a part does with it.
WORKS = ("nothing", "steps", "samples", "norm", "scale", "state")


@dataclass(frozen=True)
class Piece:
    """What one part does: the layout of its input, and what it mixes. `mode`: when it does."""

    layout: str
    work: str
    mode: str = "always"
    is_pair: bool = False


class Work(nn.Module):
    """Computes along samples or steps, of an input in some layout; returns it in that layout."""

    def __init__(self, piece: Piece) -> None:
        super().__init__()
        self.piece = piece
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, steps: int, state: torch.Tensor) -> object:
        y = torch.tanh(self.linear(fold(x, self.piece.layout, steps, back=True)))
        if self.piece.mode == "always" or self.training:
            y = self.mixed(y, state)
        y = fold(y, self.piece.layout, steps)
        return (y, y.detach().mean(), {"state": state + 1}) if self.piece.is_pair else y

    def mixed(self, y: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        match self.piece.work:
            case "steps":
                return y + y.mean(1, keepdim=True)
            case "samples":
                return y - y.mean(0, keepdim=True)
            case "norm":
                return y / (1 + y.square().mean((0, 1)).sqrt())
            case "scale":
                return y * len(y)
            case "state":
                return y + state.sum(0)[:, None]
            case _:
                return y


def fold(x: torch.Tensor, layout: str, steps: int, *, back: bool = False) -> torch.Tensor:
    """Bring (samples, steps, width) to a layout, or back."""
    match layout:
        case "time first":
            return x.transpose(0, 1)
        case "samples outer":
            return x.unflatten(0, (-1, steps)) if back else x.flatten(0, 1)
        case "samples inner":
            return x.unflatten(0, (steps, -1)).transpose(0, 1) if back else x.transpose(0, 1).flatten(0, 1)
        case "transposed":
            return x.movedim(0, 2) if back else x.movedim(2, 0)
        case _:
            return x


class Model(nn.Module):
    """Hands samples from part to part, each in its layout, with a state that has layers first."""

    def __init__(self, pieces: list[Piece]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(map(Work, pieces))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        steps = x.shape[1]
        state = x.mean((1, 2)).repeat(2, 1).unsqueeze(-1).expand(-1, -1, WIDTH).contiguous()
        for part in self.parts:
            given = part(fold(x, part.piece.layout, steps), steps, state)
            output, state = (given[0], given[2]["state"]) if part.piece.is_pair else (given, state)
            x = x + fold(output, part.piece.layout, steps, back=True)
        return x


PIECES = st.builds(
    Piece,
    st.sampled_from(LAYOUTS),
    st.sampled_from(WORKS),
    st.sampled_from(["always", "training"]),
    st.booleans(),
)


@pytest.mark.slow
@given(
    st.lists(PIECES, min_size=1, max_size=2),
    st.integers(1, 6),
    st.integers(1, 6),
    st.lists(st.integers(1, 6), min_size=1, max_size=2),
    st.sampled_from([None, 2, 3]),
    st.booleans(),
    st.integers(0, 99),
)
# A mean that is zero but for roundings, which two microbatches do not share.
@example(
    [Piece("samples first", "samples", is_pair=True), Piece("samples first", "nothing")], 2, 2, [1], None, False, 1
)
@settings(max_examples=examples(200), suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_layout_trains_as_plain_pytorch(two, pieces, rows, steps, more_steps, count, training, seed):
    torch.manual_seed(seed)
    model = Model(pieces).train(training)
    plain = copy.deepcopy(model)
    config = None if count is None else RoundPipeRunConfig(num_microbatch=count)
    wrapped = wrap(
        model,
        False,
        lower_threshold=1,
        upper_threshold=1 << 30,
        skip_modules=[],
        runtime=two,
        model_run_config=config,
    )

    for length in [steps, *more_steps]:
        x = torch.randn(rows, length, WIDTH, requires_grad=True)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            found = wrapped(x)
        wanted = plain(x)
        event("in one piece" if any(issubclass(one.category, TrainingWarning) for one in told) else "split")

        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(
            torch.autograd.grad(found.square().sum(), x)[0],
            torch.autograd.grad(wanted.square().sum(), x, retain_graph=True)[0],
            rtol=1e-3,
            atol=1e-4,
        )
        wanted.square().sum().backward()
        wrapped(x).square().sum().backward()
    wrapped.synchronize()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-3, atol=1e-4)
