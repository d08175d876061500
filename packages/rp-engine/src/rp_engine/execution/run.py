"""A run: one call under way, with its tasks on their lanes, its results and its first error.

The launcher takes every ticket and creates every slot before any task runs; workers only fill and take slots.
After the first error, every thread that waits for a slot wakes up, and the tasks that have not run release what
they hold without running.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence

import torch
from rp_optim.jobs import Outcome, wait_for_all
from rp_sched import Task
from rp_state.block import Block
from rp_state.telling.late_writes import LateWrites
from rp_telemetry import tracing
from rp_telemetry.calls.call_span import CallSpan
from rp_telemetry.layer_times import LayerTimes
from rp_telemetry.transfer_times import UNTIMED
from rp_transfer import Ticket, is_out_of_memory

from rp_engine.device.memory.call_size import CallSize
from rp_engine.device.packet import Packet, Slot
from rp_engine.device.replica import Twins
from rp_engine.device.transfers import Delivery
from rp_engine.device.weights import UploadContext, Weights
from rp_engine.errors import add_note, class_name, in_words
from rp_engine.execution.batch import Batch
from rp_engine.execution.call import Call, Streams
from rp_engine.execution.caller_slots import CallerSlots
from rp_engine.execution.effects.sampled_comparison import refusals
from rp_engine.execution.exchange import Aborted, Exchange
from rp_engine.execution.shortage.advice import Shortage, advice, explanation
from rp_engine.execution.shortage.ran_out import clear_frames
from rp_engine.execution.shortage.task_slots import TaskSlots
from rp_engine.execution.stage.task_context import TaskContext
from rp_engine.execution.task_job import TaskJob
from rp_engine.execution.turns import CallTurns
from rp_engine.runtime.lane import Lane
from rp_engine.runtime.late_errors import UnreportedError
from rp_engine.runtime.launcher import wait_until
from rp_engine.runtime.runtime import Runtime
from rp_engine.runtime.tickets import own_turn, taking_tickets

# In so many of a model's first calls samples of weights are looked at, too: what a program does, it does there.
_SAMPLED = 4


class Run:
    """A call being executed: `tasks`, in the order of their launch, on `batch`.

    The constructor decides every slot, its writer and its readers. With a loss function, `start` launches all
    tasks. Without one, it launches the forward tasks, and `backward` launches the others if the caller ever runs a
    backward pass.
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
        self._unreported = UnreportedError()
        self._outcomes: list[Outcome[None]] = []
        self._deliveries: list[Outcome[None]] = []
        self._turns = CallTurns(call.state, call.num_microbatches)
        # Time and memory of the layers: one entry for each measured launch.
        self._times: list[LayerTimes] = []
        self._tracer = tracing.SILENT
        self._adds_gradients = False
        # Parameters that were frozen after the forward: they get no gradients, as in torch.
        self._frozen: frozenset[int] = frozenset()
        # Whether part of this run's gradients may have been added on the host.
        self._has_delivered = False
        self._exchange = Exchange()
        self._exchange.expect_tasks(call, self.tasks)
        # Of blocks that backward tasks read after the call has returned.
        self._writes = LateWrites(call.state)
        self._caller = CallerSlots(call, batch, runtime.backend, self._exchange)
        self._caller.put_batch()

    # Results for the caller

    def losses(self) -> list[Packet]:
        """The losses of each microbatch."""
        return self._collect(self._caller.losses)

    def outputs(self, *, wait: bool) -> list[Packet]:
        """The outputs of each microbatch, if the call keeps them. `wait`: block until they are on the host."""
        return self._collect(self._caller.outputs, wait=wait)

    def input_grads(self) -> list[Packet]:
        """The gradients of each microbatch's inputs, if any input requires grad."""
        return self._collect(self._caller.grads)

    @property
    def seed(self) -> int | None:
        """What the call drew from the caller's generator; None if it draws no random numbers."""
        return None if self.call.randomness is None else self.call.randomness.seed

    @property
    def size(self) -> CallSize:
        """How large the call is."""
        return self._batch.size

    # Launch, on the launcher's thread

    @property
    def first_tasks(self) -> tuple[Task, ...]:
        """The tasks that `start` launches."""
        return self.tasks if self.call.has_loss else self._tasks_that_add(False)

    @property
    def later_tasks(self) -> tuple[Task, ...]:
        """The tasks that `backward` launches."""
        return () if self.call.has_loss else self._tasks_that_add(True)

    def _tasks_that_add(self, adds_gradients: bool) -> tuple[Task, ...]:
        return tuple(task for task in self.tasks if task.adds_gradients == adds_gradients)

    @property
    def step_turns(self) -> dict[Block, Ticket]:
        """Of a step during backward, its turns on gradients; see `CallTurns`."""
        return self._turns.of_step

    def start(self, times: LayerTimes | None) -> None:
        """Launch the first tasks; never blocks. `times` records the time and memory of their layers."""
        if any(task.adds_gradients for task in self.first_tasks):
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
        self._frozen = frozenset(id(block.tensors[index]) for block, index in self.call.state.frozen())
        self._caller.put_grads(outputs, iter(grads), streams)
        self._launch(self.later_tasks, times)

    @property
    def awaits_backward(self) -> bool:
        """Whether the run has backward tasks that may still be launched."""
        return bool(self.later_tasks) and not self._adds_gradients and not self.aborted

    def drop_gradients(self) -> None:
        """Have the later tasks compute only the gradients of inputs; those of weights are dropped."""
        self._turns.drops_gradients = True

    def _begin_adding(self) -> None:
        # Once a run: backward tasks consume what forward saved. If they fail before any gradient leaves its
        # device, the gradients on the host are unchanged.
        if self._adds_gradients:
            raise RuntimeError(
                "backward() was called a second time through the same forward; its saved activations are gone, "
                "also with retain_graph=True. Call the model once for each backward, or add up the losses"
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
        # Those of backward tasks, too: what changes in a layer between forward and backward belongs to neither.
        for task in self.tasks:
            self._twins[task.device].ensure(task.layers)
        samples = self.number < _SAMPLED or self.call.compares
        self._writes = LateWrites(self.call.state, self._turns.read_late(tasks), samples=samples)
        jobs: deque[tuple[Lane, TaskJob]] = deque()
        try:
            jobs.extend(self._prepare(task, times) for task in tasks)
            if self._adds_gradients and self.call.state.options.steps_in_backward:
                self._turns.take_step(tasks)
            while jobs:
                lane, job = jobs[0]
                self._outcomes.append(self._followed(lane.submit(job)))
                jobs.popleft()
        except BaseException as error:
            # For example Ctrl-C: later work must not wait for tasks that will never run.
            self._abandon(error, [job for _, job in jobs])
            raise

    def _abandon(self, error: BaseException, jobs: Sequence[TaskJob]) -> None:
        """Abort a launch, whose caller raises the error; `jobs` are not queued."""
        self.abort(error, "while it was launched")
        self._error = None
        self._unreported.tell()
        for job in jobs:
            job.leave()
        self._turns.leave_step()

    def _followed(self, outcome: Outcome[None]) -> Outcome[None]:
        self._tracer.follow(outcome)
        return outcome

    def _prepare(self, task: Task, times: LayerTimes | None) -> tuple[Lane, TaskJob]:
        lane, twins = self._runtime.lanes[task.device], self._twins[task.device]
        with taking_tickets() as take:
            turns, gradient_turns = self._turns.of_task(task, take)
            on = UploadContext(
                lane,
                twins,
                self._tracer,
                self._frozen,
                may_outlive=not self.call.waits,
                kept=self.call.kept(task.device),
                call=self.call.number,
                version=self.call.state.version,
                products=self.call.products,
                coded=self.call.coded,
            )
            moves = UNTIMED if times is None else times.transfers
            weights = Weights(on, turns, gradient_turns, spare_bytes=self.call.spare_bytes, times=moves, saved={})
            place = TaskContext(self.call, lane, self._runtime.backend, twins, self, self._tracer)
            slots = TaskSlots(self.call, self._exchange)
            return lane, TaskJob(self, place, task, weights, slots, times)

    # Gradients on their way to the host

    def send_to_host(self, delivery: Delivery, where: str) -> None:
        """Submit a delivery of gradients to its porter. See `Outbox`."""
        delivered = delivery.porter.submit(self._deliver, delivery, where)
        delivery.porter.note_load(delivered, delivery.nbytes)
        self._deliveries.append(self._followed(delivered))

    def _deliver(self, delivery: Delivery, where: str) -> None:
        try:
            if self._may_deliver():
                self._refuse_written(delivery)
                delivery.run()
        except BaseException as error:
            self.abort(error, where)
            delivery.abandon()
        finally:
            delivery.leave()
            self.note_end()

    def _refuse_written(self, delivery: Delivery) -> None:
        # Before the delivery leaves any turn: whoever has waited for these gradients may write.
        if self._writes:
            delivery.made.synchronize()
            self._writes.refuse({layer for block, *_ in delivery.sums for layer in block.users})

    def _may_deliver(self) -> bool:
        with self._lock:
            self._has_delivered |= not self.aborted
            return not self.aborted

    # Device memory that ran out

    def note_shortage(self, task: Task, error: BaseException, where: str) -> None:
        """A task ran out of device memory, and what is unfinished of it runs again. Called by any lane."""
        self.shortages.append(Shortage(task, where, in_words(error)))

    def explain_shortages(self) -> str:
        """What happened where device memory ran out, in words, once; empty if it did not."""
        if self._is_told or not self.shortages:
            return ""
        self._is_told = True
        return explanation(self.call, self.shortages)

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
                self.call.state.health.note_incomplete(self.number, class_name(error))
            self.aborted = True
            self._error = error
        self._exchange.close()
        self._describe(error, where)

    def _leaves_gradients(self) -> bool:
        # In a model of several parts, the other parts may have added their gradients of this backward already.
        # So may other machines.
        is_shared = self.call.state.is_part or self.call.state.shards.is_divided
        return self._has_delivered or (self._adds_gradients and is_shared)

    def _describe(self, error: BaseException, where: str) -> None:
        # After the wake-up and without the lock: formatting the error and clearing frames may run users' code.
        add_note(error, f"RoundPipe: in model {self.call.name!r}, {where}")
        if is_out_of_memory(error):
            add_note(error, advice(self.call))
            clear_frames(error)
        self._unreported.note(error)
        if self._adds_gradients:
            self.call.state.health.describe_incomplete(self.number, in_words(error))

    def _collect(self, slots: Sequence[Slot], *, wait: bool = True) -> list[Packet]:
        """Take the packets of `slots`; call it on the launcher's thread.

        With `wait`, the packets are readable on return, and buffers have what layers have written; otherwise the
        packets are readable after their events. Raises the run's first error, after all its tasks have ended. An
        interrupt of the caller counts as an error of the run.
        """
        try:
            with self._tracer.on_host(tracing.CALLER, "wait", "wait for results of the devices", reason="results"):
                packets = [self._exchange.take(slot, wait_until) for slot in slots]
                for packet in packets if wait else ():
                    for event in packet.events:
                        event.synchronize()
                    self._runtime.backend.host_touch(read=packet.tensors(), what="results")
                if wait:
                    self._await_buffers()
            if self.call.randomness is not None and self.call.randomness.uses_generators():
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

    def _await_buffers(self) -> None:
        # Code between calls reads and writes buffers as in plain PyTorch.
        for block in self.call.state.blocks:
            if block.is_written_by_layers:
                with own_turn(block.turns, write=False):
                    self._runtime.backend.host_touch(read=block.host_tensors(), what="buffers")

    def _await_all(self) -> None:
        for outcomes in (self._outcomes, self._deliveries):
            for outcome in outcomes:
                wait_until(outcome.wait)

    def wait(self) -> None:
        """Block until all tasks have ended and all gradients are on the host."""
        wait_for_all(self._outcomes)
        wait_for_all(self._deliveries)

    def take_times(self) -> list[LayerTimes]:
        """Remove and return the layers' times of a run that has ended, one entry a launch; empty if it failed."""
        found, self._times = self._times, []
        return [] if self.aborted else found

    def finish(self) -> None:
        """Block until all tasks have ended; raise the run's error, once."""
        for error in self.errors():
            raise error

    def errors(self) -> list[BaseException]:
        """Block until all tasks have ended; return the run's error, once, if it has one."""
        self.wait()
        if self._error is None:
            return self._impurities()
        self._await_devices(self._error)
        self._unreported.tell()
        self._exchange.clear()
        # The error keeps its frames and their objects alive, so this run drops its reference.
        found, self._error = [self._error], None
        return found

    def _impurities(self) -> list[BaseException]:
        """The error of the first layer that wrote its weights, or recomputed another output, if any has."""
        recomputed, rewritten = list(self.call.recomputed), list(self.call.rewritten)
        self.call.recomputed.clear()
        self.call.rewritten.clear()
        for each in [*recomputed, *rewritten]:
            for event in each.packet.events:
                event.synchronize()
            self._runtime.backend.host_touch(read=each.packet.tensors(), what="comparisons of recomputed layers")
        found = refusals(self.call, recomputed, rewritten)[:1]
        for error in found:
            add_note(error, f"RoundPipe: in model {self.call.name!r}")
            self.call.state.health.note_incomplete(self.number, in_words(error))
        return found

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
