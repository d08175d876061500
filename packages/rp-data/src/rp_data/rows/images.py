"""Find the images of a conversation, in parts of its contents and in columns, and give each its part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from rp_trainer.errors import Refused

from rp_data.images.sources import COLUMNS, Source
from rp_data.rows.messages import GIVEN, IMAGE, USER, Message

# What stands for an image in the texts of many data sets, such as LLaVA's.
_MARK = "<image>"
_PART: Message = {"type": IMAGE, GIVEN: {}}


def with_images(
    place: str, row: Mapping[str, Any], messages: Sequence[Message], folder: Path
) -> tuple[list[Message], list[Source]]:
    """Return messages in which a part stands for each image, and the images in that order.

    >>> messages, images = with_images(
    ...     "a:1", {"images": ["b.png"]}, [{"role": "user", "content": "<image>what?"}], Path()
    ... )
    >>> messages
    [{'role': 'user', 'content': [{'type': 'image'}, {'type': 'text', 'text': 'what?'}]}]
    >>> [one.given for one in images]
    ['b.png']

    Images of a column take the parts without one of their own; or the places of ``<image>`` in texts; or they come
    before what the user says first. `folder`: of the file, in which paths begin.

    Raises `Refused` if there are other numbers of images and of places, and for two columns.
    """
    column = _in_column(place, row)
    if column and not _parts(messages):
        messages = _marked(messages) if _MARK in _texts(messages) else _begun(place, messages, len(column))
    parts = _parts(messages)
    waiting = iter(column)
    empty = sum(not part[GIVEN] for part in parts)
    if empty != len(column):
        raise Refused(
            f"{place}: each image must have a place among the messages, but {len(column)} images are in a column "
            f"for {empty} places; write parts of type {IMAGE!r}, or {_MARK}, for them"
        )
    given = [part[GIVEN] or next(waiting) for part in parts]
    sources = [
        Source(f"{place}: image {number} of {len(given)}", one, folder) for number, one in enumerate(given, 1)
    ]
    return [_without_given(message) for message in messages], sources


def columns(row: Mapping[str, Any]) -> list[str]:
    """Return the names of a row's columns with images. Some data has an empty path where a row has none.

    >>> columns({"images": [], "image": "a.png"}), columns({"image": ""})
    (['image'], [])
    """
    return [name for name in COLUMNS if row.get(name)]


def _in_column(place: str, row: Mapping[str, Any]) -> list[object]:
    names = columns(row)
    if len(names) > 1:
        raise Refused(f"{place} has images in {' and '.join(map(repr, names))}; write all of them into one column")
    value: object = row[names[0]] if names else []
    return cast("list[object]", value) if isinstance(value, list) else [value]


def _parts(messages: Sequence[Message]) -> list[Message]:
    contents = [
        cast("list[Message]", one) for message in messages if isinstance(one := message.get("content"), list)
    ]
    return [part for one in contents for part in one if part["type"] == IMAGE]


def _texts(messages: Sequence[Message]) -> str:
    return "\n".join(one for message in messages if isinstance(one := message.get("content"), str))


def _marked(messages: Sequence[Message]) -> list[Message]:
    return [
        {**message, "content": _split(content)}
        if isinstance(content := message.get("content"), str) and _MARK in content
        else message
        for message in messages
    ]


def _split(text: str) -> list[Message]:
    parts: list[Message] = []
    for number, one in enumerate(text.split(_MARK)):
        parts += [_PART] if number else []
        parts += [{"type": "text", "text": one}] if one else []
    return parts


def _begun(place: str, messages: Sequence[Message], count: int) -> list[Message]:
    first = next((at for at, one in enumerate(messages) if one["role"] == USER and "content" in one), None)
    if first is None:
        raise Refused(f"{place} has {count} images, but no message of the user for them")
    content = messages[first]["content"]
    said: list[Message] = [{"type": "text", "text": content}] if isinstance(content, str) else content
    changed = {**messages[first], "content": [*[_PART] * count, *said]}
    return [*messages[:first], changed, *messages[first + 1 :]]


def _without_given(message: Message) -> Message:
    content = message.get("content")
    if not isinstance(content, list):
        return message
    parts = cast("list[Message]", content)
    return {**message, "content": [{n: v for n, v in part.items() if n != GIVEN} for part in parts]}
