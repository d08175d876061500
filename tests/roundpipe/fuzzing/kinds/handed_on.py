"""Segments whose layers hand each other more than one tensor: aliases and views, and containers of many kinds."""

from __future__ import annotations

import collections
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils import _pytree

from fuzzing.kinds.layers import WIDTH, Building, Function, Make

# Aliases: a layer makes two of one, others may write one of them, a last one joins them.

FORKS: dict[str, Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]] = {
    "same": lambda h: (h, h),
    "view": lambda h: (h, h.view(-1).view(h.shape)),
    "transposed": lambda h: (h, h.t()),
    "row": lambda h: (h, h[:1]),
    "halves": lambda h: (h[:, : WIDTH // 2], h[:, WIDTH // 2 :]),
    "expanded": lambda h: (h, h[:, :1].expand(-1, WIDTH)),
    "detached": lambda h: (h, h.detach()),
    "clone": lambda h: (h, h.clone()),
}
# What a layer between them does to the first one. "read" writes nothing.
BETWEEN: dict[str, Callable[[torch.Tensor], Any]] = {
    "read": lambda h: h * 0.5 + 1,
    "write": lambda h: h.mul_(0.5).add_(1),
    "write view": lambda h: h[:, :1].add_(1),
    "relu": nn.functional.leaky_relu_,
}
WRITES = frozenset(BETWEEN) - {"read"}


class Fork(nn.Module):
    """Makes an alias of its output."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.linear, self.kind = nn.Linear(WIDTH, WIDTH), kind

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return FORKS[self.kind](self.linear(x))


class Between(nn.Module):
    """Works on the first of two, and hands both on."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, pair: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        h, other = pair
        done = BETWEEN[self.kind](h)
        return (h if self.kind == "write view" else done), other


def _joined(pair: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    h, other = pair
    if h.shape[1] != WIDTH:
        return torch.cat([h, other], 1)
    if other.shape == (WIDTH, len(h)):
        other = other.t()
    return h + other.sum(1, keepdim=True) + other[:1].mean()


def pair(fork: str, between: str) -> Make:
    """Three layers: a fork, one that works on the first, and one that joins."""
    return lambda _: [Fork(fork), Between(between), Function(_joined)]


# Containers: a layer packs its tensor, others work on what is in it, a last one unpacks.


class Named(NamedTuple):
    """A named tuple, with things that are not tensors."""

    h: torch.Tensor
    scale: int
    words: str
    nothing: None = None


@dataclass
class Fields:
    """A dataclass with a nested dict."""

    h: torch.Tensor
    more: dict[str, Any]


class AttrDict(dict[str, Any]):
    """A dict whose items are attributes."""

    __getattr__ = dict.__getitem__


class Listed(list[Any]):
    """A list of its own class: no registered tree."""


class Own:
    """Holds a tensor: no registered tree."""

    def __init__(self, h: torch.Tensor) -> None:
        self.h = h


class Registered(Own):
    """Holds a tensor, and torch's pytree knows it."""


class Settings:
    """Holds no tensor."""

    def __init__(self, scale: float) -> None:
        self.scale = scale


_pytree.register_pytree_node(
    Registered, lambda own: ([own.h], None), lambda leaves, _: Registered(next(iter(leaves)))
)
SETTINGS = Settings(0.5)


class Box(NamedTuple):
    """How a container is made of a tensor, and what is taken out."""

    pack: Callable[[torch.Tensor], Any]
    unpack: Callable[[Any], torch.Tensor]


TREES: dict[str, Box] = {
    "dict": Box(lambda h: {"h": h, "n": 2, "s": "words", "none": None, "yes": True}, lambda box: box["h"]),
    "tuple": Box(lambda h: (None, h, 3, ("deep", [h.detach()])), lambda box: box[1] + box[3][1][0]),
    "list": Box(lambda h: [h, h.mean(), None], lambda box: box[0] * box[1]),
    "empty": Box(lambda h: [{}, (), h, []], lambda box: box[2]),
    "namedtuple": Box(lambda h: Named(h, 2, "words"), lambda box: box.h * box.scale),
    "dataclass": Box(lambda h: Fields(h, {"k": [h + 1, None]}), lambda box: box.h + box.more["k"][0]),
    "OrderedDict": Box(lambda h: collections.OrderedDict(z=h, a=h * 2), lambda box: box["z"] + box["a"]),
    "defaultdict": Box(lambda h: collections.defaultdict(list, h=h), lambda box: box["h"]),
    "deque": Box(lambda h: collections.deque([h, 1]), lambda box: box[0]),
    "integers": Box(lambda h: {"h": h, "ids": (h > 0).long()}, lambda box: box["h"] * box["ids"]),
    "size": Box(lambda h: (h, h.shape), lambda box: box[0].view(box[1])),
    "registered": Box(Registered, lambda box: box.h),
    "AttrDict": Box(lambda h: AttrDict(h=h), lambda box: box.h),
    "UserDict": Box(lambda h: collections.UserDict(h=h), lambda box: box["h"]),
    "settings": Box(lambda h: (h, SETTINGS), lambda box: box[0] * box[1].scale),
}
OBJECTS: dict[str, Box] = {
    "UserList": Box(lambda h: collections.UserList([h]), lambda box: box[0]),
    "list of its own": Box(lambda h: Listed([h]), lambda box: box[0]),
    "SimpleNamespace": Box(lambda h: SimpleNamespace(h=h), lambda box: box.h),
    "own class": Box(Own, lambda box: box.h),
    "object in a dict": Box(lambda h: {"deep": [Own(h)], "x": h.detach()}, lambda box: box["deep"][0].h),
    "closure": Box(lambda h: lambda: h, lambda box: box()),
}
BOXES = {**TREES, **OBJECTS}


class Pack(nn.Module):
    """Puts its output into a container."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.linear, self.kind = nn.Linear(WIDTH, WIDTH), kind

    def forward(self, x: torch.Tensor) -> Any:
        return BOXES[self.kind].pack(self.linear(x))


class Act(nn.Module):
    """Takes the tensor out, and packs what it makes of it."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.linear, self.kind = nn.Linear(WIDTH, WIDTH), kind

    def forward(self, box: Any) -> Any:
        return BOXES[self.kind].pack(self.linear(BOXES[self.kind].unpack(box)).tanh())


class Unpack(nn.Module):
    """Takes the tensor out."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, box: Any) -> torch.Tensor:
        return BOXES[self.kind].unpack(box)


def box(kind: str) -> Make:
    """Three layers that hand on a container."""

    def make(_: Building) -> list[nn.Module]:
        return [Pack(kind), Act(kind), Unpack(kind)]

    return make


HANDED: dict[str, Make] = {
    **{f"alias {fork}, {between}": pair(fork, between) for fork in FORKS for between in BETWEEN},
    **{f"box {kind}": box(kind) for kind in BOXES},
}
# Written aliases may be refused; only a clone is no alias. Objects may be, whose tensors nobody finds.
REFUSABLE_HANDED = frozenset(
    {
        *(f"alias {fork}, {between}" for fork in FORKS for between in WRITES if fork != "clone"),
        *(f"box {kind}" for kind in OBJECTS),
    }
)
