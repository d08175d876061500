"""Models, calls and injected shortages that the tests of device memory share."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from plain import batch, gradients, square_error, weights
from roundpipe import (
    RoundPipe,
    RoundPipeRunConfig,
    Runtime,
    doing_recompute,
    get_recompute_data,
    save_for_recompute,
)
from rp_sched import Plan
from rp_transfer.cpu.backend import CpuDevice
from torch import nn

PLENTY = 1 << 30
MICROBATCHES = 3
SIZE = 7


class Remembering(nn.Module):
    """Saves what it decides in forward, and prepares more."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def prepare(self, x: torch.Tensor) -> torch.Tensor:
        return x.detach().argsort(1)

    def forward(self, x: torch.Tensor, prepared: torch.Tensor) -> torch.Tensor:
        if doing_recompute():
            (mask,) = get_recompute_data()
        else:
            mask = x.detach() > 0
            save_for_recompute(mask)
        return self.linear(x).gather(1, prepared) * (1 + mask)


class Tied(nn.Module):
    """Multiplies by another layer's weight."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ self.weight.T)


def varied(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """Written buffers, random numbers, saved decisions, a weight of two layers: (batch, 4) to (batch, 3)."""
    torch.manual_seed(0)
    first = nn.Linear(4, 4)
    layers = nn.Sequential(
        first, nn.BatchNorm1d(4), nn.Dropout(0.5), Remembering(), Tied(first.weight), nn.Linear(4, 3)
    )
    return layers.to(dtype)


LAYERS = 6
SINGLES = [range(layer, layer + 1) for layer in range(LAYERS)]


@dataclass(frozen=True)
class Kind:
    """A kind of call."""

    plan: Plan | None
    how: str = "forward_backward"
    grain: str = "stage"
    dtype: torch.dtype = torch.float32
    devices: int = 1
    is_async: bool = True

    @property
    def tolerance(self) -> float:
        """In 16 bits, gradients of a weight of two layers are rounded elsewhere if the layers are cut apart."""
        return 1e-6 if self.dtype is torch.float32 else 1e-2

    @property
    def trains(self) -> bool:
        return self.how not in ("inference", "loss")

    def config(self) -> RoundPipeRunConfig:
        return RoundPipeRunConfig(
            num_microbatch=MICROBATCHES,
            execute_plan=self.plan,
            recompute_grain=self.grain,
            merge_output=False if self.how == "packed" else None,
        )


EACH = tuple(range(m, m + 1) for m in range(MICROBATCHES))
KINDS = {
    "all fused": Kind(Plan(fused=range(LAYERS))),
    "16 bits, all fused": Kind(Plan(fused=range(LAYERS)), dtype=torch.bfloat16),
    "stages": Kind(Plan([range(1), range(1, 4)], range(4, 6), [range(2, 4), range(2)]), devices=2),
    "one layer a stage": Kind(Plan(SINGLES[:5], range(5, 6), SINGLES[4::-1]), devices=2),
    "recomputed by layer": Kind(Plan([range(3)], range(3, 6), [range(3)]), grain="layer"),
    "apart": Kind(Plan([range(6)], None, [range(6)]), how="forward"),
    "apart, in stages": Kind(
        Plan([range(2), range(2, 6)], None, [range(4, 6), range(4)]), how="forward", devices=2
    ),
    "divided": Kind(Plan([range(3)], range(3, 6), [range(3)], groups=EACH, backward_groups=EACH), devices=2),
    "packed": Kind(Plan([range(4), range(4, 6)], None, [range(3, 6), range(3)]), how="packed", devices=2),
    "inference": Kind(Plan([range(3), range(3, 6)]), how="inference"),
    "loss": Kind(Plan([range(3), range(3, 6)]), how="loss"),
    "planned": Kind(None, devices=2),
}

Found = dict[str, Any]


def call(model: RoundPipe, how: str, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """One call of a kind, with its backward; the loss."""
    if how == "inference":
        with torch.no_grad():
            return model(x).sum()
    if how == "loss":
        return model.loss((x,), None, y, square_error)
    if how == "forward_backward":
        return model.forward_backward((x,), None, y, square_error)
    outputs = model(x)
    if how == "packed":
        outputs.synchronize()
        outputs = torch.cat(list(outputs))
    loss = square_error(outputs, y)
    loss.backward()
    return loss.detach()


def training(kind: Kind, runtime: Runtime, *, calls: int = 2) -> Iterator[Found]:
    """Train, and yield what each call has led to."""
    layers = varied(kind.dtype)
    model = RoundPipe(layers, runtime=runtime, model_run_config=kind.config())
    optimizer = torch.optim.SGD(model.optim_parameters(), lr=0.1)
    x, y = (tensor.to(kind.dtype) for tensor in batch(SIZE))
    for number in range(calls):
        torch.manual_seed(number)
        x = x.detach().requires_grad_(kind.trains)
        loss = call(model, kind.how, x, y)
        found: Found = {"loss": loss, "input": x.grad}
        if kind.trains:
            model.step(optimizer.step, is_async=kind.is_async)
        model.synchronize()
        yield found | weights(layers) | gradients(layers)
        optimizer.zero_grad()
        model.zero_grad()


def held(runtime: Runtime) -> list[int]:
    """Bytes on the devices while nothing runs."""
    for lane in runtime.lanes:
        lane.settle()
    gc.collect()
    return [use.used_bytes for use in runtime.memory()]


@dataclass
class Trap:
    """Fails the nth allocation on a device and the `times - 1` after it."""

    nth: int
    times: int = 2
    error: Callable[[], BaseException] = field(default=lambda: torch.OutOfMemoryError("as arranged"))
    seen: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def check(self) -> None:
        with self.lock:
            self.seen += 1
            fails = self.nth <= self.seen < self.nth + self.times
        if fails:
            raise self.error()


@contextmanager
def trapped(monkeypatch: pytest.MonkeyPatch, trap: Trap) -> Iterator[None]:
    """All allocations on limited CPU devices, by streams and by torch's operations, pass the trap."""
    take = CpuDevice._count_new

    def checked(device: CpuDevice, nbytes: int) -> None:
        trap.check()
        take(device, nbytes)

    with monkeypatch.context() as patch:
        patch.setattr(CpuDevice, "_count_new", checked)
        yield
