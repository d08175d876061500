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
from rp_engine.runtime.launcher import wait_until
from rp_engine.runtime.runtime import Runtime
from rp_engine.runtime.tickets import Take


class NextCall(Publications):
    """Has weights travel to `stores`, one for each device, as a step publishes them."""

    def __init__(self, runtime: Runtime) -> None:
        self.stores = tuple(map(WeightsAhead, runtime.lanes))
        self._runtime = runtime
        self._tasks: Sequence[Task] = ()
        self._work = GraphWork()

    def note(self, call: Call, tasks: Sequence[Task], *, is_measured: bool) -> None:
        """Note a call's tasks. If its transfers are measured, so are the next one's, each in its time."""
        # Of weights that travel as codes nobody knows whether the next call's do. Calls of other modes do not look
        # whether code outside has written weights past their counters.
        is_usual = call.mode == "fused" and not (is_measured or call.coded)
        self._work, self._tasks = call.graph_work, tasks if is_usual else ()

    def expect(self, layers: Sequence[LayerState], version: int, take: Take) -> None:
        """Have what the first tasks read travel once a step, which is yet to be launched, has published it.

        `version`: of the weights then.
        """
        # While graphs are captured and compared, the next call takes more memory than this one. What several
        # models have ahead would be more than each has seen room for.
        is_wanted = not self._work.is_prepared and len(self._runtime.states) == 1
        first = self._first() if is_wanted else {}
        for device, store in enumerate(self.stores):
            blocks = _read_by(first[device], layers) if device in first else []
            store.expect(blocks, version, take, tracing.current())
            # At once where nothing is published, or was meanwhile.
            for block in blocks:
                store.send(block)

    def _first(self) -> dict[int, Task]:
        """The first task of each device, if the next call's are dealt as the last one's."""
        count, found = len(self.stores), dict[int, Task]()
        turned = self._runtime.next_device - self._tasks[0].device if self._tasks else 0
        for task in self._tasks:
            found.setdefault((task.device + turned) % count, task)
        return found

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
    # Of frozen weights nobody is told that code outside has written them.
    return [block for block in blocks if block.kind == "trainable"]
