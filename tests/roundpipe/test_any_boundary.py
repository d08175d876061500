"""Random layers that alias, write, view and wrap: as plain PyTorch at every cut, or refused at every cut."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from examples import examples
from hypothesis import example, given, settings
from hypothesis import strategies as st
from plain import assert_near, gradients
from roundpipe import BoundaryError, RoundPipe, RoundPipeRunConfig, Runtime
from rp_sched import Plan
from test_any_training import any_plan
from torch import nn

WIDTH = 4
State = list[torch.Tensor]


# What a layer does to the tensors that it is given: a few, of any shape with 16 elements.


def scaled(state: State, which: int) -> State:
    """Replace one tensor by twice itself."""
    return [h * 2.0 if index == which else h for index, h in enumerate(state)]


def same_again(state: State, which: int) -> State:
    """Hand a tensor on twice."""
    return [*state, state[which]]


def viewed(state: State, which: int) -> State:
    """Hand a tensor and a view of it on."""
    return [*state, state[which].reshape(-1)]


def transposed(state: State, which: int) -> State:
    """Replace a tensor by its transpose."""
    return [h.transpose(0, -1) if index == which else h for index, h in enumerate(state)]


def sliced(state: State, which: int) -> State:
    """Replace a tensor by a part with gaps."""
    return [h[..., ::2] if index == which else h for index, h in enumerate(state)]


def expanded(state: State, which: int) -> State:
    """Replace a tensor by one that repeats."""
    return [h.unsqueeze(0).expand(2, *h.shape) if index == which else h for index, h in enumerate(state)]


def windows(state: State, which: int) -> State:
    """Replace a tensor by windows of it that overlap."""
    return [h.reshape(-1).unfold(0, 2, 1) if index == which else h for index, h in enumerate(state)]


def to_write(h: torch.Tensor) -> torch.Tensor:
    """A tensor to be written; windows that overlap are refused, whose gradient is undefined in PyTorch.

    PyTorch itself refuses expanded tensors only: for others its check would take too long.
    """
    # The gradient of `windows` then `overwritten` counts each element as often as windows have it: 58, not 30.
    indices = torch.arange(h.untyped_storage().nbytes() // h.element_size())
    elements = indices.as_strided(h.shape, h.stride(), h.storage_offset())
    if elements.unique().numel() < elements.numel():
        raise RuntimeError("more than one element of the written-to tensor refers to a single memory location")
    return h


def written(state: State, which: int) -> State:
    """Write a tensor in place."""
    to_write(state[which]).mul_(0.5)
    return state


def written_in_part(state: State, which: int) -> State:
    """Write a view of a tensor in place."""
    to_write(state[which][..., :1]).add_(1.0)
    return state


def overwritten(state: State, which: int) -> State:
    """Write a tensor in place by another one."""
    to_write(state[which]).copy_(state[0].mean())
    return state


def untracked(state: State, which: int) -> State:
    """Hand on what a tensor is without its graph, over the same memory."""
    return [*state, state[which].detach()]


def written_untracked(state: State, which: int) -> State:
    """Write the memory of a tensor without autograd."""
    with torch.no_grad():
        to_write(state[which].detach()).add_(0.5)
    return state


def by_strides(state: State, which: int) -> State:
    """Multiply by the tensor's strides."""
    factor = 1.0 + sum(state[which].stride()) / 8 + state[which].is_contiguous()
    return [h * factor if index == which else h for index, h in enumerate(state)]


def flat_view(state: State, which: int) -> State:
    """View a tensor as a row, which its strides may not allow."""
    return [h.view(-1) if index == which else h for index, h in enumerate(state)]


def fewer(state: State, which: int) -> State:
    """Drop the last tensor."""
    return state[:-1] if len(state) > 1 else scaled(state, which)


def reordered(state: State, which: int) -> State:
    """Hand on the same tensors in another order."""
    return [*state[which:], *state[:which]]


DOES = (
    *(scaled, same_again, viewed, transposed, sliced, expanded, windows, written, written_in_part, overwritten),
    *(untracked, written_untracked, by_strides, flat_view, fewer, reordered),
)


# How it hands them on


class AttrDict(dict[str, Any]):
    """A dict with its items as attributes."""

    __getattr__ = dict.__getitem__


@dataclass
class Record:
    """A dataclass."""

    state: Any


class Own:
    """An own class."""

    def __init__(self, state: Any) -> None:
        self.state = state


WRAPS: dict[str, Callable[[State], Any]] = {
    "tuple": tuple,
    "list": list,
    "dict": lambda state: {str(index): h for index, h in enumerate(state)},
    "AttrDict": lambda state: AttrDict(state=list(state)),
    "UserDict": lambda state: UserDict(state=tuple(state)),
    "namespace": lambda state: SimpleNamespace(state=state, word="word"),
    "record": Record,
    "own class": Own,
}


def unwrapped(held: Any) -> State:
    """The tensors in any of these."""
    if isinstance(held, torch.Tensor):
        return [held]
    if type(held) is dict:
        return [*held.values()]
    return list(
        held if isinstance(held, (tuple, list)) else held["state"] if hasattr(held, "keys") else held.state
    )


class Layer(nn.Module):
    """Does one thing, and hands on what comes of it."""

    def __init__(self, does: Callable[[State, int], State], which: int, wrap: str) -> None:
        super().__init__()
        self.does, self.which, self.wrap = does, which, wrap
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, held: Any) -> Any:
        state = unwrapped(held)
        # Writes are of what the layer was given.
        state = self.does(state, self.which % len(state))
        return WRAPS[self.wrap]([*state[:1], *state[1:]])

    def extra_repr(self) -> str:
        return f"{self.does.__name__}, {self.which}, {self.wrap}"


class Start(nn.Linear):
    """Makes the first tensor."""

    def forward(self, x: torch.Tensor) -> Any:
        return (super().forward(x),)


class End(nn.Linear):
    """Adds all up."""

    def forward(self, held: Any) -> torch.Tensor:
        total = sum(h.sum() * (index + 1) for index, h in enumerate(unwrapped(held)))
        return super().forward(torch.ones(1, WIDTH) * total)


@st.composite
def rows(draw: st.DrawFn) -> list[tuple[Callable[[State, int], State], int, str]]:
    """What each of one to six layers does."""
    wraps = st.sampled_from(["tuple"] * 6 + [*WRAPS])
    layer = st.tuples(st.sampled_from(DOES), st.integers(0, 3), wraps)
    return draw(st.lists(layer, min_size=1, max_size=6))


def built(row: list[tuple[Callable[[State, int], State], int, str]]) -> nn.Sequential:
    """The layers, always with the same weights."""
    torch.manual_seed(0)
    return nn.Sequential(Start(WIDTH, WIDTH), *(Layer(*layer) for layer in row), End(WIDTH, 1))


def loss_of(out: torch.Tensor, _: Any = None) -> torch.Tensor:
    """A loss that stays small."""
    return out.tanh().sum()


def plain_outcome(layers: nn.Sequential, x: torch.Tensor) -> torch.Tensor | None:
    """The loss in plain PyTorch, None where it refuses; gradients are in the layers."""
    try:
        loss = loss_of(layers(x.clone()))
        loss.backward()
    except RuntimeError:
        return None
    return loss.detach()


def outcome(layers: nn.Sequential, x: torch.Tensor, devices: str, plan: Plan | None, grain: Any) -> Any:
    """The loss, or the error of the model."""
    with Runtime(devices) as runtime:
        config = RoundPipeRunConfig(num_microbatch=1, execute_plan=plan, recompute_grain=grain)
        model = RoundPipe(layers, runtime=runtime, model_run_config=config)
        try:
            loss = model.forward_backward((x,), loss_fn=loss_of)
            model.synchronize()
        except BoundaryError as error:
            return error
        except RuntimeError as error:
            return error
        return loss


@st.composite
def cases(draw: st.DrawFn) -> tuple[Any, list[tuple[str, Plan | None, str]]]:
    """A row, and some ways to run it."""
    row = draw(rows())
    layers = len(row) + 2
    singles = [range(layer, layer + 1) for layer in range(layers - 1)]
    each = Plan(singles, range(layers - 1, layers), singles[::-1])
    ways = [("cpu:1", Plan(fused=range(layers)), "stage"), ("cpu:2", each, "stage")]
    for _ in range(2):
        devices = draw(st.sampled_from(["cpu:1", "cpu:2", "cpu:3"]))
        ways.append((devices, draw(st.none() | any_plan(layers, 1)), draw(st.sampled_from(["stage", "layer"]))))
    return row, ways


def one(*row: tuple[Callable[[State, int], State], int, str]) -> Any:
    """A row that is run whole, and layer by layer."""
    layers = len(row) + 2
    singles = [range(layer, layer + 1) for layer in range(layers - 1)]
    plans = [Plan(fused=range(layers)), Plan(singles, range(layers - 1, layers), singles[::-1])]
    return list(row), [("cpu:2", plan, grain) for plan in plans for grain in ("stage", "layer")]


@given(cases())
@example(one((same_again, 0, "tuple"), (written, 0, "tuple")))
@example(one((viewed, 0, "dict"), (reordered, 1, "AttrDict"), (written_in_part, 0, "tuple")))
@example(one((windows, 0, "list"), (by_strides, 0, "record")))
@example(
    one(
        (scaled, 0, "own class"),
    )
)
@settings(max_examples=examples(120))
def test_layers_are_as_in_plain_pytorch_at_every_cut_or_refused_at_every_cut(case: Any) -> None:
    row, ways = case
    x = torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(0))
    truth = built(row)
    wanted = plain_outcome(truth, x)
    found = []
    for devices, plan, grain in ways:
        layers = built(row)
        found.append((outcome(layers, x, devices, plan, grain), layers))

    refused = [isinstance(each, BoundaryError) for each, _ in found]
    if wanted is None:
        # Plain PyTorch refuses more: it sees tensors that are saved on the other side of a cut.
        return
    assert len(set(refused)) == 1, f"{row}\n{[each for each, _ in found]}"
    for each, layers in found:
        if isinstance(each, BoundaryError):
            continue
        if isinstance(each, RuntimeError):
            raise each
        assert_near(each, wanted)
        assert_near(gradients(layers), gradients(truth))
