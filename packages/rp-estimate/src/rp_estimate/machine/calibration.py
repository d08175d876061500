"""What `roundpipe bench` measured on a machine: one line of text, which `roundpipe plan --calibration` takes."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, get_type_hints

_HEAD = "roundpipe bench 1"
_MOST_BYTES = 2**16


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """A machine as measured. `link_gb_s`, `ram_gb_s`: 10^9 bytes a second. `tflops`: 10^12 operations a second.

    `utilisation`: the part of `tflops` that layers reached in a training of all weights. `torch`: its version.

    >>> line = Calibration(
    ...     gpu="RTX 4090", devices=2, memory_bytes=25_757_220_864, link_gb_s=25.1, tflops=165.0,
    ...     ram_bytes=128_000_000_000, ram_gb_s=61.0, utilisation=0.47, torch="2.15.0",
    ... ).line
    >>> Calibration.read(line).devices
    2
    """

    gpu: str
    devices: int
    memory_bytes: int
    link_gb_s: float
    tflops: float
    ram_bytes: int
    ram_gb_s: float
    utilisation: float
    torch: str

    @property
    def line(self) -> str:
        """The line to paste."""
        values = ((one.name, getattr(self, one.name)) for one in fields(self))
        shown = (
            f"{name}={value:.4g}" if isinstance(value, float) else f"{name}={value}" for name, value in values
        )
        return f"{_HEAD}: {'; '.join(shown)}"

    @classmethod
    def read(cls, text: str) -> Calibration:
        """Read the last such line of a text. Raises `ValueError` for a text without one, or with other values."""
        lines = [line.strip() for line in text.splitlines() if line.strip().startswith(_HEAD)]
        if not lines:
            raise ValueError(
                f"must have a line that begins with {_HEAD!r}, as `roundpipe bench` prints, but has none"
            )
        pairs = [part.strip().partition("=") for part in lines[-1].removeprefix(f"{_HEAD}:").split(";")]
        kinds = get_type_hints(cls)
        if sorted(name for name, _, _ in pairs) != sorted(kinds):
            raise ValueError(f"must have each of {', '.join(kinds)} once, but is {lines[-1]!r:.200}")
        return cls(**{name: _value(name, kinds[name], value) for name, _, value in pairs})


def given(text: str) -> Calibration:
    """Return the calibration of a line, or of a file that has one. Raises `ValueError` for neither."""
    if not text.startswith(_HEAD) and Path(text).is_file():
        with Path(text).open("rb") as file:
            text = file.read(_MOST_BYTES).decode(errors="replace")
    return Calibration.read(text)


def _value(name: str, kind: type[Any], text: str) -> Any:
    if kind is str:
        return text
    try:
        number = kind(text)
    except ValueError:
        number = math.nan
    if not 0 < number < 2**60 or (name == "utilisation" and number > 1):
        raise ValueError(f"must have a number above 0 as {name}, but it is {text!r}")
    return number
