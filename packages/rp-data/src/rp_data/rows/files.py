"""Find the files of an option, and open them, also where they are compressed."""

from __future__ import annotations

import codecs
import gzip
import importlib
import io
import re
import zlib
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, cast

from rp_presets import special_kind
from rp_strangers.files import check_stored
from rp_trainer.errors import Refused

from rp_data.notes import DataNotes

JSON = ".json"
JSON_LINES = frozenset({".jsonl", ".ndjson"})
TABLES = {".csv": ",", ".tsv": "\t"}
PARQUET = ".parquet"
# As `datasets` keeps what it has downloaded.
ARROW = ".arrow"
TEXTS = frozenset({".txt", ".md", ".text"})
# What data sets have beside their rows: it is about them.
_ABOUT = re.compile(r"(readme|licen[cs]e|copying|notice|changelog|contributing|citation)\b", re.IGNORECASE)
_KEPT_APART = re.compile(
    r"(?<![a-z])(test|valid|validation|val|eval|evaluation|dev|heldout)(?![a-z])", re.IGNORECASE
)
_GZIP, _ZSTD = ".gz", ".zst"
# Before a text in UTF-16, as some tables' programs write it.
_UTF_16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
# Not .json: many folders have a config.json.
_IN_FOLDERS = JSON_LINES | TEXTS | {PARQUET, *TABLES}


def kind_of(file: Path) -> str:
    """Return the suffix that tells what is in a file, in small letters, without that of a compression.

    >>> kind_of(Path("a.JSONL")), kind_of(Path("a.csv.gz"))
    ('.jsonl', '.csv')
    """
    suffix = file.suffix.lower()
    return Path(file.stem).suffix.lower() if suffix in (_GZIP, _ZSTD) else suffix


def files_of(option: str, path: Path, notes: DataNotes) -> list[Path]:
    """Return a file, or the visible files of a folder that have a known suffix, in the order of their names.

    `notes`: of the other files in a folder.

    Raises `Refused` for what is neither, and for a folder without such files.
    """
    if path.is_dir():
        return _in_folder(option, path, notes)
    check_stored(f"{option} {path}", path)
    if not path.is_file():
        what = "is neither a file nor a folder" if path.exists() else "does not exist"
        raise Refused(f"{option} {path} {what}; name files or folders")
    return [path]


def _in_folder(option: str, path: Path, notes: DataNotes) -> list[Path]:
    visible = sorted(
        file
        for file in path.rglob("*")
        if file.is_file() and special_kind(file) is None and not _is_hidden(file.relative_to(path))
    )
    known = [file for file in visible if kind_of(file) in _IN_FOLDERS]
    if not known:
        stored = next((file for file in visible if kind_of(file) in (ARROW, JSON)), None)
        hint = "" if stored is None else f"; name others yourself, such as {stored}"
        raise Refused(f"{option} {path} has no files that end with {', '.join(sorted(_IN_FOLDERS))}{hint}")
    notes.passed_over(file.suffix or file.name for file in visible if kind_of(file) not in _IN_FOLDERS)
    rows = [file for file in known if kind_of(file) not in TEXTS]
    about = [file for file in known if rows and kind_of(file) in TEXTS and _ABOUT.match(file.name)]
    notes.passed_over(file.name for file in about)
    kept = [file for file in rows if _KEPT_APART.search(str(file.relative_to(path)))]
    if 0 < len(kept) < len(rows):
        notes.folder(
            f"{len(kept)} of {len(rows)} files in {path} are named for evaluation, such as {kept[0]}, but are "
            "read like all others; name the files that are to be read"
        )
    return [file for file in known if file not in about]


def _is_hidden(path: Path) -> bool:
    """Return whether a path is hidden, like temporary files of editors and downloads."""
    return any(part.startswith(".") for part in path.parts)


@contextmanager
def opened(option: str, file: Path) -> Generator[BinaryIO]:
    """Open a file, and what is compressed in it. Errors of reading become `Refused`, also in the context."""
    try:
        with _stream(option, file) as stream:
            if stream.peek(2)[:2] in _UTF_16:
                raise Refused(
                    f"{option} {file} is in UTF-16; write it in UTF-8, as `iconv -f UTF-16 -t UTF-8` does"
                )
            yield stream
    except (EOFError, zlib.error) as error:
        raise Refused(f"{option} {file} is damaged ({error}); fetch it again") from error
    except OSError as error:
        raise Refused(f"{option} {file} cannot be read ({error.strerror or error})") from error


def _stream(option: str, file: Path) -> io.BufferedReader:
    suffix = file.suffix.lower()
    if suffix == _GZIP:
        return cast(io.BufferedReader, gzip.open(file, "rb"))
    if suffix == _ZSTD:
        return _zstd(option, file)
    return file.open("rb")


def _zstd(option: str, file: Path) -> io.BufferedReader:
    try:
        arrow: Any = importlib.import_module("pyarrow")
    except ImportError:
        raise Refused(
            f"{option} {file} is compressed with zstd, which needs pyarrow: pip install datasets"
        ) from None
    return io.BufferedReader(arrow.CompressedInputStream(str(file), "zstd"))


def content(option: str, file: Path) -> bytes:
    """Return the whole content of a text. Raises `Refused` if it cannot be read, or is no text."""
    with opened(option, file) as stream:
        whole = stream.read()
    if b"\0" in whole:
        raise Refused(f"{option} {file} must be text, JSON, CSV or Parquet, but holds zero bytes")
    return whole


def lines(option: str, file: Path) -> Iterator[bytes]:
    """Yield a file's lines. Raises `Refused` if it cannot be read."""
    with opened(option, file) as stream:
        yield from stream


def decoded(option: str, place: str, content: bytes) -> str:
    """Return text of UTF-8. Raises `Refused` for other bytes."""
    try:
        # Some editors put a byte order mark before the text.
        return content.removeprefix(codecs.BOM_UTF8).decode()
    except UnicodeDecodeError as error:
        raise Refused(f"{option} {place} must be in UTF-8, but is not (byte {error.start})") from None
