"""Segments that are no functions of their input: they draw from generators or keep something between calls.

In a row with `DRAWS`, each layer is `OnFirst`: what was drawn travels beside the tensor, to the row's outputs. So
plain PyTorch can be told afterwards what the engine drew, whatever seeds it used.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy
import torch
from torch import nn

from fuzzing.kinds.layers import WIDTH, Building, Make, one

State = tuple[torch.Tensor, torch.Tensor]


class Drawing(nn.Module):
    """Skips, or scales by a weight, as what it draws in [0, 1) says. `told`: what to take instead of drawing."""

    def __init__(self, source: Callable[[Drawing], float]) -> None:
        super().__init__()
        self.weight, self.source = nn.Parameter(torch.ones(WIDTH)), source
        self.told: list[float] = []
        self.generator, self.random = torch.Generator().manual_seed(7), random.Random(7)

    def forward(self, state: State) -> State:
        h, draws = state
        draw = self.told.pop(0) if self.told else self.source(self)
        column = torch.full((len(h), 1), draw, dtype=draws.dtype)
        h = h if draw < 0.4 else h * self.weight * (1 + draw)
        return h, torch.cat([draws, column.to(draws.device)], 1)


class OnFirst(nn.Module):
    """A layer that leaves the draws as they are."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, state: tuple[Any, torch.Tensor]) -> tuple[Any, torch.Tensor]:
        return self.inner(state[0]), state[1]


# Sources of the process, which the engine may seed; and a layer's own.
GLOBAL_SOURCES: dict[str, Callable[[Drawing], float]] = {
    "random.random": lambda _: random.random(),
    "random.choice": lambda _: random.choice([0.1, 0.5, 0.9]),
    "random.gauss": lambda _: abs(random.gauss(0.5, 0.2)),
    "numpy.random": lambda _: float(numpy.random.random()),
    "numpy.random.normal": lambda _: abs(float(numpy.random.normal(0.5, 0.2))),
    "torch.rand": lambda _: float(torch.rand(())),
    "torch and random": lambda _: 0.5 * (float(torch.rand(())) + random.random()),
}
OWN_SOURCES: dict[str, Callable[[Drawing], float]] = {
    "own Generator": lambda layer: float(torch.rand((), generator=layer.generator)),
    "own Random": lambda layer: layer.random.random(),
    "global Random": lambda _: _SHARED.random(),
    "numpy Generator": lambda _: float(_NUMPY.random()),
    "numbers of a global list": lambda _: _from_list(),
}
_SHARED = random.Random(3)
_NUMPY = numpy.random.default_rng(3)
_LIST: list[float] = []


def _from_list() -> float:
    _LIST.append(0.0)
    return len(_LIST) * 0.37 % 1


def drawing(source: Callable[[Drawing], float]) -> Make:
    return one(lambda: Drawing(source))


DRAWS: dict[str, Make] = {
    f"draws {name}": drawing(source) for name, source in {**GLOBAL_SOURCES, **OWN_SOURCES}.items()
}

# What a layer keeps in attributes.


class AuxLoss(nn.Linear):
    """Leaves a loss of its own in an attribute, which the row's loss adds."""

    aux: Any = 0.0

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        self.aux = y.square().sum()
        return y


class Counter(nn.Linear):
    """Scales by the number of its calls."""

    calls = 0

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x) * (1 + 0.1 * self.calls)


class CountsInDict(Counter):
    """Counts in a dict that it holds."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = {"calls": 0}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.counts["calls"] += 1
        return nn.Linear.forward(self, x) * (1 + 0.1 * self.counts["calls"])


class Hidden(nn.Linear):
    """Adds the mean of its last input, which it keeps."""

    hidden: Any = None

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x if self.hidden is None else x + self.hidden)
        self.hidden = x.detach().mean(0)
        return y


class HiddenInList(Hidden):
    """Keeps it in a list, so that no attribute is set."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = nn.Linear.forward(self, x + self.kept[0] if self.kept else x)
        self.kept[:] = [x.detach().mean(0)]
        return y


class Shown(nn.Linear):
    """Keeps its output for a later layer."""

    shown: Any = None

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.shown = super().forward(x)
        return self.shown


class Reader(nn.Module):
    """Reads what another layer has kept, past the row."""

    def __init__(self, shown: Shown) -> None:
        super().__init__()
        self.others = [shown]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 + self.others[0].shown


def reader(_: Building) -> list[nn.Module]:
    shown = Shown()
    return [shown, nn.Tanh(), Reader(shown)]


class Remembers(nn.Linear):
    """Keeps what nobody reads: the last number of rows, and a detached norm."""

    rows: int = 0
    norm: Any = None

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.rows, self.norm = len(x), x.detach().norm()
        return super().forward(x)


class Cached(nn.Linear):
    """Keeps a constant that it computes once, as rotary embeddings do."""

    cache: Any = None

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.cache is None:
            self.cache = torch.arange(WIDTH, dtype=x.dtype, device=x.device)
        return super().forward(x) + self.cache


KEEPS: dict[str, Make] = {
    "keeps aux loss": one(AuxLoss),
    "keeps a counter": one(Counter),
    "keeps a counter in a dict": one(CountsInDict),
    "keeps hidden state": one(Hidden),
    "keeps hidden state in a list": one(HiddenInList),
    "keeps for a later layer": reader,
    "keeps what nobody reads": one(Remembers),
    "keeps a constant": one(Cached),
}
REFUSABLE_IMPURE = frozenset({*(f"draws {name}" for name in OWN_SOURCES), *KEEPS})


def aux_losses(layers: list[nn.Module]) -> torch.Tensor | float:
    """What the row's layers have left for its loss."""
    return sum(
        (module.aux for layer in layers for module in layer.modules() if isinstance(module, AuxLoss)), start=0.0
    )


class WithDraws(nn.Module):
    """The first layer of a row with draws."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any, **kwargs: Any) -> State:
        x = self.inner(*args, **kwargs)
        return x, torch.zeros(len(x), 0, dtype=torch.float64)


def beside_draws(layer: nn.Module) -> nn.Module:
    """The layer in a row with draws."""
    return layer if isinstance(layer, Drawing) else OnFirst(layer)
