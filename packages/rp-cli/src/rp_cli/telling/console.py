"""What a training logs, printed."""

from __future__ import annotations

import logging
import sys
from collections.abc import Generator
from contextlib import contextmanager

from rp_reports.terminal import columns, wrapped
from tqdm import tqdm

# Where the fine-tuner logs.
_LOG = logging.getLogger("rp_trainer")


class _Lines(logging.Handler):
    """Prints what is logged above a progress bar: warnings to stderr, as the command's own, the rest to stdout."""

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno >= logging.WARNING:
            text = f"roundpipe: {record.getMessage()}"
            tqdm.write(wrapped(text, columns(sys.stderr)), file=sys.stderr)
            return
        tqdm.write(wrapped(record.getMessage(), columns(sys.stdout)), file=sys.stdout)
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
