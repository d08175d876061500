"""What a row says of an image: a path, bytes or a data URI; and the content that it names."""

from __future__ import annotations

import base64
import binascii
import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast
from urllib.parse import unquote, unquote_to_bytes

from rp_strangers.files import bounded_bytes
from rp_trainer.errors import Refused

from rp_data.images.decoding import decoded, frames_of

# Far more than a photograph has.
_MOST_BYTES = 2**28
_DATA, _BASE64, _FILE = "data:", ";base64", "file"
_THIS_MACHINE = ("", "localhost")
# Longer than paths are; base64 is.
_MOST_LETTERS = 255
# The fields of an object that may name an image, such as those of a part of a message, or of a row of `datasets`.
FIELDS = ("bytes", "image", "path", "url", "image_url", "base64")
# Those of a row.
COLUMNS = ("images", "image")
# The same of videos. A video is a file, a folder of frames, or a list of frames.
VIDEO_FIELDS = ("video", "frames", "path", "url", "video_url", "bytes", "base64")
VIDEO_COLUMNS = ("videos", "video")
RATES = ("fps", "sample_fps")
_WANTED = "a path, bytes, or a data URI"
_HINT = "; write base64 into the field 'base64' of a part, or as data:;base64,..."


@dataclass(frozen=True, slots=True)
class ImageSource:
    """An image that a row names. `place`: its row and number. `folder`: of the file that has the row.

    `video`, `fps`: of which video it is a part, see `videos.Numbered`.
    """

    place: str
    given: object
    folder: Path
    video: int = -1
    fps: float = 0.0

    def content(self) -> tuple[bytes, str | None]:
        """Return the image's bytes, and its file if it has one of its own.

        >>> ImageSource("a:1: image 1", "data:text/plain,abc", Path()).content()
        (b'abc', None)

        Raises `Refused` for what names none, for a URL of the web, and for a file that cannot be read.
        """
        given = self._named(self.given)
        if isinstance(given, bytes):
            return given, None
        if given[: len(_DATA)].lower() == _DATA:
            return self._of_data(given), None
        return self._of_path(given)

    def decoded(self) -> Any:
        """Return the image in RGB, or the `Frames` of a part of a video. Raises `Refused` as `content` does."""
        return (decoded if self.video < 0 else frames_of)(self.place, self.content()[0])

    def _named(self, given: object) -> bytes | str:
        if isinstance(given, Mapping):
            fields = cast("Mapping[str, object]", given)
            name = next((name for name in FIELDS if fields.get(name) is not None), None)
            if name is not None:
                inner = fields[name]
                return f"{_DATA}{_BASE64},{inner}" if name == "base64" else self._named(inner)
        if isinstance(given, bytes | str) and given:
            return given
        raise Refused(f"{self.place} must be {_WANTED}, but is {given!r:.60}")

    def _of_data(self, uri: str) -> bytes:
        head, comma, body = uri.partition(",")
        try:
            if not comma:
                raise ValueError("it has no comma")
            # Base64 may be in lines, and its marks escaped: RFC 2397 and RFC 2045.
            content = unquote_to_bytes("".join(body.split()) if (is_base64 := _is_base64(head)) else body)
            return base64.b64decode(content, validate=True) if is_base64 else content
        except (ValueError, binascii.Error) as error:
            raise Refused(f"{self.place} must be a data URI, but is {uri!r:.60}: {error}") from None

    def _of_path(self, given: str) -> tuple[bytes, str]:
        scheme, has_scheme, rest = given.partition("://")
        if has_scheme and scheme.lower() != _FILE:
            raise Refused(
                f"{self.place} is {given!r:.80}, which is not downloaded: data must stay as it is while a run "
                "goes on; download it, and give its path"
            )
        # A path that is absolute stays as it is.
        path = self.folder / (self._of_file_uri(rest) if has_scheme else given)
        try:
            is_file = path.is_file()
        except (OSError, ValueError):
            # Names of files are bounded, have no zeros, and are in folders that may be opened.
            is_file = False
        if not is_file:
            hint = _HINT if len(given) > _MOST_LETTERS else ""
            raise Refused(f"{self.place} must be {_WANTED}, but there is no file {str(path)!r:.200}{hint}")
        return bounded_bytes(f"{self.place} ({path})", path, _MOST_BYTES), str(path)

    def _of_file_uri(self, rest: str) -> str:
        """Return the path in a URI of a file. `rest`: what follows its scheme."""
        host, slash, path = rest.partition("/")
        if host.lower() not in _THIS_MACHINE:
            raise Refused(
                f"{self.place} is {f'file://{rest}'!r:.80}, a file of another machine, {host!r:.40}; give a path, "
                "or write file:/// before an absolute one"
            )
        return unquote(slash + path)


def _is_base64(head: str) -> bool:
    return head.lower().endswith(_BASE64)


def frames_named(place: str, given: object, folder: Path, video: int) -> list[ImageSource]:
    """Return the files of a video that a row names: one, all of a folder by their names, or those of a list.

    >>> [one.place for one in frames_named("a:1: video 1", {"video": ["1.png", "2.png"], "fps": 4}, Path(), 0)]
    ['a:1: video 1, frame 1', 'a:1: video 1, frame 2']

    Raises `Refused` for a list or a folder without any, and for `fps`, frames a second, that is no such number.
    """
    inner, fps = _inside(place, given)
    files = _in_folder(inner, folder)
    if not isinstance(inner, list) and files is None:
        return [ImageSource(place, inner, folder, video, fps)]
    frames = cast("list[object]", inner) if files is None else list[object](map(str, files))
    if not frames:
        raise Refused(f"{place} must have frames, but has none; name some, or leave it out")
    names = [""] * len(frames) if files is None else [f" ({one.name})" for one in files]
    return [
        ImageSource(f"{place}, frame {number}{name}", one, folder, video, fps)
        for number, (one, name) in enumerate(zip(frames, names, strict=True), 1)
    ]


def _inside(place: str, given: object, fps: float = 0.0) -> tuple[object, float]:
    """Return what names a video in the objects around it, and how many frames a second they say."""
    if not isinstance(given, Mapping):
        return given, fps
    fields = cast("Mapping[str, object]", given)
    fps = _rate(place, fields) or fps
    name = next((name for name in VIDEO_FIELDS if fields.get(name) is not None), None)
    # An object with bytes is a source itself.
    return (fields, fps) if name in (None, "bytes", "base64") else _inside(place, fields[name], fps)


def _rate(place: str, fields: Mapping[str, object]) -> float:
    found = next((fields[name] for name in RATES if fields.get(name) is not None), 0.0)
    if isinstance(found, bool) or not isinstance(found, int | float) or not 0 <= found < math.inf:
        raise Refused(f"{place}: 'fps' must be a number, of frames a second, but is {found!r:.60}")
    return float(found)


def _in_folder(given: object, folder: Path) -> list[Path] | None:
    """Return the visible files of a folder, in the order of their names; None if that is none."""
    if not isinstance(given, str) or "\0" in given or len(given) > _MOST_LETTERS:
        return None
    path = folder / given
    with suppress(OSError):
        if path.is_dir():
            return [one for one in sorted(path.iterdir()) if one.is_file() and not one.name.startswith(".")]
    return None
