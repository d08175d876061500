"""Read rows of tables: CSV and TSV with named columns, and Parquet."""

from __future__ import annotations

import csv
import importlib
import io
import logging
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from rp_trainer.errors import Refused

from rp_data.notes import DataNotes
from rp_data.rows.files import ARROW, TABLES, kind_of, opened
from rp_data.rows.json_rows import Row, without_nulls

# The module's own limit, 128 KB, is less than many a text.
_MOST_FIELD_BYTES = 2**31 - 1
_ROWS_AT_ONCE = 1024


def separated_rows(option: str, file: Path, notes: DataNotes) -> Iterator[Row]:
    """Yield each row of a CSV or TSV file, whose first line names the columns. Empty fields count as absent.

    Read as text, so that a field such as 007 stays as it is. Raises `Refused` for a row with other than one field
    for each column, unless bad rows are omitted, and for what cannot be read.
    """
    csv.field_size_limit(_MOST_FIELD_BYTES)
    with opened(option, file) as stream, _told(option, file):
        text = io.TextIOWrapper(stream, "utf-8-sig", newline="")
        rows = csv.reader(text, delimiter=TABLES[kind_of(file)], strict=True)
        names = _columns(option, file, next(rows, list[str]()))
        start = rows.line_num + 1
        for fields in rows:
            place, start = f"{file}:{start}", rows.line_num + 1
            row = notes.attempt(lambda place=place, fields=fields: _row(f"{option} {place}", names, fields))
            if row:
                yield place, row


@contextmanager
def _told(option: str, file: Path) -> Generator[None]:
    try:
        yield
    except UnicodeDecodeError as error:
        raise Refused(f"{option} {file} must be in UTF-8, but is not (byte {error.start})") from None
    except csv.Error as error:
        raise Refused(f"{option} {file} cannot be read as a table: {error}") from None


def _columns(option: str, file: Path, names: list[str]) -> list[str]:
    if len(set(names)) < len(names) or not all(names):
        raise Refused(
            f"{option} {file} must name each column once in its first line, but that is {','.join(names)!r:.80}"
        )
    if len(names) == 1 and (other := next((one for one in ";\t|" if one in names[0]), None)) is not None:
        wanted = "tabs" if kind_of(file) == ".tsv" else "commas"
        raise Refused(
            f"{option} {file} must have {wanted} between its columns, but has {other!r} in its first "
            f"line, {names[0]!r:.80}"
        )
    return names


def _row(place: str, names: list[str], fields: list[str]) -> Mapping[str, Any]:
    # An empty line is no row.
    if fields and len(fields) != len(names):
        raise Refused(f"{place} must have {len(names)} fields, one for each column, but has {len(fields)}")
    return {name: field for name, field in zip(names, fields, strict=False) if field}


def stored_rows(option: str, file: Path) -> Iterator[Row]:
    """Yield each row of a Parquet or Arrow file, which is read in parts. Raises `Refused` if it cannot be read."""
    form = "Arrow" if kind_of(file) == ARROW else "Parquet"
    try:
        datasets: Any = importlib.import_module("datasets")
    except ImportError:
        raise Refused(f"{option} {file} is {form}, which needs datasets: pip install datasets") from None
    # Readers may raise errors of many libraries.
    try:
        for number, row in enumerate(_mapped(file, datasets) if form == "Arrow" else _in_parts(file, datasets), 1):
            yield f"{file}:{number}", present(row)
    except Exception as error:
        raise Refused(f"{option} {file} cannot be read as {form}: {error}") from error


def present(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a row without what only other rows have: a table has every key in all rows, as None."""
    return without_nulls(row)[0]


def _in_parts(file: Path, datasets: Any) -> Iterator[Mapping[str, Any]]:
    arrow, parquet = (importlib.import_module(name) for name in ("pyarrow", "pyarrow.parquet"))
    for batch in parquet.ParquetFile(str(file)).iter_batches(batch_size=_ROWS_AT_ONCE):
        # A data set knows what was stored in an encoded form, such as JSON.
        yield from _undecoded(datasets, datasets.Dataset(arrow.Table.from_batches([batch])))


def _undecoded(datasets: Any, data: Any) -> Any:
    """Return a data set whose images stay the bytes and paths that are stored."""
    found = {name: _as_stored(datasets, one) for name, one in data.features.items()}
    return data if found == dict(data.features) else data.cast(datasets.Features(found))


def _as_stored(datasets: Any, feature: Any) -> Any:
    if isinstance(feature, datasets.Image):
        return datasets.Image(decode=False)
    if isinstance(feature, dict):
        fields = cast("dict[str, Any]", feature)
        return {name: _as_stored(datasets, one) for name, one in fields.items()}
    if isinstance(feature, datasets.List | datasets.LargeList):
        inner: Any = feature
        return type(inner)(_as_stored(datasets, inner.feature))
    return feature


def _mapped(file: Path, datasets: Any) -> Iterator[Mapping[str, Any]]:
    log = logging.getLogger("datasets")
    level = log.level
    try:
        # It also prints the errors that it raises.
        log.setLevel(logging.CRITICAL)
        yield from _undecoded(datasets, datasets.Dataset.from_file(str(file)))
    finally:
        log.setLevel(level)
