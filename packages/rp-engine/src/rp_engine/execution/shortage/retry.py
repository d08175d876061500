"""A task that ran out of device memory, run again in smaller parts with the device to itself."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace

from rp_sched import Task
from rp_state.block import Block
from rp_transfer import Ticket

from rp_engine.device.weights import Weights
from rp_engine.execution.shortage.parts import TaskPart, smaller
from rp_engine.execution.shortage.ran_out import drop_frames, shortage_of
from rp_engine.execution.shortage.task_slots import TaskSlots
from rp_engine.execution.stage.stage import Stage
from rp_engine.execution.stage.task_context import TaskContext

# How often a part that cannot be cut is run again, with the device to itself: what else took memory, such as
# another process, may be gone.
_TRIES = 2


class SmallerTaskRetry:
    """Runs what is unfinished of a task in parts that need less memory.

    The parts inherit the task's turns, which stay taken until `close`, its slots, and the seeds of its layers.
    Gradients that were delivered stay; those of unfinished parts are summed anew.

    `weights`: of the attempt that failed; it has been withdrawn. `note`: called with each error and where it was.
    `stage`: has run the task.
    """

    def __init__(
        self,
        place: TaskContext,
        weights: Weights,
        slots: TaskSlots,
        note: Callable[[BaseException, str], None],
        stage: Stage,
    ) -> None:
        self._place = place
        self._slots = slots
        self._note = note
        self._turns = dict(weights.turns)
        self._saved = weights.saved
        self._owed = weights.sums.undelivered()
        self._on = replace(weights.on, may_outlive=False)
        # That which has run the latest part.
        self.stage = stage

    def run(self, task: Task, error: BaseException) -> None:
        """Run `task`, which failed with `error`.

        Raises the error of the first part that cannot be cut again; those before it lose their tracebacks.
        """
        pending = deque((part, self._owed) for part in self._instead(TaskPart(task), error))
        while pending:
            part, owed = pending.popleft()
            self._place.lane.make_room()
            weights = self._weights(part, owed)
            stage = self.stage = Stage(
                self._place, part.task, weights, self._slots, recomputes=part.recomputes, is_part=True
            )
            if (found := shortage_of(stage.run)) is None:
                continue
            if not stage.may_run_again:
                raise found
            self._note(found, stage.where())
            left = {block: owed[block] for block in weights.sums.undelivered()}
            stage.withdraw()
            pending.extendleft((instead, left) for instead in reversed(self._instead(part, found)))

    def _instead(self, part: TaskPart, error: BaseException) -> list[TaskPart]:
        """What to run in the place of a part that failed."""
        call = self._place.call
        parts = smaller(part, call.state.layers, call.num_microbatches, by_layer=call.by_layer)
        if not parts and part.tries == _TRIES:
            raise error
        drop_frames(error)
        self._slots.expect(cut.task for cut in parts)
        return parts or [replace(part, tries=part.tries + 1)]

    def _weights(self, part: TaskPart, owed: dict[Block, Ticket]) -> Weights:
        layers = self._place.call.state.layers
        blocks = dict.fromkeys(block for layer in part.task.layers for block in layers[layer].blocks)
        return Weights(
            self._on,
            {block: self._lent(self._turns[block], block, part) for block in blocks},
            {
                block: self._lent(owed[block], block, part)
                for block in blocks
                if block in owed and part.task.adds_gradients
            },
            saved=self._saved,
        )

    def _lent(self, turn: Ticket, block: Block, part: TaskPart) -> Ticket:
        # What the next block's gradients wait for is left where it ends: only this part sends the block's, and no
        # later one uploads its weights, which a step may write then.
        return turn if block.passes_gradients_on and part.task.adds_gradients else turn.lend()

    def close(self) -> None:
        """Wait until nothing that the parts have queued uses the task's memory; then its turns may be left."""
        self._place.lane.outbox.wait_for_room(0)
        self._place.lane.settle_device()
