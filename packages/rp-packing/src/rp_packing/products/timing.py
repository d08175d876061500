"""What the products of a model's linear layers take on a device, in bf16 and in FP8."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import cast

import torch
from torch import nn

from rp_packing.products.layers import Fp8Choice, Fp8Linear, become
from rp_packing.products.only_multiplied import by_name
from rp_packing.products.recipe import Fp8
from rp_packing.rows import cast_rows

# The shapes with most work are measured, until they have this part of all of it; so many at most.
_SHARE = 0.95
_MOST_SHAPES = 6

Run = Callable[[nn.Module, torch.Tensor], torch.Tensor]
Clock = Callable[[Callable[[], None]], float]
"""Runs a body several times, on the device; returns the milliseconds of one run."""


@dataclass(frozen=True, slots=True)
class LinearShape:
    """The weights (outputs, inputs) of so many linear layers, `layers`, and whether they get gradients."""

    outputs: int
    inputs: int
    is_trained: bool
    layers: int

    @property
    def work(self) -> int:
        """Multiplications of all these layers for a row."""
        return self.outputs * self.inputs * self.layers * (3 if self.is_trained else 2)


def shapes_of(modules: Sequence[nn.Module], choice: Fp8Choice) -> tuple[LinearShape, ...]:
    """Return the shapes of the linear layers that would multiply in FP8, most work first; not the least ones.

    >>> row = [nn.Linear(64, 32, bias=False), nn.Linear(32, 64), nn.Linear(64, 32).requires_grad_(False)]
    >>> shapes_of(row, Fp8Choice((("",), ("",), ("",)), ()))[0]
    LinearShape(outputs=32, inputs=64, is_trained=True, layers=1)
    """
    counts = Counter(_form(one) for one in _chosen(modules, choice))
    shapes = sorted((LinearShape(*form, count) for form, count in counts.items()), key=_by_work, reverse=True)
    before = accumulate((one.work for one in shapes), initial=0)
    wanted = _SHARE * sum(one.work for one in shapes)
    return tuple(one for one, done in zip(shapes, before, strict=False) if done < wanted)[:_MOST_SHAPES]


def _chosen(modules: Sequence[nn.Module], choice: Fp8Choice) -> Iterable[nn.Module]:
    for module, names in zip(modules, choice.chosen, strict=True):
        found = by_name(module)
        yield from (found[name] for name in names)


def _form(linear: nn.Module) -> tuple[int, int, bool]:
    weight = linear.get_parameter("weight")
    return weight.shape[0], weight.shape[1], weight.requires_grad


def _by_work(shape: LinearShape) -> int:
    return shape.work


def run_linear(module: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    """Run a linear layer; of its own, so that what the compiler knows of it is apart from the model's layers."""
    return module(rows)


def time_products(
    shapes: Sequence[LinearShape],
    recipes: Iterable[Fp8 | None],
    rows: int,
    device: torch.device,
    clock: Clock,
    *,
    calls: int = 1,
    run: Run = run_linear,
) -> dict[Fp8 | None, float]:
    """Return the milliseconds of forward and gradients of all layers of these shapes, by recipe; None for bf16.

    Args:
        rows: of a layer's input.
        clock: tells what a body takes, with what it waits for.
        calls: how often a layer runs for each time that its weight's codes are made ready for that.
        run: `run_linear`, or what a compiler has made of it.

    >>> def once(body):
    ...     body()
    ...     return 2.0
    >>> time_products([LinearShape(32, 16, True, 3)], (None,), 8, torch.device("cpu"), once)
    {None: 6.0}

    Memory is allocated by torch, for one shape at a time, and freed.
    """
    times: dict[Fp8 | None, float] = dict.fromkeys(recipes, 0.0)
    for shape in shapes:
        bench = _Bench(shape, rows, device, run)
        for recipe in times:
            times[recipe] += shape.layers * bench.ms(recipe, clock, calls)
    return times


class _Bench:
    """One linear layer on a device, with an input and its output's gradient."""

    def __init__(self, shape: LinearShape, rows: int, device: torch.device, run: Run) -> None:
        # Not zeros, with which a device is faster than in training; nor from the caller's generator.
        drawn = partial(torch.randn, generator=torch.Generator(device).manual_seed(0), device=device)
        with torch.device("meta"):
            linear = nn.Linear(shape.inputs, shape.outputs, bias=False, dtype=torch.bfloat16)
        weight = drawn(shape.outputs, shape.inputs, dtype=torch.bfloat16) * shape.inputs**-0.5
        linear.weight = nn.Parameter(weight, requires_grad=shape.is_trained)
        become(linear)
        self._linear, self._run = cast("Fp8Linear", linear), run
        self._rows = drawn(rows, shape.inputs, dtype=torch.bfloat16).requires_grad_()
        self._grad = drawn(rows, shape.outputs, dtype=torch.bfloat16)
        self._wanted = [self._rows, self._linear.parameter] if shape.is_trained else [self._rows]

    def ms(self, recipe: Fp8 | None, clock: Clock, calls: int) -> float:
        """Return what a call takes, and its share of making the weight's codes ready for `calls` of them."""
        self._linear.recipe = recipe
        readying = 0.0
        if recipe is not None:
            rows = cast_rows(self._linear.parameter.detach())
            readying = clock(lambda: self._linear.take(rows, backward=True)) / max(calls, 1)
        found = clock(self._call) + readying
        self._linear.forget()
        return found

    def _call(self) -> None:
        out = self._run(self._linear, self._rows)
        torch.autograd.grad(out, self._wanted, self._grad)
