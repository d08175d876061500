"""A model's calls beside training: of a trial, and those whose layers write state, such as a key-value cache."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from functools import partial
from typing import Any

import rp_batch
import torch
from rp_recompute.widening import Widening
from rp_telemetry.tracing import in_call

from rp_engine.device.memory.weight_cache import NO_WEIGHT_CACHE, WeightCache, keeping
from rp_engine.device.packet import Packet
from rp_engine.engine.runs import Runs
from rp_engine.execution.batch import Batch
from rp_engine.execution.call import Aside, View
from rp_engine.execution.packed_data import Arrivals
from rp_engine.runtime.launcher import wait_until
from rp_engine.runtime.runtime import Runtime
from rp_engine.settings.run_config import RoundPipeRunConfig


class CallsAside:
    """The calls of model `name` from which no plan learns, and which have no gradients."""

    def __init__(self, name: str, runtime: Runtime, runs: Runs) -> None:
        self._name = name
        self._runtime = runtime
        self._runs = runs
        self._kept: tuple[WeightCache, ...] = (NO_WEIGHT_CACHE,) * len(runtime.lanes)

    def forward(
        self,
        parts: rp_batch.Parts[Any],
        arrivals: Arrivals,
        config: RoundPipeRunConfig,
        view: View | None,
        widening: Widening | None = None,
    ) -> list[Any]:
        """Return the outputs of all microbatches, or what `view` makes of them; call it inside `aside`.

        `widening`: makes layers of 16-bit weights compute in fp32.
        """
        launch = partial(self._aside, Batch.of(parts, arrivals, wants_grad=False), config, Aside(view, widening))
        return [packet.tree() for packet in self._runtime.launch(launch)]

    @contextmanager
    def keeping_weights(self) -> Generator[None]:
        """Let weights stay on their device from one `forward_with_state` to the next, as far as they find room.

        What those calls and their caller leave on the device comes first.
        """
        before, layers = self._kept, self._runs.host.state.layers
        homes = [[layers[index] for index in home] for home in self._runs.planner.homes()]
        with keeping(self._runtime, homes) as self._kept:
            try:
                yield
            finally:
                self._kept = before

    def make_room(self, state: float, work: float = 1.0) -> None:
        """Let kept weights go before the caller makes state larger than the latest `forward_with_state` left it.

        `state`: how many times as large all of it becomes. `work`: by how much more its layers work in the next
        call.
        """
        for lane, kept in zip(self._runtime.lanes, self._kept, strict=True):
            outcome = lane.do(partial(kept.make_room, state, work))
            wait_until(outcome.wait)
            outcome.result()

    @property
    def state_device(self) -> torch.device:
        """The device of the last layer in `forward_with_state`."""
        _, last = max((home[-1], device) for device, home in enumerate(self._runs.planner.homes()) if home)
        return self._runtime.lanes[last].device.torch_device

    def forward_with_state(
        self, parts: rp_batch.Parts[Any], arrivals: Arrivals, config: RoundPipeRunConfig
    ) -> list[Any]:
        """Return the outputs of a forward without gradients, whose layers write state that the arguments hold.

        Such as a key-value cache, one a microbatch. Each layer runs on the same device in all such calls, so that
        it finds there what it has left. Outputs that are wanted on the last layer's device do not leave it.
        """
        for lane in self._runtime.lanes:
            # What the caller has made of the state there, on streams of its own.
            if (device := lane.device.torch_device).type != "cpu":
                torch.accelerator.current_stream(device).synchronize()
        batch = Batch.of(parts, arrivals, wants_grad=False)
        aside = Aside(holds_state=True, kept=self._kept, stays=config.output_device == self.state_device)
        return [packet.tree() for packet in self._runtime.launch(partial(self._aside, batch, config, aside))]

    def _aside(self, batch: Batch, config: RoundPipeRunConfig, aside: Aside) -> list[Packet]:
        with in_call("forward" if aside.holds_state else "trial", self._name):
            self._runs.host.get_ready(training=False)
            run = self._runs.start_aside(batch, config, aside)
            outputs = run.outputs(wait=True)
            self._runs.settle_draws(run)
            if aside.holds_state:
                # The next call's tasks depend on the weights that stay. And nobody holds the state for this one.
                run.wait()
                self._runs.host.raise_late_errors()
            return outputs
