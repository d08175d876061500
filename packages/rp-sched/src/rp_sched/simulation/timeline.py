"""What happened in a simulation."""

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from rp_sched.problem.tasks import Task

Reason = Literal["launch", "stage before", "hop", "weights", "memory", "end"]
"""Why a device is idle. `launch`: the call's tasks are not known yet. `stage before`: the microbatch is still
there. `hop`: it is on its way. `weights`: they are. `memory`: gradients have not made room yet. `end`: nothing is
left."""


@dataclass(frozen=True, slots=True)
class Span:
    """A task that ran. Times are in ms from the launch of the first call.

    `microbatches`: start and end of each. From `fetch_ms` to `fetched_ms` its weights came; at `left_ms` its
    gradients had left the device.
    """

    call: int
    task: Task
    microbatches: tuple[tuple[float, float], ...]
    fetch_ms: float
    fetched_ms: float
    left_ms: float

    @property
    def start_ms(self) -> float:
        """When its first microbatch started."""
        return self.microbatches[0][0]

    @property
    def end_ms(self) -> float:
        """When its last microbatch ended."""
        return self.microbatches[-1][1]


@dataclass(frozen=True, slots=True)
class Idle:
    """A device that waits, and for what."""

    device: int
    start_ms: float
    end_ms: float
    reason: Reason

    @property
    def ms(self) -> float:
        """How long."""
        return self.end_ms - self.start_ms


@dataclass(frozen=True)
class Timeline:
    """What devices did, in the order of launch.

    `launches`: when each call was launched, in ms from the first. `makespan_ms`: the last task's gradients are on
    the host, or its results. `busy_ms`, `peak_bytes`: of each device. `host_peak_bytes`: weights, gradients and
    activations on the host.
    """

    spans: tuple[Span, ...]
    idle: tuple[Idle, ...]
    launches: tuple[float, ...]
    makespan_ms: float
    busy_ms: tuple[float, ...]
    peak_bytes: tuple[int, ...]
    host_peak_bytes: int

    @property
    def devices(self) -> int:
        """How many there are."""
        return len(self.busy_ms)

    @property
    def call_ms(self) -> float:
        """The time from launch to launch over the second half of the calls; of a single call, the makespan."""
        last = len(self.launches) - 1
        if last == 0:
            return self.makespan_ms
        half = last // 2
        return (self.launches[last] - self.launches[half]) / (last - half)

    @cached_property
    def idle_ms(self) -> tuple[float, ...]:
        """Of each device, until the end."""
        return tuple(self.makespan_ms - busy for busy in self.busy_ms)

    @cached_property
    def idle_ms_by_reason(self) -> dict[Reason, float]:
        """Of all devices together."""
        sums: dict[Reason, float] = {}
        for idle in self.idle:
            sums[idle.reason] = sums.get(idle.reason, 0.0) + idle.ms
        return sums
