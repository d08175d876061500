"""Facts of the machine: processor, host memory and its limits, devices, and their measured rates."""

from __future__ import annotations

import platform
import resource
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch
from rp_engine import Runtime
from rp_engine.estimates import Rates, num_cores, probe, readable_bytes
from rp_trainer.errors import Refused
from rp_transfer import BackendUnavailable, HostLimit, MemoryUse, PinningWarning, host_limits

from rp_cli.environment.facts import Fact, Section

# A link's rates: to the device, and back.
_Link = tuple[float | None, float | None]


def hardware(devices: str | None) -> tuple[list[Section], list[str]]:
    """Open the devices and measure; return the sections of host and devices, and a list of problems.

    Raises `Refused` for a devices string or a limit of memory that cannot be parsed.
    """
    problems: list[str] = []
    uses, rates = (), None
    try:
        uses, rates = _measured(devices, problems)
    except BackendUnavailable as error:
        problems.append(f"devices cannot be opened: {error}")
    except ValueError as error:
        raise Refused(str(error)) from error
    return [Section("host", tuple(_host(rates))), Section("devices", tuple(_devices(uses, rates)))], problems


def _measured(devices: str | None, problems: list[str]) -> tuple[tuple[MemoryUse, ...], Rates]:
    with Runtime(devices, strict=False, machines=False) as runtime:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", PinningWarning)
            rates = probe(runtime)
        problems += [str(each.message) for each in caught if issubclass(each.category, PinningWarning)]
        return runtime.memory(), rates


def _host(rates: Rates | None) -> Iterator[Fact]:
    yield Fact("processor", _processor())
    yield Fact("cores", num_cores())
    yield Fact("torch_threads", torch.get_num_threads())
    for limit in host_limits():
        yield _memory(limit)
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    unlimited = locked == resource.RLIM_INFINITY
    words = f"{'unlimited' if unlimited else readable_bytes(locked)} (ulimit -l)"
    yield Fact("locked_memory", {"limit_bytes": None if unlimited else locked}, words)
    if rates is not None:
        yield Fact("memory_rate", {"gb_s": rates.memory_gb_s}, f"{_rate(rates.memory_gb_s)}, updated in place")


def _memory(limit: HostLimit) -> Fact:
    value = {"total_bytes": limit.total_bytes, "free_bytes": limit.free_bytes}
    words = f"{readable_bytes(limit.total_bytes)}, {readable_bytes(limit.free_bytes)} free"
    return Fact(f"{limit.name.removeprefix('the ')}_memory", value, words)


def _devices(uses: tuple[MemoryUse, ...], rates: Rates | None) -> Iterator[Fact]:
    for index, use in enumerate(uses):
        if use.name.startswith("cuda"):
            yield _gpu(use, None if rates is None else (rates.up_gb_s[index], rates.down_gb_s[index]))
        else:
            yield Fact(use.name, {"name": "virtual"}, "virtual, in host memory")
    # Virtual devices share the host's memory, so their measurements do not show links.
    if rates is not None and any(use.name.startswith("cuda") for use in uses):
        yield from _shared(rates)


def _shared(rates: Rates) -> Iterator[Fact]:
    for switch in rates.switches:
        value = {"upload_gb_s": switch.upload_gb_s, "download_gb_s": switch.download_gb_s}
        words = f"{_rate(switch.upload_gb_s)} to them together, {_rate(switch.download_gb_s)} back"
        yield Fact(f"links_of_{'_'.join(map(str, switch.devices))}", value, words)


def _gpu(use: MemoryUse, link: _Link | None) -> Fact:
    index = int(use.name.split(":")[1])
    free, total = torch.cuda.mem_get_info(index)
    name = torch.cuda.get_device_name(index)
    value = {"name": name, "total_bytes": total, "free_bytes": free, "usable_bytes": use.total_bytes}
    words = f"{name}, {readable_bytes(total)}, {readable_bytes(free)} free"
    if link is None:
        return Fact(use.name, value, words)
    up, down = link
    return Fact(
        use.name,
        value | {"upload_gb_s": up, "download_gb_s": down},
        f"{words}; {_rate(up)} to it, {_rate(down)} back",
    )


def _rate(gb_s: float | None) -> str:
    return "unknown" if gb_s is None else f"{gb_s:.1f} GB/s"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
