"""What is trained: decoders on the standard library's sources, from scratch and tuned afterwards, a convnet."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from itertools import pairwise
from pydoc_data.topics import topics
from typing import Any

import torch
from decoder import Size, decoder
from torch import Tensor, nn
from torch.nn import functional

from late.corpus import Corpus, Text, hold_out, library_corpus

Batch = tuple[Tensor, Tensor]
_HELD_OUT_BATCHES = 8


@dataclass(frozen=True)
class Workload:
    """A model and its data. `make`: the model with the weights of a seed, on the CPU, a row of layers.

    `batch`: inputs and labels of a step of a seed, on the device; steps below zero are held out. `loss`: of
    outputs and labels, a mean over the batch. `steps`, `rate`: of a run, unless others are asked for.
    """

    name: str
    make: Callable[[int], nn.Sequential]
    batch: Callable[[int, int], Batch]
    loss: Callable[[Any, Tensor], Tensor]
    steps: int
    rate: float
    device: torch.device

    def held_out(self) -> list[Batch]:
        """The batches of all evaluations."""
        return [self.batch(0, -1 - index) for index in range(_HELD_OUT_BATCHES)]


@dataclass(frozen=True)
class _Decoder:
    """A decoder of bytes, and how it is trained."""

    size: Size
    batch: int
    sequence: int
    steps: int
    rate: float


_DECODERS = {
    "decoder-100m": _Decoder(Size(14, 768, 2048, 12, 12, 256, True, True, 1e4, head=64), 32, 256, 400, 1e-3),
    "decoder-1m": _Decoder(Size(4, 160, 448, 5, 5, 256, True, True, 1e4, head=32), 8, 64, 200, 1e-3),
}
# The decoder that is trained first, and the rate of its adapters.
_ADAPTED = {"lora": ("decoder-1m", 3e-3), "lora-100m": ("decoder-100m", 1e-3)}
_TRAINED_AT = {"decoder-1m": 2e-3, "decoder-100m": 5e-4}
WORKLOADS = (*_DECODERS, "finetune", *_ADAPTED, "convnet")


def workload(name: str, device: torch.device) -> Workload:
    """The workload of this name, its data on this device."""
    if name == "finetune" or name in _ADAPTED:
        return _tuned(name, device)
    if name == "convnet":
        return _convnet(device)
    return _decoder(name, device)


# Decoders


def _decoder(name: str, device: torch.device) -> Workload:
    kind = _DECODERS[name]
    batch = partial(_windows, _on(device, _sources()), kind)
    make = partial(decoder, kind.size, dtype=torch.float32)
    return Workload(name, make, batch, _next_byte, kind.steps, kind.rate, device)


@cache
def _sources() -> Corpus:
    return library_corpus()


def _on(device: torch.device, corpus: Corpus) -> tuple[Tensor, Tensor]:
    training, held_out = (torch.frombuffer(bytearray(text), dtype=torch.uint8) for text in _texts(corpus))
    return training.to(device), held_out.to(device)


def _texts(corpus: Corpus) -> tuple[bytes, bytes]:
    return corpus.training, corpus.held_out


def _windows(texts: tuple[Tensor, Tensor], kind: _Decoder, seed: int, step: int) -> Batch:
    text = texts[step < 0]
    generator = torch.Generator().manual_seed(1_000_003 * seed + step % 1_000_003)
    starts = torch.randint(len(text) - kind.sequence, (kind.batch,), generator=generator)
    places = starts[:, None] + torch.arange(kind.sequence + 1)
    found = text[places.to(text.device)].long()
    return found[:, :-1], found[:, 1:]


def _next_byte(logits: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


# A decoder that was trained on sources learns Python's manual: all of its weights, or adapters


class _Adapted(nn.Module):
    """A frozen linear layer plus a product of two narrow ones, as LoRA has it (Hu et al., 2021)."""

    def __init__(self, linear: nn.Linear, rank: int) -> None:
        super().__init__()
        self.linear = linear.requires_grad_(False)
        self.down = nn.Linear(linear.in_features, rank, bias=False)
        self.up = nn.Linear(rank, linear.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + 2 * self.up(self.down(x))


def _tuned(name: str, device: torch.device) -> Workload:
    manual = [Text(hashlib.sha256(text.encode()).hexdigest(), text.encode()) for text in topics.values()]
    trained, rate = _ADAPTED.get(name, ("decoder-1m", 1e-4))
    make = _adapted if name in _ADAPTED else _whole
    batch = partial(_windows, _on(device, hold_out(manual)), _DECODERS[trained])
    return Workload(name, partial(make, trained, device), batch, _next_byte, 200, rate, device)


def _whole(trained: str, device: torch.device, seed: int) -> nn.Sequential:
    del seed
    return copy.deepcopy(_trained(trained, device))


def _adapted(trained: str, device: torch.device, seed: int) -> nn.Sequential:
    model = copy.deepcopy(_trained(trained, device)).requires_grad_(False)
    torch.manual_seed(seed)
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear):
                setattr(module, name, _Adapted(child, 8))
    return model


@cache
def _trained(name: str, device: torch.device) -> nn.Sequential:
    """A decoder after some hundred plain steps on sources, on the CPU."""
    source = _decoder(name, device)
    model = source.make(0).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=_TRAINED_AT[name])
    for step in range(source.steps):
        inputs, labels = source.batch(99, step)
        source.loss(model(inputs), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.cpu()


# Images: ten smooth patterns, shifted, turned, faded and under noise

_CLASSES, _SIDE, _IMAGES = 10, 16, 64


def _convnet(device: torch.device) -> Workload:
    return Workload("convnet", _make_convnet, partial(_images, device), _which_pattern, 300, 8e-3, device)


def _make_convnet(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    widths = (1, 16, 32, 64)
    blocks = [
        nn.Sequential(nn.Conv2d(before, after, 3, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU())
        for before, after in pairwise(widths)
    ]
    pools = [nn.MaxPool2d(2), nn.MaxPool2d(2), nn.Flatten()]
    layers = [layer for pair in zip(blocks, pools, strict=True) for layer in pair]
    return nn.Sequential(*layers, nn.Linear(widths[-1] * (_SIDE // 4) ** 2, _CLASSES))


def _images(device: torch.device, seed: int, step: int) -> Batch:
    patterns = torch.randn(_CLASSES, 1, 4, 4, generator=torch.Generator().manual_seed(1))
    generator = torch.Generator().manual_seed(1_000_003 * (seed + 7) + step % 1_000_003)
    labels = torch.randint(_CLASSES, (_IMAGES,), generator=generator)
    smooth = functional.interpolate(patterns[labels], (_SIDE, _SIDE), mode="bicubic")
    angle = 0.4 * torch.randn(_IMAGES, generator=generator)
    shift = 0.25 * torch.randn(_IMAGES, 2, generator=generator)
    rows = torch.stack(
        [
            torch.stack([angle.cos(), -angle.sin(), shift[:, 0]], 1),
            torch.stack([angle.sin(), angle.cos(), shift[:, 1]], 1),
        ],
        1,
    )
    grid = functional.affine_grid(rows, [_IMAGES, 1, _SIDE, _SIDE], align_corners=False)
    moved = functional.grid_sample(smooth, grid, align_corners=False)
    contrast = 0.5 + torch.rand(_IMAGES, 1, 1, 1, generator=generator)
    noisy = contrast * moved + 1.2 * torch.randn(moved.shape, generator=generator)
    return noisy.to(device), labels.to(device)


def _which_pattern(scores: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(scores.float(), labels)
