"""Where a row begins and ends: forms of inputs, outputs and labels, and the loss."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy
import torch
from torch import nn

from fuzzing.kinds.handed_on import AttrDict, Fields, Listed
from fuzzing.kinds.layers import WIDTH

Call = tuple[tuple[Any, ...], dict[str, Any]]
OUT = 3


class Start(NamedTuple):
    """How a call's arguments are made of two tensors of as many rows, and what the first layer makes of them."""

    pack: Callable[[torch.Tensor, torch.Tensor], Call]
    take: Callable[..., torch.Tensor]


def _array(z: torch.Tensor) -> numpy.ndarray[Any, Any]:
    return z.detach().double().numpy()


def _apart(x: torch.Tensor) -> torch.Tensor:
    """The same numbers, with other strides."""
    return torch.stack([x, x], 2)[..., 0]


TABLE = torch.linspace(-1, 1, WIDTH)[None]
STARTS: dict[str, Start] = {
    "tensor": Start(lambda x, _: ((x,), {}), lambda x: x),
    "keyword": Start(lambda x, _: ((), {"x": x}), lambda x: x),
    "two": Start(lambda x, z: ((x,), {"other": z}), lambda x, other: x + other),
    "constants": Start(lambda x, _: ((x, 3, None, "words"), {}), lambda x, n, *_: x * n),
    "tree": Start(lambda x, z: (({"x": x, "more": [z, None, 2.0]},), {}), lambda t: t["x"] + t["more"][0]),
    "fields": Start(lambda x, z: ((Fields(x, {"k": z}),), {}), lambda t: t.h * t.more["k"]),
    "broadcast": Start(lambda x, _: ((x,), {"other": TABLE.to(x.dtype)}), lambda x, other: x + other),
    "scalar": Start(lambda x, _: ((x, torch.tensor(2.0, dtype=x.dtype)), {}), lambda x, two: x * two),
    "same twice": Start(lambda x, _: ((x, x), {}), lambda x, y: x + y),
    "strides": Start(lambda x, _: ((_apart(x),), {}), lambda x: x * (0.5 if x.is_contiguous() else 1.5)),
    "expanded": Start(lambda x, z: ((x, z[:, :1].expand(-1, WIDTH)), {}), lambda x, z: x + z),
    "array": Start(
        lambda x, z: ((x,), {"other": _array(z)}), lambda x, other: x + torch.as_tensor(other).to(x.dtype)
    ),
    "UserDict": Start(lambda x, z: ((x, collections.UserDict(z=z)), {}), lambda x, t: x + t["z"]),
    "AttrDict": Start(lambda x, z: ((AttrDict(x=x, z=z),), {}), lambda t: t.x + t.z),
}


class Starting(nn.Module):
    """The first layer."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.linear, self.form = nn.Linear(WIDTH, WIDTH), form

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self.linear(STARTS[self.form].take(*args, **kwargs))


ENDS: dict[str, Callable[[torch.Tensor], Any]] = {
    "tensor": lambda y: y,
    "dict": lambda y: {"y": y, "n": 3, "none": None, "words": "same"},
    "same twice": lambda y: (y, y),
    "sums": lambda y: [y, y.sum(1)],
    "view": lambda y: (y, y[:, :1]),
    "transposed": lambda y: y.t().contiguous().t(),
    "expanded": lambda y: (y, y[:, :1].expand(-1, OUT)),
    "mean": lambda y: {"y": y, "mean": y.mean()},
    "fields": lambda y: Fields(y, {"k": (y > 0).long()}),
    "AttrDict": lambda y: AttrDict(y=y),
}


class Ending(nn.Module):
    """The last layer."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.linear, self.form = nn.Linear(WIDTH, OUT), form

    def forward(self, x: torch.Tensor) -> Any:
        return ENDS[self.form](self.linear(x))


class Label(NamedTuple):
    """How a label is made of (rows, OUT), and what the loss takes out of it."""

    pack: Callable[[torch.Tensor], Any]
    take: Callable[[Any], Any]


LABELS: dict[str, Label] = {
    "tensor": Label(lambda y: y, lambda label: label),
    "none": Label(lambda _: None, lambda _: 0.0),
    "dict": Label(lambda y: {"y": y, "n": 2, "none": None}, lambda label: label["y"]),
    "array": Label(_array, torch.as_tensor),
    "column of an array": Label(lambda y: _array(y)[:, :1], torch.as_tensor),
    "dict of arrays": Label(lambda y: {"y": _array(y), "n": 2}, lambda label: torch.as_tensor(label["y"])),
    "list of arrays": Label(lambda y: [_array(y), None], lambda label: torch.as_tensor(label[0])),
    "integers": Label(lambda y: (y > 0).long(), lambda label: label),
    "list": Label(lambda y: [y, y * 2], lambda label: label[0] + label[1]),
    "words": Label(lambda y: (y, "words", b"bytes", 3), lambda label: label[0]),
    "UserDict": Label(lambda y: collections.UserDict(y=y), lambda label: label["y"]),
    "AttrDict": Label(lambda y: AttrDict(y=y), lambda label: label.y),
    "list of its own": Label(lambda y: Listed(list(y)), lambda label: torch.stack(list(label))),
}
# A list that nobody knows how to split.
REFUSABLE_LABELS = frozenset({"list of its own"})


def tensors_in(tree: Any) -> Iterable[torch.Tensor]:
    """All floating tensors of outputs, in order. The slow truth, so not by any library's tree."""
    match tree:
        case torch.Tensor():
            yield from [tree] if tree.is_floating_point() else []
        case Fields():
            yield from tensors_in([tree.h, tree.more])
        case dict() | collections.UserDict():
            yield from tensors_in(list(tree.values()))
        case list() | tuple():
            for one in tree:
                yield from tensors_in(one)
        case _:
            pass


def loss_of(outputs: Any, label: Any, form: str) -> list[torch.Tensor]:
    """Losses of the output, and of each that is beside it; their sums over microbatches are those of the batch.

    A 0-dimensional output is a mean over rows, so it is not summed.
    """
    first, *others = tensors_in(outputs)
    label = LABELS[form].take(label)
    label = label.to(first.dtype) if isinstance(label, torch.Tensor) else label
    beside = [other.square().sum() * 0.1 for other in others if other.dim()]
    return [(first - label).square().sum(), *beside]
