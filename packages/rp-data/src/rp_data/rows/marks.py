"""Marks on messages that say whether these are learned, by the names that other tools have for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rp_trainer.errors import Refused

from rp_data.rows.messages import Message

# Of OpenAI and Mistral; of axolotl; of ms-swift.
MARKS = ("weight", "train", "training", "loss")


def without_marks(where: str, messages: Sequence[Message]) -> tuple[Sequence[Message], Mapping[int, bool]]:
    """Return messages without their marks, and for the numbers of those that had one, whether they are learned.

    >>> without_marks("a:1", [{"role": "assistant", "content": "one", "weight": 0}])
    ([{'role': 'assistant', 'content': 'one'}], {0: False})

    Raises `Refused` for a weight between 0 and 1, and for marks that contradict each other.
    """
    marks = {at: mark for at, one in enumerate(messages) if (mark := _mark(where, one)) is not None}
    plain = [{name: value for name, value in one.items() if name not in MARKS} for one in messages]
    return (plain, marks) if marks else (messages, marks)


def _mark(where: str, message: Message) -> bool | None:
    found = {name: message[name] for name in MARKS if name in message}
    if not found:
        return None
    if len(values := {*map(_as_key, found.values())}) > 1 or not values <= {0, 1}:
        raise Refused(
            f"{where}: {' and '.join(map(repr, found))} of a message must be 0 or 1, for whether it is learned, "
            f"but {'are' if len(found) > 1 else 'is'} {', '.join(f'{value!r:.60}' for value in found.values())}"
        )
    return bool(values.pop())


def _as_key(value: object) -> object:
    return value if isinstance(value, int | float) else repr(value)
