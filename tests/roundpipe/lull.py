"""Things that are put off until every other thread of the process sleeps, so that all else happens before them.

A thread that forgot to wait gets past, however slow the machine is. Several things happen one by one, in the order
of the time that they were put off by, which passes only then.
"""

from __future__ import annotations

import heapq
import threading
from collections.abc import Callable
from itertools import count
from pathlib import Path

THREADS = Path("/proc/self/task")
# Between two looks: a thread that waits for the GIL gets it meanwhile.
_LOOK_S = 0.002
# On systems that do not tell what threads do.
_BLIND_S = 0.4
# What a scenario waits for comes, or something else is wrong.
LIMIT_S = 60.0


def pause(turns: float = 1, until: threading.Event | None = None) -> None:
    """Wait until everything else waits, or until an event."""
    until = until or threading.Event()
    later(until.set, turns)
    assert until.wait(LIMIT_S)


def later(do: Callable[[], object], turns: float = 1) -> None:
    """Do something when everything else waits. It must not wait itself. `turns`: less comes before more."""
    _CLOCK.put(do, turns)


class _Clock:
    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._put_off: list[tuple[float, int, Callable[[], object]]] = []
        self._now = 0.0
        self._numbers = count()
        self._is_started = False

    def put(self, do: Callable[[], object], turns: float) -> None:
        with self._changed:
            heapq.heappush(self._put_off, (self._now + turns, next(self._numbers), do))
            self._changed.notify()
            if not self._is_started:
                self._is_started = True
                threading.Thread(target=self._run, name="lull", daemon=True).start()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._put_off)
            _wait_for_lull()
            with self._changed:
                self._now, _, do = heapq.heappop(self._put_off)
            do()


_CLOCK = _Clock()


def _wait_for_lull() -> None:
    """Return when all threads have slept from one look to the next, so that each was asleep at some one time."""
    pace = threading.Event()
    if not THREADS.exists():
        pace.wait(_BLIND_S)
        return
    before = None
    while (now := _sleeping()) is None or now != before:
        before = now
        pace.wait(_LOOK_S)


def _sleeping() -> dict[str, str] | None:
    """How often each other thread has gone to sleep or been stopped; None if one is awake."""
    own = str(threading.get_native_id())
    found: dict[str, str] = {}
    for thread in THREADS.iterdir():
        if thread.name == own:
            continue
        try:
            told = (thread / "status").read_text()
        except (FileNotFoundError, ProcessLookupError):
            return None
        lines = dict(line.split(":\t", 1) for line in told.splitlines() if ":\t" in line)
        if not lines["State"].startswith("S"):
            return None
        found[thread.name] = lines["voluntary_ctxt_switches"] + lines["nonvoluntary_ctxt_switches"]
    return found
