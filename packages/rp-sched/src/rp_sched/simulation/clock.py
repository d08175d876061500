"""The planners' clock: when tasks run, and when devices and links become free, one task after another.

The rules, which `simulate` shares:

- A device runs its tasks in launch order, and the microbatches of a task one after another. A microbatch takes as
  long as its computing, or its launching if that is longer.
- A stage may start a microbatch when the stage before has finished it, plus `hop_ms` and the time to download and
  upload its bytes.
- A task's weights are fetched while the device runs the task before, in the memory of the task before that, as
  soon as the latter's gradients have left. If both tasks do not fit, the fetch waits until the gradients of the
  task before have left. They are those of the step after the call before the last.
- A backward pass waits until gradients that leave the device take no more than `leaving_bytes`.
- A link serves tasks in launch order: a task's weights, then as many bytes as its activations have. Activations
  themselves do not wait for the link: they have a stream of their own. Gradients that are added on the host have
  left when they are added. The optimizer serves tasks in the order in which their gradients have left.
- A call is launched when the losses (or outputs) of the call before are available and the call before that has
  ended, since it uses the weights of the step after that one. Otherwise calls overlap.

Two rules are simplifications that may make calls seem slower than they are: the order on the links, and the last
rule, which the engine applies layer by layer.

This clock knows what each task takes while nothing else is under way. It does not know how tasks that run at once
share the GIL, host memory and switches: `PricedPlan` adds what these take in all. `simulate` divides them at each
moment.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from rp_sched.simulation.resources import DeviceRates, Resources
from rp_sched.simulation.stage_costs import Load

# States are rounded to this many decimal places, so that states that differ by rounding errors become equal.
DIGITS = 6
# Times in ms that differ by no more count as equal: rounding alone must not choose a device.
TIE_MS = 1e-5


@dataclass(slots=True)
class Clock:
    """The state of devices and links. Times are in ms from the launch of the current call; lists are per device.

    `free`: the device has run its tasks. `up`, `down`: its links have carried their bytes. `left`, `left_before`:
    the gradients of its last task, and of the task before, have left the device. `held`, `gradients`: bytes in use
    by its last task, in all and for gradients. `turn`: the next device in turn. `before_ms`: the call before has
    ended. `results_ms`: losses or outputs of this call are available. `over_ms`: this call has ended. `added_ms`:
    the host has added all gradients so far. `stepped_ms`: the optimizer has done all its work so far;
    `stepped_last_ms` and `stepped_before_ms`: that of the last call, and of the one before it. `read_ms`: the disk
    has been read for all tasks so far.

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
    added_ms: float = 0.0
    stepped_ms: float = 0.0
    stepped_last_ms: float = 0.0
    stepped_before_ms: float = 0.0
    read_ms: float = 0.0

    @classmethod
    def idle(cls, devices: int) -> "Clock":
        """The state of idle devices."""
        free, up, down, left, left_before, held, gradients = ([0.0] * devices for _ in range(7))
        return cls(free, up, down, left, left_before, held, gradients)

    def copy(self) -> "Clock":
        """An independent copy at the launch of a call."""
        free, left, left_before, held, gradients, up, down = map(list, self._lists())
        copied = Clock(free, up, down, left, left_before, held, gradients, self.turn, self.before_ms)
        copied.added_ms, copied.stepped_ms, copied.stepped_last_ms, copied.stepped_before_ms, copied.read_ms = (
            self._host()
        )
        return copied

    def next_call(self) -> float:
        """Advance to the launch of the next call; return the time since the launch of this one."""
        passed = max(self.results_ms, self.before_ms)
        self.before_ms = _since(self.over_ms, passed)
        for times in (self.free, self.up, self.down, self.left, self.left_before):
            times[:] = [_since(ms, passed) for ms in times]
        self.added_ms = _since(self.added_ms, passed)
        self.stepped_ms = _since(self.stepped_ms, passed)
        self.stepped_before_ms = _since(self.stepped_last_ms, passed)
        self.stepped_last_ms = self.stepped_ms
        self.read_ms = _since(self.read_ms, passed)
        self.results_ms = self.over_ms = 0.0
        return passed

    def rounded_state(self, *, named: bool) -> tuple[object, ...]:
        """The rounded state, which determines the future. `named`: device numbers matter; else sort devices."""
        devices = [tuple(round(value, DIGITS) for value in device) for device in zip(*self._lists(), strict=True)]
        alike = devices[self.turn :] + devices[: self.turn] if named else sorted(devices)
        return tuple(round(ms, DIGITS) for ms in (self.before_ms, *self._host())), *alike

    def exact_state(self) -> tuple[float, ...]:
        """The exact state that determines the future."""
        return self.turn, self.before_ms, *self._host(), *chain.from_iterable(self._lists())

    def round_state(self) -> None:
        """Round the state, so that states that differ by rounding errors become equal."""
        self.before_ms = round(self.before_ms, DIGITS)
        self.added_ms, self.stepped_ms, self.stepped_last_ms, self.stepped_before_ms, self.read_ms = (
            round(ms, DIGITS) for ms in self._host()
        )
        for values in self._lists():
            values[:] = [round(value, DIGITS) for value in values]

    def first_free(self, used: int) -> int:
        """The first of `used` devices to become free; of several, chosen by their state, not their number."""
        free = self.free[:used]
        alike = _lowest(free, range(used))
        if len(alike) == 1:
            return alike[0]
        for values in self._lists()[1:]:
            alike = _lowest(values, alike)
        return alike[0]

    def first_done(self, load: Load, microbatches: int, lanes: Sequence[DeviceRates]) -> int:
        """The device that would be the first to have run a task, of devices that differ."""
        times = [
            ms + microbatches * load.step_on(lane.slowdown) for ms, lane in zip(self.free, lanes, strict=False)
        ]
        return _lowest(times, range(len(times)))[0]

    def run(self, load: Load, batch: range, device: int, ready: list[float], resources: Resources) -> None:
        """Simulate a task. `ready[m]`: when it may start microbatch m; set to when the next stage may."""
        lane = resources.lanes[device]
        fetch_ms = max(self.up[device], self._room_ms(load, device, lane.memory_bytes), self.stepped_before_ms)
        fetched_ms = fetch_ms + load.weight_bytes * lane.up_ms
        if load.disk_bytes and resources.disk_ms:
            # One task after the other, as the bytes of all are there no sooner if devices share the disk.
            self.read_ms = max(self.read_ms, fetch_ms) + load.disk_bytes * resources.disk_ms
            fetched_ms = max(fetched_ms, self.read_ms)
        self.up[device] = fetched_ms + len(batch) * load.input_bytes * lane.up_ms
        start_ms = max(self.free[device], fetched_ms, self._cleared_ms(load, device, lane.memory_bytes))
        begin_ms = max(start_ms, ready[batch.start])
        step_ms = load.step_on(lane.slowdown)
        computed_ms = end_ms = start_ms
        # The first microbatch ends later if its backward pass has to wait for memory.
        least_ms = self._leaving_ms(load, device, resources) + load.backward_part * step_ms
        for microbatch in batch:
            computed_ms = end_ms = max(end_ms, ready[microbatch]) + step_ms
            if end_ms < least_ms:
                end_ms = least_ms
            ready[microbatch] = end_ms + load.hop_ms
        sent_ms = max(self.down[device], begin_ms) + len(batch) * load.output_bytes * lane.down_ms
        leaving_ms = (load.sent_bytes - load.added_bytes) * lane.down_ms + load.added_bytes * lane.add_ms
        left_ms = max(sent_ms, end_ms) + leaving_ms if leaving_ms else end_ms
        if load.added_bytes:
            adding_ms = load.added_bytes * resources.add_ms
            self.added_ms = max(self.added_ms + adding_ms, left_ms)
            left_ms = self.added_ms
        self.down[device] = left_ms if leaving_ms else sent_ms
        if load.sent_bytes:
            self.stepped_ms = max(self.stepped_ms, left_ms) + load.step_bytes * resources.update_ms
        self._note(load, device, end_ms, left_ms)
        # Losses do not wait for memory: they precede the backward pass.
        self.results_ms = max(self.results_ms, computed_ms + load.results_after_ms(step_ms))
        self.over_ms = max(self.over_ms, left_ms, sent_ms)

    def _room_ms(self, load: Load, device: int, memory: int | None) -> float:
        """When the device has memory for the weights: together with its last task, or after it."""
        beside = has_room_beside(load, self.held[device], memory)
        return self.left_before[device] if beside else self.left[device]

    def _cleared_ms(self, load: Load, device: int, memory: int | None) -> float:
        """When the last task's gradients no longer take memory that this task's activations need."""
        return 0.0 if is_clear(load, self.gradients[device], memory) else self.left[device]

    def _leaving_ms(self, load: Load, device: int, resources: Resources) -> float:
        """When the last task's gradients no longer take memory that this task's need; 0 if they never do."""
        return self.left[device] if waits_to_leave(load, self.gradients[device], resources) else 0.0

    def _note(self, load: Load, device: int, end_ms: float, left_ms: float) -> None:
        self.free[device] = end_ms
        self.left_before[device], self.left[device] = self.left[device], left_ms
        self.held[device] = load.state_bytes + load.kept_bytes
        self.gradients[device] = load.gradient_bytes

    def _host(self) -> tuple[float, float, float, float, float]:
        return self.added_ms, self.stepped_ms, self.stepped_last_ms, self.stepped_before_ms, self.read_ms

    def _lists(self) -> tuple[list[float], ...]:
        return self.free, self.left, self.left_before, self.held, self.gradients, self.up, self.down


def has_room_beside(load: Load, held: float, memory: int | None) -> bool:
    """Whether a device has memory for a task's weights and gradients beside `held` bytes of the task before."""
    return memory is None or held + load.state_bytes <= memory


def is_clear(load: Load, gradients: float, memory: int | None) -> bool:
    """Whether a task may run beside so many bytes of the gradients of the task before."""
    return memory is None or gradients + load.state_bytes + load.kept_bytes <= memory


def waits_to_leave(load: Load, gradients: float, resources: Resources) -> bool:
    """Whether a task's backward pass waits for the gradients of the task before to leave."""
    leaving = resources.leaving_bytes
    return leaving is not None and load.gradient_bytes > 0 and gradients > leaving


def _lowest(values: Sequence[float], among: Sequence[int]) -> list[int]:
    """Those of some devices whose value is the lowest, or differs from it by rounding alone."""
    limit = min([values[device] for device in among]) + TIE_MS
    return [device for device in among if values[device] <= limit]


def _since(ms: float, passed: float) -> float:
    return ms - passed if ms > passed else 0.0
