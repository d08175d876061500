"""The text to train on where none is given: some of the Python standard library's own source."""

from __future__ import annotations

import sysconfig
from pathlib import Path

# 1.6 MB in most versions: more than a short training reads.
_PACKAGES = ("asyncio", "collections", "concurrent", "email", "http", "importlib", "json", "logging")


def library_source() -> tuple[Path, ...]:
    """Return the files, in order.

    >>> [path.name for path in library_source() if path.parent.name == "json"]
    ['__init__.py', 'decoder.py', 'encoder.py', 'scanner.py', 'tool.py']
    """
    library = Path(sysconfig.get_path("stdlib"))
    files = (path for name in _PACKAGES for path in sorted((library / name).rglob("*.py")))
    # Empty ones have nothing to learn.
    return tuple(path for path in files if path.stat().st_size)
