"""Convert rows that say which of two answers is better, or whether one is good, to one form for each of these."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeGuard, cast

from rp_trainer.errors import Refused

from rp_data.rows.beside import BESIDE, after_system, listed, variables_of
from rp_data.rows.images import columns
from rp_data.rows.marks import MARKS
from rp_data.rows.messages import ASSISTANT, SYSTEM, USER, Message, messages_in, messages_of, says
from rp_data.rows.shapes import JUDGED, Row, asked_of

# Text, or what was said.
Side = str | list[Message]
_CHOSEN, _REJECTED, _COMPLETION = "chosen", "rejected", "completion"
_TRUTHS: dict[object, bool] = {1: True, 0: False, "true": True, "false": False, "1": True, "0": False}
_WANTED = "'chosen' and 'rejected', or 'label' beside 'completion', 'output', 'messages' or 'conversations'"
_ASKED = ("prompt", "question", "instruction")
_CONVERSATIONS = ("messages", "conversations")
_UNREAD = ("audios",)
_READ = {*_ASKED, *_CONVERSATIONS, *JUDGED, _CHOSEN, _REJECTED, _COMPLETION, "output", "input", "history", *BESIDE}


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


def ignored(row: Row) -> list[str]:
    """Return the names of a row's fields that say nothing of what it prefers.

    >>> ignored({"chosen": "1", "rejected": "2", "margin": 0.5})
    ['margin']
    """
    return [name for name in row if name not in _READ]


def preference_of(option: str, place: str, row: Row) -> Preference:
    """Convert a row without nulls.

    >>> preference_of("data", "a:1", {"chosen": "1+1 is 2", "rejected": "1+1 is 3"}).answers
    (' 2', ' 3')

    Raises `Refused` for a row that prefers nothing or contradicts itself, and for fields of other types.
    """
    where = f"{option} {place}"
    for name in (*columns(row), *(name for name in _UNREAD if row.get(name))):
        raise Refused(f"{where} has {name!r}, which are not read from preferences; leave the row out")
    if not isinstance(row.get("system", ""), str):
        raise Refused(f"{where}: 'system' must be text, but is a {type(row['system']).__name__}")
    if _CHOSEN in row and _REJECTED in row:
        return _pair(option, place, row)
    if not set(JUDGED) & set(row) or not {_COMPLETION, "output", *_CONVERSATIONS} & set(row):
        raise Refused(f"{where} must have {_WANTED}, but has {', '.join(map(repr, row)) or 'nothing'}")
    return _judged(option, place, row)


def _pair(option: str, place: str, row: Row) -> Preference:
    where = f"{option} {place}"
    chosen, rejected = (_side(where, name, row[name]) for name in (_CHOSEN, _REJECTED))
    prompt = asked = _prompt(option, place, row)
    if prompt is None or (isinstance(prompt, str) and _are_whole(chosen, rejected)):
        prompt, (chosen, rejected) = _shared(where, chosen, rejected)
        if isinstance(prompt, list):
            prompt = after_system(where, row, prompt)
            _check_asked(where, row, asked, prompt)
        elif row.get("system"):
            raise Refused(f"{where} has a 'system', which is for conversations, but is text; give it a 'prompt'")
    _check_once(where, prompt, {_CHOSEN: chosen, _REJECTED: rejected})
    prompt, answers = _alike(where, row, prompt, [chosen, rejected])
    prompt, answers = _once(prompt, answers)
    if answers[0] == answers[1]:
        raise Refused(f"{where}: 'chosen' and 'rejected' must differ, but are the same; leave the row out")
    return _made(where, place, row, prompt, dict(zip((_CHOSEN, _REJECTED), answers, strict=True)))


def _judged(option: str, place: str, row: Row) -> Preference:
    where = f"{option} {place}"
    is_good = _label(where, row)
    name = next((one for one in (_COMPLETION, "output") if one in row), None)
    if name is None:
        return _in_conversation(option, place, row, is_good)
    answer = _side(where, name, row[name])
    prompt = _prompt(option, place, row)
    if prompt is None:
        raise Refused(f"{where} must have a 'prompt' for its {name!r}, but has {', '.join(map(repr, row))}")
    _check_once(where, prompt, {name: answer})
    prompt, answers = _once(*_alike(where, row, prompt, [answer]))
    return _made(where, place, row, prompt, {name: answers[0]}, is_good)


def _in_conversation(option: str, place: str, row: Row, is_good: bool) -> Preference:
    """Convert a conversation whose end is good or bad. What was asked may be in another field, too."""
    where = f"{option} {place}"
    name = next(one for one in _CONVERSATIONS if one in row)
    said = after_system(where, row, _messages(where, name, row[name]))
    start = max((at for at, one in enumerate(said, 1) if one["role"] == USER), default=0)
    _check_asked(where, row, _asked(option, place, row), said[:start])
    return _made(where, place, row, said[:start], {name: said[start:]}, is_good)


def _label(where: str, row: Row) -> bool:
    found = {name: _truth(where, name, row[name]) for name in JUDGED if name in row}
    if len({*found.values()}) > 1:
        raise Refused(f"{where}: 'label' and 'kto_tag' must say the same, but are {found}; leave one of them out")
    return next(iter(found.values()))


def _truth(where: str, name: str, value: object) -> bool:
    plain = value.lower() if isinstance(value, str) else value
    if not isinstance(plain, str | bool | int) or plain not in _TRUTHS:
        raise Refused(f"{where}: {name!r} must be true or false, for a good or a bad answer, but is {value!r:.60}")
    return _TRUTHS[plain]


def _prompt(option: str, place: str, row: Row) -> Side | None:
    """Return what comes before the answers; None if it is only in these. What is said by a system is first."""
    prompt = _asked(option, place, row)
    name = next((one for one in reversed(_CONVERSATIONS) if one in row), None)
    if prompt is None and name is not None:
        prompt = _messages(f"{option} {place}", name, row[name])
    return after_system(f"{option} {place}", row, prompt) if isinstance(prompt, list) else prompt


def _asked(option: str, place: str, row: Row) -> Side | None:
    """Return what was asked, of a field that has nothing else; None if there is no such field."""
    if "prompt" in row:
        return _side(f"{option} {place}", "prompt", row["prompt"], may_be_empty=True)
    if isinstance(question := row.get("question"), str):
        return [says(USER, question)]
    return asked_of(option, place, row) if "instruction" in row else None


def _side(where: str, name: str, value: object, *, may_be_empty: bool = False) -> Side:
    """Return text, or messages: a list of these or one, also as JSON in a text."""
    if isinstance(value, str):
        inside = messages_in(value)
        if inside is None:
            if not value and not may_be_empty:
                raise Refused(f"{where}: {name!r} must say something, but is empty; leave the row out")
            return value
        value = inside
    if isinstance(value, dict):
        value = [cast("object", value)]
    if not isinstance(value, list):
        raise Refused(f"{where}: {name!r} must be text or messages, but is a {type(value).__name__}")
    return _messages(where, name, cast("list[object]", value))


def _messages(where: str, name: str, value: object) -> list[Message]:
    messages = messages_of(where, name, value)
    if any(not isinstance(one.get("content", ""), str) for one in messages):
        raise Refused(
            f"{where}: {name!r} has images or videos, which are not read from preferences; leave the row out"
        )
    if (mark := next((name for one in messages for name in MARKS if name in one), None)) is not None:
        raise Refused(
            f"{where}: {name!r} has a message with {mark!r}, but trainers learn all of an answer and nothing of a "
            "prompt; remove it, or leave the row out"
        )
    return messages


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


def _check_asked(where: str, row: Row, asked: Side | None, prompt: Sequence[Message]) -> None:
    """Raise `Refused` for something else that was asked than in a conversation. `asked`: None if there is none."""
    if not asked:
        return
    messages = [says(USER, asked)] if isinstance(asked, str) else asked
    known = [*map(_stripped, prompt)]
    if any(_stripped(one) not in known for one in messages):
        name = next(name for name in _ASKED if name in row)
        raise Refused(f"{where}: {name!r} must be in the conversation, but is not; leave one of them out")


def _stripped(message: Message) -> Message:
    return {**message, "content": (message.get("content") or "").strip()}


def _check_once(where: str, prompt: Side, answers: Mapping[str, Side]) -> None:
    """Raise `Refused` if texts repeat the prompt: an answer to "Hello" may begin with that word, too."""
    if not isinstance(prompt, str) or not prompt.strip():
        return
    if all(isinstance(one, str) and one.startswith(prompt) for one in answers.values()):
        raise Refused(
            f"{where}: {' and '.join(map(repr, answers))} must be what comes after 'prompt', but are texts that "
            "begin with it; leave it out of them or, if they say it again, write 'prompt' as messages"
        )


def _alike(where: str, row: Row, prompt: Side, answers: Sequence[Side]) -> tuple[Side, list[Side]]:
    """Return all as messages if some are, or if a system says something."""
    if not row.get("system") and not any(isinstance(one, list) for one in (prompt, *answers)):
        return prompt, [*answers]
    asked = after_system(where, row, [says(USER, prompt)]) if isinstance(prompt, str) else prompt
    return asked, [[says(ASSISTANT, one)] if isinstance(one, str) else one for one in answers]


def _once(prompt: Side, answers: Sequence[Side]) -> tuple[Side, list[Side]]:
    """Return answers without a prompt that they repeat before what the assistant says, also without a system's."""
    if isinstance(prompt, list):
        for repeated in (prompt, prompt[1:] if prompt[0]["role"] == SYSTEM else []):
            if repeated and all(one[: len(repeated)] == repeated for one in answers):
                return prompt, [one[len(repeated) :] for one in answers]
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
    options, tools = variables_of(where, row), listed(where, row, "tools")
    _check_stored(where, [prompt, *answers.values(), tools, options])
    return Preference(
        place,
        prompt,
        tuple(answers.values()),
        label,
        tools,
        options,
    )


def _check_stored(where: str, values: Sequence[Any]) -> None:
    """Raise `Refused` for what a data set cannot keep."""
    try:
        json.dumps(values, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = ascii(error.object[error.start])
        raise Refused(f"{where} must be text, but has half of a surrogate pair ({half})") from None
    except (TypeError, ValueError, RecursionError) as error:
        raise Refused(f"{where} must have what JSON can say, but has not: {error}") from None


def _is_said(side: Side) -> TypeGuard[list[Message]]:
    return isinstance(side, list)
