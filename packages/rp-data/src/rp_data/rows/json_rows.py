"""Read rows of JSON: one object a line, or a list of objects."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any, cast

from rp_trainer.errors import Refused

from rp_data.notes import DataNotes
from rp_data.rows.files import JSON, content, decoded, kind_of, lines

Row = tuple[str, Mapping[str, Any]]


def json_rows(option: str, file: Path, notes: DataNotes) -> Iterator[Row]:
    """Yield each object of a file with its place. A file that ends with ``.json`` may have a list of them.

    Raises `Refused` for anything else, unless bad rows are omitted.
    """
    waiting = enumerate(lines(option, file), 1)
    # What is before the first line with anything in it.
    for number, line in waiting:
        if text := decoded(option, f"{file}:{number}", line).strip():
            if text.startswith("[") and kind_of(file) == JSON:
                yield from _members(option, file, notes)
                return
            yield from _of_lines(option, file, chain([(number, line)], waiting), notes)
            return


def _of_lines(option: str, file: Path, numbered: Iterator[tuple[int, bytes]], notes: DataNotes) -> Iterator[Row]:
    for number, line in numbered:
        place = f"{file}:{number}"
        read = notes.attempt(lambda place=place, line=line: _of_line(option, place, line))
        if read is not None and (row := read[0]) is not None:
            notes.dropped_nulls(place, read[1])
            yield place, row


def _of_line(option: str, place: str, line: bytes) -> tuple[Mapping[str, Any] | None, int]:
    """Return an object, None for an empty line, and the number of nulls that it had."""
    text = decoded(option, place, line)
    if not text.strip():
        return None, 0
    # A list, or the first line of an object in several.
    is_begun = text.lstrip().startswith("[") or text.strip() == "{"
    hint = "; write one object a line, or a list of objects into a file named .json" if is_begun else ""
    return _object(f"{option} {place}", read_json(f"{option} {place} must be one JSON object", text, hint))


def _members(option: str, file: Path, notes: DataNotes) -> Iterator[Row]:
    text = decoded(option, str(file), content(option, file))
    for number, member in enumerate(read_json(f"{option} {file} must be a list of JSON objects", text), 1):
        place = f"{file}, object {number}"
        read = notes.attempt(lambda place=place, member=member: _object(f"{option} {place}", member))
        if read is not None:
            notes.dropped_nulls(place, read[1])
            yield place, read[0]


def read_json(wanted: str, text: str, hint: str = "") -> Any:
    """Return what a text of JSON says. Raises `Refused`, which begins with what is `wanted`, for other texts.

    >>> read_json("a:1 must be one JSON object", '{"text": "one"}')
    {'text': 'one'}
    """
    try:
        value: object = json.loads(text, object_pairs_hook=_once)
        if "\\ud" in text.lower():
            # Halves of surrogate pairs, which JSON allows, are not text.
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = ascii(error.object[error.start])
        place = wanted.partition(" must be ")[0]
        raise Refused(f"{place} must be text, but has half of a surrogate pair ({half})") from None
    except (ValueError, RecursionError) as error:
        raise Refused(f"{wanted}, but is not: {error}{hint}") from None
    return value


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object whose names are there once: JSON does not say which of two values counts."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{twice!r:.60} is in one object twice")
    return found


def _object(place: str, value: object) -> tuple[Mapping[str, Any], int]:
    """Return an object without its nulls, and their number."""
    if not isinstance(value, dict):
        raise Refused(f"{place} must be a JSON object, but is a {type(value).__name__}")
    try:
        return without_nulls(cast(object, value))
    except RecursionError:
        raise Refused(f"{place} must be a JSON object, but its lists are nested too deeply") from None


def without_nulls(value: Any) -> tuple[Any, int]:
    """Return a value of JSON without its keys that are null, and their number.

    Tables have every key of a column in every row, as null where a row has none.

    >>> without_nulls({"a": None, "b": [{"c": None}, None]})
    ({'b': [{}, None]}, 2)
    """
    if isinstance(value, dict):
        fields = cast("dict[str, Any]", value)
        kept = {name: without_nulls(one) for name, one in fields.items() if one is not None}
        dropped = len(fields) - len(kept) + sum(count for _, count in kept.values())
        return {name: one for name, (one, _) in kept.items()}, dropped
    if isinstance(value, list):
        members = [without_nulls(one) for one in cast("list[Any]", value)]
        return [one for one, _ in members], sum(count for _, count in members)
    return value, 0
