"""What a training says on a terminal: its log, and a progress bar."""

from __future__ import annotations

import logging
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from rp_engine.estimates import readable_bytes
from rp_trainer.finetuning.reports import StepFigures
from tqdm import tqdm

# Where the fine-tuner logs.
_LOG = logging.getLogger("rp_trainer")


class _Lines(logging.Handler):
    """Prints what is logged above a progress bar: warnings to stderr, as the command's own, the rest to stdout."""

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno >= logging.WARNING:
            tqdm.write(f"roundpipe: {record.getMessage()}", file=sys.stderr)
            return
        tqdm.write(record.getMessage(), file=sys.stdout)
        sys.stdout.flush()


@contextmanager
def log_printed() -> Generator[None]:
    """Inside the context what the fine-tuner logs is printed."""
    handler, level, propagates = _Lines(), _LOG.level, _LOG.propagate
    _LOG.addHandler(handler)
    _LOG.setLevel(logging.INFO)
    _LOG.propagate = False
    try:
        yield
    finally:
        _LOG.removeHandler(handler)
        _LOG.setLevel(level)
        _LOG.propagate = propagates


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

    def held_out(self, step: int, loss: float) -> None:
        """Show nothing: it is logged."""

    def follow(self, folder: Path) -> None:
        """Change nothing: the bar is in no folder."""

    def close(self) -> None:
        """Leave the bar as it is."""
        self._bar.close()


def _postfix(figures: StepFigures) -> str:
    host = readable_bytes(figures.host_bytes)
    device = readable_bytes(max(figures.device_peak_bytes))
    speed = f"{figures.tokens_per_s:,.0f} tokens/s"
    late = f" ({figures.steps_late} step late)" if figures.steps_late else ""
    return f"loss {figures.loss:.3f}{late}, {speed}, host {host}, device {device}"
