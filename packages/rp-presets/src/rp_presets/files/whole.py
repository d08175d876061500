"""Read JSON files and headers of safetensors files; one that was damaged is named, with what to do."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from rp_presets.errors import DamagedFile

_AGAIN = "fetch it again, or copy it again from where it is whole"
# https://github.com/git-lfs/git-lfs/blob/main/docs/spec.md: pointers begin so, and are shorter than 1 KiB.
_POINTER = b"version https://git-lfs.github.com/spec/"
_PAGES = (b"<!doctype html", b"<html", b"<?xml")
_BLANK = b"\xef\xbb\xbf \t\r\n"
# Enough to recognize either of them behind white space.
_FIRST_BYTES = 512
_MIB = 2**20
# Configurations have kilobytes, and the largest published index of weights has 9 MB.
_MOST_JSON_BYTES = 64 * _MIB
# The limit of the safetensors library.
_MOST_HEADER_BYTES = 100_000_000
_LENGTH_BYTES = 8
# Of other libraries' messages, so many characters are shown.
_MOST_TOLD = 200
_KINDS = (
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)
# The system makes the content of these while they are read, some without an end.
_NOT_STORED = ("/proc/", "/sys/")


def read_object(file: Path, most_bytes: int = _MOST_JSON_BYTES) -> dict[str, Any]:
    """Return the JSON object in a file. Raises `DamagedFile` for anything else, and for files too large.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     size = Path(folder, "config.json").write_text('{"model_type": "llama"}')
    ...     read_object(Path(folder, "config.json"))
    {'model_type': 'llama'}
    """
    return _as_object(file, read_json(file, most_bytes))


def read_json(file: Path, most_bytes: int = _MOST_JSON_BYTES) -> object:
    """Return what a JSON file holds. Raises as `read_object`."""
    if (size := check_kind(file)) > most_bytes:
        raise damaged(file, f"must have at most {most_bytes} bytes, but has {size}")
    return _loaded(file, read_bytes(file))


def read_bytes(file: Path) -> bytes:
    """Return the bytes of a file of known size. Raises `DamagedFile`."""
    try:
        return file.read_bytes()
    except OSError as error:
        raise _unreadable(file, error) from error


def read_header(file: Path) -> dict[str, Mapping[str, Any]]:
    """Return the header of a safetensors file: each tensor's dtype, shape and place, by its name.

    No more is read than the file has, whatever length its first bytes tell. Raises `DamagedFile`.
    """
    size = check_kind(file)
    try:
        with file.open("rb") as opened:
            # The file begins with the header's length in 8 bytes, little-endian, and the header in JSON.
            length = int.from_bytes(opened.read(_LENGTH_BYTES), "little")
            most = max(min(size - _LENGTH_BYTES, _MOST_HEADER_BYTES), 0)
            if not 0 < length <= most:
                raise damaged(
                    file,
                    f"must be a safetensors file, but its header would have {length} bytes, where at most {most} "
                    "can be",
                )
            text = opened.read(length)
    except OSError as error:
        raise _unreadable(file, error) from error
    header = _as_object(file, _loaded(file, text, " in its header"), " as its header")
    tensors = {name: entry for name, entry in header.items() if name != "__metadata__"}
    _check_size(file, size - _LENGTH_BYTES - length, tensors)
    return tensors


def _check_size(file: Path, data_bytes: int, tensors: Mapping[str, Any]) -> None:
    try:
        end = max((int(entry["data_offsets"][1]) for entry in tensors.values()), default=0)
        # Those who read headers rely on these.
        for entry in tensors.values():
            _ = str(entry["dtype"]), [int(one) for one in entry["shape"]], int(entry["data_offsets"][0])
    except (LookupError, TypeError, ValueError, OverflowError, AttributeError) as error:
        raise damaged(file, f"must be a safetensors file, but its header cannot be used ({error!r})") from error
    if end != data_bytes:
        raise damaged(
            file, f"was cut, or is mixed up: its tensors have {end:,} bytes, but it has {data_bytes:,} for them"
        )


def _loaded(file: Path, text: bytes, where: str = "") -> object:
    try:
        return json.loads(text)
    except RecursionError:
        raise damaged(file, f"must be JSON of few levels{where}, but has thousands") from None
    except ValueError as error:
        raise damaged(file, f"must be JSON{where}, but is not: {error!s:.{_MOST_TOLD}}") from None


def _as_object(file: Path, content: object, where: str = "") -> dict[str, Any]:
    if not isinstance(content, dict):
        raise damaged(file, f"must be a JSON object{where}, but is a {type(content).__name__}")
    return cast("dict[str, Any]", content)


def check_kind(file: Path) -> int:
    """Return the size of a regular file that is not empty, no Git LFS pointer and no page of a web server.

    Raises `DamagedFile`.
    """
    check_is_stored(file)
    try:
        about = file.stat()
        if stat.S_ISDIR(about.st_mode):
            raise damaged(file, "must be a file, but is a folder")
        with file.open("rb") as opened:
            first = opened.read(_FIRST_BYTES)
    except OSError as error:
        raise _unreadable(file, error) from error
    if not first:
        raise damaged(file, "is empty")
    if first.startswith(_POINTER):
        raise DamagedFile(
            f"{file} is a Git LFS pointer, not the file itself; run `git lfs pull` in its folder, or fetch the "
            "file from the hub"
        )
    if first.lstrip(_BLANK).lower().startswith(_PAGES):
        raise damaged(file, "is a page of a web server, not the file")
    return about.st_size


def check_is_stored(path: Path) -> None:
    """Raise `DamagedFile` for a path to something that reading may wait for: a pipe, a socket or a device."""
    try:
        kind = special_kind(path)
    except OSError as error:
        raise _unreadable(path, error) from error
    if kind is not None:
        raise damaged(path, f"must be a file, but is {kind}")


def special_kind(path: Path) -> str | None:
    """Return what a path leads to if reading it may wait or never end, such as ``"a pipe"``; None for files.

    >>> special_kind(Path("/dev/zero")), special_kind(Path("/dev")), special_kind(Path("/there/is/none"))
    ('a device', None, None)
    """
    try:
        mode = path.stat().st_mode
    except OSError:
        return None  # there is nothing, or what reads it will tell
    kind = next((name for is_kind, name in _KINDS if is_kind(mode)), None)
    if kind is None and path.is_symlink() and os.path.realpath(path).startswith(_NOT_STORED):
        return "a link to what the system makes"
    return kind


def is_there(file: Path) -> bool:
    """Return whether there is something of this name, be it a folder or a link to nothing."""
    try:
        file.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise _unreadable(file, error) from error
    return True


def damaged(file: Path, what: str) -> DamagedFile:
    """Return the error for a file: `what` is wrong with it, and what to do."""
    return DamagedFile(f"{file} {what}; {_AGAIN}")


def _unreadable(file: Path, error: OSError) -> DamagedFile:
    return DamagedFile(f"{file} cannot be read ({error.strerror}); make it readable, or {_AGAIN}")
