"""Find the images and videos of a conversation, in parts of its contents and in columns: each has its part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from rp_trainer.errors import Refused

from rp_data.images.sources import COLUMNS, VIDEO_COLUMNS, ImageSource, frames_named
from rp_data.rows.messages import GIVEN, IMAGE, USER, VIDEO, Message


@dataclass(frozen=True, slots=True)
class _Kind:
    """What can be shown. `mark`: what stands for one in the texts of many data sets, such as LLaVA's."""

    name: str
    columns: tuple[str, ...]
    mark: str

    @property
    def part(self) -> Message:
        """A part that names none."""
        return {"type": self.name, GIVEN: {}}


_KINDS = (_Kind(IMAGE, COLUMNS, "<image>"), _Kind(VIDEO, VIDEO_COLUMNS, "<video>"))


def with_images(
    place: str, row: Mapping[str, Any], messages: Sequence[Message], folder: Path
) -> tuple[list[Message], list[ImageSource]]:
    """Return messages in which a part stands for each image or video, and the files of these in that order.

    >>> messages, images = with_images(
    ...     "a:1", {"images": ["b.png"]}, [{"role": "user", "content": "<image>what?"}], Path()
    ... )
    >>> messages
    [{'role': 'user', 'content': [{'type': 'image'}, {'type': 'text', 'text': 'what?'}]}]
    >>> [one.given for one in images]
    ['b.png']

    Images of a column take the parts without one of their own; or the places of ``<image>`` in texts; or they come
    before what the user says first. Videos are the same with ``<video>``. `folder`: of the file, in which paths
    begin.

    Raises `Refused` if there are other numbers of images and of places, and for two columns.
    """
    waiting = {kind.name: iter(_in_column(place, row, kind)) for kind in _KINDS}
    for kind in _KINDS:
        messages = _with_places(place, messages, kind, len(_in_column(place, row, kind)))
    parts = _parts(messages, *(kind.name for kind in _KINDS))
    given = [(part["type"], part[GIVEN] or next(waiting[part["type"]])) for part in parts]
    return [_without_given(message) for message in messages], _sources(place, given, folder)


def columns(row: Mapping[str, Any]) -> list[str]:
    """Return the names of a row's columns with images or videos. Some data has an empty path where a row has none.

    >>> columns({"images": [], "image": "a.png"}), columns({"image": ""})
    (['image'], [])
    """
    return [name for kind in _KINDS for name in kind.columns if row.get(name)]


def _sources(place: str, given: Sequence[tuple[str, object]], folder: Path) -> list[ImageSource]:
    counts = {kind.name: sum(name == kind.name for name, _ in given) for kind in _KINDS}
    numbers = dict.fromkeys(counts, 0)
    found: list[ImageSource] = []
    for name, one in given:
        numbers[name] += 1
        where = f"{place}: {name} {numbers[name]} of {counts[name]}"
        if name == IMAGE:
            found.append(ImageSource(where, one, folder))
        else:
            found += frames_named(where, one, folder, numbers[name] - 1)
    return found


def _with_places(place: str, messages: Sequence[Message], kind: _Kind, count: int) -> Sequence[Message]:
    """Return messages with a place for each of a column. `count`: how many are in it."""
    if count and not _parts(messages, kind.name):
        is_marked = any(kind.mark in text for message in messages for text in _texts(message))
        messages = _marked(messages, kind) if is_marked else _begun(place, messages, kind, count)
    empty = sum(not part[GIVEN] for part in _parts(messages, kind.name))
    if empty != count:
        raise Refused(
            f"{place}: each {kind.name} must have a place among the messages, but {count} {kind.name}s are in a "
            f"column for {empty} places; write parts of type {kind.name!r}, or {kind.mark}, for them"
        )
    return messages


def _in_column(place: str, row: Mapping[str, Any], kind: _Kind) -> list[object]:
    names = [name for name in kind.columns if row.get(name)]
    if len(names) > 1:
        raise Refused(
            f"{place} has {kind.name}s in {' and '.join(map(repr, names))}; write all of them into one column"
        )
    value: object = row[names[0]] if names else []
    if kind.name == VIDEO and names == [VIDEO] and isinstance(value, list):
        raise Refused(
            f"{place}: {VIDEO!r} must be one video, but is a list; write {kind.columns[0]!r}, a list in which a "
            "list of frames is one video"
        )
    return cast("list[object]", value) if isinstance(value, list) else [value]


def _parts(messages: Sequence[Message], *kinds: str) -> list[Message]:
    contents = [
        cast("list[Message]", one) for message in messages if isinstance(one := message.get("content"), list)
    ]
    return [part for one in contents for part in one if part["type"] in kinds]


def _content(message: Message) -> list[Message]:
    """Return what a message says as parts."""
    content = message.get("content")
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    return cast("list[Message]", content or [])


def _texts(message: Message) -> list[str]:
    return [part["text"] for part in _content(message) if part["type"] == "text"]


def _marked(messages: Sequence[Message], kind: _Kind) -> list[Message]:
    return [
        {**message, "content": [one for part in _content(message) for one in _split(part, kind)]}
        if any(kind.mark in text for text in _texts(message))
        else message
        for message in messages
    ]


def _split(part: Message, kind: _Kind) -> list[Message]:
    if part["type"] != "text":
        return [part]
    found: list[Message] = []
    for number, one in enumerate(part["text"].split(kind.mark)):
        found += [kind.part] if number else []
        found += [{"type": "text", "text": one}] if one else []
    return found


def _begun(place: str, messages: Sequence[Message], kind: _Kind, count: int) -> list[Message]:
    first = next((at for at, one in enumerate(messages) if one["role"] == USER and "content" in one), None)
    if first is None:
        raise Refused(f"{place} has {count} {kind.name}s, but no message of the user for them")
    changed = {**messages[first], "content": [*[kind.part] * count, *_content(messages[first])]}
    return [*messages[:first], changed, *messages[first + 1 :]]


def _without_given(message: Message) -> Message:
    content = message.get("content")
    if not isinstance(content, list):
        return message
    parts = cast("list[Message]", content)
    return {**message, "content": [{n: v for n, v in part.items() if n != GIVEN} for part in parts]}
