"""Calls to the operating system that go wrong on purpose, for tests of what is on disk."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from dataclasses import replace
from threading import Lock
from typing import Any

from rp_optim.disk.system import SYSTEM, System


class Fault:
    """The system's calls, of which the `nth` of one kind and those after it go wrong until `is_over`."""

    def __init__(self, kind: str, how: str, nth: int) -> None:
        self._how, self._left, self._lock = how, nth, Lock()
        self.has_struck = self.is_over = False
        calls: dict[str, Any] = {kind: self._around(getattr(SYSTEM, kind))}
        self.system: System = replace(SYSTEM, **calls)

    def _around(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def faulty(*args: Any) -> Any:
            with self._lock:
                self._left -= 1
                strikes = self._left < 0 and not self.is_over
                self.has_struck = self.has_struck or strikes
            return self._strike(call, *args) if strikes else call(*args)

        return faulty

    def _strike(self, call: Callable[..., Any], *args: Any) -> Any:
        if self._how == "short":
            # A part is moved, and less of it is told: that need not be aligned.
            descriptor, memory, offset = args
            pages = max(len(memory) // 8192, 1)
            return call(descriptor, memory[: pages * 4096], offset) - (pages > 1)
        if self._how == "none":
            return 0
        if self._how == "delay":
            time.sleep(0.002)
            return call(*args)
        if self._how == "stall":
            while not self.is_over:
                time.sleep(0.01)
            return call(*args)
        raise OSError(getattr(errno, self._how), os.strerror(getattr(errno, self._how)))
