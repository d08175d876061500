"""Options that describe the machine, named as in `roundpipe plan`; they override the costs file."""

import argparse
import re
from collections.abc import Callable
from dataclasses import replace

from rp_sched.problem.limits import Limits, Switch

_PREFIXES = {"": 1} | {
    f"{prefix}{binary}": base**power
    for power, prefix in enumerate("KMGT", start=1)
    for binary, base in (("", 1000), ("i", 1024))
}
# A smaller number without a unit is refused: the unit was probably forgotten.
_LEAST_WITHOUT_UNIT = 2**20
_COUNTS = re.compile(r"[1-9]\d{0,5}(,[1-9]\d{0,5})*")
_SIZE = re.compile(r"(\d{1,15}(?:\.\d{1,9})?)(?:\s*([A-Za-z]*)B)?")


def add_hardware(command: argparse.ArgumentParser) -> None:
    """Add the options that describe the machine to a command."""
    command.add_argument(
        "--device-memory", type=_argument_type(size), help="memory of each device, such as 24GB or 24GiB"
    )
    command.add_argument("--link", type=_argument_type(_rate), help="GB/s of each device's link, each way")
    command.add_argument(
        "--switches", type=_argument_type(_counts), help="devices behind each switch, such as 4,4"
    )
    command.add_argument("--ram", type=_argument_type(size), help="host memory, such as 512GB")
    command.add_argument("--ram-gb-s", type=_argument_type(_rate), help="GB/s of host memory")


def with_hardware(limits: Limits, options: argparse.Namespace) -> Limits:
    """Return `limits` with the given options applied. A switch is as fast as the link of one of its devices.

    Raises `ValueError` if the switches do not add up to `--devices`, or no link rate is known.
    """
    if options.device_memory is not None:
        limits = replace(limits, device_memory_bytes=options.device_memory)
    if options.link is not None:
        limits = replace(limits, upload_gb_s=options.link, download_gb_s=options.link)
    if options.ram is not None:
        limits = replace(limits, host_memory_bytes=options.ram)
    if options.ram_gb_s is not None:
        limits = replace(limits, host=replace(limits.host, memory_gb_s=options.ram_gb_s))
    return limits if options.switches is None else _switched(limits, options.switches, options.devices)


def size(text: str) -> int:
    """Read a size such as ``48GB`` (10^9 bytes) or ``48 GiB`` (2^30).

    >>> size("2GB"), size("1.5KiB")
    (2000000000, 1536)

    Raises `ValueError` for anything else, and for less than a MiB without a unit, such as ``64``.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None or (match[2] or "") not in _PREFIXES:
        raise ValueError("must read like 48GB (10^9 bytes) or 48GiB (2^30 bytes)")
    nbytes = int(float(match[1]) * _PREFIXES[match[2] or ""])
    if text.strip()[-1].isdigit() and nbytes < _LEAST_WITHOUT_UNIT:
        raise ValueError(f"must have a unit, such as {text}GB (10^9 bytes) or {text}GiB (2^30 bytes)")
    return nbytes


def _switched(limits: Limits, counts: tuple[int, ...], devices: int) -> Limits:
    if sum(counts) != devices:
        raise ValueError(f"--switches must add up to --devices, {devices}, but add up to {sum(counts)}")
    if limits.upload_gb_s is None or limits.download_gb_s is None:
        raise ValueError("--switches share the rate of a link, but no link rate is known; give --link")
    starts = [sum(counts[:at]) for at in range(len(counts))]
    switches = tuple(
        Switch(
            devices=tuple(range(start, start + count)),
            upload_gb_s=limits.upload_gb_s,
            download_gb_s=limits.download_gb_s,
        )
        for start, count in zip(starts, counts, strict=True)
    )
    return replace(limits, switches=switches)


def _rate(text: str) -> float:
    try:
        rate = float(text)
    except ValueError:
        rate = 0.0
    if not 1e-9 <= rate <= 1e9:
        raise ValueError("must be a number above 0, in 10^9 bytes a second")
    return rate


def _counts(text: str) -> tuple[int, ...]:
    if _COUNTS.fullmatch(text) is None:
        raise ValueError("must be numbers of devices, such as 4,4")
    return tuple(map(int, text.split(",")))


def _argument_type(read: Callable[[str], object]) -> Callable[[str], object]:
    """Wrap a reader of option values so that argparse reports its errors in one line."""

    def value(text: str) -> object:
        try:
            return read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{error}, but is {text[:40]!r}") from None

    return value
