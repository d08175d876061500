"""Report a running job: progress bar, metrics file, TensorBoard."""

from __future__ import annotations

import json
import sys
from collections.abc import Generator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from rp_transfer import resident_bytes
from tqdm import tqdm

from roundpipe.cli.errors import Refused, Unwritable
from roundpipe.cli.output import writing
from roundpipe.runtime.runtime import Runtime
from roundpipe.telemetry.tables import readable_bytes


@dataclass(frozen=True, slots=True)
class StepFigures:
    """Measurements of one training step.

    `loss`: nats per token. `steps_late`: the number of steps by which this loss's weights lag the newest.
    `tokens_per_s`: without padding. Device bytes: one number for each device.
    """

    step: int
    loss: float
    steps_late: int
    tokens_per_s: float
    learning_rate: float
    host_bytes: int
    device_bytes: Sequence[int]
    device_peak_bytes: Sequence[int]
    seconds: float


def figures_of(
    runtime: Runtime, *, step: int, loss: float, late: int, tokens: int, rate: float, seconds: float
) -> StepFigures:
    """Return the figures of a step, with the memory in use now."""
    memory = runtime.memory()
    return StepFigures(
        step=step,
        loss=loss,
        steps_late=late,
        tokens_per_s=tokens / seconds,
        learning_rate=rate,
        host_bytes=resident_bytes(),
        device_bytes=[use.used_bytes for use in memory],
        device_peak_bytes=[use.peak_bytes for use in memory],
        seconds=seconds,
    )


class Report(Protocol):
    """Records a training."""

    def step(self, figures: StepFigures) -> None:
        """Record one training step. Raises `Unwritable`."""
        ...

    def held_out(self, step: int, loss: float) -> None:
        """Record the held-out loss after step `step`. Raises `Unwritable`."""
        ...

    def close(self) -> None:
        """Write what is left. Raises `Unwritable`."""
        ...


class Reports:
    """Several reports. If one cannot be written, a line is printed, and the training continues.

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

    def held_out(self, step: int, loss: float) -> None:
        """Record the held-out loss after step `step`."""
        for report in self._reports:
            with self._continuing(report):
                report.held_out(step, loss)

    @contextmanager
    def _continuing(self, report: Report) -> Generator[None]:
        try:
            yield
        except Unwritable as error:
            if report not in self._reported:
                self._reported.add(report)
                tqdm.write(f"roundpipe: {error}; the training continues", file=sys.stderr)

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
    """Writes measurements to a file as JSON lines, without buffering; writes nothing if `path` is None.

    A training step is a line with the fields of `StepFigures`; an evaluation is a line with `step`, the number of
    steps done so far, and `held_out_loss`.

    `after`: continue a file after the lines of the steps up to this one; later lines are dropped.

    A line that cannot be written raises `Unwritable`, is kept, and is tried again with the next line.
    """

    def __init__(self, path: Path | None, *, after: int | None = None) -> None:
        self._path = path
        self._file: FileIO | None = None
        self._left = b""
        if path is not None:
            with writing(f"--output {path}"):
                self._file = FileIO(path, "w" if after is None else "a")
                if after is not None:
                    # Shortened in place, which needs no disk space.
                    self._file.truncate(_bytes_up_to(path, after))

    def step(self, figures: StepFigures) -> None:
        """Record one training step."""
        self._write(json.dumps(asdict(figures)) + "\n")

    def held_out(self, step: int, loss: float) -> None:
        """Record the held-out loss after step `step`."""
        self._write(json.dumps({"step": step, "held_out_loss": loss}) + "\n")

    def close(self) -> None:
        """Write what is left."""
        if self._file is not None:
            with closing(self._file):
                self._write("")

    def _write(self, text: str) -> None:
        if self._file is None:
            return
        self._left += text.encode()
        with writing(f"--output {self._path}"):
            while self._left:
                self._left = self._left[self._file.write(self._left) :]


def _bytes_up_to(path: Path, step: int) -> int:
    """Return the length of the complete lines up to a step; a killed run may have left part of a line."""
    length = 0
    for line in path.read_bytes().splitlines(keepends=True):
        try:
            if not line.endswith(b"\n") or json.loads(line)["step"] > step:
                break
        except (ValueError, LookupError, TypeError):
            break
        length += len(line)
    return length


class TensorBoard:
    """Writes the same measurements as `Metrics` to a folder for TensorBoard; nothing if it is None.

    Raises `Refused` if TensorBoard is not installed.
    """

    def __init__(self, folder: Path | None, *, after: int | None = None) -> None:
        self._folder = folder
        self._writer: Any = None  # Any: torch leaves it untyped
        self._failure: Unwritable | None = None
        if folder is not None:
            with writing(f"--output {folder}"):
                self._writer = tensorboard_writer()(str(folder), purge_step=None if after is None else after + 1)

    def step(self, figures: StepFigures) -> None:
        """Record one training step."""
        for name in ("loss", "steps_late", "tokens_per_s", "learning_rate"):
            self._add(f"training/{name}", getattr(figures, name), figures.step)

    def held_out(self, step: int, loss: float) -> None:
        """Record the held-out loss after step `step`."""
        self._add("held_out/loss", loss, step)

    def _add(self, name: str, value: float, step: int) -> None:
        if self._writer is None:
            return
        try:
            with writing(f"--output {self._folder}"):
                self._writer.add_scalar(name, value, step)
        except Unwritable as error:
            self._failure = error
            raise

    def close(self) -> None:
        """Write the rest. Raises an earlier error again, since the values of that time are lost."""
        if self._writer is not None:
            with writing(f"--output {self._folder}"):
                self._writer.close()
        if self._failure is not None:
            raise self._failure


def tensorboard_writer() -> Any:  # Any: torch leaves it untyped
    """Return the class that writes for TensorBoard. Raises `Refused` if that is not installed."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise Refused("--report tensorboard needs TensorBoard: pip install tensorboard") from None
    return SummaryWriter


class Progress:
    """The progress bar, on stderr. `done`: steps of an earlier run. `is_shown`: whether to show it."""

    def __init__(self, steps: int, *, done: int = 0, is_shown: bool = True) -> None:
        self._bar = tqdm(
            total=steps,
            initial=done,
            desc="train",
            unit="step",
            file=sys.stderr,
            dynamic_ncols=True,
            disable=not is_shown,
        )

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


def say(line: str) -> None:
    """Print a line to stdout, above a progress bar on the same terminal."""
    tqdm.write(line, file=sys.stdout)
    sys.stdout.flush()


def _postfix(figures: StepFigures) -> str:
    host = readable_bytes(figures.host_bytes)
    device = readable_bytes(max(figures.device_peak_bytes))
    speed = f"{figures.tokens_per_s:,.0f} tokens/s"
    late = f" ({figures.steps_late} step late)" if figures.steps_late else ""
    return f"loss {figures.loss:.3f}{late}, {speed}, host {host}, device {device}"
