"""`Limits`: the devices, links and host that a plan runs on."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from rp_sched.errors import InvalidCost
from rp_sched.problem import bounds
from rp_sched.problem.checks import amount, flag, milliseconds, nbytes, part, shown, speed, whole

_T = TypeVar("_T")

# Adam in one pass: read a 16-bit gradient, read and write an fp32 master and two moments, write a 16-bit weight.
OPTIMIZER_BYTES = 28.0
# Without a second weight block, new 16-bit weights are written to a buffer, read from it and written again.
COPYING_BYTES = 6.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One device, where devices differ. A field that is `None` has its value from `Limits`.

    >>> Device(speed=0.5).slowdown
    2.0

    `speed`: how fast it computes, relative to the times in `LayerCost`. `memory_bytes`, `upload_gb_s`,
    `download_gb_s`: see `Limits`.

    Raises `InvalidCost` for a number out of range, `TypeError` for a value that is not a number.
    """

    speed: float = 1.0
    memory_bytes: int | None = None
    upload_gb_s: float | None = None
    download_gb_s: float | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "speed", speed("speed", self.speed, unit="relative speed"))
        _set_bytes(self, "memory_bytes")
        _set_speeds(self, "upload_gb_s", "download_gb_s")

    @property
    def slowdown(self) -> float:
        """A layer's time on this device, divided by the time in its `LayerCost`."""
        return 1 / self.speed


@dataclass(frozen=True, slots=True, kw_only=True)
class Switch:
    """A switch, root port or bus whose bandwidth the links of several devices share.

    >>> Switch(devices=(0, 1, 2, 3), upload_gb_s=25, download_gb_s=25).devices
    (0, 1, 2, 3)

    `devices`: the numbers of the devices behind it. `upload_gb_s`, `download_gb_s`: their total bandwidth from and
    to the host, in 10^9 bytes per second; `None` means no limit.

    Raises `InvalidCost` for a device that is listed twice or a number out of range.
    """

    devices: tuple[int, ...]
    upload_gb_s: float | None = None
    download_gb_s: float | None = None

    def __post_init__(self) -> None:
        devices = tuple(whole("devices", device, error=InvalidCost) for device in self.devices)
        if not devices or len(set(devices)) < len(devices):
            raise InvalidCost(f"devices must be different devices, at least one, but are {shown(devices)} instead")
        object.__setattr__(self, "devices", devices)
        _set_speeds(self, "upload_gb_s", "download_gb_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """The host's resources, which all devices share. A rate of `None` means no limit; the defaults cost nothing.

    >>> Host(memory_gb_s=220, add_gb_s=25, gil_ms_per_gb=5).optimizer_bytes
    28.0

    `memory_gb_s`: bandwidth of host memory, in 10^9 bytes per second, shared by all transfers, additions and the
    optimizer. `gil_ms_per_gb`: how long the threads that move weights, gradients and activations hold the GIL for
    each 10^9 bytes; twice as long for gradients that are added. `launch_gil_share`: the fraction of a layer's
    launch time that holds the GIL, from 0 to 1. Each device's own launches take the full time.

    Several tasks of a call may send gradients for one layer. With two `gradient_buffers` or more, that many tasks
    write a buffer each, in 16 bits, and the optimizer reads all buffers; later tasks' gradients arrive in 16 bits
    and are added to them. With one buffer and several tasks, all gradients are fp32, and all but the first are
    added. `None`: nothing is widened or added. `add_gb_s`: how many 10^9 bytes of arriving gradients one of
    `add_threads` threads adds per second.

    `optimizer_bytes`: host memory traffic of a step per parameter. `optimizer_gb_s`: the traffic that the
    optimizer reaches alone. A step overlaps the next call, and the call after that reads its weights.
    `double_buffer`: the host holds a second copy of the trainable weights, which steps write; otherwise new
    weights are copied between calls, at `COPYING_BYTES` more per parameter. `disk_gb_s`: how fast all devices
    together are given the weights that lie on disk (`LayerCost.disk_bytes`).

    Raises `InvalidCost` for a number out of range, `TypeError` for a value of another type.
    """

    memory_gb_s: float | None = None
    gil_ms_per_gb: float = 0.0
    launch_gil_share: float = 1.0
    add_gb_s: float | None = None
    add_threads: int = 1
    gradient_buffers: int | None = None
    optimizer_bytes: float = OPTIMIZER_BYTES
    optimizer_gb_s: float | None = None
    double_buffer: bool = False
    disk_gb_s: float | None = None

    def __post_init__(self) -> None:
        put = object.__setattr__
        _set_speeds(self, "memory_gb_s", "add_gb_s", "optimizer_gb_s", "disk_gb_s")
        put(self, "gil_ms_per_gb", milliseconds("gil_ms_per_gb", self.gil_ms_per_gb))
        put(self, "launch_gil_share", part("launch_gil_share", self.launch_gil_share))
        for name in ("add_threads", "gradient_buffers"):
            if name == "add_threads" or self.gradient_buffers is not None:
                put(self, name, whole(name, getattr(self, name), least=1, bound=bounds.DEVICES, error=InvalidCost))
        put(self, "optimizer_bytes", amount("optimizer_bytes", self.optimizer_bytes, unit="number of bytes"))
        put(self, "double_buffer", flag("double_buffer", self.double_buffer))

    @property
    def step_bytes(self) -> float:
        """Host memory traffic of a step per parameter, including the copy of new weights."""
        return self.optimizer_bytes + (0.0 if self.double_buffer else COPYING_BYTES)

    @property
    def memory_ms_per_byte(self) -> float:
        """Time per byte of host memory traffic; zero if the bandwidth is not limited."""
        return _ms_per_byte(self.memory_gb_s)

    @property
    def gil_ms_per_byte(self) -> float:
        """How long moving a byte holds the GIL."""
        return self.gil_ms_per_gb / 1e9

    @property
    def add_ms_per_byte(self) -> float:
        """Time that all threads together take to add a byte; zero if the rate is not limited."""
        return _ms_per_byte(self.add_gb_s) / self.add_threads

    @property
    def optimizer_ms_per_byte(self) -> float:
        """Time per byte of the optimizer's traffic when it runs alone; zero if the rate is not limited."""
        return _ms_per_byte(self.optimizer_gb_s)

    @property
    def disk_ms_per_byte(self) -> float:
        """Time to read a byte from disk; zero if the rate is not limited."""
        return _ms_per_byte(self.disk_gb_s)

    @property
    def is_free(self) -> bool:
        """Whether nothing on the host takes any time, except launching layers."""
        rates = (self.memory_gb_s, self.add_gb_s, self.optimizer_gb_s, self.disk_gb_s)
        return rates == (None,) * len(rates) and not self.gil_ms_per_gb

    def gradient_copies(self, tasks: int) -> int:
        """Return the host's gradient bytes, in multiples of 16-bit gradients, if `tasks` tasks add to each.

        >>> [Host(gradient_buffers=2).gradient_copies(tasks) for tasks in (1, 2, 3)]
        [1, 2, 2]
        """
        # An fp32 block takes the bytes of two in 16 bits.
        return min(tasks, max(self.gradient_buffers or 1, 2))

    def widens(self, tasks: int) -> bool:
        """Return whether gradients that `tasks` tasks of a call add to are fp32 on the host."""
        return self.gradient_buffers == 1 and tasks > 1

    def adds(self, nth: int) -> bool:
        """Return whether a task's gradients are added on the host if `nth` tasks came before it."""
        return self.gradient_buffers is not None and nth >= self.gradient_buffers

    @property
    def added_traffic(self) -> int:
        """Bytes of host memory traffic for each byte of gradients that is added.

        The byte is written and read; a sum of the same size, or two buffers, are read and written.
        """
        return 4 if self.gradient_buffers == 1 else 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The limits of devices, links and host; `None` means no limit.

    >>> Limits(device_memory_bytes=80_000).stage_limit_bytes
    40000

    `device_memory_bytes`: memory of one device for weights, gradients and kept activations. `stage_bytes`: the
    most that the weights and gradients of a stage may take, unless it is a single layer; by default half of the
    device memory, since the other half holds the weights fetched ahead. `ahead_bytes`, instead of `stage_bytes`:
    the memory for weights fetched ahead, if a stage's gradients wait until those of the stage before have left the
    device; no stage except the fused one may have more weights. `leaving_bytes`: device memory for gradients on
    their way to the host while the next backward pass runs; by default what the running task leaves free.
    `host_memory_bytes`: host memory for weights, gradients and activations between stages (see `host_bytes`),
    without optimizer state.

    `upload_gb_s`, `download_gb_s`: bandwidth of each device's link from host to device and back, in 10^9 bytes per
    second. `hop_ms`: the latency of passing a microbatch to the next stage, in addition to the transfer of its
    bytes. `devices`: if they differ, every device, in order; a plan for fewer devices uses the first ones, and a
    stage must fit the smallest. `switches`: bandwidth that links share. `host`: what all devices share.

    Raises `InvalidCost` for a number out of range, `TypeError` for a value that is not a number.
    """

    device_memory_bytes: int | None = None
    stage_bytes: int | None = None
    ahead_bytes: int | None = None
    leaving_bytes: int | None = None
    host_memory_bytes: int | None = None
    upload_gb_s: float | None = None
    download_gb_s: float | None = None
    hop_ms: float = 0.0
    devices: tuple[Device, ...] = ()
    switches: tuple[Switch, ...] = ()
    host: Host = field(default_factory=Host)

    def __post_init__(self) -> None:
        # A frozen dataclass can set its fields only through object.__setattr__.
        put = object.__setattr__
        _set_bytes(self, "device_memory_bytes", "stage_bytes", "ahead_bytes", "host_memory_bytes")
        _set_bytes(self, "leaving_bytes", least=0)
        _set_speeds(self, "upload_gb_s", "download_gb_s")
        put(self, "hop_ms", milliseconds("hop_ms", self.hop_ms))
        put(self, "devices", _all_of("devices", self.devices, Device))
        put(self, "switches", _all_of("switches", self.switches, Switch))
        _all_of("host", (self.host,), Host)
        self._check_switches()
        self._check_stage_bytes()

    def _check_switches(self) -> None:
        behind = [device for switch in self.switches for device in switch.devices]
        if len(set(behind)) < len(behind):
            raise InvalidCost(
                f"a device must be behind one switch at most, but switches are for {shown(behind)} instead"
            )

    def _check_stage_bytes(self) -> None:
        if self.stage_bytes is not None and self.ahead_bytes is not None:
            raise InvalidCost(
                "stage_bytes and ahead_bytes exclude each other, but both are given; give one of them"
            )
        smallest = self.smallest_memory_bytes
        if self.stage_bytes is None or smallest is None:
            return
        if 2 * self.stage_bytes > smallest:
            raise InvalidCost(
                f"stage_bytes must be at most half of device_memory_bytes ({smallest // 2}), "
                f"since the next stage is fetched while one runs, but is {self.stage_bytes} instead"
            )

    def check_devices(self, devices: int) -> None:
        """Raise `InvalidCost` if only some of `devices` devices are described.

        >>> Limits(devices=(Device(),)).check_devices(2)
        Traceback (most recent call last):
        rp_sched.errors.InvalidCost: Limits.devices must describe all 2 devices or none, but describes 1 instead
        """
        if self.devices and len(self.devices) < devices:
            raise InvalidCost(
                f"Limits.devices must describe all {devices} devices or none, "
                f"but describes {len(self.devices)} instead"
            )

    def first(self, devices: int) -> "Limits":
        """Return the limits if only the first `devices` devices are used."""
        return replace(self, devices=self.devices[:devices]) if len(self.devices) > devices else self

    def device(self, number: int) -> Device:
        """Return the device with this number, its missing fields filled in from these limits."""
        own = self.devices[number] if self.devices else Device()
        return Device(
            speed=own.speed,
            memory_bytes=_either(own.memory_bytes, self.device_memory_bytes),
            upload_gb_s=_either(own.upload_gb_s, self.upload_gb_s),
            download_gb_s=_either(own.download_gb_s, self.download_gb_s),
        )

    def _each(self) -> Sequence[Device]:
        return [self.device(number) for number in range(len(self.devices) or 1)]

    @property
    def smallest_memory_bytes(self) -> int | None:
        """The memory of the smallest device; None if no device's memory is limited."""
        return min((one.memory_bytes for one in self._each() if one.memory_bytes is not None), default=None)

    @property
    def shares_nothing(self) -> bool:
        """Whether no device's work slows another's, apart from launching layers."""
        return not self.switches and self.host.is_free

    @property
    def only_devices_take_time(self) -> bool:
        """Whether devices are alike, and transfers and the host take no time (apart from `hop_ms`)."""
        rates = (self.upload_gb_s, self.download_gb_s, self.leaving_bytes)
        return self.shares_nothing and not self.devices and rates == (None, None, None)

    @property
    def stage_limit_bytes(self) -> int | None:
        """The most bytes of weights and gradients in a stage of several layers; None without such a limit."""
        smallest = self.smallest_memory_bytes
        if self.stage_bytes is not None or smallest is None or self.ahead_bytes is not None:
            return self.stage_bytes
        return smallest // 2

    @property
    def room_ahead_bytes(self) -> int:
        """Device memory reserved for the next stage's weights while a stage of several layers runs."""
        return self.ahead_bytes if self.ahead_bytes is not None else self.stage_limit_bytes or 0

    @property
    def upload_ms_per_byte(self) -> float:
        """Upload time per byte on the slowest link; zero if the bandwidth is not limited."""
        return max(_ms_per_byte(one.upload_gb_s) for one in self._each())

    @property
    def download_ms_per_byte(self) -> float:
        """Download time per byte on the slowest link; zero if the bandwidth is not limited."""
        return max(_ms_per_byte(one.download_gb_s) for one in self._each())


def _either(own: _T | None, common: _T | None) -> _T | None:
    return common if own is None else own


def _ms_per_byte(gb_s: float | None) -> float:
    return 0.0 if gb_s is None else 1 / (gb_s * 1e6)


def _all_of(name: str, values: Sequence[_T], kind: type[_T]) -> tuple[_T, ...]:
    for value in values:
        if type(value) is not kind:
            raise TypeError(f"{name} must be made of {kind.__name__}, but has {shown(value)} instead")
    return tuple(values)


def _set_bytes(owner: object, *names: str, least: int = 1) -> None:
    for name in names:
        if getattr(owner, name) is not None:
            object.__setattr__(owner, name, nbytes(name, getattr(owner, name), least=least))


def _set_speeds(owner: object, *names: str) -> None:
    for name in names:
        if getattr(owner, name) is not None:
            object.__setattr__(owner, name, speed(name, getattr(owner, name)))


NO_LIMITS = Limits()
