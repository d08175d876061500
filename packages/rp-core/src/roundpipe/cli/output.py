"""The folder that a job writes to."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from roundpipe import __version__
from roundpipe.cli.errors import Refused

OPTIONS = "options.json"
METRICS = "metrics.jsonl"
_MARK = "roundpipe_version"


def check_output(folder: Path) -> None:
    """Refuse a path that is no folder, or a folder with anything in it but an earlier run of this command."""
    try:
        _check(folder)
    except OSError as error:
        raise _unusable(folder, error) from error


def create_output(folder: Path, options: Mapping[str, object]) -> None:
    """Make the folder and write the options there, which marks it as this command's.

    Raises `Refused` if it cannot be written to.
    """
    marked = {_MARK: __version__, **options}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        folder.joinpath(OPTIONS).write_text(json.dumps(marked, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise _unusable(folder, error) from error


def create_profile(path: Path) -> None:
    """Make the file that a trace will be written to; raises `Refused` if it cannot be written."""
    try:
        path.open("w", encoding="utf-8").close()
    except OSError as error:
        raise Refused(
            f"--profile {path} cannot be written ({error.strerror}); name a file in a folder that exists"
        ) from error


def _check(folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise Refused(f"--output {folder} must be a folder, but is a file; name a new folder")
    if folder.is_dir() and any(folder.iterdir()) and not _is_earlier_run(folder):
        raise Refused(f"--output {folder} has other files in it; name a new or empty folder")


def _is_earlier_run(folder: Path) -> bool:
    try:
        found: Any = json.loads(folder.joinpath(OPTIONS).read_bytes())  # Any: whatever the file holds
    except (OSError, ValueError):
        return False
    return isinstance(found, dict) and _MARK in cast("dict[Any, Any]", found)


def _unusable(folder: Path, error: OSError) -> Refused:
    return Refused(f"--output {folder} cannot be written to ({error.strerror}); name another folder")
