"""One call under way: its tasks on their lanes, what they hand to each other, and its end, good or bad.

The launcher takes every ticket and makes every slot here, before any task runs; workers only fill and take.
Errors go the same way as results: the first one is kept, whoever waits for a slot wakes up, and the tasks that
have not run step aside.
"""

from __future__ import annotations

import threading
import traceback
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import rp_batch
import torch
from rp_optim.jobs import Outcome, wait_for_all, wait_for_any
from rp_sched import Task

from roundpipe.device.packet import Packet
from roundpipe.device.replica import Twins
from roundpipe.device.transfers import Delivery
from roundpipe.device.weights import Weights
from roundpipe.errors import add_note, in_words
from roundpipe.execution.call import Call
from roundpipe.execution.oom_advice import remedies
from roundpipe.execution.stage import Stage
from roundpipe.runtime.launcher import wait_until
from roundpipe.runtime.runtime import Lane, Runtime
from roundpipe.runtime.tickets import taking
from roundpipe.telemetry import tracing
from roundpipe.telemetry.layer_times import LayerTimes

Key = tuple[Literal["input", "grad", "label", "loss"], int, int]


class Aborted(Exception):
    """Another task of the same run failed; never seen by users."""


class _Slot:
    """A place for one packet, filled once and taken by a known number of readers; locked while it is empty."""

    __slots__ = ("_empty", "packet", "readers")

    def __init__(self) -> None:
        self.readers = 0
        self.packet: Packet | None = None
        self._empty = threading.Lock()
        self._empty.acquire()

    def fill(self, packet: Packet | None) -> None:
        """Once; None where nothing will come."""
        self.packet = packet
        self._empty.release()

    def is_filled(self, seconds: float) -> bool:
        """Wait so long at most; whether it is filled, perhaps with nothing."""
        if not self._empty.acquire(timeout=seconds):
            return False
        self._empty.release()
        return True

    def wait(self) -> Packet:
        """Block until it is filled; `Aborted` where nothing will come."""
        with self._empty:
            if self.packet is None:
                raise Aborted
            return self.packet


class _TaskJob:
    """A task in its lane's queue."""

    def __init__(self, run: Run, stage: Stage, weights: Weights) -> None:
        self._run = run
        self._stage = stage
        self._weights = weights

    def prefetch(self) -> None:
        if not self._run.aborted:
            self._guard(self._weights.prefetch)

    def run(self) -> None:
        if not self._run.aborted:
            self._guard(self._stage.run)
        if self._run.aborted:
            self._guard(self._stage.step_aside)
        self.leave()

    def leave(self) -> None:
        """Give up the turns that are left."""
        for ticket in self._weights.tickets():
            ticket.leave()

    def _guard(self, body: Any) -> None:
        try:
            body()
        except Aborted:
            pass
        except BaseException as error:
            self._run.abort(error, self._stage.where())


class Run:
    """A call's tasks and what they exchange; the `Exchange` of its stages."""

    def __init__(self, call: Call, runtime: Runtime, twins: Sequence[Twins]) -> None:
        self.call = call
        self.aborted = False
        self._error: BaseException | None = None
        self._runtime = runtime
        self._twins = twins
        self._slots: dict[Key, _Slot] = {}
        self._buffers: dict[tuple[int, int], Packet] = {}
        self._saved: dict[tuple[int, int], Packet] = {}
        self._recomputed: set[tuple[int, int]] = set()
        self._lock = threading.Lock()
        self._outcomes: list[Outcome[None]] = []
        self._deliveries: list[Outcome[None]] = []
        self.number = 0
        self._microbatches = 0
        # What the layers took, one for each launch in which that is measured.
        self._times: list[LayerTimes] = []
        self._tracer = tracing.SILENT
        self._adds_gradients = False
        # Whether a gradient on the host may hold a part of this run's.
        self._has_delivered = False

    # Launch, on the launcher's thread

    def expect(self, tasks: Iterable[Task]) -> None:
        """Make the slots that these tasks take their inputs, labels and gradients from."""
        for task in tasks:
            self._microbatches = max(self._microbatches, task.microbatches.stop)
            for microbatch in task.microbatches:
                for boundary in self._boundaries(task):
                    self.reserve(("input", boundary, microbatch))
                if task.kind == "B":
                    self.reserve(("grad", task.layers.stop, microbatch))
                    self._recomputed.update((layer, microbatch) for layer in task.layers)
                if task.kind == "FB":
                    self.reserve(("label", 0, microbatch))
                    self.reserve(("loss", 0, microbatch))

    def _boundaries(self, task: Task) -> Sequence[int]:
        by_layer = task.kind == "B" and self.call.grain == "layer"
        return task.layers if by_layer else (task.layers.start,)

    def reserve(self, key: Key) -> None:
        """One more reader for a slot."""
        if (slot := self._slots.get(key)) is None:
            slot = self._slots[key] = _Slot()
        slot.readers += 1

    def reserve_all(self, keys: Iterable[Key]) -> None:
        """`reserve` each."""
        for key in keys:
            self.reserve(key)

    def launch(self, tasks: Sequence[Task], times: LayerTimes | None = None) -> None:
        """Take all turns in the order of the tasks, then queue them. Never blocks."""
        self._tracer = tracing.current()
        if times is not None:
            self._times.append(times)
        # A layer that cannot be copied must show before any turn is taken: nobody would leave it.
        for task in tasks:
            self._twins[task.device].ensure(task.layers)
        jobs: deque[tuple[Lane, _TaskJob]] = deque()
        try:
            jobs.extend(self._prepare(task, times) for task in tasks)
            while jobs:
                lane, job = jobs[0]
                self._outcomes.append(self._followed(lane.submit(job)))
                jobs.popleft()
        except BaseException as error:
            # Such as Ctrl-C: those behind must not wait for tasks that will never run.
            self.abort(error, "while it was launched")
            self._error = None
            for _, job in jobs:
                job.leave()
            raise

    def _followed(self, outcome: Outcome[None]) -> Outcome[None]:
        self._tracer.follow(outcome)
        return outcome

    def _prepare(self, task: Task, times: LayerTimes | None) -> tuple[Lane, _TaskJob]:
        lane = self._runtime.lanes[task.device]
        twins = self._twins[task.device]
        blocks = dict.fromkeys(block for layer in task.layers for block in self.call.state.layers[layer].blocks)
        with taking() as take:
            turns = {
                block: take(block.turns, write=block.kind == "buffer" and task.kind != "B") for block in blocks
            }
            gradient_turns = {
                block: take(block.gradient.turns, write=True)
                for block in blocks
                if block.gradient is not None and task.kind != "F"
            }
            spare = self.call.spare_bytes
            weights = Weights(lane, twins, turns, gradient_turns, spare, times, self._tracer)
            backend = self._runtime.backend
            stage = Stage(self.call, task, lane, backend, twins, weights, self, times, self._tracer)
            return lane, _TaskJob(self, stage, weights)

    # The exchange

    def take_input(self, boundary: int, microbatch: int) -> Packet:
        """See `Exchange`."""
        return self.take(("input", boundary, microbatch))

    def take_grad(self, boundary: int, microbatch: int) -> Packet:
        """See `Exchange`."""
        return self.take(("grad", boundary, microbatch))

    def take_label(self, microbatch: int) -> Packet:
        """See `Exchange`."""
        return self.take(("label", 0, microbatch))

    def take_buffers(self, layer: int, microbatch: int) -> Packet | None:
        """See `Exchange`."""
        with self._lock:
            return self._buffers.pop((layer, microbatch), None)

    def wants_input(self, boundary: int, microbatch: int) -> bool:
        """See `Exchange`."""
        return ("input", boundary, microbatch) in self._slots

    def will_recompute(self, layer: int, microbatch: int) -> bool:
        """See `Exchange`."""
        return (layer, microbatch) in self._recomputed

    def wants_grad(self, boundary: int, microbatch: int) -> bool:
        """See `Exchange`."""
        return ("grad", boundary, microbatch) in self._slots

    def put_input(self, boundary: int, microbatch: int, packet: Packet) -> None:
        """See `Exchange`."""
        self.put(("input", boundary, microbatch), packet)

    def put_grad(self, boundary: int, microbatch: int, packet: Packet) -> None:
        """See `Exchange`."""
        self.put(("grad", boundary, microbatch), packet)

    def put_buffers(self, layer: int, microbatch: int, packet: Packet) -> None:
        """See `Exchange`."""
        with self._lock:
            self._buffers[layer, microbatch] = packet

    def put_saved(self, layer: int, microbatch: int, packet: Packet) -> None:
        """See `Exchange`."""
        with self._lock:
            self._saved[layer, microbatch] = packet

    def take_saved(self, layer: int, microbatch: int) -> Packet | None:
        """See `Exchange`."""
        with self._lock:
            return self._saved.pop((layer, microbatch), None)

    def put_loss(self, microbatch: int, packet: Packet) -> None:
        """See `Exchange`."""
        self.put(("loss", 0, microbatch), packet)

    def send_home(self, delivery: Delivery, where: str) -> None:
        """See `Exchange`."""
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

    def _may_deliver(self) -> bool:
        with self._lock:
            self._has_delivered |= not self.aborted
            return not self.aborted

    def put(self, key: Key, packet: Packet) -> None:
        """Fill a slot."""
        with self._lock:
            if not self.aborted:
                self._slots[key].fill(packet)

    def take(self, key: Key) -> Packet:
        """What is in a slot; blocks until it is filled. The last reader empties it."""
        return self._emptied(self._slot(key), key)

    def _emptied(self, slot: _Slot, key: Key) -> Packet:
        packet = slot.wait()
        with self._lock:
            slot.readers -= 1
            if slot.readers == 0:
                self._slots.pop(key, None)
        return packet

    def _slot(self, key: Key) -> _Slot:
        with self._lock:
            if self.aborted:
                raise Aborted
            return self._slots[key]

    # The end

    def abort(self, error: BaseException, where: str) -> None:
        """Keep the first error with a note of where it happened, and wake everyone who waits for a slot."""
        with self._lock:
            if self.aborted:
                return
            if self._leaves_gradients():
                # Before anybody steps aside and lets a step come to what there is of the gradients.
                self.call.state.note_broken(self.number, type(error).__name__)
            self.aborted = True
            self._error = error
            waiting = [slot for slot in self._slots.values() if slot.packet is None]
        for slot in waiting:
            slot.fill(None)
        self._describe(error, where)

    def _leaves_gradients(self) -> bool:
        # The other parts of a whole may have their gradients of this backward already.
        return self._has_delivered or (self._adds_gradients and self.call.state.is_part)

    def _describe(self, error: BaseException, where: str) -> None:
        # After all are awake, and not under the lock: words, and what ends with the frames, may be anyone's code.
        add_note(error, f"RoundPipe: in model {self.call.name!r}, {where}")
        if issubclass(type(error), torch.OutOfMemoryError):
            add_note(error, remedies(self._microbatches, self.call.grain, is_planned=self.call.is_planned))
            _clear_frames(error)
        if self._adds_gradients:
            self.call.state.describe_broken(self.number, in_words(error))

    def collect(self, keys: Iterable[Key], *, wait: bool = True) -> list[Packet]:
        """Take slots on the launcher's thread; their memory may be read afterwards, or after their events.

        Raises the run's first error, once all its tasks have stepped aside; what interrupts the caller is one.
        """
        try:
            with self._tracer.on_host(tracing.CALLER, "wait", "wait for results of the devices", reason="results"):
                packets = [self._awaited(key) for key in keys]
                for packet in packets if wait else ():
                    for event in packet.events:
                        event.synchronize()
                    self._runtime.backend.host_touch(read=packet.tensors(), what="results")
            if self.call.randomness is not None and self.call.randomness.drew_any():
                # The generators are the caller's too: nothing may use them once the call has returned.
                self._await_all()
            return packets
        except Aborted:
            pass
        except BaseException as error:
            self.abort(error, "while the caller waited")
        # Not where another error is handled, which would take the place of what the run's own was raised after.
        self.finish()
        raise AssertionError("an aborted run has an error")

    def _awaited(self, key: Key) -> Packet:
        slot = self._slot(key)
        wait_until(slot.is_filled)
        return self._emptied(slot, key)

    def _await_all(self) -> None:
        for outcomes in (self._outcomes, self._deliveries):
            for outcome in outcomes:
                wait_until(outcome.wait)

    def add_gradients(self) -> None:
        """The tasks launched from now on add gradients; once a run, since they use up what forward saved.

        If they fail before any gradient has begun to leave its device, the host has those of before.
        """
        if self._adds_gradients:
            raise RuntimeError(
                "backward() was called a second time through the same forward; its saved activations are gone"
            )
        self.number = self.call.state.num_runs
        self.call.state.num_runs += 1
        self._adds_gradients = True

    def wait(self) -> None:
        """Block until all tasks are over, and all gradients at home."""
        wait_for_all(self._outcomes)
        wait_for_all(self._deliveries)

    def wait_for_any(self, seconds: float) -> bool:
        """Wait so long for a first task to be over; whether one is, or the run has failed."""
        return self.aborted or wait_for_any(self._outcomes, seconds)

    def take_times(self) -> list[LayerTimes]:
        """What its layers took, of a run that is over; each launch once, and nothing of a run that failed."""
        found, self._times = self._times, []
        return [] if self.aborted else found

    def finish(self) -> None:
        """Block until all tasks are over and raise the run's error, once."""
        if (error := self.outcome()) is not None:
            raise error

    def outcome(self) -> BaseException | None:
        """Block until all tasks are over; the run's error, once."""
        self.wait()
        if self._error is None:
            return None
        self._slots.clear()
        self._buffers.clear()
        self._saved.clear()
        # The error holds its frames and all that is in them: it is the caller's from here on.
        error, self._error = self._error, None
        return error

    def over(self) -> bool:
        """Whether all tasks are over, or have failed."""
        return self.aborted or all(outcome.done() for outcome in [*self._outcomes, *self._deliveries])


def _clear_frames(error: BaseException) -> None:
    """Let go of what the frames of an error hold, and of those behind it: kept, they would keep a device full."""
    behind: list[BaseException | None] = [error]
    seen: set[int] = set()
    while behind:
        one = behind.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            traceback.clear_frames(one.__traceback__)
            behind += (one.__cause__, one.__context__)


def sum_losses(packets: Sequence[Packet]) -> torch.Tensor | list[torch.Tensor]:
    """The sums over the microbatches, in their order: a tensor, or a list where the loss function gave several."""
    columns = zip(*(packet.leaves for packet in packets), strict=True)
    sums = [_sum(column) for column in columns]
    found = rp_batch.unflatten(packets[0].treedef, sums)
    return found if isinstance(found, torch.Tensor) else sums


def _sum(column: Sequence[torch.Tensor]) -> torch.Tensor:
    total = column[0].clone()
    for loss in column[1:]:
        total = total + loss
    return total
