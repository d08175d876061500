"""What ``compute="auto"`` is in a model's calls: bf16 or FP8, decided once, by what products take on a device."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from rp_optim.jobs import Outcome
from rp_packing import (
    Decision,
    Fp8,
    LinearShape,
    candidates,
    choose,
    decide,
    fp8_refusal,
    run_linear,
    shapes_of,
    time_products,
)
from rp_transfer import is_out_of_memory
from torch import nn

from rp_engine.device.compiling import Eager
from rp_engine.device.memory.call_size import CallSize
from rp_engine.errors import in_words
from rp_engine.peers.peers import Peers
from rp_engine.planning.fp8_layers import has_own_forward
from rp_engine.runtime.lane import Lane
from rp_engine.runtime.launcher import wait_until
from rp_engine.runtime.runtime import Runtime
from rp_engine.settings.run_config import Compute

_LOG = logging.getLogger(__name__)
# With more rows than this, what products take grows as they do; with less than that nothing is learnt.
_MOST_ROWS, _LEAST_ROWS = 1 << 14, 1 << 10
# How long each product is repeated for, and how often at most.
_REPEATED_MS, _MOST_RUNS = 20.0, 10
_MOST_VARIANTS = 1 << 16


@dataclass(frozen=True, slots=True)
class ProductTrial:
    """Products to be measured on a lane, by each of these recipes, of which None is bf16.

    `rows`, `calls`: see `rp_packing.time_products`.
    """

    lane: Lane
    shapes: Sequence[LinearShape]
    recipes: Sequence[Fp8 | None]
    rows: int
    calls: int


_Times = Mapping[Fp8 | None, float]
# What the products of a trial take, by recipe, in milliseconds. Raises `Unmeasured`.
Measured = Callable[[ProductTrial], _Times]


class Unmeasured(Exception):
    """What products take cannot be told; the message says why, for `Decision.reason`."""


class AutoCompute:
    """Decides for one model. `decision`: None until its first call that trains, or a checkpoint of one, has it.

    `measure`: tells what products take; what is put in its place before the decision is used instead.
    """

    def __init__(self, name: str, runtime: Runtime, compiler: Eager) -> None:
        self._name = name
        self._runtime = runtime
        self.decision: Decision | None = None
        self._decided: Compute | Fp8 = "bf16"
        self._reason = ""
        self.measure: Measured = partial(measured, compiler)

    def resolved(self, compute: Compute | Fp8 | None) -> Compute | Fp8 | None:
        """Return what a call that is told `compute` does; before the decision ``"auto"`` is bf16."""
        return self._decided if compute == "auto" else compute

    def decide(self, modules: Sequence[nn.Module], size: CallSize, refused: str | None, peers: Peers) -> Decision:
        """Decide, before a call of this size; the same on all machines, by what the first of them has measured.

        `refused`: why this call could not multiply in FP8, in words; None if it could.
        """
        kind = f"choosing how linear layers of model {self._name!r} multiply"
        with peers.telling(kind):
            where = "" if peers.is_alone else f"on machine {peers.rank} "
            own = self._own(modules, size, refused, where, measures=peers.rank == 0)
        told = peers.agree(kind, dict, own.encoded())
        first, *others = map(Decision.decoded, told)
        # Those beside the first have at most reasons against FP8.
        against = [one for one in others if one.reason and first.recipe]
        return self.note((against or [first])[0])

    def note(self, decision: Decision) -> Decision:
        """Calls compute so from now on. Returns the decision."""
        if decision != self.decision:
            _LOG.info("model %r: %s", self._name, decision)
        self.decision, self._decided, self._reason = decision, decision.recipe or "bf16", decision.reason
        return decision

    def amend(self, recipe: Fp8, because: str) -> None:
        """Change the recipe that was decided for. `because`: added to the reason."""
        self.note(Decision(recipe, self._reason + because))

    def refusal(self) -> str | None:
        """Return why some device cannot multiply in FP8, in words; None if all can."""
        return next(filter(None, (fp8_refusal(lane.device.torch_device) for lane in self._runtime.lanes)), None)

    def _own(
        self, modules: Sequence[nn.Module], size: CallSize, refused: str | None, where: str, *, measures: bool
    ) -> Decision:
        choice = choose(modules, Fp8(), has_own_forward)
        if (reason := refused or self.refusal()) is not None:
            return Decision(None, f"bf16, since {where}{reason}")
        if not choice.count:
            return Decision(None, f"bf16, since {choice}")
        if not measures:
            return Decision(None, "")
        try:
            times, rows = self._times(shapes_of(modules, choice), size)
        except Unmeasured as error:
            return Decision(None, f"bf16, since {error}")
        return decide(times, f"{choice.count} linear layers, {rows} rows")

    def _times(self, shapes: Sequence[LinearShape], size: CallSize) -> tuple[_Times, int]:
        """Return what products take, and for how many rows: fewer where the device has no memory for all."""
        lane, rows = self._runtime.lanes[0], min(size.rows, _MOST_ROWS)
        recipes = candidates(trains_weights=any(one.is_trained for one in shapes))
        while True:
            try:
                return self.measure(ProductTrial(lane, shapes, recipes, rows, size.microbatches)), rows
            except Unmeasured:
                raise
            except Exception as error:
                # Nobody would gain from a call that fails because of what it might have gained.
                if not is_out_of_memory(error):
                    _LOG.warning("products in FP8 could not be measured", exc_info=True)
                    raise Unmeasured(f"products in FP8 could not be measured: {in_words(error)}") from None
            if rows <= _LEAST_ROWS:
                raise Unmeasured(f"{lane.device.name} has too little memory left to measure products in FP8")
            rows //= 2


def autocast_refusal(kinds: Sequence[tuple[bool, torch.dtype]]) -> str | None:
    """Return why FP8 does not go with a call's autocast, in words; None if it does. `kinds`: is it on, its dtype.

    >>> autocast_refusal([(True, torch.float16)])
    'products in FP8 are of bfloat16 numbers, but autocast asks for float16'
    """
    others = [str(dtype).removeprefix("torch.") for is_on, dtype in kinds if is_on and dtype != torch.bfloat16]
    return f"products in FP8 are of bfloat16 numbers, but autocast asks for {others[0]}" if others else None


def measured(compiler: Eager, trial: ProductTrial) -> _Times:
    """Measure on a lane's device: see `Measured`."""
    if trial.lane.device.torch_device.type == "cpu":
        raise Unmeasured(f"{trial.lane.device.name} emulates products in FP8, which takes longer")
    return timed(compiler, trial)


def timed(compiler: Eager, trial: ProductTrial) -> _Times:
    """Measure on the lane's thread, after all that was queued there, products that are compiled as layers are."""
    found: list[_Times] = []
    outcome: Outcome[None] = trial.lane.do(lambda: found.append(_timed(compiler, trial)))
    wait_until(outcome.wait)
    outcome.result()
    return found[0]


def _timed(compiler: Eager, trial: ProductTrial) -> _Times:
    lane, device = trial.lane, trial.lane.device
    config: Any = torch._dynamo.config  # pyright: ignore[reportPrivateUsage] - where torch documents its limits
    # Beyond torch's own limits products would run uncompiled, also those of a process's second or third model.
    limits = {"recompile_limit": _MOST_VARIANTS, "accumulated_recompile_limit": _MOST_VARIANTS}
    run, clock = compiler.compiled(run_linear), partial(_clocked, lane)
    lane.settle_device()
    try:
        with config.patch(limits), device.computing():
            return time_products(
                trial.shapes, trial.recipes, trial.rows, device.torch_device, clock, calls=trial.calls, run=run
            )
    finally:
        lane.settle_device()


def _clocked(lane: Lane, body: Callable[[], None]) -> float:
    # The first one compiles, and has the device's libraries choose their kernels.
    body()
    once = _taken(lane, body, 1)
    times = max(1, min(_MOST_RUNS, int(_REPEATED_MS / max(once, 1e-3))))
    return min(once, _taken(lane, body, times))


def _taken(lane: Lane, body: Callable[[], None], times: int) -> float:
    stream = lane.device.compute
    first = stream.record(timed=True)
    for _ in range(times):
        body()
    last = stream.record(timed=True)
    last.synchronize()
    return max(last.seconds_since(first) * 1e3 / times, 1e-6)
