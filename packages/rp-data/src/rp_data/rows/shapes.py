"""Convert rows to samples, by the names of their fields: one normalisation for all formats."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar, cast

from rp_trainer.errors import Refused

from rp_data.images.sources import COLUMNS, VIDEO_COLUMNS
from rp_data.rows.beside import BESIDE, after_system, listed, variables_of
from rp_data.rows.images import columns, with_images
from rp_data.rows.marks import without_marks
from rp_data.rows.messages import ASSISTANT, USER, Message, messages_in, messages_of, parsed, says
from rp_data.samples import Chat, Completion, Sample, Text

Row = Mapping[str, Any]
_Sample = TypeVar("_Sample", bound=Sample)
_PREFERENCES = ("chosen", "rejected")
_UNREAD = ("audios",)
# Names of data sets and of LLaMA-Factory for whether an answer is good.
JUDGED = ("label", "kto_tag")
_ALPACA = ("input", "history")
# Of Stanford's Alpaca: https://github.com/tatsu-lab/stanford_alpaca#data-release
_BELOW = "Below is an instruction that describes a task"
_WITH_INPUT = f"{_BELOW}, paired with an input that provides further context"
_WRITE = "Write a response that appropriately completes the request."


def sample_of(option: str, place: str, row: Row, folder: Path | None = None) -> Sample:
    """Convert a row without nulls to a sample: the first that fits of the names in `_SHAPES`.

    >>> sample_of("--data", "a:1", {"prompt": "1+1=", "completion": "2", "id": 7})
    Completion(place='a:1', prompt='1+1=', completion='2')

    `folder`: in which paths of images begin; by default that of the process.

    Raises `Refused` for other names, and for fields of other types.
    """
    for names, convert in _SHAPES.items():
        if all(name in row for name in names):
            _check_good(option, place, row, names)
            return seeing(option, row, convert(option, place, row), folder or Path())
    found = ", ".join(map(repr, row)) or "nothing"
    if set(_PREFERENCES) <= set(row):
        raise Refused(
            f"{option} {place} is a pair to choose of, which trainers learn from (docs/how-to/preferences.md); "
            "for this command, rename 'chosen' to 'messages' or 'completion'"
        )
    raise Refused(f"{option} {place} must have {_WANTED}, but has {found}")


def _check_good(option: str, place: str, row: Row, names: Sequence[str]) -> None:
    """Refuse answers that are said to be bad. Labels of texts may be anything."""
    if names != ("text",) and any(row.get(name) is False for name in JUDGED):
        raise Refused(
            f"{option} {place} is said to be a bad answer, which trainers learn from (docs/how-to/preferences.md)"
            "; for this command, leave it out"
        )


def has_form(row: Row) -> bool:
    """Return whether a row has the names of a form that is read."""
    return any(all(name in row for name in names) for names in _SHAPES)


def ignored(row: Row, sample: Sample) -> list[str]:
    """Return the names of a row's fields that are not in its sample.

    >>> row = {"prompt": "1+1=", "completion": "2", "id": 7}
    >>> ignored(row, sample_of("--data", "a:1", row))
    ['id']
    """
    shape = next(names for names in _SHAPES if all(name in row for name in names))
    beside = (*BESIDE, *_ALPACA, *COLUMNS, *VIDEO_COLUMNS) if isinstance(sample, Chat) else ()
    return [name for name in row if name not in shape and name not in beside]


def seeing(option: str, row: Row, sample: _Sample, folder: Path) -> _Sample:
    """Return a sample with the images of its row. Raises `Refused` for what would not be seen."""
    for name in _UNREAD:
        if isinstance(row.get(name), list) and row[name]:
            raise Refused(f"{option} {sample.place} has {name}, which are not read; leave the row out")
    if isinstance(sample, Chat):
        messages, images = with_images(f"{option} {sample.place}", row, sample.messages, folder)
        return cast("_Sample", replace(sample, messages=messages, images=images)) if images else sample
    if names := columns(row):
        raise Refused(
            f"{option} {sample.place} has images or videos, which need a conversation; write it as 'messages', or "
            f"leave {names[0]!r} out"
        )
    return sample


def _of_messages(option: str, place: str, row: Row) -> Chat:
    return conversation_of(option, place, row, "messages")


def _of_conversations(option: str, place: str, row: Row) -> Chat:
    return conversation_of(option, place, row, "conversations")


def conversation_of(option: str, place: str, row: Row, name: str) -> Chat:
    """Return the conversation in a field, with what the row has beside it but images.

    >>> conversation_of("--data", "a:1", {"said": [{"from": "human", "value": "one"}]}, "said").messages
    [{'role': 'user', 'content': 'one'}]
    """
    where = f"{option} {place}"
    return _chat(option, place, row, after_system(where, row, messages_of(where, name, row[name])))


def _of_completion(option: str, place: str, row: Row) -> Sample:
    # Conversations in two parts, as TRL has them, which tables have as JSON.
    if isinstance(row["completion"], list) or _is_said(row["completion"]):
        where = f"{option} {place}"
        prompt, completion = (messages_of(where, name, row[name]) for name in ("prompt", "completion"))
        asked = after_system(where, row, prompt)
        return _chat(option, place, row, [*asked, *completion], prompted=len(asked))
    return Completion(place, _string(option, place, row, "prompt"), _string(option, place, row, "completion"))


def _is_said(value: object) -> bool:
    return isinstance(value, str) and messages_in(value) is not None


def _of_instruction(option: str, place: str, row: Row) -> Chat:
    instruction, given, output = (
        _string(option, place, {"input": "", **row}, name) for name in ("instruction", "input", "output")
    )
    asked = asked_of(option, place, row)
    is_alone = len(asked) == 1 and not any(row.get(name) for name in BESIDE)
    plain = Completion(place, _alpaca(instruction, given), output) if is_alone else None
    said = after_system(f"{option} {place}", row, [*asked, says(ASSISTANT, output)])
    return _chat(option, place, row, said, plain=plain)


def asked_of(option: str, place: str, row: Row) -> list[Message]:
    """Return what Alpaca's fields ask: the earlier turns, and then the instruction with its input.

    >>> asked_of("--data", "a:1", {"instruction": "Add.", "input": "1+1"})
    [{'role': 'user', 'content': 'Add.\\n1+1'}]
    """
    instruction, given = (_string(option, place, {"input": "", **row}, name) for name in ("instruction", "input"))
    return [*_history(option, place, row), says(USER, f"{instruction}\n{given}" if given else instruction)]


def _history(option: str, place: str, row: Row) -> list[Message]:
    """Return the earlier turns: pairs of what was asked and answered."""
    pairs: Any = parsed(f"{option} {place}", "history", row.get("history", []))
    if not isinstance(pairs, list) or not all(map(_is_pair, cast("list[object]", pairs))):
        raise Refused(f"{option} {place}: 'history' must be pairs of texts, but is {pairs!r:.60}")
    turns = cast("list[tuple[str, str]]", pairs)
    return [message for asked, said in turns for message in (says(USER, asked), says(ASSISTANT, said))]


def _is_pair(value: object) -> bool:
    texts = cast("list[object]", value) if isinstance(value, list) else []
    return len(texts) == 2 and all(isinstance(text, str) for text in texts)


def _alpaca(instruction: str, given: str) -> str:
    """Return the prompt for a tokenizer without a chat template."""
    if not given:
        return f"{_BELOW}. {_WRITE}\n\n### Instruction:\n{instruction}\n\n### Response:\n"
    return f"{_WITH_INPUT}. {_WRITE}\n\n### Instruction:\n{instruction}\n\n### Input:\n{given}\n\n### Response:\n"


def _of_text(option: str, place: str, row: Row) -> Text:
    return Text(place, _string(option, place, row, "text"))


_SHAPES: Mapping[Sequence[str], Callable[[str, str, Row], Sample]] = {
    ("messages",): _of_messages,
    ("prompt", "completion"): _of_completion,
    ("conversations",): _of_conversations,
    ("instruction", "output"): _of_instruction,
    ("text",): _of_text,
}
_WANTED = ", ".join(" and ".join(map(repr, names)) for names in _SHAPES).replace(", 'text'", ", or 'text'")


def _chat(
    option: str,
    place: str,
    row: Row,
    messages: Sequence[Message],
    *,
    prompted: int = 0,
    plain: Completion | None = None,
) -> Chat:
    where = f"{option} {place}"
    tools, documents = (listed(where, row, name) for name in ("tools", "documents"))
    said, marks = without_marks(where, messages)
    return Chat(place, said, tools, documents, prompted, plain, variables_of(where, row), marks=marks)


def _string(option: str, place: str, row: Row, name: str) -> str:
    value = row[name]
    if isinstance(value, str):
        return value
    kind = type(value).__name__
    hint = "; write conversations as 'messages'" if kind == "list" else ""
    raise Refused(f"{option} {place}: {name!r} must be text, but is a {kind}{hint}")
