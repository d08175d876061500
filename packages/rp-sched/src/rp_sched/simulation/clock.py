"""When devices and links are free, and when a task runs on them.

The clock goes in the order of launch, task by task; each time is the latest of the times it has to wait for:

- a device runs its tasks in the order of launch, and the microbatches of a task in a row;
- a stage takes a microbatch one hop, and its bytes down and up again, after the stage before was done with it;
- a task's weights are fetched while the device runs its last task, into the room of the one before that, as soon
  as that one's gradients have left; if both do not fit, once the last task's gradients have left;
- a link carries the tasks in the order of launch: a task's weights, then as many bytes as its activations have
  (which do not wait for each other: a stream of their own carries them as they come);
- a call is launched when the losses (or outputs) of the one before are there and the one before that is over,
  since its weights come from the step after that one. Until then calls overlap.

The order on the links is a simplification, and so is the last rule, which the engine keeps layer by layer: both
make calls seem slower than they may be.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

from rp_sched.problem.costs import Limits
from rp_sched.simulation.stage_costs import Load

# Times that differ by less, in digits after the point of a millisecond, are the same.
DIGITS = 6


class Ran(NamedTuple):
    """When a task ran: fetching from `fetch_ms` to `fetched_ms`, each microbatch from its start to its end.

    `cleared_ms`: the last task's gradients made room for it. `left_ms`: its own gradients have left the device.
    `over_ms`: so has all that it hands on.
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
    """Where devices and links stand, from the launch of a call on, which is zero. Lists have an entry a device.

    `free`: the device has run its tasks. `up`, `down`: its link has carried its bytes (a shared link is the first
    device's). `left`, `left_before`: the last task's gradients have left the device, and those of the one before
    it. `held`, `gradients`: the bytes of the last task. `turn`: the device whose turn it is. `before_ms`: the call
    before is over. `results_ms`: the losses or outputs of this call are there; `over_ms`: it is over.

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
        """Devices that have nothing to do."""
        free, up, down, left, left_before, held, gradients = ([0.0] * devices for _ in range(7))
        return cls(free, up, down, left, left_before, held, gradients)

    def copy(self) -> "Clock":
        """A clock that goes on by itself."""
        free, left, left_before, held, gradients, up, down = map(list, self._lists())
        return Clock(free, up, down, left, left_before, held, gradients, self.turn, self.before_ms)

    def next_call(self) -> float:
        """Go on to the launch of the next call; how long after this one that is."""
        passed = max(self.results_ms, self.before_ms)
        self.before_ms = _since(self.over_ms, passed)
        for times in (self.free, self.up, self.down, self.left, self.left_before):
            times[:] = [_since(ms, passed) for ms in times]
        self.results_ms = self.over_ms = 0.0
        return passed

    def standing(self, *, named: bool) -> tuple[object, ...]:
        """All that the future depends on; `named` if it matters which device is which."""
        devices = [tuple(round(value, DIGITS) for value in device) for device in zip(*self._lists(), strict=True)]
        alike = devices[self.turn :] + devices[: self.turn] if named else sorted(devices)
        return round(self.before_ms, DIGITS), *alike

    def exactly(self) -> tuple[float, ...]:
        """All that the future depends on, as it is."""
        return self.turn, self.before_ms, *chain.from_iterable(self._lists())

    def tidy(self) -> None:
        """Drop differences that do not matter, so that what is alike becomes equal."""
        self.before_ms = round(self.before_ms, DIGITS)
        for values in self._lists():
            values[:] = [round(value, DIGITS) for value in values]

    def first_free(self, used: int) -> int:
        """Of the first `used` devices the one that frees first; where several do, it must not matter which."""
        free = self.free[:used]
        soonest = min(free)
        if free.count(soonest) == 1:
            return free.index(soonest)
        alike = [device for device, ms in enumerate(free) if ms == soonest]
        standing = list(zip(*self._lists(), strict=True))
        return min(alike, key=standing.__getitem__)

    def run(self, load: Load, batch: range, device: int, ready: list[float], limits: Limits) -> Ran:
        """Run a task; `ready[m]` is when microbatch m may start, and then when the next stage may start it."""
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
        """When the weights have room: beside the last task, or after it."""
        memory = limits.device_memory_bytes
        beside = memory is None or self.held[device] + load.state_bytes <= memory
        return self.left_before[device] if beside else self.left[device]

    def _cleared_ms(self, load: Load, device: int, limits: Limits) -> float:
        """When the last task's gradients do not take the room of this task's activations any more."""
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
