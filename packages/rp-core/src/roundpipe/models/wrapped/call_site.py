"""The line of a script that wraps a model: the model's name where it was given none."""

from __future__ import annotations

import inspect
from pathlib import Path


def caller() -> str:
    """Return the ``file:line`` of the nearest caller outside this package; ``"unnamed"`` if there is none."""
    here = Path(__file__).parents[2]
    frame = inspect.currentframe()
    while frame is not None and Path(frame.f_code.co_filename).is_relative_to(here):
        frame = frame.f_back
    if frame is None:
        return "unnamed"
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
