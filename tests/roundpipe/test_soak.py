"""Hundreds of calls with random plans and faults end with the weights of those that succeeded; nothing grows."""

from __future__ import annotations

import ctypes
import gc
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from plain import assert_near, batch, plans, square_error, weights
from roundpipe import GradientsIncomplete, RoundPipe, RoundPipeRunConfig, Runtime, StepFailed
from rp_transfer import CpuBackend
from torch import nn

CALLS = 1000
LAYERS = 5
GROWTH_BYTES = 32 << 20
# A staging ring may still grow by a slot now and then: four for each device and way.
RING_SLOTS = 4 * 2 * 4


class Fault(Exception):
    """Injected."""


class Fuse:
    """Burns at one kind of place, and goes off there the `countdown`-th time."""

    def __init__(self) -> None:
        self.where, self.countdown, self.blown = "", 0, 0
        self._lock = threading.Lock()

    def __deepcopy__(self, memo: dict[int, Any]) -> Fuse:
        return self

    def burn(self, where: str) -> None:
        with self._lock:
            if where != self.where:
                return
            self.countdown -= 1
            if self.countdown != 0:
                return
            self.blown += 1
        raise Fault(where)


class _Burning(torch.autograd.Function):
    """Burns the fuse in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, fuse: Fuse) -> torch.Tensor:
        ctx.fuse = fuse
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.fuse.burn("backward")
        return grads[0], None


class Burning(nn.Module):
    """A linear layer with dropout that burns the fuse."""

    def __init__(self, wide: int, narrow: int, fuse: Fuse) -> None:
        super().__init__()
        self.linear, self.drop, self.fuse = nn.Linear(wide, narrow), nn.Dropout(0.1), fuse

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.fuse.burn("forward")
        return _Burning.apply(self.drop(self.linear(x)), self.fuse)


def row(fuse: Fuse) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Burning(wide, narrow, fuse) for wide, narrow in pairwise([4, *[5] * (LAYERS - 1), 3])))


@dataclass(frozen=True)
class Move:
    """One call and perhaps a step after it; `fault` is where something goes wrong in it, if anything does."""

    seed: int
    size: int
    microbatches: int
    plan: str
    steps: bool
    is_async: bool
    fault: str
    countdown: int


PLACES = ["forward", "backward", "loss", "step", "upload", "download", "allocation"]


def draw(seed: int) -> Move:
    chance = random.Random(seed)
    microbatches = chance.randint(1, 4)
    return Move(
        seed=seed,
        size=chance.randint(microbatches, 6),
        microbatches=microbatches,
        plan=chance.choice(list(plans(LAYERS, microbatches))),
        steps=chance.random() < 0.7,
        is_async=chance.random() < 0.7,
        fault=chance.choice(PLACES) if chance.random() < 0.2 else "",
        countdown=chance.randint(1, 6),
    )


class Soak:
    """One model on a runtime whose copies and allocations burn the fuse, too."""

    def __init__(self, runtime: Runtime, fuse: Fuse) -> None:
        self.layers, self.fuse = row(fuse), fuse
        self.model = RoundPipe(self.layers, runtime=runtime)
        self.optimizer = torch.optim.SGD(self.model.optim_parameters(), lr=1e-3)

    def make(self, move: Move) -> bool:
        """Make the move; returns whether all of it succeeded. If not, its gradients are dropped."""
        if move.fault:
            # So that nothing of the move before goes wrong.
            self.model.synchronize()
        self.fuse.where, self.fuse.countdown = move.fault, move.countdown
        blown = self.fuse.blown
        try:
            self._call(move)
            if move.fault:
                # So that what goes wrong late goes wrong in this move.
                self.model.synchronize()
            if move.steps:
                self.model.step(self._step, is_async=move.is_async)
            if move.fault:
                self.model.synchronize()
        except Fault:
            assert self.fuse.blown == blown + 1
            self._check_refused()
            self.drop()
            return False
        finally:
            self.fuse.where = ""
        return True

    def drop(self) -> None:
        """Go on without the gradients there are."""
        self.model.reset()
        self.model.synchronize()

    def _call(self, move: Move) -> None:
        x, y = batch(move.size, move.seed)
        config = RoundPipeRunConfig(
            num_microbatch=move.microbatches, execute_plan=plans(LAYERS, move.microbatches)[move.plan]
        )
        torch.manual_seed(move.seed)
        self.model.forward_backward((x,), None, y, self._loss, run_config=config)

    def _loss(self, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        self.fuse.burn("loss")
        return square_error(outputs, labels)

    def _step(self) -> None:
        self.fuse.burn("step")
        self.optimizer.step()
        self.optimizer.zero_grad()

    def _check_refused(self) -> None:
        # A step that failed, or gradients of which part is missing, are not trained on.
        try:
            self._call(draw(0))
        except (StepFailed, GradientsIncomplete):
            return
        # The fault came before any gradient was begun.


def burning(fuse: Fuse, function: Callable[..., Any], where: str) -> Callable[..., Any]:
    def burn_first(*args: Any, **kwargs: Any) -> Any:
        fuse.burn(where)
        return function(*args, **kwargs)

    return burn_first


def wire(runtime: Runtime, fuse: Fuse) -> None:
    """Let the devices' copies and allocations burn the fuse."""
    assert isinstance(runtime.backend, CpuBackend)
    for device in runtime.backend.devices:
        up, down = device.weights_in, device.gradients_out
        up.copy_part = burning(fuse, up.copy_part, "upload")  # type: ignore[method-assign]
        down.copy_part = burning(fuse, down.copy_part, "download")  # type: ignore[method-assign]
        device.empty = burning(fuse, device.empty, "allocation")  # type: ignore[method-assign]


def resident_bytes() -> int:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) * 1024


def tensors() -> int:
    return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())


def counted(runtime: Runtime) -> tuple[int, int, int]:
    """Tensors, threads and resident bytes while nothing runs."""
    for lane in runtime.lanes:
        lane.device.synchronize()
        lane.retainer.flush()
    resident = resident_bytes()
    return tensors(), threading.active_count(), resident


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("samples_first")
@pytest.mark.parametrize("calls", [CALLS // 5, pytest.param(CALLS, marks=pytest.mark.nightly)])
def test_calls_with_faults_end_where_those_that_succeeded_do(calls: int) -> None:
    moves, fuse, warm = [draw(seed) for seed in range(1, calls + 1)], Fuse(), calls // 2
    with Runtime("cpu:4") as runtime:
        wire(runtime, fuse)
        soak = Soak(runtime, fuse)
        succeeded = [soak.make(move) for move in moves[:warm]]
        soak.model.synchronize()
        before = counted(runtime)
        succeeded += [soak.make(move) for move in moves[warm:]]
        soak.model.synchronize()
        after = counted(runtime)
        found = weights(soak.layers)
    with Runtime("cpu:4") as runtime:
        reference = Soak(runtime, Fuse())
        for index, (move, made) in enumerate(zip(moves, succeeded, strict=True)):
            if index == warm:
                reference.model.synchronize()
            reference.make(replace(move, countdown=0)) if made else reference.drop()
        reference.model.synchronize()
        assert_near(found, weights(reference.layers), 1e-6)
    blown = {move.fault for move, made in zip(moves, succeeded, strict=True) if not made}
    assert blown == set(PLACES)
    assert succeeded.count(False) >= calls // 20
    assert after[0] <= before[0] + RING_SLOTS
    assert after[1] == before[1]
    assert after[2] <= before[2] + GROWTH_BYTES


@pytest.mark.cuda
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("samples_first")
def test_a_thousand_calls_on_all_gpus_end_where_those_on_one_do() -> None:
    """Few microbatches, tiny layers, plans that change: whatever is not waited for shows in some of them."""
    moves = [replace(draw(seed), fault="") for seed in range(1, CALLS + 1)]
    found = []
    for devices in ("cuda", "cuda:0"):
        with Runtime(devices) as runtime:
            soak = Soak(runtime, Fuse())
            assert all(map(soak.make, moves))
            soak.model.synchronize()
            found.append(weights(soak.layers))
    assert_near(found[0], found[1], 1e-6)
