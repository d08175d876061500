"""`Say`: is called with a line on what an estimate works on; `silent` ignores it."""

from __future__ import annotations

from collections.abc import Callable

Say = Callable[[str], None]


def silent(_: str) -> None:
    """Tell nobody."""
