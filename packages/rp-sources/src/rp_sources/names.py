"""Names on the hub, as they are written in options."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

# As the hub allows, with the owner: a name without one looks like a folder that is not there.
_REPOSITORY = r"(?P<repository>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)"
_REVISION = r"(?:@(?P<revision>[\w.-]+))?"
_PART = r"[\w.-]+"
_MODEL = re.compile(_REPOSITORY + _REVISION)
_DATA = re.compile(rf"{_REPOSITORY}{_REVISION}(?::(?P<configuration>{_PART})(?=:))?(?::(?P<split>{_PART}))?")
# A path with such an ending is a file that is not there.
_OF_FILES = (
    ".json",
    ".jsonl",
    ".ndjson",
    ".parquet",
    ".txt",
    ".md",
    ".text",
    ".yaml",
    ".csv",
    ".tsv",
    ".gz",
    ".zst",
)


@dataclass(frozen=True, slots=True)
class HubName:
    """A repository of the hub. `revision`: branch, tag or commit. `configuration`, `split`: of a data set."""

    repository: str
    revision: str | None = None
    configuration: str | None = None
    split: str = "train"


def is_repository(text: str) -> bool:
    """Return whether a text is the name of a repository, ``owner/name``.

    >>> is_repository("Qwen/Qwen3-8B"), is_repository("Qwen3-8B")
    (True, False)
    """
    return re.fullmatch(_REPOSITORY, text) is not None


def model_named(path: Path) -> HubName | None:
    """Return the model that a value names, ``owner/name[@revision]``; None if it is a path.

    What is there is a path, whatever it looks like.

    >>> model_named(Path("Qwen/Qwen3-8B@main"))
    HubName(repository='Qwen/Qwen3-8B', revision='main', configuration=None, split='train')
    >>> model_named(Path("models/config.json")) is None
    True
    """
    return _named(_MODEL, path)


def data_named(path: Path) -> HubName | None:
    """Return the data set that a value names, ``owner/name[@revision][[:configuration]:split]``; None for a path.

    >>> data_named(Path("openai/gsm8k:main:test"))
    HubName(repository='openai/gsm8k', revision=None, configuration='main', split='test')
    """
    return _named(_DATA, path)


def _named(pattern: re.Pattern[str], path: Path) -> HubName | None:
    match = pattern.fullmatch(str(path))
    # A broken link is there, too.
    if match is None or path.is_symlink() or path.exists():
        return None
    if match["repository"].endswith(_OF_FILES):
        return None
    return HubName(**{name: value for name, value in match.groupdict().items() if value is not None})
