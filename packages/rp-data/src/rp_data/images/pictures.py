"""The images of documents: where each is kept, and its content, which must be what it was when data was read."""

from __future__ import annotations

import hashlib
import os
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

from rp_trainer.errors import Refused

from rp_data.images.decoding import decoded, frames_of


@dataclass(frozen=True, slots=True)
class Picture:
    """An image. `place`: its row and number. `digest`: the SHA-256 of its bytes, in hexadecimal digits.

    `path`: its file, or that of all images, where it is at `start`, with `nbytes` bytes; None: it is so in the
    spool. `video`, `fps`: of which video of its row it is a part, see `videos.Numbered`.
    """

    place: str
    digest: str
    path: str | None
    start: int = 0
    nbytes: int = 0
    video: int = -1
    fps: float = 0.0

    def decoded(self, content: bytes) -> Any:
        """Return the image in RGB, or the `Frames` of a part of a video."""
        return decoded(self.place, content) if self.video < 0 else frames_of(self.place, content)


@dataclass(frozen=True, slots=True)
class PicturedText:
    """What a document shows. `text`: its text, with a mark where each image is. `pictures`: in that order.

    `end`: so many tokens hold all images; of fewer tokens the model would not take them.
    """

    text: str
    pictures: tuple[Picture, ...]
    end: int

    @property
    def digest(self) -> bytes:
        """The SHA-256 of all images."""
        parts = (one.digest if one.video < 0 else f"{one.digest} {one.video} {one.fps};" for one in self.pictures)
        return hashlib.sha256("".join(parts).encode()).digest()


def seen_of(fields: dict[str, Any]) -> PicturedText:
    """Return what `dataclasses.asdict` made of a `PicturedText`."""
    return PicturedText(fields["text"], tuple(Picture(**one) for one in fields["pictures"]), fields["end"])


class Spool:
    """Keeps images without a file of their own, on disk, in a file of `folder` that has no name.

    The system removes it when this process ends. Equal images are kept once. `name`: of a file in the folder that
    is to stay, and keeps all images.
    """

    def __init__(self, folder: Path | None = None, name: str | None = None) -> None:
        self._folder = folder
        self._name = name
        self._file: IO[bytes] | None = None
        self._starts: dict[str, int] = {}
        self._end = 0

    def keep(self, picture: Picture, content: bytes) -> Picture:
        """Keep the content of an image; return where it is."""
        if picture.digest not in self._starts:
            self._file = self._file or self._opened()
            self._file.write(content)
            self._file.flush()
            self._starts[picture.digest], self._end = self._end, self._end + len(content)
        return replace(picture, start=self._starts[picture.digest], nbytes=len(content))

    def kept(self, picture: Picture, content: bytes | None) -> Picture:
        """Return an image where it is from now on. `content`: its bytes; None if it has a file.

        Raises `Refused` if its file cannot be read any more, or has others by now.
        """
        if content is None and self._name is None:
            return picture
        content = self.content(picture) if content is None else content
        return self.keep(replace(picture, path=None), content)

    def _opened(self) -> IO[bytes]:
        # It stays open while the run goes on.
        if self._folder is None or self._name is None:
            return tempfile.TemporaryFile(dir=self._folder)
        return (self._folder / self._name).open("xb+")

    def content(self, picture: Picture) -> bytes:
        """Return the bytes of an image, from any thread. Raises `Refused` if its file has others by now."""
        if picture.path is None:
            assert self._file is not None
            return os.pread(self._file.fileno(), picture.nbytes, picture.start)
        try:
            with open(picture.path, "rb") as file:
                file.seek(picture.start)
                content = file.read(picture.nbytes or -1)
        except OSError as error:
            raise Refused(f"{picture.place} cannot be read any more ({error.strerror}): {picture.path}") from error
        if hashlib.sha256(content).hexdigest() != picture.digest:
            raise Refused(
                f"{picture.place} is not what it was when the data was read: {picture.path}; begin a new run"
            )
        return content
