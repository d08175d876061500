"""What a job shows and records while it runs."""

from __future__ import annotations

import json
import resource
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType

from tqdm import tqdm


@dataclass(frozen=True, slots=True)
class StepFigures:
    """One training step. `loss` is in nats a byte, `seconds` the step's own, `device_bytes` one number a device."""

    step: int
    loss: float
    tokens_per_s: float
    learning_rate: float
    host_bytes: int
    device_bytes: Sequence[int]
    device_peak_bytes: Sequence[int]
    seconds: float


class Report:
    """The progress bar on stderr, and the metrics as JSON lines in a file where one is wanted.

    A step is a line with the names of `StepFigures`; an evaluation is a line with `step`, the number of steps done,
    and `held_out_loss`. Each line is on disk before the next step begins.
    """

    def __init__(self, steps: int, metrics: Path | None) -> None:
        self._bar = tqdm(total=steps, desc="train", unit="step", file=sys.stderr, dynamic_ncols=True)
        self._metrics = None if metrics is None else metrics.open("w", encoding="utf-8")

    def step(self, figures: StepFigures) -> None:
        """Show and record one training step."""
        self._record(asdict(figures))
        self._bar.set_postfix_str(_postfix(figures), refresh=False)
        self._bar.update()

    def held_out(self, step: int, loss: float) -> None:
        """Record the held-out loss after so many steps."""
        self._record({"step": step, "held_out_loss": loss})

    def _record(self, line: Mapping[str, object]) -> None:
        if self._metrics is not None:
            self._metrics.write(json.dumps(line) + "\n")
            self._metrics.flush()

    def __enter__(self) -> Report:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.close()
        if self._metrics is not None:
            self._metrics.close()


def resident_bytes() -> int:
    """Host memory that this process holds now; its peak where the system tells no more."""
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    except OSError:
        return _peak_resident_bytes()
    line = next(line for line in status.splitlines() if line.startswith("VmRSS:"))
    return int(line.split()[1]) * 1024


def _peak_resident_bytes() -> int:
    # macOS counts bytes where Linux counts KiB.
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _postfix(figures: StepFigures) -> str:
    return (
        f"loss {figures.loss:.3f}, {figures.tokens_per_s:,.0f} tokens/s, "
        f"host {readable_bytes(figures.host_bytes)}, "
        f"device {readable_bytes(max(figures.device_peak_bytes))}"
    )


def readable_bytes(count: int) -> str:
    """A size as people read it.

    >>> readable_bytes(1536 * 1024)
    '1.5 MiB'
    """
    size = float(count)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"
