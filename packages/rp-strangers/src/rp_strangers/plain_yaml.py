"""Read a YAML file of names and plain values; the rest of YAML, whose size has no bound, is refused."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rp_trainer.errors import Refused

from rp_strangers.files import bounded_bytes

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
    events = _events(what, text)
    next(events)  # the stream's begin
    if type(next(events)).__name__ == "StreamEndEvent":
        return []
    pairs = _pairs(what, events)
    next(events)  # the document's end
    if type(next(events)).__name__ != "StreamEndEvent":
        raise Refused(f"{what} must be one YAML document, but has several; remove all but one")
    return pairs


def _events(what: str, text: str) -> Iterator[Any]:  # Any: yaml has no types of its own
    """Yield the events of a YAML text, as they are asked for. Raises `Refused` for those that are not plain."""
    import yaml  # pyright: ignore[reportMissingModuleSource]

    module: Any = yaml
    try:
        for event in module.parse(text, Loader=module.SafeLoader):
            line = f"{what}, line {event.start_mark.line + 1}"
            if type(event).__name__ == "AliasEvent":
                raise Refused(
                    f"{line}: aliases are not read; write the value itself instead of *{event.anchor:.40}"
                )
            if getattr(event, "anchor", None) is not None:
                raise Refused(f"{line}: anchors are not read; remove &{event.anchor:.40}")
            if getattr(event, "tag", None) is not None:
                raise Refused(f"{line}: tags are not read; remove {event.tag:.40}")
            yield event
    except (module.YAMLError, ValueError, RecursionError) as error:
        raise Refused(f"{what} must be YAML, but is not: {str(error)[:_MOST_OF_AN_ERROR]}") from error


def _kind_of(event: Any) -> str:
    """Return what YAML takes an unquoted scalar for: ``str``, ``int``, ``bool`` ..."""
    import yaml  # pyright: ignore[reportMissingModuleSource]

    module: Any = yaml
    tag: str = module.SafeLoader("").resolve(module.ScalarNode, event.value, event.implicit)
    return tag.rpartition(":")[2]


def _pairs(what: str, events: Iterator[Any]) -> list[tuple[str, Value]]:
    first = next(events)
    if type(first).__name__ == "ScalarEvent" and _kind_of(first) == "null":
        return []
    if type(first).__name__ != "MappingStartEvent":
        raise Refused(f"{what} must have options and their values, such as 'batch: 8', but has {_shown(first)}")
    pairs: list[tuple[str, Value]] = []
    while type(key := next(events)).__name__ != "MappingEndEvent":
        line = f"{what}, line {key.start_mark.line + 1}"
        if type(key).__name__ != "ScalarEvent":
            raise Refused(f"{line} must begin with the name of an option, but has {_shown(key)}")
        if _kind_of(key) == "merge":
            raise Refused(f"{line}: merge keys are not read; write the options themselves instead of <<")
        pairs.append((key.value, _value(f"{line}: {key.value[:_MOST_SHOWN]}", events)))
    return pairs


def _value(place: str, events: Iterator[Any]) -> Value:
    event = next(events)
    if type(event).__name__ != "SequenceStartEvent":
        return _plain(place, event)
    values: list[bool | str | None] = []
    while type(event := next(events)).__name__ != "SequenceEndEvent":
        values.append(_plain(place, event))
    return values


def _plain(place: str, event: Any) -> bool | str | None:
    if type(event).__name__ != "ScalarEvent":
        raise Refused(f"{place} must be a number or text, or a list of those, but has {_shown(event)}")
    text: str = event.value
    match _kind_of(event):
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


def _shown(event: Any) -> str:
    match type(event).__name__:
        case "SequenceStartEvent":
            return "a list"
        case "MappingStartEvent":
            return "names with values"
        case _:
            return f"{event.value!r:.40}"
