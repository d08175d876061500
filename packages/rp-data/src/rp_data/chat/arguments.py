"""The arguments of tool calls, objects or text of JSON: give each template what it takes."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from rp_trainer.errors import Refused

Message = Mapping[str, Any]
_PROBE = '{"a_name": "a value"}'
_OBJECT = {"a_name": "a value"}
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


def wants_text(render: Callable[[Sequence[Message]], str], messages: Sequence[Message]) -> bool:
    """Return whether a template takes arguments as text alone: others it refuses, or writes as Python does."""
    try:
        return str(_OBJECT) in render(_replaced(messages, lambda _: _OBJECT))
    except Refused:
        return _renders(render, _replaced(messages, lambda _: _PROBE))


def wants_null(render: Callable[[Sequence[Message]], str], messages: Sequence[Message]) -> bool:
    """Return whether a template asks for the content of calls without one, whatever their arguments are."""
    forms = [_replaced(messages, lambda _, form=form: form) for form in (_OBJECT, _PROBE)]
    return not any(_renders(render, one) for one in forms) and any(
        _renders(render, with_null(one)) for one in forms
    )


def with_null(messages: Sequence[Message]) -> list[Message]:
    """Return messages with a content of None where they have none, as OpenAI writes it beside calls.

    >>> with_null([{"role": "assistant", "tool_calls": []}])
    [{'role': 'assistant', 'tool_calls': [], 'content': None}]
    """
    return [message if "content" in message else {**message, "content": None} for message in messages]


def encoded(messages: Sequence[Message]) -> Sequence[Message]:
    """Return messages with arguments as text of JSON.

    >>> encoded([{"tool_calls": [{"function": {"name": "add", "arguments": {"a": 1}}}]}])
    [{'tool_calls': [{'function': {'name': 'add', 'arguments': '{"a": 1}'}}]}]
    """
    return _replaced(messages, lambda one: one if isinstance(one, str) else json.dumps(one, ensure_ascii=False))


def _renders(render: Callable[[Sequence[Message]], str], messages: Sequence[Message]) -> bool:
    try:
        render(messages)
    except Refused:
        return False
    return True


def decoded(messages: Sequence[Message]) -> Sequence[Message]:
    """Return messages with arguments decoded that are JSON objects as text.

    >>> decoded([{"tool_calls": [{"function": {"name": "add", "arguments": '{"a": 1}'}}]}])
    [{'tool_calls': [{'function': {'name': 'add', 'arguments': {'a': 1}}}]}]
    """
    return _replaced(messages, _object)


def _object(text: Any) -> Any:
    if not isinstance(text, str):
        return text
    try:
        value: object = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return cast("dict[str, Any]", value) if isinstance(value, dict) else text


def has_calls(messages: Sequence[Message]) -> bool:
    """Return whether a message calls a tool."""
    return any(map(_calls, messages))


def _calls(message: Message) -> list[Mapping[str, Any]]:
    calls = message.get("tool_calls")
    listed = cast("list[object]", calls if isinstance(calls, list) else [])
    return [_function(cast("Message", call)) for call in listed if isinstance(call, dict)]


def _function(call: Message) -> Message:
    function = call.get("function")
    return cast("Message", function) if isinstance(function, dict) else call


def _replaced(messages: Sequence[Message], by: Callable[[Any], Any]) -> list[Message]:
    return [_with_calls(message, by) if _calls(message) else message for message in messages]


def _with_calls(message: Message, by: Callable[[Any], Any]) -> Message:
    return {**message, "tool_calls": [_with_arguments(call, by) for call in message["tool_calls"]]}


def _with_arguments(call: Any, by: Callable[[Any], Any]) -> Any:
    if not isinstance(call, dict):
        return call
    given = cast("dict[str, Any]", call)
    if isinstance(given.get("function"), dict):
        return {**given, "function": _with_arguments(given["function"], by)}
    return {**given, "arguments": by(given["arguments"])} if "arguments" in given else given
