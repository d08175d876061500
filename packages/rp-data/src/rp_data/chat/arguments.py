"""The arguments of tool calls, which some data has as text of JSON: decode them for templates that encode them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from rp_trainer.errors import Refused

Message = Mapping[str, Any]
_PROBE = '{"a_name": "a value"}'
# What is left of the probe where it was encoded as a text.
_ENCODED = '\\"a_name\\"'


def has_text(messages: Sequence[Message]) -> bool:
    """Return whether a call has its arguments as text."""
    return any(isinstance(call.get("arguments"), str) for message in messages for call in _calls(message))


def encodes(render: Callable[[Sequence[Message]], str], messages: Sequence[Message]) -> bool:
    """Return whether a template, which `render` applies, encodes arguments, or goes through their names.

    It is tried with a probe in place of all texts.
    """
    try:
        return _ENCODED in render(_replaced(messages, lambda _: _PROBE))
    except Refused:
        # It needs names. If it refuses something else, that comes again.
        return True


def decoded(messages: Sequence[Message]) -> Sequence[Message]:
    """Return messages with arguments decoded that are JSON objects as text.

    >>> decoded([{"tool_calls": [{"function": {"name": "add", "arguments": '{"a": 1}'}}]}])
    [{'tool_calls': [{'function': {'name': 'add', 'arguments': {'a': 1}}}]}]
    """
    return _replaced(messages, _object)


def _object(text: str) -> Any:
    try:
        value: object = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return cast("dict[str, Any]", value) if isinstance(value, dict) else text


def _calls(message: Message) -> list[Mapping[str, Any]]:
    calls = message.get("tool_calls")
    listed = cast("list[object]", calls if isinstance(calls, list) else [])
    return [_function(cast("Message", call)) for call in listed if isinstance(call, dict)]


def _function(call: Message) -> Message:
    function = call.get("function")
    return cast("Message", function) if isinstance(function, dict) else call


def _replaced(messages: Sequence[Message], by: Callable[[str], Any]) -> list[Message]:
    return [_with_calls(message, by) if _calls(message) else message for message in messages]


def _with_calls(message: Message, by: Callable[[str], Any]) -> Message:
    return {**message, "tool_calls": [_with_arguments(call, by) for call in message["tool_calls"]]}


def _with_arguments(call: Any, by: Callable[[str], Any]) -> Any:
    if not isinstance(call, dict):
        return call
    given = cast("dict[str, Any]", call)
    if isinstance(given.get("function"), dict):
        return {**given, "function": _with_arguments(given["function"], by)}
    text = given.get("arguments")
    return {**given, "arguments": by(text)} if isinstance(text, str) else given
