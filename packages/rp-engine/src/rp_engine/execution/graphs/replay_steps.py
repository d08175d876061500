"""What surrounds the graphs of a replay, segment by segment: weights that arrive, gradients that leave, times."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

from rp_recompute.randomness import Randomness, RngConsumer
from rp_state.block import Block
from rp_telemetry.layer_times import LayerTimes, ReplayPass
from rp_telemetry.tracing import NOTHING

from rp_engine.execution.graphs.layer_graphs import Additions
from rp_engine.execution.stage.activity import TaskActivity
from rp_engine.execution.stage.task_context import TaskContext

LayerCallback = Callable[[int], None]
_FORWARD = "in a replay of {0} and layers after it, microbatch {1}"
_BACKWARD = "in a replay of the backward of {0} and layers after it, microbatch {1}"


def ignore(layer: int) -> None:
    """Do nothing with a layer."""
    del layer


def divided(layers: range, blocks_of: Callable[[int], Iterable[Block]], least_bytes: int) -> list[range]:
    """Divide layers into segments with at least so many bytes of weights each, but for the last one.

    Layers that share trained weights stay together: autograd adds up their gradients before it adds them to sums.
    """
    last_use = {block: layer for layer in layers for block in blocks_of(layer) if block.kind == "trainable"}
    found: list[range] = []
    start, reaches, blocks = layers.start, layers.start, set[Block]()
    for layer in layers:
        blocks.update(blocks_of(layer))
        reaches = max([reaches, *(last_use.get(block, 0) for block in blocks_of(layer))])
        is_enough = sum(block.nbytes for block in blocks) >= least_bytes and reaches <= layer
        if is_enough or layer + 1 == layers.stop:
            found.append(range(start, layer + 1))
            start, blocks = layer + 1, set[Block]()
    return found


@dataclass(frozen=True, slots=True)
class Replays:
    """What replays of a task have in common. `count`: notes what a graph adds to gradients."""

    place: TaskContext
    activity: TaskActivity
    times: LayerTimes | None
    count: Callable[[Additions], None]

    @property
    def randomness(self) -> Randomness | None:
        """What draws the call's random numbers; None if it has no seeds."""
        return self.place.call.randomness

    @contextmanager
    def timed(self, which: ReplayPass, layers: range) -> Generator[None]:
        """Time the graph of a segment."""
        stream = self.place.lane.device.compute
        with NOTHING if self.times is None else self.times.replays.replay(which, layers, stream):
            yield


@dataclass(frozen=True, slots=True)
class MicrobatchSteps:
    """The steps of one microbatch's replay.

    `bind`: makes a layer's weights be there; None if they are. `passed`: told of the layer below a segment whose
    backward was launched: of those above it nothing is left.
    """

    of: Replays
    microbatch: int
    bind: LayerCallback | None = None
    passed: LayerCallback = ignore

    def seeds(self, layers: Sequence[int]) -> list[int]:
        """The seeds of layers that draw random numbers."""
        randomness = self.of.randomness
        if randomness is None:
            return []
        consumers = [RngConsumer("layer", layer) for layer in layers]
        # Another task may recompute them by Python.
        randomness.drew_on_device.update((consumer, self.microbatch) for consumer in consumers)
        return [randomness.seed_of(consumer, self.microbatch) for consumer in consumers]

    def forward(self, layers: range) -> AbstractContextManager[None]:
        """Wait for the weights of a segment, which is replayed within the context."""
        self.of.activity.current = (_FORWARD, layers.start, self.microbatch)
        if self.bind is not None:
            for layer in layers:
                self.bind(layer)
        return self.of.timed("forward", layers)

    @contextmanager
    def backward(self, layers: range, additions: Additions) -> Generator[None]:
        """Let gradients leave once backward of a segment, replayed within the context, has added to them."""
        self.of.activity.current = (_BACKWARD, layers.start, self.microbatch)
        with self.of.timed("backward", layers):
            yield
        self.of.count(additions)
        self.passed(layers.start - 1)
