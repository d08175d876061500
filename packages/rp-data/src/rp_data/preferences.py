"""Read preferences from files of all formats and the hub, as a data set for TRL's trainers."""

from __future__ import annotations

import importlib
import json
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from pathlib import Path
from typing import Any, cast

from rp_sources import data_named, fetched_split
from rp_trainer.errors import Refused

from rp_data.notes import DataNotes
from rp_data.rows.documents import rows_of
from rp_data.rows.files import files_of
from rp_data.rows.json_rows import Row
from rp_data.rows.preferences import Preference, ignored, preference_of
from rp_data.rows.tables import present

_LOG = logging.getLogger(__name__)
_DATA = "data"
_KINDS = {True: "says whether one answer is good", False: "chooses one of two answers"}
_FORMS = {True: "a conversation", False: "text"}
_SAID = ("prompt", "chosen", "rejected", "completion")


def read_preferences(
    *data: str | Path | Iterable[Mapping[str, Any]], unpaired: bool = False, skip_bad_rows: bool = False
) -> Any:
    """Return a `datasets.Dataset` of preferences, for TRL's DPO, KTO, ORPO, CPO and reward trainers.

    >>> rows = [{"question": "1+1?", "chosen": "2", "rejected": "3"}]
    >>> read_preferences(rows)[0]["prompt"]
    [{'role': 'user', 'content': '1+1?'}]
    >>> read_preferences(rows, unpaired=True)["label"][:]
    [True, False]

    Pairs have the columns ``prompt``, ``chosen`` and ``rejected``; answers that are said to be good or bad have
    ``prompt``, ``completion`` and ``label``. Each is text, or a list of messages. ``tools``, as JSON, and
    ``chat_template_kwargs`` are there if some row has them.

    Args:
        data: files, folders of them, names on the hub (``owner/name[:split]``), data sets or lists of rows.
        unpaired: take pairs apart, each into a good and a bad answer, as TRL does for KTO.
        skip_bad_rows: omit rows that cannot be used, and log a warning that tells which, instead of refusing them.

    Raises `rp_trainer.Refused`, with the file and line, for what cannot be used, and for rows of both kinds, or of
    texts and conversations, together.
    """
    notes = DataNotes(skip_bad_rows)
    found = [one for part in data for one in _all(part, notes)]
    for line in notes.lines(_DATA):
        _LOG.warning(line)
    if not found:
        raise Refused(f"{_DATA} has no preferences; name files that hold some")
    if unpaired:
        found = [one for each in found for one in _apart(each)]
    _check_alike(found)
    return _data_set(found)


def _all(part: str | Path | Iterable[Mapping[str, Any]], notes: DataNotes) -> Iterator[Preference]:
    rows = _of_files(Path(part), notes) if isinstance(part, str | Path) else _of_rows(part, notes)
    for place, row in rows:
        one = notes.attempt(lambda place=place, row=row: preference_of(_DATA, place, row))
        if one is not None:
            notes.ignored(ignored(row))
            yield one


def _of_files(path: Path, notes: DataNotes) -> Iterator[Row]:
    name = data_named(path)
    for each in (path,) if name is None else fetched_split(_DATA, name):
        for file in files_of(_DATA, each, notes):
            rows = rows_of(_DATA, file, notes)
            if rows is None:
                raise Refused(f"{_DATA} {file} is text, which prefers nothing; name JSON, CSV or Parquet")
            yield from rows


def _of_rows(rows: Iterable[object], notes: DataNotes) -> Iterator[Row]:
    if isinstance(rows, Mapping):
        raise Refused(
            f"{_DATA} must be rows, but is a {type(cast('object', rows)).__name__}; choose one of its splits, "
            "such as data['train'], or write a row in a list"
        )
    if not isinstance(rows, Sized):
        raise Refused(
            f"{_DATA} must be a whole data set, but is a {type(rows).__name__}; load it without streaming"
        )
    for number, row in enumerate(rows, 1):
        place = f"row {number}"
        found = notes.attempt(lambda place=place, row=row: _fields(place, row))
        if found is not None:
            yield place, found


def _fields(place: str, row: object) -> Mapping[str, Any]:
    if not isinstance(row, Mapping):
        raise Refused(f"{_DATA} {place} must have names and values, as a dict has, but is a {type(row).__name__}")
    return present(dict(cast("Mapping[str, Any]", row)))


def _apart(pair: Preference) -> list[Preference]:
    """Return a good and a bad answer for a pair."""
    if pair.label is not None:
        return [pair]
    return [
        Preference(pair.place, pair.prompt, (answer,), is_good, pair.tools, pair.options)
        for answer, is_good in zip(pair.answers, (True, False), strict=True)
    ]


def _check_alike(found: Sequence[Preference]) -> None:
    """Raise `Refused` for rows of several kinds: TRL looks at the first alone."""
    first = found[0]
    for one in found:
        if (one.label is None) != (first.label is None):
            raise Refused(
                f"{_DATA} {one.place} {_KINDS[one.label is not None]}, but {first.place} "
                f"{_KINDS[first.label is not None]}; read them apart, or with unpaired=True"
            )
        if one.is_conversation != first.is_conversation:
            raise Refused(
                f"{_DATA} {one.place} is {_FORMS[one.is_conversation]}, but {first.place} is "
                f"{_FORMS[first.is_conversation]}; read them apart"
            )


def _data_set(found: Sequence[Preference]) -> Any:
    try:
        datasets: Any = importlib.import_module("datasets")
    except ImportError:
        raise Refused("preferences need datasets: pip install datasets") from None
    names = ("chosen", "rejected") if found[0].label is None else ("completion",)
    table: dict[str, list[Any]] = {"prompt": [one.prompt for one in found]}
    for at, name in enumerate(names):
        table[name] = [one.answers[at] for one in found]
    if found[0].label is not None:
        table["label"] = [one.label for one in found]
    if any(one.tools for one in found):
        table["tools"] = [None if one.tools is None else json.dumps(one.tools) for one in found]
    if any(one.options for one in found):
        table["chat_template_kwargs"] = [dict(one.options) for one in found]
    return datasets.Dataset.from_dict(table, features=_features(datasets, table))


def _features(datasets: Any, table: Mapping[str, list[Any]]) -> Any:
    """Return the types of columns. Messages of several kinds are JSON: as a table, all would have each key."""
    text = datasets.Value("string")
    kinds: dict[str, Any] = {"label": datasets.Value("bool"), "tools": text}
    for name in _SAID:
        if name in table:
            kinds[name] = _feature(datasets, text, table[name])
    if "chat_template_kwargs" in table:
        kinds["chat_template_kwargs"] = _json(datasets)
    return datasets.Features({name: kinds[name] for name in table})


def _feature(datasets: Any, text: Any, column: list[Any]) -> Any:
    if not isinstance(column[0], list):
        return text
    messages = (message for one in column for message in cast("list[Mapping[str, Any]]", one))
    plain = all({*message} == {"role", "content"} for message in messages)
    return datasets.List({"role": text, "content": text} if plain else _json(datasets))


def _json(datasets: Any) -> Any:
    if not hasattr(datasets, "Json"):
        raise Refused(
            "messages with more than a role and a content need a newer version of datasets: pip install -U "
            "datasets"
        )
    return datasets.Json()
