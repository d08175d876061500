"""What a row has beside its messages: a system's words, tools, documents, and variables of the chat template."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, cast

from rp_trainer.errors import Refused

from rp_data.rows.messages import SYSTEM, Message, parsed, says

VARIABLES = "chat_template_kwargs"
BESIDE = ("system", "tools", "documents", VARIABLES)


def after_system(where: str, row: Mapping[str, Any], messages: list[Message]) -> list[Message]:
    """Return the messages after the system's, if a field of its own has that.

    >>> after_system("a:1", {"system": "Be brief."}, [says("user", "one")])[0]
    {'role': 'system', 'content': 'Be brief.'}

    Raises `Refused` for a field that is no text, and for one that contradicts the system in the messages.
    """
    system = row.get("system", "")
    if not isinstance(system, str):
        raise Refused(f"{where}: 'system' must be text, but is a {type(system).__name__}")
    if not system:
        return messages
    if messages[0].get("role") != SYSTEM:
        return [says(SYSTEM, system), *messages]
    if not _is_text(messages[0].get("content"), system):
        raise Refused(f"{where}: 'system' must be what the messages' own system says, but is not; leave one out")
    return messages


def _is_text(content: object, text: str) -> bool:
    return isinstance(content, str) and content.strip() == text.strip()


def listed(where: str, row: Mapping[str, Any], name: str) -> Sequence[Any] | None:
    """Return a list with anything in it, else None: templates for tools are not for conversations without any.

    >>> listed("a:1", {"tools": '[{"name": "add"}]'}, "tools"), listed("a:1", {"tools": ""}, "tools")
    ([{'name': 'add'}], None)

    Raises `Refused` for what is no list, also as JSON in a text.
    """
    # Some data has an empty text where a row has none.
    value = parsed(where, name, row.get(name) or [])
    if not isinstance(value, list | None):
        raise Refused(f"{where}: {name!r} must be a list, also as JSON, but is {value!r:.60}")
    return cast("list[Any] | None", value) or None


def variables_of(where: str, row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what a chat template is given, which tables have as JSON in a text.

    >>> variables_of("a:1", {"chat_template_kwargs": '{"enable_thinking": false}'})
    {'enable_thinking': False}

    Raises `Refused` for what has no names.
    """
    value: object = row.get(VARIABLES, {})
    if isinstance(value, str):
        with suppress(ValueError, RecursionError):
            value = json.loads(value) if value else {}
    if not isinstance(value, dict):
        raise Refused(f"{where}: {VARIABLES!r} must be names and values, also as JSON, but is {value!r:.60}")
    return cast("Mapping[str, Any]", value)
