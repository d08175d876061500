"""The simulated clock: when each task runs, and when devices and links become free.

Tasks are simulated one by one in launch order. Each event happens at the latest of the times it depends on:

- A device runs its tasks in launch order, and the microbatches of a task one after another.
- A stage may start a microbatch when the stage before has finished it, plus `hop_ms` and the time to download and
  upload its bytes.
- A task's weights are fetched while the device runs the task before, in the memory of the task before that, as
  soon as the latter's gradients have left. If both tasks do not fit, the fetch waits until the gradients of the
  task before have left.
- A link serves tasks in launch order: a task's weights, then as many bytes as its activations have. Activations
  themselves do not wait for the link: they have a stream of their own.
- A call is launched when the losses (or outputs) of the call before are available and the call before that has
  ended, since it uses the weights of the step after that one. Otherwise calls overlap.

Two rules are simplifications that may make calls seem slower than they are: the order on the links, and the last
rule, which the engine applies layer by layer.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

from rp_sched.problem.costs import Limits
from rp_sched.simulation.stage_costs import Load

# Times in ms that are equal to this many decimal places count as equal.
DIGITS = 6


class Ran(NamedTuple):
    """The times of one simulated task.

    `fetch_ms`, `fetched_ms`: start and end of the weights' upload. `cleared_ms`: the gradients of the device's
    task before no longer take memory that this one needs. `microbatches`: start and end of each. `left_ms`: its
    gradients have left the device. `over_ms`: so have its outputs.
    """

    fetch_ms: float
    fetched_ms: float
    cleared_ms: float
    microbatches: tuple[tuple[float, float], ...]
    left_ms: float
    over_ms: float

    @property
    def end_ms(self) -> float:
        return self.microbatches[-1][1]


@dataclass(slots=True)
class Clock:
    """The state of devices and links. Times are in ms from the launch of the current call; lists are per device.

    `free`: the device has run its tasks. `up`, `down`: its links have carried their bytes (a shared link is that
    of device 0). `left`, `left_before`: the gradients of its last task, and of the task before, have left the
    device. `held`, `gradients`: bytes in use by its last task, in all and for gradients. `turn`: the next device
    in turn. `before_ms`: the call before has ended. `results_ms`: losses or outputs of this call are available.
    `over_ms`: this call has ended.

    >>> Clock.idle(2).free
    [0.0, 0.0]
    """

    free: list[float]
    up: list[float]
    down: list[float]
    left: list[float]
    left_before: list[float]
    held: list[float]
    gradients: list[float]
    turn: int = 0
    before_ms: float = 0.0
    results_ms: float = 0.0
    over_ms: float = 0.0

    @classmethod
    def idle(cls, devices: int) -> "Clock":
        """The state of idle devices."""
        free, up, down, left, left_before, held, gradients = ([0.0] * devices for _ in range(7))
        return cls(free, up, down, left, left_before, held, gradients)

    def copy(self) -> "Clock":
        """An independent copy at the launch of a call."""
        free, left, left_before, held, gradients, up, down = map(list, self._lists())
        return Clock(free, up, down, left, left_before, held, gradients, self.turn, self.before_ms)

    def next_call(self) -> float:
        """Advance to the launch of the next call; return the time since the launch of this one."""
        passed = max(self.results_ms, self.before_ms)
        self.before_ms = _since(self.over_ms, passed)
        for times in (self.free, self.up, self.down, self.left, self.left_before):
            times[:] = [_since(ms, passed) for ms in times]
        self.results_ms = self.over_ms = 0.0
        return passed

    def rounded_state(self, *, named: bool) -> tuple[object, ...]:
        """The rounded state, which determines the future. `named`: device numbers matter; else sort devices."""
        devices = [tuple(round(value, DIGITS) for value in device) for device in zip(*self._lists(), strict=True)]
        alike = devices[self.turn :] + devices[: self.turn] if named else sorted(devices)
        return round(self.before_ms, DIGITS), *alike

    def exact_state(self) -> tuple[float, ...]:
        """The exact state that determines the future."""
        return self.turn, self.before_ms, *chain.from_iterable(self._lists())

    def round_state(self) -> None:
        """Round the state, so that states that differ by rounding errors become equal."""
        self.before_ms = round(self.before_ms, DIGITS)
        for values in self._lists():
            values[:] = [round(value, DIGITS) for value in values]

    def first_free(self, used: int) -> int:
        """The first of `used` devices to become free; of several, chosen by their state, not their number."""
        free = self.free[:used]
        soonest = min(free)
        if free.count(soonest) == 1:
            return free.index(soonest)
        alike = [device for device, ms in enumerate(free) if ms == soonest]
        states = list(zip(*self._lists(), strict=True))
        return min(alike, key=states.__getitem__)

    def run(self, load: Load, batch: range, device: int, ready: list[float], limits: Limits) -> Ran:
        """Simulate a task. `ready[m]`: when it may start microbatch m; set to when the next stage may."""
        link = 0 if limits.shared_links else device
        fetch_ms = max(self.up[link], self._room_ms(load, device, limits))
        fetched_ms = fetch_ms + load.weights_ms
        self.up[link] = fetched_ms + len(batch) * load.inputs_ms
        cleared_ms = self._cleared_ms(load, device, limits)
        start_ms = max(self.free[device], fetched_ms, cleared_ms)
        times = tuple(_run_microbatches(load, batch, start_ms, ready))
        end_ms = times[-1][1]
        sent_ms = max(self.down[link], times[0][0]) + len(batch) * load.outputs_ms
        left_ms = max(sent_ms, end_ms) + load.gradients_ms if load.gradients_ms else end_ms
        self.down[link] = left_ms if load.gradients_ms else sent_ms
        self._note(load, device, end_ms, left_ms)
        return Ran(fetch_ms, fetched_ms, cleared_ms, times, left_ms, max(left_ms, sent_ms))

    def _room_ms(self, load: Load, device: int, limits: Limits) -> float:
        """When the device has memory for the weights: together with its last task, or after it."""
        memory = limits.device_memory_bytes
        beside = memory is None or self.held[device] + load.state_bytes <= memory
        return self.left_before[device] if beside else self.left[device]

    def _cleared_ms(self, load: Load, device: int, limits: Limits) -> float:
        """When the last task's gradients no longer take memory that this task's activations need."""
        memory = limits.device_memory_bytes
        beside = memory is None or self.gradients[device] + load.state_bytes + load.kept_bytes <= memory
        return 0.0 if beside else self.left[device]

    def _note(self, load: Load, device: int, end_ms: float, left_ms: float) -> None:
        self.free[device] = end_ms
        self.left_before[device], self.left[device] = self.left[device], left_ms
        self.held[device] = load.state_bytes + load.kept_bytes
        self.gradients[device] = load.gradient_bytes

    def _lists(self) -> tuple[list[float], ...]:
        return self.free, self.left, self.left_before, self.held, self.gradients, self.up, self.down


def _run_microbatches(
    load: Load, batch: range, start_ms: float, ready: list[float]
) -> Sequence[tuple[float, float]]:
    times: list[tuple[float, float]] = []
    end_ms = start_ms
    for microbatch in batch:
        begin_ms = max(end_ms, ready[microbatch])
        end_ms = begin_ms + load.ms
        ready[microbatch] = end_ms + load.hop_ms
        times.append((begin_ms, end_ms))
    return times


def _since(ms: float, passed: float) -> float:
    return ms - passed if ms > passed else 0.0
