"""Convert the messages of a conversation to those that chat templates take, from the forms that data has."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, cast

from rp_trainer.errors import Refused

from rp_data.images.sources import COLUMNS, FIELDS, RATES, VIDEO_COLUMNS, VIDEO_FIELDS

Message = Mapping[str, Any]
# The types of parts that stand for an image and for a video, and where such a part has what the row says of it.
IMAGE, VIDEO, GIVEN = "image", "video", "given"
USER, ASSISTANT, SYSTEM = "user", "assistant", "system"
_TEXT = "text"
# Sizes that one image alone is to have, in Qwen's data.
_SIZES = ("min_pixels", "max_pixels", "resized_height", "resized_width")
# What part of a video is to be seen, in Qwen's data.
_CUTS = (*_SIZES, "total_pixels", "nframes", "min_frames", "max_frames", "video_start", "video_end")
_CALL = "function_call"
# Who speaks in ShareGPT's form, by the names that data sets use.
_SPEAKERS = {
    "human": USER,
    "user": USER,
    "gpt": ASSISTANT,
    "chatgpt": ASSISTANT,
    "model": ASSISTANT,
    "assistant": ASSISTANT,
    "system": SYSTEM,
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
    _CALL: ASSISTANT,
}


def messages_of(place: str, name: str, value: object) -> list[Message]:
    """Return the messages in a field, which may be JSON in a text.

    >>> messages_of("a:1", "conversations", [{"from": "human", "value": "one"}])
    [{'role': 'user', 'content': 'one'}]
    >>> messages_of("a:1", "messages", '[{"role": "user", "content": [{"type": "text", "text": "one"}]}]')
    [{'role': 'user', 'content': 'one'}]

    A content with images or videos is a list of parts, each of which has what the row says of it as ``given``.

    Raises `Refused` for an empty list and for what are no messages.
    """
    messages = parsed(place, name, value)
    if not isinstance(messages, list) or not messages:
        raise Refused(f"{place}: {name!r} must be a list of at least one message, but is {messages!r:.60}")
    return [_message(place, one) for one in cast("list[object]", messages)]


def parsed(place: str, name: str, value: object) -> object:
    """Return what a text of JSON says, such as a table's columns have; anything else as it is."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        hint = (
            "; write it by json.dumps, not as Python shows it" if value.lstrip().startswith(("[{'", "{'")) else ""
        )
        raise Refused(
            f"{place}: {name!r} must be a list, also as JSON, but is the text {value!r:.60}{hint}"
        ) from None


def messages_in(text: str) -> list[object] | None:
    """Return the messages that a text has as JSON, as in columns of tables; None if it is plain text.

    >>> messages_in('[{"role": "user", "content": "one"}]'), messages_in("[one]")
    ([{'role': 'user', 'content': 'one'}], None)
    """
    if not text.lstrip().startswith(("[", "{")):
        return None
    try:
        value: object = json.loads(text)
    except (ValueError, RecursionError):
        return None
    some = cast("list[object]", value if isinstance(value, list) else [value])
    return some if some and all(isinstance(one, dict) and {"role", "from"} & {*one} for one in some) else None


def says(role: str, content: str) -> Message:
    """Return a message."""
    return {"role": role, "content": content}


def _message(place: str, message: object) -> Message:
    given = cast("Message", message if isinstance(message, dict) else {})
    if "role" not in given and "from" in given:
        given = _of_share_gpt(place, given)
    _refuse_beside(place, given)
    content = given.get("content")
    if not isinstance(given.get("role"), str) or (content is None and not given.get("tool_calls")):
        raise Refused(f"{place}: each message must have a 'role' and a 'content', but one is {message!r:.60}")
    if isinstance(content, list):
        return {**given, "content": _of_parts(place, cast("list[object]", content))}
    # Templates write anything that is not text as Python does, such as a list's brackets.
    if not isinstance(content, str | None):
        raise Refused(f"{place}: the 'content' of a message must be text, but one is {content!r:.60}")
    return given


def _refuse_beside(place: str, message: Message) -> None:
    """Raise `Refused` for images beside a message's content: templates do not look there."""
    for kind, names in ((IMAGE, COLUMNS), (VIDEO, VIDEO_COLUMNS)):
        if (name := next((name for name in names if message.get(name)), None)) is not None:
            raise Refused(
                f"{place}: a message has {name!r} beside its content; write parts of type {kind!r}, or a column "
                f"{names[0]!r} of the row"
            )


def _of_parts(place: str, parts: Sequence[object]) -> str | list[Message]:
    """Return the text of parts or, if some are images, all parts."""
    found = [_part(place, part) for part in parts]
    texts = [one[_TEXT] for one in found if one["type"] == _TEXT]
    return "".join(texts) if len(texts) == len(found) else found


def _part(place: str, part: object) -> Message:
    given = cast("Message", part if isinstance(part, dict) else {})
    if given.get("type") in (IMAGE, "image_url"):
        _refuse_other(place, given, (_TEXT,))
        _refuse_wishes(place, given, _SIZES)
        return {"type": IMAGE, GIVEN: {name: given[name] for name in FIELDS if name in given}}
    if given.get("type") in (VIDEO, "video_url"):
        _refuse_other(place, given, (_TEXT,))
        _refuse_wishes(place, given, _CUTS)
        return {"type": VIDEO, GIVEN: {name: given[name] for name in (*VIDEO_FIELDS, *RATES) if name in given}}
    if given.get("type", _TEXT) != _TEXT or not isinstance(given.get(_TEXT), str):
        raise Refused(
            f"{place}: the 'content' of a message must be text, or parts of type {_TEXT!r}, {IMAGE!r} or "
            f"{VIDEO!r}, but one is {part!r:.60}"
        )
    _refuse_other(place, given, (*FIELDS, *VIDEO_FIELDS))
    return {"type": _TEXT, _TEXT: given[_TEXT]}


def _refuse_other(place: str, part: Message, names: Sequence[str]) -> None:
    """Raise `Refused` for a part that has what its type is not."""
    found = next((name for name in names if part.get(name)), None)
    if found is not None:
        raise Refused(
            f"{place}: a part of a message has the type {part.get('type', _TEXT)!r}, but {found!r}, too; write "
            "two parts"
        )


def _refuse_wishes(place: str, part: Message, names: Sequence[str]) -> None:
    """Raise `Refused` for what one image or video alone is to be like: all are as the processor makes them."""
    found = next((name for name in names if part.get(name) is not None), None)
    if found is not None:
        raise Refused(
            f"{place}: a part of type {part['type']!r} has {found!r}, which is not read; remove it, and set "
            "--min-pixels or --max-pixels for all images, or prepare the file itself"
        )


def _of_share_gpt(place: str, given: Message) -> Message:
    speaker, value = given["from"], given.get("value")
    if not isinstance(speaker, str) or speaker not in _SPEAKERS:
        raise Refused(f"{place}: 'from' must be one of {', '.join(_SPEAKERS)}, but is {speaker!r:.60}")
    rest = {name: one for name, one in given.items() if name not in ("from", "value")}
    if "content" in rest and "value" in given:
        raise Refused(f"{place}: a message has both 'value' and 'content'; leave one of them out")
    value = rest.pop("content", value)
    if speaker == _CALL:
        return {"role": ASSISTANT, "tool_calls": _calls(place, value), **rest}
    return {"role": _SPEAKERS[speaker], "content": value, **rest}


def _calls(place: str, value: object) -> list[Any]:
    """Return the calls of tools that a text of JSON has: one, or a list."""
    calls = parsed(place, _CALL, value)
    listed = cast("list[object]", calls if isinstance(calls, list) else [calls])
    if not all(isinstance(call, dict) and "name" in call for call in listed):
        raise Refused(f"{place}: a {_CALL} must have a 'name' and 'arguments', but is {value!r:.60}")
    return [{"type": "function", "function": call} for call in listed]
