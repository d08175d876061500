"""Guesses what the next call of a model reads first on each device: what the last one did."""

from __future__ import annotations

from collections.abc import Sequence

from rp_sched import Task
from rp_state.block import Block
from rp_state.layers import LayerState
from rp_state.publications import Publications
from rp_telemetry import tracing

from rp_engine.device.memory.graph_store import GraphWork
from rp_engine.device.memory.weights_ahead import WeightsAhead
from rp_engine.execution.call import Call
from rp_engine.runtime.lane import Lane
from rp_engine.runtime.launcher import wait_until
from rp_engine.runtime.tickets import Take


class NextCall(Publications):
    """Has weights travel to `stores`, one for each device, as a step publishes them."""

    def __init__(self, lanes: Sequence[Lane]) -> None:
        self.stores = tuple(map(WeightsAhead, lanes))
        self._first: dict[int, Task] = {}
        self._work = GraphWork()

    def note(self, call: Call, tasks: Sequence[Task], *, is_measured: bool) -> None:
        """Note a call's tasks. If its transfers are measured, so are the next one's, each in its time."""
        self._work, self._first = call.graph_work, {}
        # Of weights that travel as codes nobody knows whether the next call's do.
        for task in () if is_measured or call.coded else tasks:
            self._first.setdefault(task.device, task)

    def expect(self, layers: Sequence[LayerState], version: int, take: Take) -> None:
        """Have what the first tasks read travel once a step, which is yet to be launched, has published it.

        `version`: of the weights then.
        """
        # While graphs are captured and compared, the next call takes more memory than this one.
        if self._work.is_prepared:
            return
        for device, task in self._first.items():
            store, blocks = self.stores[device], _read_by(task, layers)
            store.expect(blocks, version, take, tracing.current())
            # At once where nothing is published, or was meanwhile.
            for block in blocks:
                store.send(block)

    def note_published(self, block: Block) -> None:
        """Have a block travel."""
        for store in self.stores:
            store.send(block)

    def note_step_over(self) -> None:
        """What was not published will not be."""
        for store in self.stores:
            store.expect_no_more()

    def clear(self) -> None:
        """Free what has travelled for no call, and wait for that."""
        for freed in [store.clear() for store in self.stores]:
            if freed is not None:
                wait_until(freed.wait)


def _read_by(task: Task, layers: Sequence[LayerState]) -> list[Block]:
    blocks = dict.fromkeys(block for layer in task.layers for block in layers[layer].blocks)
    return [block for block in blocks if block.kind != "buffer" and not block.on_disk]
