"""Contents in parts, for templates that take nothing else, as those of models that also see do."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rp_trainer.errors import Refused

Message = Mapping[str, Any]
_PROBE = "probe-of-a-content"
_ASKED: Sequence[Message] = ({"role": "user", "content": _PROBE},)


def takes_parts(render: Callable[[Sequence[Message]], str]) -> bool:
    """Return whether a template, which `render` applies, writes contents in parts only.

    Some go through the letters of a text in search of parts, and write nothing.
    """
    return not _writes(render, _ASKED) and _writes(render, in_parts(_ASKED))


def in_parts(messages: Sequence[Message]) -> list[Message]:
    """Return messages whose contents are lists of one part.

    >>> in_parts([{"role": "user", "content": "one"}])
    [{'role': 'user', 'content': [{'type': 'text', 'text': 'one'}]}]
    """
    return [
        {**message, "content": [{"type": "text", "text": message["content"]}]}
        if isinstance(message.get("content"), str)
        else message
        for message in messages
    ]


def _writes(render: Callable[[Sequence[Message]], str], messages: Sequence[Message]) -> bool:
    try:
        return _PROBE in render(messages)
    except Refused:
        return False
