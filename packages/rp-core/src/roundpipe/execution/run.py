"""Execution of one call: launches its tasks on their lanes, collects results, and reports the first error.

The launcher takes every ticket and creates every slot before any task runs; workers only fill and take slots.
After the first error, every thread that waits for a slot wakes up, and the tasks that have not run release what
they hold without running.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from rp_optim.jobs import Outcome, wait_for_all, wait_for_any
from rp_sched import Task
from rp_transfer import Ticket, is_out_of_memory

from roundpipe.device.packet import Packet, Slot
from roundpipe.device.replica import Twins
from roundpipe.device.transfers import Delivery
from roundpipe.device.weights import Weights
from roundpipe.errors import add_note, class_name, in_words
from roundpipe.execution.batch import Batch
from roundpipe.execution.call import Call, Streams
from roundpipe.execution.exchange import Aborted, Exchange
from roundpipe.execution.packed_data import Arrivals
from roundpipe.execution.shortage.advice import remedies
from roundpipe.execution.shortage.ran_out import clear_frames
from roundpipe.execution.shortage.slots import TaskSlots
from roundpipe.execution.stage import Workplace
from roundpipe.execution.task_job import TaskJob
from roundpipe.runtime.launcher import wait_until
from roundpipe.runtime.runtime import Lane, Runtime
from roundpipe.runtime.tickets import Take, taking
from roundpipe.state.block import Block, in_turn
from roundpipe.telemetry import tracing
from roundpipe.telemetry.call_span import CallSpan
from roundpipe.telemetry.late_errors import Late
from roundpipe.telemetry.layer_times import LayerTimes


@dataclass(frozen=True, slots=True)
class Shortage:
    """A task that ran out of device memory: where, and the error, in words."""

    task: Task
    where: str
    error: str


class Run:
    """A call being executed: `tasks`, in the order of their launch, on `batch`.

    The constructor decides every slot, its writer and its readers. With a loss function, `start` launches all
    tasks. Without one, it launches the forward tasks, and `backward` launches the others if the caller ever runs a
    backward pass.

    `step_turns`: where an optimizer steps during backward, the step's turn on each block's gradients, in the order
    in which these are complete.
    """

    def __init__(
        self, call: Call, tasks: Sequence[Task], batch: Batch, runtime: Runtime, twins: Sequence[Twins]
    ) -> None:
        self.call = call
        self.tasks = tuple(tasks)
        self.aborted = False
        # From its latest launch to the end of its latest task or delivery.
        self.span = CallSpan()
        # Where device memory ran out, while the run went on.
        self.shortages: list[Shortage] = []
        self._is_told = False
        # This run's place in the sequence of the model's runs that add gradients.
        self.number = 0
        self._batch = batch
        self._runtime = runtime
        self._twins = twins
        self._lock = threading.Lock()
        self._error: BaseException | None = None
        self._late = Late()
        self._outcomes: list[Outcome[None]] = []
        self._deliveries: list[Outcome[None]] = []
        self.step_turns: dict[Block, Ticket] = {}
        # Time and memory of the layers: one entry for each measured launch.
        self._times: list[LayerTimes] = []
        self._tracer = tracing.SILENT
        self._adds_gradients = False
        self._drops_gradients = False
        # Whether part of this run's gradients may have been added on the host.
        self._has_delivered = False
        self._exchange = Exchange()
        self._exchange.expect_tasks(self.tasks, by_layer=call.grain == "layer")
        self._exchange.expect([*self._loss_slots(), *self._output_slots(), *self._grad_slots()])
        self._put_batch()

    def _put_batch(self) -> None:
        arrivals, with_grads = self._batch.arrivals, self.call.with_grad
        with self._batch.streams.current_here():
            for m, part in enumerate(self._batch.parts):
                packet = self._copied(tuple(part), f"inputs, microbatch {m}", arrivals, with_grads=with_grads)
                self._exchange.put(Slot("input", 0, m), packet)
            for m, label in enumerate(self._batch.labels):
                packet = self._copied(label, f"labels, microbatch {m}", arrivals)
                self._exchange.put(Slot("label", self.call.num_layers, m), packet)

    def _copied(
        self, tree: Any, what: str, arrivals: Arrivals | None = None, *, with_grads: bool = False
    ) -> Packet:
        backend = self._runtime.backend
        found = Arrivals(backend, ()) if arrivals is None else arrivals
        try:
            return Packet.of(backend, tree, with_grads=with_grads, arrival=found.of)
        except BaseException as error:
            add_note(error, f"RoundPipe: in model {self.call.name!r}, copying {what}")
            raise

    # Results for the caller

    def _slots(self, what: Literal["loss", "input", "grad"], at: int) -> list[Slot]:
        return [Slot(what, at, m) for m in range(self.call.num_microbatches)]

    def _loss_slots(self) -> list[Slot]:
        return self._slots("loss", self.call.num_layers) if self.call.loss_fn is not None else []

    def _output_slots(self) -> list[Slot]:
        return self._slots("input", self.call.num_layers) if self.call.keep_outputs else []

    def _grad_slots(self) -> list[Slot]:
        return self._slots("grad", 0) if self._batch.inputs else []

    def losses(self) -> list[Packet]:
        """The losses of each microbatch."""
        return self._collect(self._loss_slots())

    def outputs(self, *, wait: bool) -> list[Packet]:
        """The outputs of each microbatch, if the call keeps them. `wait`: block until they are on the host."""
        return self._collect(self._output_slots(), wait=wait)

    def input_grads(self) -> list[Packet]:
        """The gradients of each microbatch's inputs, if any input requires grad."""
        return self._collect(self._grad_slots())

    @property
    def seed(self) -> int | None:
        """What the call drew from the caller's generator; None if it draws no random numbers."""
        return None if self.call.randomness is None else self.call.randomness.seed

    # Launch, on the launcher's thread

    @property
    def first_tasks(self) -> tuple[Task, ...]:
        """The tasks that `start` launches."""
        return self.tasks if self.call.loss_fn is not None else self._tasks_that_add(False)

    @property
    def later_tasks(self) -> tuple[Task, ...]:
        """The tasks that `backward` launches."""
        return () if self.call.loss_fn is not None else self._tasks_that_add(True)

    def _tasks_that_add(self, adds_gradients: bool) -> tuple[Task, ...]:
        return tuple(task for task in self.tasks if task.adds_gradients == adds_gradients)

    def start(self, times: LayerTimes | None) -> None:
        """Launch the first tasks; never blocks. `times` records the time and memory of their layers."""
        if self.call.loss_fn is not None:
            self._begin_adding()
        self._launch(self.first_tasks, times)

    def backward(
        self,
        outputs: Sequence[Packet],
        grads: Sequence[torch.Tensor | None],
        streams: Streams,
        times: LayerTimes | None,
    ) -> None:
        """Launch the later tasks.

        `grads`: the gradients of the outputs that require grad, microbatch by microbatch, computed on `streams`.
        """
        self._begin_adding()
        with streams.current_here():
            self._put_grads(outputs, iter(grads))
        self._launch(self.later_tasks, times)

    def drop_gradients(self) -> None:
        """Let the later tasks compute the gradients of inputs alone, and drop those of weights."""
        self._drops_gradients = True

    def _put_grads(self, outputs: Sequence[Packet], grads: Iterator[torch.Tensor | None]) -> None:
        for m, packet in enumerate(outputs):
            found = [next(grads) if requires_grad else None for requires_grad in packet.grads]
            slot = Slot("grad", self.call.num_layers, m)
            if self._exchange.is_expected(slot):
                self._exchange.put(slot, self._copied(found, f"gradients of outputs, microbatch {m}"))

    def _begin_adding(self) -> None:
        # Once a run: backward tasks consume what forward saved. If they fail before any gradient leaves its
        # device, the gradients on the host are unchanged.
        if self._adds_gradients:
            raise RuntimeError(
                "backward() was called a second time through the same forward; its saved activations are gone"
            )
        self.number = self.call.state.num_runs
        self.call.state.num_runs += 1
        self._adds_gradients = True

    def _launch(self, tasks: Sequence[Task], times: LayerTimes | None) -> None:
        """Take all tickets in the order of the tasks, then queue the tasks."""
        self._tracer = tracing.current()
        self._runtime.num_calls += 1
        self.span = CallSpan.begin(self._runtime.num_calls)
        if times is not None:
            self._times.append(times)
        # A layer that cannot be copied must fail before any ticket is taken: no task would release the ticket.
        for task in tasks:
            self._twins[task.device].ensure(task.layers)
        jobs: deque[tuple[Lane, TaskJob]] = deque()
        try:
            jobs.extend(self._prepare(task, times) for task in tasks)
            if self.call.state.options.steps_in_backward:
                self._take_step_turns(tasks)
            while jobs:
                lane, job = jobs[0]
                self._outcomes.append(self._followed(lane.submit(job)))
                jobs.popleft()
        except BaseException as error:
            # For example Ctrl-C: later work must not wait for tasks that will never run.
            self.abort(error, "while it was launched")
            self._error = None
            self._late.tell()
            for _, job in jobs:
                job.leave()
            for ticket in self.step_turns.values():
                ticket.leave()
            raise

    def _followed(self, outcome: Outcome[None]) -> Outcome[None]:
        self._tracer.follow(outcome)
        return outcome

    def _prepare(self, task: Task, times: LayerTimes | None) -> tuple[Lane, TaskJob]:
        lane, twins = self._runtime.lanes[task.device], self._twins[task.device]
        blocks = self._blocks_of(task)
        with taking() as take:
            turns = {
                block: take(block.turns, write=block.kind == "buffer" and task.runs_forward) for block in blocks
            }
            gradient_turns = self._gradient_turns(task, blocks, take)
            weights = Weights(
                lane,
                twins,
                turns,
                gradient_turns,
                self.call.spare_bytes,
                times,
                self._tracer,
                may_outlive=not self.call.waits,
            )
            place = Workplace(self.call, lane, self._runtime.backend, twins, self, self._tracer)
            slots = TaskSlots(self._exchange, by_layer=self.call.grain == "layer")
            return lane, TaskJob(self, place, task, weights, slots, times)

    def _blocks_of(self, task: Task) -> list[Block]:
        layers = self.call.state.layers
        return list(dict.fromkeys(block for layer in task.layers for block in layers[layer].blocks))

    def _gradient_turns(self, task: Task, blocks: Sequence[Block], take: Take) -> dict[Block, Ticket]:
        turns: dict[Block, Ticket] = {}
        for block in in_turn(blocks) if task.adds_gradients and not self._drops_gradients else ():
            if block.gradient is not None:
                turns[block] = take(block.gradient.turns, write=True)
                if block.passes_gradients_on:
                    # Before the turn of the next block that uses the memory.
                    self.step_turns[block] = take(block.gradient.turns, write=True)
        return turns

    def _take_step_turns(self, tasks: Sequence[Task]) -> None:
        """Take the step's other turns: a block that several tasks add to is complete at the end of the last."""
        order: dict[Block, None] = {}
        for task in tasks if self._adds_gradients else ():
            for block in in_turn(self._blocks_of(task)) if task.adds_gradients else ():
                if block.gradient is not None:
                    order.pop(block, None)
                    order[block] = None
        order.update(dict.fromkeys(self.call.state.trainable) if self._adds_gradients else {})
        with taking() as take:
            for block in order:
                if block.gradient is not None and block not in self.step_turns:
                    self.step_turns[block] = take(block.gradient.turns, write=True)
        self.step_turns = {block: self.step_turns[block] for block in order}

    # Gradients on their way to the host

    def send_home(self, delivery: Delivery, where: str) -> None:
        """Submit a delivery of gradients to its porter. See `Outbox`."""
        delivered = delivery.porter.submit(self._deliver, delivery, where)
        delivery.porter.note_load(delivered, delivery.nbytes)
        self._deliveries.append(self._followed(delivered))

    def _deliver(self, delivery: Delivery, where: str) -> None:
        try:
            if self._may_deliver():
                delivery.run()
        except BaseException as error:
            self.abort(error, where)
            delivery.abandon()
        finally:
            delivery.leave()
            self.note_end()

    def _may_deliver(self) -> bool:
        with self._lock:
            self._has_delivered |= not self.aborted
            return not self.aborted

    # Device memory that ran out

    def note_shortage(self, task: Task, error: BaseException, where: str) -> None:
        """A task ran out of device memory, and what is unfinished of it runs again. Called by any lane."""
        self.shortages.append(Shortage(task, where, in_words(error)))

    def explain_shortages(self) -> str | None:
        """What happened where device memory ran out, in words, once; None if it did not."""
        if self._is_told or not self.shortages:
            return None
        self._is_told = True
        first, count = self.shortages[0], len(self.shortages)
        times = "once" if count == 1 else f"{count} times, first"
        return (
            f"model {self.call.name!r} ran out of device memory in a call, {times} {first.where}: {first.error}. "
            "What was unfinished ran again in smaller parts: layers, hooks and the loss function may have run "
            f"twice, with the same results. {self._how_to_avoid_shortages()}"
        )

    def _how_to_avoid_shortages(self) -> str:
        if all(len(shortage.task.layers) == 1 for shortage in self.shortages):
            more = f"num_microbatch={2 * self.call.num_microbatches} instead of {self.call.num_microbatches}"
            return f"These were tasks of one layer each, and later calls will have them, too: take {more}."
        if self.call.is_planned:
            return "Later calls are planned to take less."
        return "Stages of fewer layers in your execute_plan avoid that."

    @property
    def parts(self) -> Sequence[Any]:
        """The arguments of each microbatch."""
        return self._batch.parts

    # The end

    def note_end(self) -> None:
        """A task or a delivery has ended just now."""
        self.span = self.span.until_now()

    def abort(self, error: BaseException, where: str) -> None:
        """Keep the first error, note on it where it happened, and wake every thread that waits for a slot."""
        with self._lock:
            if self.aborted:
                return
            if self._leaves_gradients():
                # Before any task releases its tickets, which would let a step read the incomplete gradients.
                self.call.state.note_broken(self.number, class_name(error))
            self.aborted = True
            self._error = error
        self._exchange.close()
        self._describe(error, where)

    def _leaves_gradients(self) -> bool:
        # In a model of several parts, the other parts may have added their gradients of this backward already.
        # So may other machines.
        is_shared = self.call.state.is_part or self.call.state.shards is not None
        return self._has_delivered or (self._adds_gradients and is_shared)

    def _describe(self, error: BaseException, where: str) -> None:
        # After the wake-up and without the lock: formatting the error and clearing frames may run users' code.
        add_note(error, f"RoundPipe: in model {self.call.name!r}, {where}")
        if is_out_of_memory(error):
            add_note(error, remedies(self.call.num_microbatches, self.call.grain, is_planned=self.call.is_planned))
            clear_frames(error)
        self._late.note(error)
        if self._adds_gradients:
            self.call.state.describe_broken(self.number, in_words(error))

    def _collect(self, slots: Sequence[Slot], *, wait: bool = True) -> list[Packet]:
        """Take the packets of `slots`; call it on the launcher's thread.

        With `wait`, the packets are readable on return, otherwise after their events. Raises the run's first
        error, after all its tasks have ended. An interrupt of the caller counts as an error of the run.
        """
        try:
            with self._tracer.on_host(tracing.CALLER, "wait", "wait for results of the devices", reason="results"):
                packets = [self._exchange.take(slot, wait_until) for slot in slots]
                for packet in packets if wait else ():
                    for event in packet.events:
                        event.synchronize()
                    self._runtime.backend.host_touch(read=packet.tensors(), what="results")
            if self.call.randomness is not None and self.call.randomness.drew_any():
                # The caller uses the same generators: no task may use them after the call has returned.
                self._await_all()
            return packets
        except Aborted:
            pass
        except BaseException as error:
            self.abort(error, "while the caller waited")
        # Outside the except blocks, which would overwrite the `__context__` of the run's own error.
        self.finish()
        raise AssertionError("an aborted run has an error")

    def _await_all(self) -> None:
        for outcomes in (self._outcomes, self._deliveries):
            for outcome in outcomes:
                wait_until(outcome.wait)

    def wait(self) -> None:
        """Block until all tasks have ended and all gradients are on the host."""
        wait_for_all(self._outcomes)
        wait_for_all(self._deliveries)

    def wait_for_any(self, seconds: float) -> bool:
        """Wait for at most `seconds`; return whether a task has ended or the run has failed."""
        return self.aborted or wait_for_any(self._outcomes, seconds)

    def take_times(self) -> list[LayerTimes]:
        """Remove and return the layers' times of a run that has ended, one entry a launch; empty if it failed."""
        found, self._times = self._times, []
        return [] if self.aborted else found

    def finish(self) -> None:
        """Block until all tasks have ended; raise the run's error, once."""
        if (error := self.outcome()) is not None:
            raise error

    def outcome(self) -> BaseException | None:
        """Block until all tasks have ended; return the run's error, once."""
        self.wait()
        if self._error is None:
            return None
        self._await_devices(self._error)
        self._late.tell()
        self._exchange.clear()
        # The error keeps its frames and their objects alive, so this run drops its reference.
        error, self._error = self._error, None
        return error

    def _await_devices(self, error: BaseException) -> None:
        """Nobody has waited for what the tasks before the failed one queued, and the model may be gone soon."""
        for index in sorted({task.device for task in self.tasks}):
            device = self._runtime.lanes[index].device
            try:
                device.synchronize()
            except Exception as other:
                add_note(error, f"RoundPipe: then waiting for {device.name} failed: {in_words(other)}")

    def over(self) -> bool:
        """Whether all tasks have ended, or one has failed."""
        return self.aborted or all(outcome.done() for outcome in [*self._outcomes, *self._deliveries])
