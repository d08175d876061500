"""Segments of rows, (rows, WIDTH) to (rows, WIDTH): ordinary layers, and unusual ones that torch accepts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

WIDTH = 4
TIME = 3


@dataclass
class Building:
    """A row while it is made."""

    layers: list[nn.Module] = field(default_factory=list)

    def linears(self) -> list[nn.Linear]:
        """The linear layers so far, whose weights others may share."""
        return [layer for layer in self.layers if type(layer) is nn.Linear]


Make = Callable[[Building], list[nn.Module]]


def one(make: Callable[[], nn.Module]) -> Make:
    """A segment of one layer that depends on no other."""
    return lambda _: [make()]


class Function(nn.Module):
    """A layer without parameters."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any) -> Any:
        return self.function(*args)


def frozen(module: nn.Module) -> nn.Module:
    return module.requires_grad_(False)


def half_frozen() -> nn.Module:
    linear = nn.Linear(WIDTH, WIDTH)
    linear.bias.requires_grad_(False)
    return linear


class Tied(nn.Module):
    """Multiplies by another layer's weight."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight.T


def tied(building: Building) -> list[nn.Module]:
    linears = building.linears()
    return [Tied(linears[0].weight)] if linears else [nn.Linear(WIDTH, WIDTH)]


def same(building: Building) -> list[nn.Module]:
    """A layer of the row once more: the same object."""
    linears = building.linears()
    return [linears[-1] if linears else nn.Linear(WIDTH, WIDTH)]


class Centred(nn.Module):
    """Subtracts a running mean, a buffer that it writes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        centred = x - self.mean
        self.mean.lerp_(x.detach().mean(0).to(self.mean.dtype), 0.5)
        return centred


class Counting(nn.Module):
    """Counts its calls in an integer buffer, and scales by the count."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x * (1 + 0.1 * self.calls).to(x.dtype)


class Batched(nn.Module):
    """Batch norm; of one row it only uses what it has gathered."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(x) == 1:
            return (x - self.norm.running_mean) * self.norm.weight
        return self.norm(x)


class Unused(nn.Module):
    """Has a parameter that no loss depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.unused = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


class Mixed(nn.Module):
    """Computes in fp32, whatever the row does. `is_exact`: all of them compute as the row does."""

    is_exact = False

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def _apply(self, fn: Any, recurse: bool = True) -> Mixed:
        super()._apply(fn, recurse)
        if not Mixed.is_exact:
            self.linear.weight.data, self.linear.bias.data = (one.data.float() for one in self.linear.parameters())
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x.to(self.linear.weight.dtype)).to(x.dtype)


class _Steep(torch.autograd.Function):
    """The identity, whose gradient is doubled and whose saved tensor is its output."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        y = x.clone()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (y,) = ctx.saved_tensors
        return grad * 2 + 0 * y


class Checkpointed(nn.Module):
    """Uses torch's own checkpoint."""

    def __init__(self, *inner: nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.inner, self.reentrant = nn.Sequential(*inner), reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.reentrant and not x.requires_grad:
            return self.inner(x)
        return checkpoint(self.inner, x, use_reentrant=self.reentrant)


def hooked(kind: str) -> nn.Module:
    linear = nn.Linear(WIDTH, WIDTH)
    if kind == "forward":
        linear.register_forward_hook(_triple)
    elif kind == "before":
        linear.register_forward_pre_hook(_shifted)
    else:
        linear.register_full_backward_hook(_steeper)
    return linear


def _triple(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
    del module, args
    return output * 3


def _shifted(module: nn.Module, args: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
    del module
    return (args[0] + 1,)


def _steeper(module: nn.Module, grads: tuple[torch.Tensor], outer: Any) -> tuple[torch.Tensor]:
    del module, outer
    return (grads[0] * 2,)


class TensorHook(nn.Module):
    """Hooks its output's gradient."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * 1
        if y.requires_grad:
            y.register_hook(lambda grad: grad * 3)
        return y


class Attending(nn.Module):
    """Attention over a sequence of TIME, with a mask that is a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.register_buffer("mask", torch.ones(TIME, TIME).triu(1).bool(), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.attention(x, x, x, attn_mask=self.mask, need_weights=False)[0]


class Spread(nn.Module):
    """(rows, WIDTH) to (rows, TIME, WIDTH)."""

    def __init__(self) -> None:
        super().__init__()
        self.place = nn.Parameter(torch.randn(TIME, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[:, None] + self.place


class Recurrent(nn.Module):
    """Hands on its sequence and its states, which have the batch in their second dimension."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.inner = kind(WIDTH, WIDTH, num_layers=2, batch_first=True)

    def forward(self, x: Any) -> Any:
        return self.inner(*x) if isinstance(x, tuple) else self.inner(x)


def _middle(x: Any) -> torch.Tensor:
    return (x[0] if isinstance(x, tuple) else x).mean(1)


def over_time(*layers: nn.Module) -> list[nn.Module]:
    """Layers that work on a sequence."""
    return [Spread(), *layers, Function(_middle)]


class Embedding(nn.Module):
    """Looks its input's signs up in a table."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(2, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.table((x.detach()[:, 0] > 0).long())


class Convolution(nn.Module):
    """A convolution over the width."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Conv1d(1, 2, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x[:, None]).mean(1)


def _column_major(x: torch.Tensor) -> torch.Tensor:
    # A copy, also of one row, which lies in memory as well as its transpose.
    return x.t().clone(memory_format=torch.contiguous_format).t()


def _column_major_with_gaps(x: torch.Tensor) -> torch.Tensor:
    # No number of rows makes it contiguous, as one row does a tensor without gaps.
    return torch.stack([x.t(), x.t()], 2)[..., 0].t()


def _by_strides(x: torch.Tensor) -> torch.Tensor:
    return x * (1.5 if x.is_contiguous() else 0.5)


def _chunk(x: torch.Tensor) -> torch.Tensor:
    return torch.cat([x, x + 1], dim=1)[:, 1::2]


def _expanded(x: torch.Tensor) -> torch.Tensor:
    return x.mean(1, keepdim=True).expand(-1, WIDTH)


def _write_view(x: torch.Tensor) -> torch.Tensor:
    x[:, :2].mul_(2)
    return x


def _write_transposed(x: torch.Tensor) -> torch.Tensor:
    x.t()[0].add_(1)
    return x.view_as(x)


def _write_and_read(x: torch.Tensor) -> torch.Tensor:
    alias = x[:, 1:]
    x.add_(1)
    return torch.cat([alias, x[:, :1]], 1)


def written(function: Callable[..., Any]) -> Make:
    """A layer whose output the next one writes."""
    return lambda _: [nn.Linear(WIDTH, WIDTH), Function(function)]


def after(maker: Callable[..., Any], then: Callable[..., Any]) -> Make:
    """A layer whose output has strides of its own, and one that depends on them."""
    return lambda _: [Function(maker), Function(then)]


ORDINARY: dict[str, Make] = {
    "linear": one(lambda: nn.Linear(WIDTH, WIDTH)),
    "tanh": one(nn.Tanh),
    "gelu": one(nn.GELU),
    "norm": one(lambda: nn.LayerNorm(WIDTH)),
    "group norm": one(lambda: nn.GroupNorm(2, WIDTH)),
    "batch norm": one(Batched),
    "convolution": one(Convolution),
    "embedding": one(Embedding),
    "mlp": one(lambda: nn.Sequential(nn.Linear(WIDTH, 7), nn.ReLU(inplace=True), nn.Linear(7, WIDTH))),
    "nested": one(
        lambda: nn.Sequential(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2)), nn.Tanh(), nn.Identity())
    ),
    "attention": lambda _: over_time(Attending(), nn.LayerNorm(WIDTH)),
    "gru": lambda _: over_time(Recurrent(nn.GRU)),
    "lstm": lambda _: over_time(Recurrent(nn.LSTM), Recurrent(nn.LSTM)),
    "frozen": one(lambda: frozen(nn.Linear(WIDTH, WIDTH))),
    "half frozen": one(half_frozen),
    "dropout": one(lambda: nn.Dropout(0.5)),
    "tied": tied,
    "same": same,
    "unused": one(Unused),
    "mixed dtype": one(Mixed),
    "written buffer": one(Centred),
    "counting buffer": one(Counting),
}

# Documented to be those of microbatches, whatever the whole batch gives: what is drawn, batch norm's statistics,
# and estimates that each forward improves.
BY_MICROBATCH = frozenset({"dropout", "nested", "checkpoint, dropout", "batch norm", "spectral norm"})
# A norm of two numbers is nearly the sign of their difference, so 16 bits decide its gradient.
STEEP = frozenset({"group norm"})
# Torch has no second derivative of these.
ONCE_DIFFERENTIABLE = frozenset({"attention", "checkpoint, reentrant"})
# What these give to later samples, outputs may not show.
WRITES_BUFFERS = frozenset({"written buffer", "counting buffer"})

UNUSUAL: dict[str, Make] = {
    "custom function": one(lambda: Function(_Steep.apply)),
    "checkpoint": one(lambda: Checkpointed(nn.Linear(WIDTH, WIDTH), nn.Tanh(), reentrant=False)),
    "checkpoint, reentrant": one(lambda: Checkpointed(nn.Linear(WIDTH, WIDTH), nn.Tanh(), reentrant=True)),
    "checkpoint, dropout": one(lambda: Checkpointed(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5), reentrant=False)),
    "forward hook": one(lambda: hooked("forward")),
    "hook before": one(lambda: hooked("before")),
    "backward hook": one(lambda: hooked("backward")),
    "tensor hook": one(TensorHook),
    "weight norm": one(lambda: parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))),
    "spectral norm": one(lambda: parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))),
    "column major": after(_column_major, torch.tanh),
    "by strides": after(_column_major_with_gaps, _by_strides),
    "view by strides": after(_chunk, _by_strides),
    "expanded": after(_expanded, _by_strides),
    "in place": written(lambda x: x.mul_(0.5)),
    "in place, relu": written(lambda x: torch.relu_(x)),
    "in place, view": written(_write_view),
    "in place, transposed": written(_write_transposed),
    "in place, alias": written(_write_and_read),
    "in place, column major": lambda _: [Function(_column_major), Function(lambda x: x.mul_(2)), nn.Tanh()],
}
