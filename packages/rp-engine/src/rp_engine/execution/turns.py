"""The turns of a call on the blocks of its model, taken at launch in the order of its tasks."""

from __future__ import annotations

from collections.abc import Sequence

from rp_sched import Task
from rp_state.block import Block, in_turn
from rp_state.model_state import ModelState
from rp_transfer import Ticket

from rp_engine.runtime.tickets import Take, taking_tickets


class CallTurns:
    """Takes the turns of tasks and, where an optimizer steps during backward, of its step.

    A task that runs forward has its buffers to itself, so that later tasks read what it writes. But tasks that
    divide a call's microbatches share read-only buffers: else they would run one after another.

    `num_microbatches`: of the call. `of_step`: the step's turn on each block's gradients, in the order in which
    these are complete. `drops_gradients`: tasks take no turns on gradients, so theirs are dropped.
    """

    def __init__(self, state: ModelState, num_microbatches: int) -> None:
        self._state = state
        self._num_microbatches = num_microbatches
        self.drops_gradients = False
        self.of_step: dict[Block, Ticket] = {}

    def of_task(self, task: Task, take: Take) -> tuple[dict[Block, Ticket], dict[Block, Ticket]]:
        """Take a task's turns on weights and buffers, and on gradients."""
        blocks = self._blocks_of(task)
        turns = {block: take(block.turns, write=self._writes(task, block)) for block in blocks}
        return turns, self._of_gradients(task, blocks, take)

    def _writes(self, task: Task, block: Block) -> bool:
        is_divided = len(task.microbatches) < self._num_microbatches
        return task.runs_forward and block.kind == "buffer" and not (is_divided and block.is_read_only)

    def _of_gradients(self, task: Task, blocks: Sequence[Block], take: Take) -> dict[Block, Ticket]:
        turns: dict[Block, Ticket] = {}
        for block in _trained(blocks) if task.adds_gradients and not self.drops_gradients else ():
            turns[block] = take(block.gradient.turns, write=True)
            if block.passes_gradients_on:
                # Before the turn of the next block that uses the memory.
                self.of_step[block] = take(block.gradient.turns, write=True)
        return turns

    def read_late(self, tasks: Sequence[Task]) -> list[Block]:
        """Return the weights that tasks read after the call may have returned: those of backward tasks."""
        late = (task for task in tasks if task.adds_gradients and not task.runs_forward)
        return [block for task in late for block in self._blocks_of(task) if block.kind != "buffer"]

    def take_step(self, tasks: Sequence[Task]) -> None:
        """Take the step's other turns: a block that several tasks add to is complete at the end of the last."""
        order: dict[Block, None] = {}
        for task in tasks:
            for block in _trained(self._blocks_of(task)) if task.adds_gradients else ():
                order.pop(block, None)
                order[block] = None
        order.update(dict.fromkeys(self._state.trainable))
        with taking_tickets() as take:
            for block in order:
                if block not in self.of_step:
                    self.of_step[block] = take(block.gradient.turns, write=True)
        self.of_step = {block: self.of_step[block] for block in order}

    def leave_step(self) -> None:
        """Leave the step's turns: there will be no step."""
        for ticket in self.of_step.values():
            ticket.leave()

    def _blocks_of(self, task: Task) -> list[Block]:
        layers = self._state.layers
        return list(dict.fromkeys(block for layer in task.layers for block in layers[layer].blocks))


def _trained(blocks: Sequence[Block]) -> list[Block]:
    return in_turn(block for block in blocks if block.kind == "trainable")
