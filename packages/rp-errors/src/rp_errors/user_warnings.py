"""Warnings that point at the user's line, whichever function or thread finds the reason."""

from __future__ import annotations

import contextlib
import inspect
import threading
import warnings
from collections.abc import Generator
from types import FrameType

# Code between the user's line and a warning: torch, whose modules call `forward`, and contextlib, which runs the
# bodies of context managers. Packages add themselves.
_INSIDE = {"rp_errors", "torch", "contextlib"}


def count_as_inside(package: str) -> None:
    """Let warnings point past the code of a package that stands on this one."""
    _INSIDE.add(package)


class _Here(threading.local):
    held: list[tuple[str, type[Warning]]] | None = None


_HERE = _Here()


def warn_user(words: str, category: type[Warning] = UserWarning) -> None:
    """Issue a warning at the nearest line that is not inside (`count_as_inside`).

    A fixed `stacklevel` points into this package as soon as a decorator or a helper stands between. Where warnings
    are held back (`held_back`), it is left to whoever holds them.
    """
    if _HERE.held is not None:
        _HERE.held.append((words, category))
    else:
        warnings.warn(words, category, stacklevel=_level_of_user())


@contextlib.contextmanager
def held_back(told: list[tuple[str, type[Warning]]]) -> Generator[None]:
    """Append this thread's warnings to `told` in place of issuing them: its stack has no line of the user's."""
    _HERE.held = told
    try:
        yield
    finally:
        _HERE.held = None


def _level_of_user() -> int:
    """The `stacklevel`, for whoever calls this, of the nearest frame that is not inside."""
    frame, level = inspect.currentframe(), 0
    while frame is not None and _package(frame) in _INSIDE:
        frame, level = frame.f_back, level + 1
    return level


def _package(frame: FrameType) -> str:
    return frame.f_globals.get("__name__", "").partition(".")[0]
