"""Videos: frames that are shown one after another, each an image or a picture of an animation."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

# What `fps` is where a row does not say, as in the processors of Qwen, GLM and others.
USUAL_FPS = 2.0


class Numbered(Protocol):
    """What is an image or a part of a video. `video`: the number of that video in its row; -1: none."""

    @property
    def video(self) -> int:
        """The number of the video."""
        ...

    @property
    def fps(self) -> float:
        """Frames a second of the video; 0: unknown."""
        ...


@dataclass(frozen=True, slots=True)
class Frames:
    """The pictures of one file of a video. `fps`: how many a second, as the file says; 0: it does not."""

    pictures: tuple[Any, ...]
    fps: float


@dataclass(frozen=True, slots=True)
class Video:
    """A video. `frames`: images of Pillow, of one size. `fps`: how many a second.

    >>> Video(("a", "b", "c", "d"), 2.0).metadata
    {'total_num_frames': 4, 'fps': 2.0, 'duration': 2.0, 'frames_indices': [0, 1, 2, 3]}
    """

    frames: tuple[Any, ...]
    fps: float

    @property
    def metadata(self) -> dict[str, Any]:
        """What processors are told of a video whose frames are all shown."""
        count = len(self.frames)
        return {
            "total_num_frames": count,
            "fps": self.fps,
            "duration": count / self.fps,
            "frames_indices": list(range(count)),
        }


def shown(found: Iterable[tuple[Numbered, Any]]) -> list[Any]:
    """Return images, and a `Video` for each video, of what each is and was decoded to, in their order.

    >>> from collections import namedtuple
    >>> one = namedtuple("one", "video fps")
    >>> shown([(one(-1, 0), "a"), (one(0, 4.0), Frames(("b",), 0)), (one(0, 4.0), Frames(("c", "d"), 0))])
    ['a', Video(frames=('b', 'c', 'd'), fps=4.0)]
    """
    made: list[Any] = []
    last = -1
    for source, content in found:
        if not isinstance(content, Frames):
            made.append(content)
        elif source.video == last:
            made[-1] = Video((*made[-1].frames, *content.pictures), made[-1].fps)
        else:
            made.append(Video(content.pictures, source.fps or content.fps or USUAL_FPS))
            last = source.video
    return made
