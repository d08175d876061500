"""One task in its lane's queue: prefetch, run, run again in smaller parts, release its turns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from rp_sched import Task
from rp_telemetry.layer_times import LayerTimes

from rp_engine.device.weights import Weights
from rp_engine.execution.exchange import Aborted
from rp_engine.execution.shortage.ran_out import shortage_of
from rp_engine.execution.shortage.retry import SmallerTaskRetry
from rp_engine.execution.shortage.task_slots import TaskSlots
from rp_engine.execution.stage.stage import Stage
from rp_engine.execution.stage.task_context import TaskContext


class Owner(Protocol):
    """The run that a task belongs to."""

    aborted: bool

    def abort(self, error: BaseException, where: str) -> None:
        """The task has failed."""
        ...

    def note_shortage(self, task: Task, error: BaseException, where: str) -> None:
        """A device ran out of memory, and what is unfinished of the task is run again."""
        ...

    def note_end(self) -> None:
        """The task is over."""
        ...


class TaskJob:
    """A task in its lane's queue; its errors abort the run. See `rp_engine.runtime.lane.Job`."""

    def __init__(
        self,
        owner: Owner,
        place: TaskContext,
        task: Task,
        weights: Weights,
        slots: TaskSlots,
        times: LayerTimes | None,
    ) -> None:
        self._owner = owner
        self._place = place
        self._task = task
        self._weights = weights
        self._slots = slots
        self._stage = Stage(place, task, weights, slots, times)
        self._retries: list[SmallerTaskRetry] = []

    def prefetch(self) -> None:
        """Start uploads whose turns are open."""
        if not self._owner.aborted:
            self._guard(self._prefetch)

    def _prefetch(self) -> None:
        # What finds no room is uploaded when the task runs.
        shortage_of(self._weights.prefetch)

    def withdraw(self) -> None:
        """Free what `prefetch` has uploaded."""
        if not self._owner.aborted:
            self._guard(self._weights.withdraw)

    def run(self) -> None:
        """Run the task, or step aside if the run has failed."""
        if not self._owner.aborted:
            self._guard(self._run)
        if self._owner.aborted:
            self._guard(self._latest.release_after_failure)
        for retry in self._retries:
            self._guard(retry.close)
        self.leave()
        self._slots.clear()
        self._owner.note_end()

    @property
    def _latest(self) -> Stage:
        return [self._stage, *(retry.stage for retry in self._retries)][-1]

    def _run(self) -> None:
        error = shortage_of(self._stage.run)
        if error is None:
            return
        if not self._stage.may_run_again:
            raise error
        self._note(error, self._stage.where())
        self._stage.withdraw()
        retry = SmallerTaskRetry(self._place, self._weights, self._slots, self._note, self._stage)
        self._retries.append(retry)
        left = range(self._stage.next_microbatch, self._task.microbatches.stop)
        if left:
            retry.run(replace(self._task, microbatches=left), error)

    def _note(self, error: BaseException, where: str) -> None:
        self._owner.note_shortage(self._task, error, where)

    def leave(self) -> None:
        """Release the tickets that it still holds."""
        for ticket in self._weights.tickets():
            ticket.leave()

    def _guard(self, body: Callable[[], None]) -> None:
        try:
            body()
        except Aborted:
            pass
        except BaseException as error:
            self._owner.abort(error, self._latest.where())
