"""Stop the clock of chat templates: some write today's date, but a resumed run must make the same tokens."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from datetime import datetime, tzinfo
from typing import Any


@contextmanager
def stopped(at: datetime | None) -> Generator[None]:
    """In the context, templates see this time; None: the clock goes on."""
    if at is None:
        yield
        return
    # Imported here: help needs no transformers.
    from transformers.utils import chat_template_utils

    class Stopped(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> Any:
            return at if tz is None else at.astimezone(tz)

    # The name that `strftime_now`, the templates' only clock, looks up: transformers takes no time from outside.
    module: Any = chat_template_utils
    real, module.datetime = module.datetime, Stopped
    try:
        yield
    finally:
        module.datetime = real
