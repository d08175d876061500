"""Report a training to TensorBoard."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rp_trainer.errors import Refused, Unwritable
from rp_trainer.finetuning.files import writing
from rp_trainer.finetuning.reports import StepFigures


class TensorBoard:
    """Writes the same measurements as `Metrics` to a folder for TensorBoard.

    Raises `Refused` if TensorBoard is not installed.
    """

    def __init__(self, folder: Path, *, after: int | None = None) -> None:
        self._folder = folder
        self._writer: Any = None  # Any: torch leaves it untyped
        self._failure: Unwritable | None = None
        tensorboard_writer()
        with self._noting_failure():
            self._writer = self._opened(None if after is None else after + 1)

    def _opened(self, purge_step: int | None = None) -> Any:
        return tensorboard_writer()(str(self._folder), purge_step=purge_step)

    def step(self, figures: StepFigures) -> None:
        """Record one training step."""
        for name in ("loss", "steps_late", "tokens_per_s", "learning_rate", "grad_norm"):
            if (value := getattr(figures, name)) is not None:
                self._add(f"training/{name}", value, figures.step)

    def evaluating(self, done: int, batches: int) -> None:
        """Record nothing: the loss comes."""

    def held_out(self, step: int, loss: float) -> None:
        """Record the held-out loss after step `step`."""
        self._add("held_out/loss", loss, step)

    def follow(self, folder: Path) -> None:
        """Write in this folder from now on; the values of before stay where they are."""
        self._folder, self._writer = folder / self._folder.name, None

    def _add(self, name: str, value: float, step: int) -> None:
        with self._noting_failure():
            if self._writer is None:
                self._writer = self._opened()
            self._writer.add_scalar(name, value, step)

    @contextmanager
    def _noting_failure(self) -> Generator[None]:
        """Raise `Unwritable`; begin a new file with the next value: a writer that has failed writes no more."""
        try:
            with writing(f"--output {self._folder}"):
                yield
        except Unwritable as error:
            self._failure, self._writer = error, None
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
