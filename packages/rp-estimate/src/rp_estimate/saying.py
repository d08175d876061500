"""Who is told what is worked on."""

from __future__ import annotations

from collections.abc import Callable

Say = Callable[[str], None]


def silent(_: str) -> None:
    """Tell nobody."""
