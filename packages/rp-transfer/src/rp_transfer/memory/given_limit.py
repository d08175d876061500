"""The host memory that this process may use: what the user allows, or else what the system has."""

from __future__ import annotations

import os
import re

from rp_transfer.memory.limits import HostLimit, host_limits, resident_bytes, tightest

VARIABLE = "ROUNDPIPE_HOST_MEMORY"
_UNITS = {"": 1, "B": 1} | {
    f"{prefix}{unit}": base**power
    for power, prefix in enumerate("KMGT", start=1)
    for unit, base in (("B", 1000), ("iB", 1024))
}
# Nobody means so few bytes: the unit was forgotten.
_LEAST_WITHOUT_UNIT = 2**20
_SYNTAX = re.compile(r"(?P<number>\d{1,15}(\.\d{1,9})?)\s*(?P<unit>[A-Za-z]*)")


def parse_bytes(text: str) -> int:
    """Read a size such as ``48GB`` (10^9 bytes), ``48 GiB`` (2^30) or ``51539607552``.

    >>> parse_bytes("1.5 KiB"), parse_bytes("2GB")
    (1536, 2000000000)

    Raises `ValueError` for anything else, and for less than a MiB without a unit, such as ``64``.
    """
    match = _SYNTAX.fullmatch(text.strip())
    if match is None or match["unit"] not in _UNITS:
        raise ValueError(f"a size must read like '48GB' (10^9 bytes) or '48GiB' (2^30 bytes), but is {text!r}")
    nbytes = int(float(match["number"]) * _UNITS[match["unit"]])
    if not match["unit"] and nbytes < _LEAST_WITHOUT_UNIT:
        raise ValueError(
            f"a size must have a unit, such as '{text}GB' (10^9 bytes), but is {text!r}: {nbytes} bytes"
        )
    return nbytes


def current_limit(host_memory_bytes: int | None = None) -> HostLimit:
    """The limit on this process's host memory that leaves least free at this moment.

    Args:
        host_memory_bytes: what the process may use in all. None takes ``ROUNDPIPE_HOST_MEMORY`` if that is set,
            otherwise the memory of the machine and of the control groups around the process.

    >>> current_limit(1 << 50).total_bytes == 1 << 50
    True

    Raises `ValueError` if the variable cannot be read.
    """
    given = os.environ.get(VARIABLE)
    if host_memory_bytes is None and given:
        host_memory_bytes = _read(given)
    if host_memory_bytes is None:
        return tightest(host_limits())
    used = resident_bytes(with_files=False)
    return HostLimit("the given limit", host_memory_bytes, max(host_memory_bytes - used, 0))


def _read(given: str) -> int:
    try:
        return parse_bytes(given)
    except ValueError as error:
        raise ValueError(f"{VARIABLE}: {error}") from None
