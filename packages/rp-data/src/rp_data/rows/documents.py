"""Read samples from files of all formats, or from rows of a data set."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

from rp_strangers.limited import Unlimited
from rp_trainer.errors import Refused

from rp_data.notes import DataNotes
from rp_data.rows.files import (
    ARROW,
    JSON,
    JSON_LINES,
    PARQUET,
    TABLES,
    content,
    decoded,
    files_of,
    kind_of,
)
from rp_data.rows.json_rows import Row, json_rows
from rp_data.rows.shapes import has_form, ignored, sample_of
from rp_data.rows.tables import separated_rows, stored_rows
from rp_data.samples import Sample, Text


def read_samples(
    option: str, paths: Sequence[Path], budget: Unlimited | None = None, notes: DataNotes | None = None
) -> Iterator[Sample]:
    """Read files, and the visible files of folders that have a known suffix, in the order of their names.

    A file with the suffix ``.jsonl``, ``.ndjson`` or ``.json`` has one object per line, ``.json`` also a list of
    them; ``.csv`` and ``.tsv`` have columns with names; ``.parquet`` needs `datasets`; any other file is one text.
    All but Parquet may end with ``.gz`` or ``.zst``.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     path = Path(folder, "a.jsonl")
    ...     size = path.write_text('{"text": "one"}')
    ...     [sample.text for sample in read_samples("--data", [path])]
    ['one']

    Raises `Refused` for a path that is missing, cannot be read, or has other content; the message names the place.
    `option`: the option with which the paths were given. `budget`: told of each file before it is read. `notes`:
    whether bad rows are omitted, and what is noticed.
    """
    notes = notes or DataNotes()
    for path in paths:
        for file in files_of(option, path, notes):
            (budget or Unlimited()).allow(f"{option} {file}", file.stat().st_size)
            yield from _samples(option, file, notes)


def _samples(option: str, file: Path, notes: DataNotes) -> Iterator[Sample]:
    rows = rows_of(option, file, notes)
    if rows is None:
        text = decoded(option, str(file), content(option, file))
        _check_no_json(option, file, text)
        return iter([Text(str(file), text)])
    return _converted(option, rows, notes, file.parent)


def _check_no_json(option: str, file: Path, text: str) -> None:
    """Refuse JSON in a file with another suffix, which would be learned letter by letter."""
    if not (whole := text.strip()).startswith(("{", "[")):
        return
    # Of a list in several lines, the first is no JSON.
    for part in (whole.partition("\n")[0], whole):
        with suppress(ValueError, RecursionError):
            value: object = json.loads(part)
            row = next(iter(cast("list[object]", value)), None) if isinstance(value, list) else value
            if isinstance(row, dict) and has_form(cast("Mapping[str, Any]", row)):
                raise Refused(
                    f"{option} {file} has JSON, but would be learned as text, as its name has it; name it .jsonl, "
                    "or .json if it is one list"
                )
            return


def rows_of(option: str, file: Path, notes: DataNotes) -> Iterator[Row] | None:
    """Return the rows of a file, with their places and without nulls; None if it is a text."""
    kind = kind_of(file)
    if kind in JSON_LINES | {JSON}:
        return json_rows(option, file, notes)
    if kind in TABLES:
        return separated_rows(option, file, notes)
    return stored_rows(option, file) if kind in (PARQUET, ARROW) else None


def _converted(option: str, rows: Iterable[Row], notes: DataNotes, folder: Path | None = None) -> Iterator[Sample]:
    for place, row in rows:
        sample = notes.attempt(lambda place=place, row=row: sample_of(option, place, row, folder))
        if sample is not None:
            notes.ignored(ignored(row, sample))
            yield sample
