"""Read a YAML file of names and plain values; the rest of YAML, whose size has no bound, is refused."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rp_trainer.errors import Refused

from rp_cli.strangers.files import bounded_bytes

# PyYAML reads 50 KB a second.
_MOST_BYTES = 2**17
_MOST_SHOWN = 60
_MOST_OF_AN_ERROR = 300
_TRUE = frozenset({"yes", "true", "on"})
_DECIMAL = re.compile(r"[-+]?(0|[1-9][0-9_]*)")

# A flag, nothing, a text or number as written, or a list of these.
Value = bool | str | None | list[bool | str | None]


def read_plain(option: str, path: Path) -> list[tuple[str, Value]]:
    """Return the names of a YAML file with their values, in its order. Numbers are texts, as written.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     path = Path(folder, "a.yaml")
    ...     size = path.write_text("batch: 8\\ndata: [a, b]\\ncompile: yes\\n")
    ...     read_plain("--config", path)
    [('batch', '8'), ('data', ['a', 'b']), ('compile', True)]

    Raises `Refused` for anything but one list of names with values, or with lists of values: aliases and anchors,
    merge keys, tags, deeper lists, several documents. No value is built before that is known, so a small file that
    stands for a large value costs nothing.

    `option`: with which the path was given.
    """
    what = f"{option} {path}"
    try:
        text = bounded_bytes(what, path, _MOST_BYTES).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise Refused(f"{what} must be YAML in UTF-8, but is not (byte {error.start})") from None
    events = _Events(what, text)
    events.skip("StreamStartEvent")
    if events.is_next("StreamEndEvent"):
        return []
    events.skip("DocumentStartEvent")
    pairs = _pairs(what, events)
    events.skip("DocumentEndEvent")
    if not events.is_next("StreamEndEvent"):
        raise Refused(f"{what} must be one YAML document, but has several; remove all but one")
    return pairs


class _Events:
    """The events of a YAML text, one at a time. Raises `Refused` for those that are not plain."""

    def __init__(self, what: str, text: str) -> None:
        import yaml  # pyright: ignore[reportMissingModuleSource] - it has no types of its own

        module: Any = yaml
        self._what = what
        self._error: type[Exception] = module.YAMLError
        self._loader: Any = module.SafeLoader
        self._scalar: Any = module.ScalarNode
        self._events: Iterator[Any] = self._parsed(module, text)
        self._waiting: Any = None

    def _parsed(self, module: Any, text: str) -> Iterator[Any]:
        try:
            yield from module.parse(text, Loader=self._loader)
        except (self._error, ValueError, RecursionError) as error:
            told = str(error)
            raise Refused(f"{self._what} must be YAML, but is not: {told[:_MOST_OF_AN_ERROR]}") from error

    def next(self) -> Any:
        event, self._waiting = self._waiting or next(self._events), None
        line = f"{self._what}, line {event.start_mark.line + 1}"
        if type(event).__name__ == "AliasEvent":
            raise Refused(f"{line}: aliases are not read; write the value itself instead of *{event.anchor:.40}")
        if getattr(event, "anchor", None) is not None:
            raise Refused(f"{line}: anchors are not read; remove &{event.anchor:.40}")
        if getattr(event, "tag", None) is not None:
            raise Refused(f"{line}: tags are not read; remove {event.tag:.40}")
        return event

    def is_next(self, kind: str) -> bool:
        self._waiting = self.next() if self._waiting is None else self._waiting
        return type(self._waiting).__name__ == kind

    def skip(self, kind: str) -> None:
        event = self.next()
        assert type(event).__name__ == kind, event

    def kind_of(self, event: Any) -> str:
        """Return what YAML takes an unquoted scalar for: ``str``, ``int``, ``bool`` ..."""
        tag: str = self._loader("").resolve(self._scalar, event.value, event.implicit)
        return tag.rpartition(":")[2]


def _pairs(what: str, events: _Events) -> list[tuple[str, Value]]:
    first = events.next()
    if _is_empty(events, first):
        return []
    if type(first).__name__ != "MappingStartEvent":
        raise Refused(f"{what} must have options and their values, such as 'batch: 8', but has {_shown(first)}")
    pairs: list[tuple[str, Value]] = []
    while not events.is_next("MappingEndEvent"):
        key = events.next()
        line = f"{what}, line {key.start_mark.line + 1}"
        if type(key).__name__ != "ScalarEvent":
            raise Refused(f"{line} must begin with the name of an option, but has {_shown(key)}")
        if events.kind_of(key) == "merge":
            raise Refused(f"{line}: merge keys are not read; write the options themselves instead of <<")
        pairs.append((key.value, _value(f"{line}: {key.value[:_MOST_SHOWN]}", events)))
    events.skip("MappingEndEvent")
    return pairs


def _value(place: str, events: _Events) -> Value:
    event = events.next()
    if type(event).__name__ != "SequenceStartEvent":
        return _plain(place, events, event)
    values: list[bool | str | None] = []
    while not events.is_next("SequenceEndEvent"):
        values.append(_plain(place, events, events.next()))
    events.skip("SequenceEndEvent")
    return values


def _plain(place: str, events: _Events, event: Any) -> bool | str | None:
    if type(event).__name__ != "ScalarEvent":
        raise Refused(f"{place} must be a number or text, or a list of those, but has {_shown(event)}")
    text: str = event.value
    match events.kind_of(event):
        case "bool":
            return text.lower() in _TRUE
        case "null":
            return None
        case "int" if not _DECIMAL.fullmatch(text):
            raise Refused(f"{place} must be a number in decimal digits, but is {text!r:.60}")
        case "int" | "float":
            return text.replace("_", "")
        case _:
            return text


def _is_empty(events: _Events, event: Any) -> bool:
    return type(event).__name__ == "ScalarEvent" and events.kind_of(event) == "null"


def _shown(event: Any) -> str:
    match type(event).__name__:
        case "SequenceStartEvent":
            return "a list"
        case "MappingStartEvent":
            return "names with values"
        case _:
            return f"{event.value!r:.40}"
