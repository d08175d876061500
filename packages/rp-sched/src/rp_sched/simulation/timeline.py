"""`Timeline`: the recorded result of a simulation."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from rp_sched.problem.tasks import Task
from rp_sched.simulation.resources import Resource

Reason = Literal["launch", "stage before", "hop", "optimizer", "weights", "memory", "GIL", "end"]
"""Why a device is idle. `launch`: the call is not launched yet. `stage before`: the microbatch is still in the
stage before. `hop`: it is in transit between stages. `optimizer`: the weights are not written yet. `weights`: they
are in transit. `memory`: gradients have not left the device yet. `GIL`: layers are launched more slowly than the
device computes them. `end`: there are no more tasks."""


@dataclass(frozen=True, slots=True)
class TaskSpan:
    """A task that ran. Times are in ms from the launch of the first call.

    `microbatches`: start and end of each. `fetch_ms`, `fetched_ms`: start and end of the weights' upload.
    `left_ms`: its gradients had left the device.
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
    """A span of time in which a device was idle, and why. Times are in ms from the launch of the first call."""

    device: int
    start_ms: float
    end_ms: float
    reason: Reason

    @property
    def ms(self) -> float:
        """The length of the span."""
        return self.end_ms - self.start_ms


@dataclass(frozen=True)
class Timeline:
    """The result of a simulation; `spans` are in launch order.

    `launches`: the launch of each call, in ms from the first. `makespan_ms`: when all results and gradients are on
    the host. `busy_ms`, `peak_bytes`: per device, compute time and most bytes. `host_peak_bytes`: the most bytes
    of weights, gradients and activations on the host. `resource_ms`: how long the busiest device, link, switch and
    so on is busy with all calls at its full rate, a step of the optimizer after the last call among them.
    """

    spans: tuple[TaskSpan, ...]
    idle: tuple[Idle, ...]
    launches: tuple[float, ...]
    makespan_ms: float
    busy_ms: tuple[float, ...]
    peak_bytes: tuple[int, ...]
    host_peak_bytes: int
    resource_ms: Mapping[Resource, float]

    @property
    def devices(self) -> int:
        """The number of devices."""
        return len(self.busy_ms)

    @property
    def call_ms(self) -> float:
        """The mean time from launch to launch over the second half of the calls; for one call, the makespan."""
        return mean_ms(self.launches) if len(self.launches) > 1 else self.makespan_ms

    @property
    def bottleneck(self) -> Resource:
        """The resource that is busy for the longest time."""
        return max(self.resource_ms, key=self.resource_ms.__getitem__)

    @cached_property
    def idle_ms(self) -> tuple[float, ...]:
        """The idle time of each device within the makespan."""
        return tuple(self.makespan_ms - busy for busy in self.busy_ms)

    @cached_property
    def idle_ms_by_reason(self) -> dict[Reason, float]:
        """The idle time by reason, summed over devices."""
        sums: dict[Reason, float] = {}
        for idle in self.idle:
            sums[idle.reason] = sums.get(idle.reason, 0.0) + idle.ms
        return sums


def mean_ms(launches: Sequence[float]) -> float:
    """The mean time from launch to launch over the second half of at least two calls.

    >>> mean_ms([0.0, 9.0, 10.0, 12.0])
    1.5
    """
    last = len(launches) - 1
    half = last // 2
    return (launches[last] - launches[half]) / (last - half)
