"""Random modules that are no rows: their forward turns, folds and mixes dimensions between calls of submodules."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import nn

WIDTH = 4
# Of which two samples seldom have the same ids: parts that get equal samples show little.
VOCABULARY = 101
HEADS = 2
# The order of dimensions before the width: (batch, time), (time, batch), either folded into one, or batch alone.
Layout = Literal["bt", "tb", "(bt)", "(tb)", "b", "(bh)t"]

# What the model's own forward does on the host, and to which layout it leads.
TURNS: dict[str, dict[Layout, Layout]] = {
    "turn": {"bt": "tb", "tb": "bt"},
    "fold": {"bt": "(bt)", "tb": "(tb)"},
    "unfold": {"(bt)": "bt", "(tb)": "tb"},
    "split heads": {"bt": "(bh)t"},
    "join heads": {"(bh)t": "bt"},
    "last": {"bt": "b", "tb": "b"},
    "mean": {"bt": "b", "tb": "b"},
    "repeat": {"b": "bt"},
}


class Stats(nn.Linear):
    """Subtracts the mean over its first dimension, as a loss over a whole batch would."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        return y - y.mean(0, keepdim=True)


class Cumulative(nn.Linear):
    """Adds up along its first dimension, in order."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).cumsum(0) / len(x)


class Similar(nn.Linear):
    """Compares the samples of a batch with each other."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        return torch.softmax(y.flatten(1) @ y.flatten(1).T, 1) @ y.flatten(1) if y.dim() == 2 else y


class Rolled(nn.Linear):
    """Gives each sample its neighbour's."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).roll(1, 0)


class Gathered(nn.Linear):
    """Takes some rows more than once."""

    def forward(self, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return super().forward(x)[rows]


class Total(nn.Linear):
    """Returns one number: a sum, a norm, or a mean."""

    def __init__(self, kind: str) -> None:
        super().__init__(WIDTH, WIDTH)
        self.kind = kind

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        return getattr(y, self.kind)()


class Sized(nn.Linear):
    """Returns numbers that are no tensors: those of its rows, too."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, int, torch.Size]:
        y = super().forward(x)
        return y, len(x), y.shape


class Bias(nn.Module):
    """Returns a table, whatever the batch: (time, width), or of the first dimension's size."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(64, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.table[: x.shape[-2]]


class Positions(nn.Embedding):
    """Embeds the numbers 0 to n."""

    def __init__(self) -> None:
        super().__init__(16, WIDTH)


class Masked(nn.Linear):
    """Takes a mask of (1, time, 1) or none, by keyword, and words that it ignores."""

    def forward(self, x: torch.Tensor, *, mask: torch.Tensor | None = None, words: str = "") -> torch.Tensor:
        del words
        y = super().forward(x)
        return y if mask is None else y.masked_fill(mask, 0.0)


class Dict(nn.Linear):
    """Returns a dict with things that are not tensors."""

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        return {"y": super().forward(x), "n": 2, "none": None}


class Two(nn.Bilinear):
    """Takes two tensors, the second one of another length."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return super().forward(x, other.mean(1, keepdim=True).expand_as(x).contiguous())


class Seq2Seq(nn.Module):
    """The second recurrent layer begins with the states of the first."""

    def __init__(self, *, first: bool, both: bool) -> None:
        super().__init__()
        options: dict[str, Any] = {"num_layers": 2, "batch_first": first, "bidirectional": both}
        self.first = nn.LSTM(WIDTH, WIDTH, **options)
        self.second = nn.LSTM(WIDTH, WIDTH, **options)
        self.join = nn.Linear(WIDTH * (1 + both), WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        _, states = self.first(x)
        return self.join(self.second(x, states)[0])


class LastState(nn.Module):
    """The recurrent layer's last states, added to its output."""

    def __init__(self, *, first: bool) -> None:
        super().__init__()
        self.first, self.gru = first, nn.GRU(WIDTH, WIDTH, num_layers=2, batch_first=first)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, states = self.gru(x)
        return y + states[-1].unsqueeze(1 if self.first else 0)


class Padded(nn.Module):
    """Attends to itself, without what a mask of (batch, time) leaves out."""

    def __init__(self, *, first: bool) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(WIDTH, HEADS, batch_first=first)

    def forward(self, x: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
        return self.inner(x, x, x, key_padding_mask=padding, need_weights=False)[0]


class Cross(nn.Module):
    """Attends to a memory of another length, with a mask of (time, length)."""

    def __init__(self, *, first: bool) -> None:
        super().__init__()
        self.inner = nn.TransformerDecoderLayer(WIDTH, HEADS, 8, 0.0, batch_first=first)

    def forward(self, x: torch.Tensor, memory: torch.Tensor, *, mask: torch.Tensor) -> torch.Tensor:
        return self.inner(x, memory, memory_mask=mask)


class Attention(nn.Module):
    """Attends to itself; its weights are an output, too."""

    def __init__(self, *, first: bool) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(WIDTH, HEADS, batch_first=first)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, weights = self.inner(x, x, x)
        return y + weights.mean()


def encoder(*, first: bool) -> nn.Module:
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 8, 0.0, batch_first=first)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


Make = Callable[[bool], nn.Module]
# Submodules that take any layout; `first`: whether the batch comes first.
ANYWHERE: dict[str, Make] = {
    "linear": lambda _: nn.Linear(WIDTH, WIDTH),
    "row": lambda _: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)),
    "norm": lambda _: nn.LayerNorm(WIDTH),
    "bias": lambda _: Bias(),
    "dict": lambda _: Dict(WIDTH, WIDTH),
    "words": lambda _: Masked(WIDTH, WIDTH),
    "statistics": lambda _: Stats(WIDTH, WIDTH),
    "cumulative": lambda _: Cumulative(WIDTH, WIDTH),
    "list": lambda _: nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(2)]),
    "batch norm": lambda _: nn.BatchNorm1d(WIDTH),
    "in place": lambda _: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True)),
    "tied": lambda _: nn.Linear(WIDTH, WIDTH, bias=False),
    "scale": lambda _: nn.ParameterList([torch.ones(WIDTH)]),
    "rolled": lambda _: Rolled(WIDTH, WIDTH),
    "gathered": lambda _: Gathered(WIDTH, WIDTH),
    "sum": lambda _: Total("sum"),
    "norm of all": lambda _: Total("norm"),
    "mean of all": lambda _: Total("mean"),
    "sized": lambda _: Sized(WIDTH, WIDTH),
}
# Those that need a sequence and a batch.
SEQUENCES: dict[str, Make] = {
    "gru": lambda first: nn.GRU(WIDTH, WIDTH, batch_first=first),
    "lstm both ways": lambda first: nn.LSTM(WIDTH, WIDTH // 2, batch_first=first, bidirectional=True),
    "states handed on": lambda first: Seq2Seq(first=first, both=False),
    "states both ways": lambda first: Seq2Seq(first=first, both=True),
    "last state": lambda first: LastState(first=first),
    "attention": lambda first: Attention(first=first),
    "encoder": lambda first: encoder(first=first),
    "padded": lambda first: Padded(first=first),
    "cross": lambda first: Cross(first=first),
    "masked": lambda _: Masked(WIDTH, WIDTH),
    "positions": lambda _: Positions(),
}
BATCH_FIRST: dict[str, Make] = {
    "convolution": lambda _: nn.Conv1d(WIDTH, WIDTH, 3, padding=1),
    "two": lambda _: Two(),
    "cell": lambda _: nn.GRUCell(WIDTH, WIDTH),
    "packed": lambda _: nn.GRU(WIDTH, WIDTH, batch_first=True),
    "image": lambda _: nn.Conv2d(1, 1, 3, padding=1),
}
SAMPLES: dict[str, Make] = {"similarity": lambda _: Similar(WIDTH, WIDTH)}
MODULES = {**ANYWHERE, **SEQUENCES, **BATCH_FIRST, **SAMPLES}


def _module(step: str, layout: Layout) -> nn.Module:
    """The module of a step. One that is swapped takes the batch to be second where it is first."""
    first = layout in ("bt", "b")
    return MODULES[SWAPPED[step]](not first) if step in SWAPPED else MODULES[step](first)


# Those that may as well take time for the batch, and the batch for time.
SWAPPED = {f"{name}, swapped": name for name in ("gru", "states both ways", "last state", "attention", "encoder")}


def fits(layout: Layout) -> list[str]:
    """Names of steps that work on this layout."""
    names = [turn for turn, ways in TURNS.items() if layout in ways]
    if layout == "(bh)t":
        return [*names, "scores"]
    names += ANYWHERE
    names += [*SEQUENCES, *SWAPPED] if layout in ("bt", "tb") else []
    names += BATCH_FIRST if layout == "bt" else {}
    names += SAMPLES if layout == "b" else {}
    return names


def draw_steps(chance: random.Random, most: int) -> tuple[str, ...]:
    """A random forward. It begins in (batch, time, width)."""
    layout: Layout = "bt"
    steps: list[str] = []
    for _ in range(chance.randint(2, most)):
        names = fits(layout)
        turns = [name for name in names if name in TURNS]
        step = chance.choice(turns) if turns and chance.random() < 0.35 else chance.choice(names)
        steps.append(step)
        layout = TURNS[step][layout] if step in TURNS else layout
    if layout == "(bh)t":
        steps.append("join heads")
    return tuple(steps)


def is_valid(steps: tuple[str, ...]) -> bool:
    """Whether each step fits what the ones before have made."""
    layout: Layout = "bt"
    for step in steps:
        if step not in fits(layout):
            return False
        layout = TURNS[step][layout] if step in TURNS else layout
    return layout != "(bh)t"


class Scores(nn.Module):
    """Works on (batch * heads, time, width / heads), as Bloom's biases do."""

    def __init__(self) -> None:
        super().__init__()
        self.slopes = nn.Parameter(torch.linspace(0.5, 1.5, HEADS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.slopes.repeat(len(x) // HEADS)[:, None, None]


class Apart(nn.Module):
    """Runs its steps one after another; `start`: ``"numbers"``, ``"ids"``, or ``"tied ids"``."""

    def __init__(self, steps: tuple[str, ...], start: str) -> None:
        super().__init__()
        self.steps, self.start = steps, start
        self.root = nn.Parameter(torch.randn(WIDTH))
        self.begin = nn.Linear(WIDTH, WIDTH) if start == "numbers" else nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleDict()
        layout: Layout = "bt"
        for place, step in enumerate(steps):
            if step in TURNS:
                layout = TURNS[step][layout]
            else:
                self.blocks[str(place)] = Scores() if step == "scores" else _module(step, layout)
        tied = [block for place, block in self.blocks.items() if steps[int(place)] == "tied"]
        for block in tied[1:]:
            block.weight = tied[0].weight
        self.end = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if start == "tied ids":
            self.end.weight = self.begin.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = len(x)
        h, layout = self.begin(x) * self.root, "bt"
        for place, step in enumerate(self.steps):
            if step in TURNS:
                h, layout = _turned(h, step, layout, rows), TURNS[step][layout]
            else:
                h = self._run(step, self.blocks[str(place)], h, layout)
        return self.end(h if layout != "tb" else h.transpose(0, 1))

    @staticmethod
    def _run(step: str, block: Any, h: torch.Tensor, layout: Layout) -> torch.Tensor:
        match step:
            case "gru" | "gru, swapped" | "lstm both ways":
                return block(h)[0]
            case "gathered":
                return block(h, torch.arange(len(h)) // 2) + h
            case "sum" | "norm of all" | "mean of all":
                return h * (1 + block(h).tanh())
            case "sized":
                y, rows, shape = block(h)
                return y.view(shape) / rows
            case "padded":
                rows, times = h.shape[:2] if layout == "bt" else h.shape[1::-1]
                return h + block(h, torch.arange(times)[None] > torch.arange(rows)[:, None] % times)
            case "cross":
                memory = h[:, :2] if layout == "bt" else h[:2]
                mask = torch.arange(h.shape[layout == "bt"])[:, None] + torch.arange(2) == 1
                return block(h, memory, mask=mask)
            case "cell":
                state = torch.zeros_like(h[:, 0])
                states = [state := block(h[:, time], state) for time in range(h.shape[1])]
                return torch.stack(states, 1)
            case "packed":
                lengths = torch.arange(len(h)) % h.shape[1] + 1
                packed = nn.utils.rnn.pack_padded_sequence(h, lengths, batch_first=True, enforce_sorted=False)
                padded = nn.utils.rnn.pad_packed_sequence(
                    block(packed)[0], batch_first=True, total_length=h.shape[1]
                )
                return h + padded[0]
            case "image":
                return block(h[:, None])[:, 0]
            case "bias":
                return h + block(h)
            case "dict":
                return block(h)["y"]
            case "words":
                return block(h, words="some")
            case "list":
                return block[1](block[0](h).tanh())
            case "scale":
                return h * block[0]
            case "batch norm":
                samples = h.flatten(0, -2)
                # Torch refuses statistics of one.
                return block(samples).view(h.shape) if len(samples) > 1 else h
            case "masked":
                mask = torch.arange(h.shape[1])[None, :, None] % 2 == 1
                return block(h, mask=mask if layout == "bt" else None)
            case "positions":
                places = block(torch.arange(h.shape[1 if layout == "bt" else 0]))
                return h + (places if layout == "bt" else places[:, None])
            case "convolution":
                return block(h.transpose(1, 2)).transpose(1, 2)
            case "two":
                return block(h, h[:, 1:].flip(1))
            case "in place":
                return block(h) + h
            case _:
                return block(h)


def _turned(h: torch.Tensor, step: str, layout: Layout, rows: int) -> torch.Tensor:
    match step:
        case "turn":
            return h.transpose(0, 1)
        case "fold":
            return h.flatten(0, 1)
        case "unfold":
            return h.unflatten(0, (rows, -1) if layout == "(bt)" else (-1, rows))
        case "split heads":
            return h.unflatten(-1, (HEADS, -1)).transpose(1, 2).flatten(0, 1)
        case "join heads":
            return h.unflatten(0, (rows, HEADS)).transpose(1, 2).flatten(-2)
        case "last":
            return h[:, -1] if layout == "bt" else h[-1]
        case "mean":
            return h.mean(1 if layout == "bt" else 0)
        case "repeat":
            return h[:, None].expand(-1, 3, -1)
        case _:
            raise AssertionError(step)
