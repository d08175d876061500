"""The measured rates of a runtime's devices, links and host, by probes, calls and steps; plans' limits by them."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median
from typing import Literal

from rp_sched import Device, Host, Limits, Switch

from rp_telemetry.transfer_times import Transfers

# The number of latest samples that count. A plan follows a change after at most this many measured calls.
RECENT = 8
# Links that together reach less than this part of the sum of their rates share a switch.
_SHARED = 0.85
# Relative change of a rate below which plans are not remade.
_NEWS = 0.1

Way = Literal["up", "down"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Measured rates in 10^9 bytes a second; None where nothing was measured.

    >>> Rates(up_gb_s=(50.0, 51.0)).is_near(Rates(up_gb_s=(50.0, 54.0)))
    True

    `up_gb_s`, `down_gb_s`: each device's link. `switches`: what links share when used at once. `memory_gb_s`: host
    memory. `gil_ms_per_gb`: processor time of a porter. `add_gb_s`: arriving gradients that one porter adds.
    `optimizer_gb_s`: traffic of steps.
    """

    up_gb_s: tuple[float | None, ...] = ()
    down_gb_s: tuple[float | None, ...] = ()
    switches: tuple[Switch, ...] = ()
    memory_gb_s: float | None = None
    gil_ms_per_gb: float | None = None
    add_gb_s: float | None = None
    optimizer_gb_s: float | None = None

    def is_near(self, other: Rates) -> bool:
        """Return whether no rate differs enough for plans to be remade."""
        return self.switches == other.switches and all(
            near(mine, theirs) for mine, theirs in zip(self._numbers(), other._numbers(), strict=True)
        )

    def _numbers(self) -> list[float | None]:
        lists = (*self.up_gb_s, *self.down_gb_s)
        return [*lists, self.memory_gb_s, self.gil_ms_per_gb, self.add_gb_s, self.optimizer_gb_s]


def near(one: float | None, other: float | None) -> bool:
    """Return whether two measurements of a quantity count as equal.

    >>> near(10.0, 10.5), near(10.0, 12.0), near(None, 10.0), near(None, None)
    (True, False, False, True)
    """
    if one is None or other is None:
        return one is other
    return abs(one - other) <= _NEWS * max(one, other)


@dataclass(frozen=True, slots=True)
class Machinery:
    """The properties of a runtime that plans depend on, apart from rates.

    `memory_bytes`: each device's memory. `speeds`: of each device, if they differ. `host`: the bytes that a step
    moves there and the layout of gradients there; None on CPU devices, which share the host's cores and memory.
    """

    memory_bytes: tuple[int, ...]
    speeds: tuple[float, ...] | None = None
    host: Host | None = None


def priced(limits: Limits, rates: Rates, machinery: Machinery) -> Limits:
    """Return `limits` for a machine with these rates; a rate that was not measured sets no limit.

    >>> machinery = Machinery((80, 80), None, Host())
    >>> found = priced(Limits(), Rates(up_gb_s=(50.0, 52.0), down_gb_s=(40.0, None)), machinery)
    >>> found.upload_gb_s, found.download_gb_s, found.devices
    (51.0, 40.0, ())
    """
    count = len(machinery.memory_bytes)
    ups, downs = _filled(rates.up_gb_s, count), _filled(rates.down_gb_s, count)
    on_host = machinery.host is None
    linked = replace(limits, upload_gb_s=_common(ups), download_gb_s=_common(downs))
    if on_host:
        return linked
    return replace(
        linked,
        devices=_devices(limits, ups, downs, machinery),
        switches=rates.switches,
        host=_host(machinery.host, rates, count),
    )


def _filled(rates: Sequence[float | None], count: int) -> list[float | None]:
    """Replace missing rates: assume that a device that has moved nothing yet is like the others."""
    common = _common(rates)
    return [common if rate is None else rate for rate in rates] or [None] * count


def _common(rates: Sequence[float | None]) -> float | None:
    known = [rate for rate in rates if rate is not None]
    return median(known) if known else None


def _host(host: Host | None, rates: Rates, count: int) -> Host:
    return replace(
        host or Host(),
        memory_gb_s=rates.memory_gb_s,
        gil_ms_per_gb=rates.gil_ms_per_gb or 0.0,
        add_gb_s=rates.add_gb_s,
        # Each device's porter adds what it brings.
        add_threads=count,
        optimizer_gb_s=rates.optimizer_gb_s,
    )


def _devices(
    limits: Limits, ups: Sequence[float | None], downs: Sequence[float | None], machinery: Machinery
) -> tuple[Device, ...]:
    """Return each device; () if they differ by no more than measurements do."""
    least = min(machinery.memory_bytes)
    columns = (ups, downs, machinery.memory_bytes)
    if machinery.speeds is None and all(near(min(column), max(column)) for column in map(_numbers, columns)):
        return ()
    speeds = machinery.speeds or [1.0] * len(ups)
    return tuple(
        Device(
            speed=speed,
            memory_bytes=_part(limits.device_memory_bytes, total / least),
            upload_gb_s=up,
            download_gb_s=down,
        )
        for speed, total, up, down in zip(speeds, machinery.memory_bytes, ups, downs, strict=True)
    )


def _numbers(column: Sequence[float | None]) -> list[float]:
    return [0.0 if number is None else number for number in column]


def _part(nbytes: int | None, factor: float) -> int | None:
    return None if nbytes is None else int(nbytes * factor)


class Recent:
    """The latest samples of a quantity. `pick`: computes the value from them.

    >>> recent = Recent(max)
    >>> for sample in (1.0, 5.0, 2.0):
    ...     recent.add(sample)
    >>> recent.value
    5.0
    """

    def __init__(self, pick: Callable[[Iterable[float]], float]) -> None:
        self._pick = pick
        self._samples: deque[float] = deque(maxlen=RECENT)

    def add(self, sample: float) -> None:
        """Add a sample; the oldest of `RECENT` is dropped."""
        self._samples.append(sample)

    @property
    def value(self) -> float | None:
        """The value that `pick` returns; None without samples."""
        return self._pick(self._samples) if self._samples else None


class DeviceSpeeds:
    """The relative speeds at which devices run the layers of one model.

    >>> speeds = DeviceSpeeds()
    >>> speeds.add({"cuda:0": {0: 1.0, 1: 2.0}, "cuda:1": {0: 3.0, 1: 6.0}})
    >>> speeds.of(["cuda:0", "cuda:1"])
    (2.0, 0.6666666666666666)
    """

    def __init__(self) -> None:
        self._recent: dict[tuple[str, int], Recent] = {}
        self._given: tuple[float, ...] | None = None

    def add(self, times: Mapping[str, Mapping[int, float]]) -> None:
        """Add the ms of layers in one launch, by device and layer."""
        for device, by_layer in times.items():
            for layer, ms in by_layer.items():
                self._recent.setdefault((device, layer), Recent(median)).add(ms)

    def of(self, devices: Sequence[str]) -> tuple[float, ...] | None:
        """Return each device's speed, relative to the mean time; None if they are alike, or no layer ran on all.

        Repeats the last result while the speeds have hardly changed.
        """
        layers = {layer for _, layer in self._recent}
        shared = [layer for layer in layers if all((device, layer) in self._recent for device in devices)]
        times = [sum(self._recent[device, layer].value or 0.0 for layer in shared) for device in devices]
        if not all(times):
            return None
        speeds = tuple(fmean(times) / ms for ms in times)
        if self._given is None or not all(map(near, speeds, self._given)):
            self._given = None if near(min(times), max(times)) else speeds
        return self._given


class Measurements:
    """Measurements of one runtime's devices, in their order, shared by its models.

    For links, additions and the optimizer the fastest of the latest calls counts: in the others they also waited,
    for causes that plans price separately. For the porters' processor time the median counts. Threads may add at
    any time.
    """

    def __init__(self, devices: Sequence[str]) -> None:
        self._devices = tuple(devices)
        self._lock = threading.Lock()
        self._up, self._down = ([Recent(max) for _ in devices] for _ in range(2))
        self._carrying, self._adding, self._stepping = Recent(median), Recent(max), Recent(max)
        self.is_probed = False
        self._probed = Rates()
        self._given = Rates()

    def note_probe(self, probed: Rates) -> None:
        """Add the rates that a probe measured; its link rates count as samples."""
        self.is_probed, self._probed = True, probed
        with self._lock:
            for recents, rates in ((self._up, probed.up_gb_s), (self._down, probed.down_gb_s)):
                # A probe that failed has no rates.
                for recent, rate in zip(recents, rates, strict=False):
                    if rate is not None:
                        recent.add(rate)

    def note_call(self, transfers: Transfers) -> None:
        """Add the transfers of a finished launch."""
        with self._lock:
            for recents, moved in ((self._up, transfers.moved("up")), (self._down, transfers.moved("down"))):
                for device, (nbytes, ms) in moved.items():
                    _add(recents[self._devices.index(device)], nbytes, ms)
            for nbytes, ms in transfers.moved("add").values():
                _add(self._adding, nbytes, ms)
            nbytes, ms = transfers.carried()
            if nbytes:
                self._carrying.add(ms / nbytes * 1e9)

    def note_step(self, nbytes: float, seconds: float) -> None:
        """Add an optimizer step that moved `nbytes` of host memory, as the planner counts them."""
        with self._lock:
            _add(self._stepping, nbytes, seconds * 1e3)

    def rates(self) -> Rates:
        """Return the latest rates; the same as last time while no rate has changed much."""
        with self._lock:
            rates = self._now()
        if len(self._given.up_gb_s) == len(rates.up_gb_s) and rates.is_near(self._given):
            return self._given
        self._given = rates
        return rates

    def _now(self) -> Rates:
        optimizer = self._stepping.value
        known = [rate for rate in (self._probed.memory_gb_s, optimizer) if rate is not None]
        return Rates(
            up_gb_s=tuple(recent.value for recent in self._up),
            down_gb_s=tuple(recent.value for recent in self._down),
            switches=self._probed.switches,
            # A rate that one user of host memory reaches, any other can reach, too.
            memory_gb_s=None if self._probed.memory_gb_s is None else max(known),
            gil_ms_per_gb=self._carrying.value,
            add_gb_s=self._adding.value,
            optimizer_gb_s=optimizer,
        )


def _add(recent: Recent, nbytes: float, ms: float) -> None:
    if nbytes and ms > 0:
        recent.add(nbytes / ms / 1e6)


# Returns the GB/s of each of these devices, by number, when all of them copy at once in this direction.
Measure = Callable[[Way, Sequence[int]], Sequence[float]]


def shared_by(ups: Sequence[float], downs: Sequence[float], measure: Measure) -> tuple[Switch, ...]:
    """Return the switches that links share, from the rates of each link alone and of several at once.

    >>> def measure(way, chosen):
    ...     return [min(25.0, 40.0 / len(chosen))] * len(chosen)
    >>> shared_by([25.0] * 2, [25.0] * 2, measure)
    (Switch(devices=(0, 1), upload_gb_s=40.0, download_gb_s=40.0),)

    Devices of which any two slow each other are behind one switch. If all together are slower but no two are, all
    are behind one.
    """
    everyone = range(len(ups))
    if len(ups) < 2:
        return ()
    together = {way: measure(way, everyone) for way in ("up", "down")}
    if not (_slower(together["up"], ups) or _slower(together["down"], downs)):
        return ()
    groups = _groups(ups, measure)
    if all(len(group) == 1 for group in groups):
        groups = [tuple(everyone)]
    return tuple(
        Switch(
            devices=group,
            upload_gb_s=sum(together["up"][at] for at in group),
            download_gb_s=sum(together["down"][at] for at in group),
        )
        for group in groups
        if len(group) > 1
    )


def _groups(alone: Sequence[float], measure: Measure) -> list[tuple[int, ...]]:
    """Group devices by their switch: measure each together with the first one of every group so far."""
    groups: list[tuple[int, ...]] = []
    for device in range(len(alone)):
        for at, group in enumerate(groups):
            pair = (group[0], device)
            if _slower(measure("up", pair), [alone[number] for number in pair]):
                groups[at] = (*group, device)
                break
        else:
            groups.append((device,))
    return groups


def _slower(together: Sequence[float], alone: Sequence[float]) -> bool:
    return sum(together) < _SHARED * sum(alone)
