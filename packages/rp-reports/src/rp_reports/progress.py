"""The line of a training that is under way: loss, speed and the time that is left, at any width."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rp_engine.estimates import readable_bytes
from rp_trainer.finetuning.reports import StepFigures
from tqdm import tqdm

from rp_reports.terminal import columns, wrapped

# A bar has at least so many characters, and at most.
_LEAST, _MOST = 8, 40
# Where there is no terminal, a line is written after this part of the steps, or so many seconds.
_PART, _SECONDS = 10, 60.0
# A character of the bar that is filled by eighths.
_SHADES = " ▏▎▍▌▋▊▉█"
# How much of the last step's time goes into the mean by which time is foreseen.
_NEW = 0.1


class Progress:
    """The progress of a training, on stderr: a line that changes or, without a terminal, one now and then.

    `done`: steps of an earlier run. `is_shown`: whether to show it. `told`: returns what the first step
    has decided, or nothing.
    """

    def __init__(self, steps: int, *, done: int = 0, is_shown: bool = True, told: Callable[[], str] = str) -> None:
        self._decided = told
        self._steps, self._done, self._begun = steps, done, done
        self._is_shown, self._is_terminal = is_shown, columns(sys.stderr) is not None
        self._bar: Any = tqdm(  # Any: tqdm is untyped here
            bar_format="{desc}", file=sys.stderr, dynamic_ncols=True, disable=not (is_shown and self._is_terminal)
        )
        self._told: tuple[int, float] = done, time.monotonic()
        self._mean_s: float | None = None
        self._trained_s = 0.0
        self._figures: StepFigures | None = None

    def step(self, figures: StepFigures) -> None:
        """Show one training step as done."""
        self._figures, self._done = figures, figures.step
        self._trained_s += figures.seconds
        # The first step makes what all others have.
        is_young = self._mean_s is None or figures.step <= self._begun + 2
        self._mean_s = figures.seconds if is_young else _NEW * figures.seconds + (1 - _NEW) * (self._mean_s or 0)
        if figures.step == self._begun + 1:
            self._tell_decided()
        if figures.step == min(self._begun + 2, self._steps):
            self._tell_memory(figures)
        self._show(figures, self._left())

    def evaluating(self, done: int, batches: int) -> None:
        """Show that an evaluation is under way."""
        self._bar.set_description_str(
            laid_out(f"evaluating after step {self._done}", f"{done}/{batches}", [], done / batches, self._room())
        )

    def held_out(self, step: int, loss: float) -> None:
        """Show the last step again. The loss is logged."""
        del step, loss
        if self._is_terminal and self._figures is not None:
            self._show(self._figures, self._left())

    def follow(self, folder: Path) -> None:
        """Change nothing: the line is in no folder."""

    def close(self) -> None:
        """Leave the last step's line, with the time that the steps took."""
        if self._figures is not None:
            self._show(self._figures, f"took {tqdm.format_interval(self._trained_s)}")
        else:
            self._bar.set_description_str("")
        self._bar.close()

    def _show(self, figures: StepFigures, duration: str) -> None:
        counted = f"{self._done}/{self._steps}"
        shown = [f"loss {figures.loss:.3f}", f"{figures.tokens_per_s:,.0f} tokens/s", duration]
        if self._is_terminal:
            self._bar.set_description_str(
                laid_out("train", counted, shown, self._done / self._steps, self._room())
            )
        elif self._is_shown and self._is_due():
            self._told = self._done, time.monotonic()
            self._write(f"step {counted}, {', '.join(shown)}")

    def _left(self) -> str:
        return f"{tqdm.format_interval((self._mean_s or 0) * (self._steps - self._done))} left"

    def _is_due(self) -> bool:
        steps, when = self._told
        is_other = steps != self._done
        is_last = self._done == self._steps
        return is_other and (
            is_last or self._done - steps >= self._steps / _PART or time.monotonic() - when >= _SECONDS
        )

    def _tell_decided(self) -> None:
        if self._is_shown and (text := self._decided()):
            self._write(text)

    def _tell_memory(self, figures: StepFigures) -> None:
        if not self._is_shown:
            return
        late = f"; a loss is of weights {figures.steps_late} step older" if figures.steps_late else ""
        devices = len(figures.device_peak_bytes)
        each = "the device" if devices == 1 else "a device"
        self._write(
            f"memory in use: host {readable_bytes(figures.host_bytes)}, {each} at most "
            f"{readable_bytes(max(figures.device_peak_bytes))}{late}"
        )

    def _write(self, text: str) -> None:
        tqdm.write(wrapped(text, columns(sys.stderr)), file=sys.stderr)
        sys.stderr.flush()

    def _room(self) -> int:
        # In the last column some terminals begin a new line.
        return (columns(sys.stderr) or 80) - 1


def laid_out(what: str, counted: str, figures: list[str], part: float, room: int) -> str:
    """Return a line of at most `room` characters: a bar only where figures leave room, then no name and no count.

    Where there is less room still, the last figures but one are left out.

    >>> laid_out("train", "2/4", ["loss 1.234", "0:12 left"], 0.5, 50)
    'train |███████▌       | 2/4, loss 1.234, 0:12 left'
    >>> laid_out("train", "2/4", ["loss 1.234", "0:12 left"], 0.5, 26)
    '2/4, loss 1.234, 0:12 left'
    """
    shown = ", ".join([counted, *figures])
    bar = min(room - len(what) - len(shown) - 4, _MOST)
    if bar >= _LEAST:
        return f"{what} |{_bar(part, bar)}| {shown}"
    fewer = [", ".join([*figures[:kept], *figures[-1:]]) for kept in range(len(figures) - 1, 0, -1)]
    texts = [f"{what} {shown}", shown, *fewer, *figures[:1]]
    return next((text for text in texts if len(text) <= room), "")


def _bar(part: float, width: int) -> str:
    encoding = getattr(sys.stderr, "encoding", None) or "ascii"
    is_utf = encoding.lower().replace("-", "").startswith("utf")
    shades = _SHADES if is_utf else " #"
    full, rest = divmod(int(min(part, 1.0) * width * (len(shades) - 1)), len(shades) - 1)
    return (shades[-1] * full + shades[rest] * (full < width)).ljust(width)
