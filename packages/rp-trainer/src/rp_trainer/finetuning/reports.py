"""Report a running training: in a file of metrics, and wherever else is asked for."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from rp_engine import Runtime
from rp_transfer import resident_bytes

from rp_trainer.errors import Unwritable
from rp_trainer.finetuning.files import writing
from rp_trainer.finetuning.settings import Names

NAMES = Names()
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StepFigures:
    """Measurements of one training step.

    `loss`: nats per token. `tokens`: trained on so far, without padding; `epoch`: how often the data was, so far.
    `steps_late`: the number of steps by which this loss's weights lag the newest.
    `tokens_per_s`: without padding. `grad_norm`: of the gradients, before they are clipped; of those of the step
    before, if steps are asynchronous; None if it is not known. Device bytes: one number for each device.
    """

    step: int
    loss: float
    tokens: int
    epoch: float
    steps_late: int
    tokens_per_s: float
    learning_rate: float
    grad_norm: float | None
    host_bytes: int
    device_bytes: Sequence[int]
    device_peak_bytes: Sequence[int]
    seconds: float


def memory_figures(runtime: Runtime) -> dict[str, Any]:
    """Return the fields of `StepFigures` that are memory, as it is in use now."""
    memory = runtime.memory()
    return {
        "host_bytes": resident_bytes(),
        "device_bytes": [use.used_bytes for use in memory],
        "device_peak_bytes": [use.peak_bytes for use in memory],
    }


class Report(Protocol):
    """Records a training."""

    def step(self, figures: StepFigures) -> None:
        """Record one training step. Raises `Unwritable`."""
        ...

    def evaluating(self, done: int, batches: int) -> None:
        """Show that an evaluation is under way: so many of its batches are done."""
        ...

    def held_out(self, step: int, loss: float) -> None:
        """Record the held-out loss after step `step`. Raises `Unwritable`."""
        ...

    def follow(self, folder: Path) -> None:
        """Write in this folder from now on; it is where the one before was moved to, or was made in its place."""
        ...

    def close(self) -> None:
        """Write what is left. Raises `Unwritable`."""
        ...


class Reports:
    """Several reports. If one cannot be written, that is logged, and the training continues.

    Leaving the context closes them, and raises `Unwritable` for missing writes, unless there is another error.
    """

    def __init__(self, *reports: Report) -> None:
        self._reports = reports
        self._reported: set[Report] = set()

    def step(self, figures: StepFigures) -> None:
        """Record one training step."""
        for report in self._reports:
            with self._continuing(report):
                report.step(figures)

    def evaluating(self, done: int, batches: int) -> None:
        """Show that an evaluation is under way."""
        for report in self._reports:
            report.evaluating(done, batches)

    def held_out(self, step: int, loss: float) -> None:
        """Record the held-out loss after step `step`."""
        for report in self._reports:
            with self._continuing(report):
                report.held_out(step, loss)

    def follow(self, folder: Path) -> None:
        """Write in a folder that was moved or made anew."""
        for report in self._reports:
            report.follow(folder)

    @contextmanager
    def _continuing(self, report: Report) -> Generator[None]:
        try:
            yield
        except Unwritable as error:
            if report not in self._reported:
                self._reported.add(report)
                _LOG.warning("%s; the training continues", error)

    def __enter__(self) -> Reports:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        failures: list[Unwritable] = []
        for report in self._reports:
            try:
                report.close()
            except Unwritable as failure:
                failures.append(failure)
        if failures and error is None:
            raise failures[0]


class Metrics:
    """Writes measurements to a file as JSON lines, without buffering.

    A training step is a line with the fields of `StepFigures`; an evaluation is a line with `step`, the number of
    steps done so far, and `held_out_loss`.

    `after`: continue a file after the lines of the steps up to this one; later lines are dropped.

    A line that cannot be written raises `Unwritable`, is kept, and is tried again with the next line. If the file
    was removed meanwhile, a new one has all its lines.
    """

    def __init__(self, path: Path, names: Names = NAMES, *, after: int | None = None) -> None:
        self.path, self._names = path, names
        self._left = b""
        with writing(f"{names.folder} {path}"):
            self._file = FileIO(path, "w+" if after is None else "a+")
            if after is not None:
                # Shortened in place, which needs no disk space.
                self._file.truncate(_bytes_up_to(path, after))
            self._file.seek(0, os.SEEK_END)

    def step(self, figures: StepFigures) -> None:
        """Record one training step."""
        self._write(json.dumps(asdict(figures)) + "\n")

    def evaluating(self, done: int, batches: int) -> None:
        """Write nothing: the line comes with the loss."""

    def held_out(self, step: int, loss: float) -> None:
        """Record the held-out loss after step `step`."""
        self._write(json.dumps({"step": step, "held_out_loss": loss}) + "\n")

    def close(self) -> None:
        """Write what is left."""
        try:
            self._write("")
        finally:
            with suppress(OSError):
                self._file.close()

    def follow(self, folder: Path) -> None:
        """Write in this folder from now on."""
        self.path = folder / self.path.name

    def _write(self, text: str) -> None:
        self._left += text.encode()
        with writing(f"{self._names.folder} {self.path}"):
            if not self._is_in_place(self.path):
                self._file = self._again(self.path, self._file)
            while self._left:
                self._left = self._left[self._file.write(self._left) :]

    def _is_in_place(self, path: Path) -> bool:
        try:
            return os.path.samestat(os.fstat(self._file.fileno()), path.stat())
        except FileNotFoundError:
            return False

    def _again(self, path: Path, gone: FileIO) -> FileIO:
        """Open a new file; the lines of the one that was removed, which can be read while it is open, are left."""
        made = FileIO(path, "x+")
        with gone:
            gone.seek(0)
            # Of a file: a device, as tests use, may have no end.
            self._left = (gone.read(os.fstat(gone.fileno()).st_size) or b"") + self._left
        return made


def _bytes_up_to(path: Path, step: int) -> int:
    """Return the length of the complete lines up to a step; a killed run may have left part of a line."""
    length = 0
    for line in path.read_bytes().splitlines(keepends=True):
        try:
            if not line.endswith(b"\n") or json.loads(line)["step"] > step:
                break
        except (ValueError, LookupError, TypeError, RecursionError):
            break
        length += len(line)
    return length
