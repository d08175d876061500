"""What tasks take of links and of what devices share: switches, host memory, the GIL, adding threads, disks."""

import math
from collections.abc import Iterable
from typing import Literal, NamedTuple

from rp_sched.problem.limits import Device, Limits

Resource = Literal["device", "link", "switch", "host memory", "GIL", "additions", "optimizer", "disk"]
"""What may bound a plan. `link`: one direction of a device's link; `switch`: the same of several links."""

# Resources that all devices share have these indices in `Rate.shared`; those of switches follow.
GIL, MEMORY, ADDITIONS, OPTIMIZER, DISK = range(5)
_NAMES: tuple[Resource, ...] = ("GIL", "host memory", "additions", "optimizer", "disk")


class Rate(NamedTuple):
    """What moving a byte takes: ms of a resource of its own, and of each shared one, by index.

    >>> Rate(2.0, ((GIL, 0.5), (MEMORY, 3.0))).alone
    3.0
    """

    own: float
    shared: tuple[tuple[int, float], ...] = ()

    @property
    def alone(self) -> float:
        """ms per byte if nothing else is under way."""
        return max((self.own, *(ms for _, ms in self.shared)))

    @property
    def shares(self) -> list[tuple[int, float]]:
        """By shared resource, the part of it that moving bytes takes at full speed."""
        alone = self.alone
        return [(resource, ms / alone) for resource, ms in self.shared]

    def beside(self, resource: int, ms: float) -> "Rate":
        """The rate of bytes that take so many ms of another shared resource, too.

        >>> Rate(2.0).beside(DISK, 5.0).alone
        5.0
        """
        return self._replace(shared=(*self.shared, (resource, ms))) if ms else self


class DeviceRates(NamedTuple):
    """One device: its slowdown and memory, and the rates of uploads, of downloads, and of gradients to be added.

    `up_ms`, `down_ms`, `add_ms`: ms per byte of each, alone.
    """

    slowdown: float
    memory_bytes: int | None
    up: Rate
    down: Rate
    add: Rate
    up_ms: float
    down_ms: float
    add_ms: float


class TaskWork(NamedTuple):
    """What tasks take in all: compute time, launching, and bytes of each kind; see `Load`."""

    busy_ms: float
    launch_ms: float
    up_bytes: int
    down_bytes: int
    added_bytes: int
    step_bytes: float
    disk_bytes: int


def total(works: Iterable[TaskWork]) -> TaskWork:
    """The sum of several tasks' work.

    >>> total([TaskWork(1.0, 0.0, 3, 0, 0, 0.0, 0)] * 2).up_bytes
    6
    """
    return TaskWork(*map(sum, zip(*works, strict=True)))


class Resources:
    """The resources of a machine, and what work takes of them.

    >>> resources = Resources(Limits(upload_gb_s=1.0), devices=2)
    >>> resources.lanes[1].up.alone * 1e9
    1000.0
    """

    def __init__(self, limits: Limits, devices: int) -> None:
        self.leaving_bytes = limits.leaving_bytes
        self._limits = limits
        self.names: list[Resource] = [*_NAMES, *("switch" for _ in range(2 * len(limits.switches)))]
        switch_of = {device: at for at, switch in enumerate(limits.switches) for device in switch.devices}
        self.lanes = [self._lane(limits.device(number), switch_of.get(number)) for number in range(devices)]
        host = limits.host
        self.update = Rate(host.optimizer_ms_per_byte, _taken([(MEMORY, host.memory_ms_per_byte)]))
        self.update_ms = self.update.alone
        self.add_ms = host.add_ms_per_byte
        self.disk_ms = host.disk_ms_per_byte

    def loads_ms(self, work: TaskWork, used: int) -> dict[Resource, float]:
        """How long each resource of the first `used` devices is busy with this work, if it is spread evenly.

        So no call that does this work can be faster, whatever device runs which task.
        """
        host = self._limits.host
        moved = work.up_bytes + work.down_bytes
        in_memory = moved + host.added_traffic * work.added_bytes + work.step_bytes
        return {
            "device": work.busy_ms / sum(1 / lane.slowdown for lane in self.lanes[:used]),
            "link": self._moving_ms(work, used, behind_switches=False),
            "switch": self._moving_ms(work, used, behind_switches=True) if self._limits.switches else 0.0,
            "host memory": in_memory * host.memory_ms_per_byte,
            "GIL": work.launch_ms * host.launch_gil_share + (moved + 2 * work.added_bytes) * host.gil_ms_per_byte,
            "additions": work.added_bytes * host.add_ms_per_byte,
            "optimizer": work.step_bytes * host.optimizer_ms_per_byte,
            "disk": work.disk_bytes * host.disk_ms_per_byte,
        }

    def _moving_ms(self, work: TaskWork, used: int, *, behind_switches: bool) -> float:
        up, down = (self._bytes_per_ms(used, way, behind_switches) for way in ("up", "down"))
        return max(work.up_bytes / up, (work.down_bytes + work.added_bytes) / down)

    def _bytes_per_ms(self, used: int, way: Literal["up", "down"], behind_switches: bool) -> float:
        """What the links of the first `used` devices carry together."""
        speeds = [_inverse(lane.up.own if way == "up" else lane.down.own) for lane in self.lanes[:used]]
        for switch in self._limits.switches if behind_switches else ():
            inside = [device for device in switch.devices if device < used]
            most = _inverse(_ms(switch.upload_gb_s if way == "up" else switch.download_gb_s))
            together = min(most, sum(speeds[device] for device in inside))
            for nth, device in enumerate(inside):
                speeds[device] = 0.0 if nth else together
        return sum(speeds)

    def _lane(self, device: Device, switch: int | None) -> DeviceRates:
        host = self._limits.host
        up, down = ([(GIL, host.gil_ms_per_byte), (MEMORY, host.memory_ms_per_byte)] for _ in range(2))
        if switch is not None:
            shared = self._limits.switches[switch]
            up.append((len(_NAMES) + 2 * switch, _ms(shared.upload_gb_s)))
            down.append((len(_NAMES) + 2 * switch + 1, _ms(shared.download_gb_s)))
        adding = [
            (GIL, 2 * host.gil_ms_per_byte),
            (MEMORY, host.added_traffic * host.memory_ms_per_byte),
            (ADDITIONS, host.add_ms_per_byte),
            *down[2:],
        ]
        rates = (
            Rate(_ms(device.upload_gb_s), _taken(up)),
            Rate(_ms(device.download_gb_s), _taken(down)),
            Rate(_ms(device.download_gb_s), _taken(adding)),
        )
        return DeviceRates(device.slowdown, device.memory_bytes, *rates, *(rate.alone for rate in rates))


def _taken(shared: list[tuple[int, float]]) -> tuple[tuple[int, float], ...]:
    return tuple((resource, ms) for resource, ms in shared if ms)


def _inverse(ms: float) -> float:
    return 1 / ms if ms else math.inf


def _ms(gb_s: float | None) -> float:
    return 0.0 if gb_s is None else 1 / (gb_s * 1e6)
