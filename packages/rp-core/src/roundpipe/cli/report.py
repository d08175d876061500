"""A running job's progress bar and metrics file."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from io import TextIOWrapper
from pathlib import Path
from types import TracebackType

from tqdm import tqdm

from roundpipe.cli.output import writing
from roundpipe.telemetry.tables import readable_bytes


@dataclass(frozen=True, slots=True)
class StepFigures:
    """Measurements of one training step. `loss`: nats per byte. Device bytes: one number for each device."""

    step: int
    loss: float
    tokens_per_s: float
    learning_rate: float
    host_bytes: int
    device_bytes: Sequence[int]
    device_peak_bytes: Sequence[int]
    seconds: float


class Metrics:
    """Writes measurements to a file as JSON lines, each flushed at once; writes nothing if `path` is None.

    A training step is a line with the fields of `StepFigures`; an evaluation is a line with `step`, the number of
    steps done so far, and `held_out_loss`.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._file: TextIOWrapper | None = None
        if path is not None:
            with writing(f"--output {path}"):
                self._file = path.open("w", encoding="utf-8")

    def step(self, figures: StepFigures) -> None:
        """Record one training step."""
        self._write(asdict(figures))

    def held_out(self, step: int, loss: float) -> None:
        """Record the held-out loss after so many steps."""
        self._write({"step": step, "held_out_loss": loss})

    def _write(self, line: Mapping[str, object]) -> None:
        if self._file is not None:
            with writing(f"--output {self._path}"):
                self._file.write(json.dumps(line) + "\n")
                self._file.flush()

    def __enter__(self) -> Metrics:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            with writing(f"--output {self._path}"):
                self._file.close()


class Progress:
    """The progress bar, on stderr."""

    def __init__(self, steps: int) -> None:
        self._bar = tqdm(total=steps, desc="train", unit="step", file=sys.stderr, dynamic_ncols=True)

    def step(self, figures: StepFigures) -> None:
        """Show one training step as done."""
        self._bar.set_postfix_str(_postfix(figures), refresh=False)
        self._bar.update()

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.close()


def _postfix(figures: StepFigures) -> str:
    host = readable_bytes(figures.host_bytes)
    device = readable_bytes(max(figures.device_peak_bytes))
    speed = f"{figures.tokens_per_s:,.0f} tokens/s"
    return f"loss {figures.loss:.3f}, {speed}, host {host}, device {device}"
