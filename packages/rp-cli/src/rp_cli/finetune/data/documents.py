"""Read samples from files: plain text, JSONL, and Parquet."""

from __future__ import annotations

import codecs
import importlib
import json
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from rp_presets import special_kind
from rp_trainer.errors import Refused

from rp_cli.strangers.files import check_stored
from rp_cli.strangers.limited import Unlimited

JSON_LINES = frozenset({".jsonl", ".ndjson", ".json"})
PARQUET = ".parquet"
# As `datasets` keeps what it has downloaded.
ARROW = ".arrow"
TEXTS = frozenset({".txt", ".md", ".text"})
_SHAPES = "'messages', 'prompt' and 'completion', or 'text'"


@dataclass(frozen=True, slots=True)
class Text:
    """Text whose tokens are all learned. `place`: its file and line, for errors."""

    place: str
    text: str


@dataclass(frozen=True, slots=True)
class Completion:
    """A prompt and its completion."""

    place: str
    prompt: str
    completion: str


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation. `messages`: at least one, each with a ``role``. `tools`: as chat templates take them."""

    place: str
    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Any] | None = None


Sample = Text | Completion | Chat


def bytes_of(sample: Sample) -> int:
    """Return about how many bytes of text a sample has, with names and marks.

    >>> bytes_of(Text("a:1", "one")), bytes_of(Chat("a:1", [{"role": "user", "content": "one"}]))
    (3, 18)
    """
    match sample:
        case Text():
            return len(sample.text)
        case Completion():
            return len(sample.prompt) * 2 + len(sample.completion)
        case Chat():
            return _letters([sample.messages, sample.tools])


def _letters(value: object) -> int:
    letters, waiting = 0, [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, str):
            letters += len(one)
        elif isinstance(one, list):
            waiting += cast("list[object]", one)
        elif isinstance(one, dict):
            fields = cast("dict[object, object]", one)
            waiting += [*fields, *fields.values()]
    return letters


def read_samples(option: str, paths: Sequence[Path], budget: Unlimited | None = None) -> Iterator[Sample]:
    """Read files, and the visible files of folders that have a known suffix, in the order of their names.

    A file with the suffix ``.jsonl``, ``.ndjson`` or ``.json`` has one object per line; ``.parquet`` needs
    `datasets`; any other file is one text.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     path = Path(folder, "a.jsonl")
    ...     size = path.write_text('{"text": "one"}')
    ...     [sample.text for sample in read_samples("--data", [path])]
    ['one']

    Raises `Refused` for a path that is missing, cannot be read, or has other content; the message names the place.
    `option`: the option with which the paths were given. `budget`: told of each file before it is read.
    """
    for path in paths:
        for file in _files(option, path):
            (budget or Unlimited()).allow(f"{option} {file}", file.stat().st_size)
            yield from _samples(option, file)


def _files(option: str, path: Path) -> list[Path]:
    if path.is_dir():
        # Not .json: many folders have a config.json.
        known = JSON_LINES - {".json"} | TEXTS | {PARQUET}
        files = (
            file
            for file in path.rglob("*")
            if file.suffix.lower() in known and file.is_file() and special_kind(file) is None
        )
        visible = sorted(file for file in files if not _is_hidden(file.relative_to(path)))
        if not visible:
            raise Refused(f"{option} {path} has no files that end with {', '.join(sorted(known))}")
        return visible
    check_stored(f"{option} {path}", path)
    if not path.is_file():
        what = "is neither a file nor a folder" if path.exists() else "does not exist"
        raise Refused(f"{option} {path} {what}; name files or folders")
    return [path]


def _is_hidden(path: Path) -> bool:
    """Return whether a path is hidden, like temporary files of editors and downloads."""
    return any(part.startswith(".") for part in path.parts)


def _samples(option: str, file: Path) -> Iterator[Sample]:
    if file.suffix.lower() in JSON_LINES:
        return _of_lines(option, file)
    if file.suffix.lower() == PARQUET:
        return _of_table(option, file, "Parquet")
    if file.suffix.lower() == ARROW:
        return _of_table(option, file, "Arrow")
    return iter([Text(str(file), _decoded(option, str(file), _content(option, file)))])


def _content(option: str, file: Path) -> bytes:
    try:
        content = file.read_bytes()
    except OSError as error:
        raise Refused(f"{option} {file} cannot be read ({error.strerror})") from error
    if b"\0" in content:
        raise Refused(f"{option} {file} must be text, JSONL or Parquet, but holds zero bytes")
    return content


def _decoded(option: str, place: str, content: bytes) -> str:
    try:
        # Some editors put a byte order mark before the text.
        return content.removeprefix(codecs.BOM_UTF8).decode()
    except UnicodeDecodeError as error:
        raise Refused(f"{option} {place} must be in UTF-8, but is not (byte {error.start})") from None


def _of_lines(option: str, file: Path) -> Iterator[Sample]:
    for number, line in enumerate(_lines(option, file), 1):
        place = f"{file}:{number}"
        text = _decoded(option, place, line)
        if text.strip():
            yield sample_of(option, place, _object(option, place, text))


def _lines(option: str, file: Path) -> Iterator[bytes]:
    try:
        with file.open("rb") as opened:
            yield from opened
    except OSError as error:
        raise Refused(f"{option} {file} cannot be read ({error.strerror})") from error


def _object(option: str, place: str, line: str) -> Mapping[str, Any]:
    try:
        value: object = json.loads(line)
    except (ValueError, RecursionError) as error:
        hint = "; write one object a line, not a list" if line.lstrip().startswith("[") else ""
        raise Refused(f"{option} {place} must be one JSON object, but is not: {error}{hint}") from None
    if not isinstance(value, dict):
        raise Refused(f"{option} {place} must be a JSON object with {_SHAPES}, but is a {type(value).__name__}")
    if "\\ud" in line.lower():
        _check_pairs(f"{option} {place}", cast(object, value))
    return cast("Mapping[str, Any]", value)


def _check_pairs(place: str, value: object) -> None:
    """Refuse halves of surrogate pairs, which JSON allows but which are not text."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = ascii(error.object[error.start])
        raise Refused(f"{place} must be text, but has half of a surrogate pair ({half})") from None


def _of_table(option: str, file: Path, form: Literal["Parquet", "Arrow"]) -> Iterator[Sample]:
    try:
        datasets: Any = importlib.import_module("datasets")
    except ImportError:
        raise Refused(f"{option} {file} is {form}, which needs datasets: pip install datasets") from None
    log = logging.getLogger("datasets")
    level = log.level
    try:
        # datasets also prints the errors that it raises.
        log.setLevel(logging.CRITICAL)
        of = datasets.Dataset
        rows: Iterable[Mapping[str, Any]] = (
            of.from_parquet(str(file), keep_in_memory=True) if form == "Parquet" else of.from_file(str(file))
        )
    except Exception as error:  # readers may raise errors of many libraries
        raise Refused(f"{option} {file} cannot be read as {form}: {error}") from error
    finally:
        log.setLevel(level)
    for number, row in enumerate(rows, 1):
        # A column that only other rows have is None here.
        given = {name: value for name, value in row.items() if value is not None}
        yield sample_of(option, f"{file}:{number}", given)


def sample_of(option: str, place: str, record: Mapping[str, Any]) -> Sample:
    """Convert a record to a sample by its ``messages``, else its ``prompt`` and ``completion``, else its ``text``.

    >>> sample_of("--data", "a:1", {"prompt": "1+1=", "completion": "2", "id": 7})
    Completion(place='a:1', prompt='1+1=', completion='2')
    """
    if "messages" in record:
        return _chat(option, place, record)
    if "prompt" in record and "completion" in record:
        return Completion(
            place, _string(option, place, record, "prompt"), _string(option, place, record, "completion")
        )
    if "text" in record:
        return Text(place, _string(option, place, record, "text"))
    raise Refused(f"{option} {place} must have {_SHAPES}, but has {', '.join(map(repr, record)) or 'nothing'}")


def _string(option: str, place: str, record: Mapping[str, Any], name: str) -> str:
    value = record[name]
    if isinstance(value, str):
        return value
    kind = type(value).__name__
    hint = "; write conversations as 'messages'" if kind == "list" else ""
    raise Refused(f"{option} {place}: {name!r} must be text, but is a {kind}{hint}")


def _chat(option: str, place: str, record: Mapping[str, Any]) -> Chat:
    messages, tools = cast("tuple[object, Any]", (record["messages"], record.get("tools")))
    if not isinstance(messages, list) or not messages:
        shown = repr(cast(object, messages))
        raise Refused(f"{option} {place}: 'messages' must be a list of at least one message, but is {shown:.60}")
    for message in cast("list[object]", messages):
        _check_message(f"{option} {place}", message)
    return Chat(place, cast("Sequence[Mapping[str, Any]]", messages), tools)


def _check_message(place: str, message: object) -> None:
    """Refuse a content that is not text: templates write anything, such as a list's brackets."""
    given = cast("Mapping[str, object]", message if isinstance(message, dict) else {})
    content = given.get("content")
    if not isinstance(given.get("role"), str) or (content is None and not given.get("tool_calls")):
        raise Refused(f"{place}: each message must have a 'role' and a 'content', but one is {message!r:.60}")
    if not isinstance(content, str | None):
        raise Refused(f"{place}: the 'content' of a message must be text, but one is {content!r:.60}")
