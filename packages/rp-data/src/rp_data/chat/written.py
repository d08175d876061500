"""What a chat template leaves out of a conversation: names that it does not read, and whole messages."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, cast

from rp_trainer.errors import Refused

from rp_data.rows.messages import ASSISTANT
from rp_data.samples import Chat

Message = Mapping[str, Any]
# Roles by other names and, spelt otherwise, by their own.
_MEANT = {
    "human": "user",
    "gpt": ASSISTANT,
    "chatgpt": ASSISTANT,
    "bot": ASSISTANT,
    "ai": ASSISTANT,
    "model": ASSISTANT,
    "observation": "tool",
    **{name: name for name in ("system", "user", ASSISTANT, "tool", "developer", "function")},
}
_CALLS = ("tool_calls", "function_call")
_THOUGHT = "</think>"
_PROBE = "probeofamessage"


def check_known(chat: Chat, template: str) -> None:
    """Raise `Refused` for a role that another one is meant by, and for calls of tools, if no template reads them.

    Many templates write the name of any role, and so of ones that the model has never seen.
    """
    known = _words(template)
    for message in chat.messages:
        meant = _MEANT.get(message["role"].lower())
        if meant is not None and meant != message["role"] and message["role"] not in known:
            raise Refused(
                f"{chat.place} has the role {message['role']!r}, which the chat template does not know; write "
                f"{meant!r}"
            )
        for name in _CALLS:
            if message.get(name) and name not in known:
                raise Refused(
                    f"{chat.place} calls tools ({name!r}), which the chat template does not write; give "
                    "--tokenizer one whose template does, or leave the row out"
                )


def unread(chat: Chat, template: str) -> list[str]:
    """Return the names of what a conversation has that are nowhere in the text of a template.

    >>> unread(Chat("a:1", [{"role": "user", "content": "one"}], tools=[{}]), "{{ messages[0]['content'] }}")
    ['tools']
    """
    beside = (name for name, value in (("tools", chat.tools), ("documents", chat.documents)) if value)
    of_messages = (name for message in chat.messages for name in message if name not in ("role", "content"))
    known = _words(template)
    return [name for name in dict.fromkeys([*beside, *chat.options, *of_messages]) if name not in known]


@cache
def _words(template: str) -> frozenset[str]:
    return frozenset(re.findall(r"\w+", template))


def check_written(chat: Chat, text: str, render: Callable[[Sequence[Message]], str]) -> bool:
    """Return whether the text of a conversation has all that is said beside calls of tools.

    `render`: applies the template.

    Raises `Refused` if it lacks another message, since the template does not write such ones. Many templates pass
    over roles that they do not know, or over a system that is not first.
    """
    messages, at, is_whole = chat.messages, 0, True
    for number, message in enumerate(messages):
        said = said_in(message)
        found = text.find(said, at)
        at = max(at, found)
        if found >= 0 or any(one in text for one in _forms(said)):
            continue
        if _writes(render, [*messages[:number], _probing(message), *messages[number + 1 :]]):
            continue
        if not message.get("tool_calls"):
            raise Refused(
                f"{chat.place}: the chat template does not write message {number + 1}, of the role "
                f"{message['role']!r:.60}, in its place; give it a role that the template writes there, or leave "
                "the row out"
            )
        is_whole = False
    return is_whole


def _probing(message: Message) -> Message:
    content = message["content"]
    if isinstance(content, str):
        return {**message, "content": _PROBE}
    parts = cast("list[Message]", content)
    return {**message, "content": [{**one, "text": _PROBE} if "text" in one else one for one in parts]}


def _writes(render: Callable[[Sequence[Message]], str], messages: Sequence[Message]) -> bool:
    try:
        return _PROBE in render(messages).lower()
    except Refused:
        # It is particular about what is said, so it reads it.
        return True


def said_in(message: Message) -> str:
    """Return what a message says, without thoughts, which templates move, and space around it.

    >>> said_in({"role": "assistant", "content": "<think>\\nno\\n</think>\\n\\nyes"})
    'yes'
    """
    content = message.get("content")
    parts = cast("list[Message]", content if isinstance(content, list) else [])
    text = (
        content if isinstance(content, str) else max((one.get("text", "") for one in parts), key=len, default="")
    )
    return text.rpartition(_THOUGHT)[2].strip()


def _forms(said: str) -> Iterator[str]:
    """Yield the forms in which templates write a text: as it is, as JSON, and line by line."""
    yield said
    yield json.dumps(said, ensure_ascii=False)[1:-1]
    yield max(said.splitlines(), key=len, default="").strip()
