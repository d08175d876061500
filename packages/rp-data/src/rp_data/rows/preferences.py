"""Convert rows that say which of two answers is better, or whether one is good, to one form for each of these."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeGuard, cast

from rp_trainer.errors import Refused

from rp_data.rows.images import columns
from rp_data.rows.messages import ASSISTANT, USER, Message, messages_of, parsed
from rp_data.rows.shapes import Row, after_system, asked_of, listed, says

# Text, or what was said.
Side = str | list[Message]
_CHOSEN, _REJECTED, _COMPLETION = "chosen", "rejected", "completion"
# Names of data sets and of LLaMA-Factory for what an answer is: good or bad.
_LABELS = ("label", "kto_tag")
_TRUTHS: dict[object, bool] = {1: True, 0: False, "true": True, "false": False, "1": True, "0": False}
_WANTED = "'chosen' and 'rejected', or 'label' beside 'completion', 'output', 'messages' or 'conversations'"
_UNREAD = ("videos", "audios")


@dataclass(frozen=True, slots=True)
class Preference:
    """What a row prefers.

    `answers`: the better one and the worse one; or one, which is good or bad, as `label` says. `tools`, `options`:
    for chat templates.
    """

    place: str
    prompt: Side
    answers: tuple[Side, ...]
    label: bool | None = None
    tools: Sequence[Any] | None = None
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @property
    def is_conversation(self) -> bool:
        """Whether it is what was said, instead of text."""
        return isinstance(self.prompt, list)


def preference_of(option: str, place: str, row: Row) -> Preference:
    """Convert a row without nulls.

    >>> preference_of("data", "a:1", {"chosen": "1+1 is 2", "rejected": "1+1 is 3"}).answers
    (' 2', ' 3')

    Raises `Refused` for a row that prefers nothing, and for fields of other types.
    """
    where = f"{option} {place}"
    for name in (*columns(row), *(name for name in _UNREAD if row.get(name))):
        raise Refused(f"{where} has {name!r}, which are not read from preferences; leave the row out")
    if _CHOSEN in row and _REJECTED in row:
        return _pair(option, place, row)
    label = next((name for name in _LABELS if name in row), None)
    if label is None or not {_COMPLETION, "output", "messages", "conversations"} & set(row):
        raise Refused(f"{where} must have {_WANTED}, but has {', '.join(map(repr, row)) or 'nothing'}")
    return _judged(option, place, row, label)


def _pair(option: str, place: str, row: Row) -> Preference:
    where = f"{option} {place}"
    chosen, rejected = (_side(where, name, row[name]) for name in (_CHOSEN, _REJECTED))
    prompt = _prompt(option, place, row)
    if prompt is None or (isinstance(row.get("prompt"), str) and _are_whole(chosen, rejected)):
        prompt, (chosen, rejected) = _shared(where, chosen, rejected)
        prompt = after_system(row, prompt) if isinstance(prompt, list) else prompt
    prompt, answers = _alike(row, prompt, [chosen, rejected])
    prompt, answers = _once(prompt, answers)
    if answers[0] == answers[1]:
        raise Refused(f"{where}: 'chosen' and 'rejected' must differ, but are the same; leave the row out")
    return _made(where, place, row, prompt, dict(zip((_CHOSEN, _REJECTED), answers, strict=True)))


def _judged(option: str, place: str, row: Row, label: str) -> Preference:
    where = f"{option} {place}"
    is_good = _truth(where, label, row[label])
    prompt = _prompt(option, place, row)
    name = next((one for one in (_COMPLETION, "output") if one in row), None)
    if name is not None:
        answer = _side(where, name, row[name])
        if prompt is None:
            raise Refused(f"{where} must have a 'prompt' for its {name!r}, but has {', '.join(map(repr, row))}")
        prompt, answers = _once(*_alike(row, prompt, [answer]))
        return _made(where, place, row, prompt, {name: answers[0]}, is_good)
    name = "messages" if "messages" in row else "conversations"
    said = cast("list[Message]", prompt)
    start = max((at for at, one in enumerate(said, 1) if one["role"] == USER), default=0)
    return _made(where, place, row, said[:start], {name: said[start:]}, is_good)


def _truth(where: str, name: str, value: object) -> bool:
    plain = value.lower() if isinstance(value, str) else value
    if not isinstance(plain, str | bool | int) or plain not in _TRUTHS:
        raise Refused(f"{where}: {name!r} must be true or false, for a good or a bad answer, but is {value!r:.60}")
    return _TRUTHS[plain]


def _prompt(option: str, place: str, row: Row) -> Side | None:
    """Return what comes before the answers; None if it is only in these. What is said by a system is first."""
    where = f"{option} {place}"
    if "prompt" in row:
        prompt = _side(where, "prompt", row["prompt"], may_be_empty=True)
    elif isinstance(question := row.get("question"), str):
        prompt = [says(USER, question)]
    elif "instruction" in row:
        prompt = asked_of(option, place, row)
    else:
        name = next((one for one in ("conversations", "messages") if one in row), None)
        prompt = None if name is None else messages_of(where, name, row[name])
    if isinstance(prompt, str) and isinstance(row.get("system"), str) and row["system"]:
        prompt = [says(USER, prompt)]
    return after_system(row, prompt) if isinstance(prompt, list) else prompt


def _side(where: str, name: str, value: object, *, may_be_empty: bool = False) -> Side:
    """Return text, or messages: a list of these or one, also as JSON in a text."""
    if isinstance(value, str):
        inside = _messages_in(value)
        if inside is None:
            if not value and not may_be_empty:
                raise Refused(f"{where}: {name!r} must say something, but is empty; leave the row out")
            return value
        value = inside
    if isinstance(value, dict):
        value = [cast("object", value)]
    if not isinstance(value, list):
        raise Refused(f"{where}: {name!r} must be text or messages, but is a {type(value).__name__}")
    messages = messages_of(where, name, cast("list[object]", value))
    if any(not isinstance(one.get("content", ""), str) for one in messages):
        raise Refused(f"{where}: {name!r} has images, which are not read from preferences; leave the row out")
    return messages


def _messages_in(text: str) -> list[object] | None:
    """Return the messages that a text has as JSON, as in columns of tables; None if it is plain text."""
    if not text.lstrip().startswith(("[", "{")):
        return None
    try:
        value: object = json.loads(text)
    except (ValueError, RecursionError):
        return None
    some = cast("list[object]", value if isinstance(value, list) else [value])
    return some if some and all(isinstance(one, dict) and {"role", "from"} & {*one} for one in some) else None


def _are_whole(*sides: Side) -> bool:
    """Return whether conversations have what was asked, too, as many data sets repeat it."""
    return all(isinstance(side, list) and side[0]["role"] != ASSISTANT for side in sides)


def _shared(where: str, chosen: Side, rejected: Side) -> tuple[Side, tuple[Side, Side]]:
    """Return how two answers begin, and what follows of each: whole messages, or letters up to a space."""
    if isinstance(chosen, str) != isinstance(rejected, str):
        raise Refused(f"{where}: 'chosen' and 'rejected' must both be text or both be messages")
    pairs = enumerate(zip(chosen, rejected, strict=False))
    same = next((at for at, (one, other) in pairs if one != other), min(len(chosen), len(rejected)))
    if isinstance(chosen, str) and same and chosen[same - 1] == " ":
        same -= 1
    if not same:
        raise Refused(
            f"{where} must have a 'prompt', or 'chosen' and 'rejected' that begin with the same one, but these "
            "differ from the beginning"
        )
    return chosen[:same], (chosen[same:], rejected[same:])


def _alike(row: Row, prompt: Side, answers: Sequence[Side]) -> tuple[Side, list[Side]]:
    """Return all as messages if some are."""
    if not any(isinstance(one, list) for one in (prompt, *answers)):
        return prompt, [*answers]
    asked = after_system(row, [says(USER, prompt)]) if isinstance(prompt, str) else prompt
    return asked, [[says(ASSISTANT, one)] if isinstance(one, str) else one for one in answers]


def _once(prompt: Side, answers: Sequence[Side]) -> tuple[Side, list[Side]]:
    """Return answers without a prompt that they repeat before what the assistant says."""
    if isinstance(prompt, list) and all(one[: len(prompt)] == prompt for one in answers):
        return prompt, [one[len(prompt) :] for one in answers]
    return prompt, [*answers]


def _made(
    where: str, place: str, row: Row, prompt: Side, answers: Mapping[str, Side], label: bool | None = None
) -> Preference:
    for name, answer in answers.items():
        if _is_said(answer) and (not answer or answer[0]["role"] != ASSISTANT):
            found = f"begins with a message of the {answer[0]['role']}" if answer else "is nothing"
            raise Refused(f"{where}: {name!r} must be what the assistant says after the prompt, but {found}")
        if not answer:
            raise Refused(f"{where}: {name!r} must say something, but is empty; leave the row out")
    if _is_said(prompt) and (not prompt or prompt[-1]["role"] == ASSISTANT):
        found = "ends with a message of the assistant" if prompt else "is nothing"
        raise Refused(f"{where}: the prompt must be what the assistant answers, but {found}")
    options = row.get("chat_template_kwargs")
    return Preference(
        place,
        prompt,
        tuple(answers.values()),
        label,
        listed(parsed(where, "tools", row.get("tools"))),
        cast("Mapping[str, Any]", options) if isinstance(options, dict) else {},
    )


def _is_said(side: Side) -> TypeGuard[list[Message]]:
    return isinstance(side, list)
