"""The entry point of the `roundpipe` command, which imports torch only once Ctrl-C is handled."""

from __future__ import annotations

import os
import signal
from types import FrameType

_INTERRUPTED = 130


def main() -> int:
    """Run the command and return its exit status; Ctrl-C while modules are imported ends it with one line."""
    before = signal.getsignal(signal.SIGINT)
    # Shells let what a script starts in the background ignore Ctrl-C.
    if callable(before):
        signal.signal(signal.SIGINT, _end)
    from roundpipe.cli import main as run

    if callable(before):
        signal.signal(signal.SIGINT, before)
    return run()


def _end(number: int, frame: FrameType | None) -> None:
    # At once: an exception in the midst of an import may arrive as another one, or not at all.
    del number, frame
    os.write(2, b"roundpipe: interrupted\n")
    os._exit(_INTERRUPTED)
