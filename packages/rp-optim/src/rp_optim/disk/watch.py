"""Who is told what disks do, and what waits for them: a profile, for example."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, TypeAlias


@dataclass(frozen=True, slots=True)
class DiskWork:
    """What a disk did: a ``read`` or ``write`` of `nbytes` in a directory; or a ``wait`` of a thread for it."""

    kind: Literal["read", "write", "wait"]
    directory: str
    nbytes: int = 0


DiskWatcher: TypeAlias = Callable[[DiskWork, float, float], object]
"""Is called with work that is over, on its thread, and when it began and ended, by `time.perf_counter`."""

_watchers: list[DiskWatcher] = []


def watch_disks(watcher: DiskWatcher) -> None:
    """Have a function told of all disks' work of this process, in place of the one before. It must not raise."""
    _watchers[:] = [watcher]


@contextmanager
def watched(work: DiskWork) -> Generator[None]:
    """Tell of this work, once it is over."""
    began_s = time.perf_counter()
    try:
        yield
    finally:
        for watcher in _watchers:
            watcher(work, began_s, time.perf_counter())
