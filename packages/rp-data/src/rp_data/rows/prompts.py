"""Read prompts from a file: texts, and conversations that want a reply, with what is beside them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from rp_trainer.errors import Refused

from rp_data.notes import DataNotes
from rp_data.rows.documents import rows_of
from rp_data.rows.files import JSON, JSON_LINES, content, decoded, kind_of
from rp_data.rows.images import columns
from rp_data.rows.json_rows import read_json, without_nulls
from rp_data.rows.messages import ASSISTANT, SYSTEM, parsed, says
from rp_data.rows.shapes import conversation_of, seeing
from rp_data.samples import Chat

Row = Mapping[str, Any]
_CONVERSATIONS = ("messages", "conversations", "prompt")


@dataclass(frozen=True, slots=True)
class Prompt:
    """A row of a file. `place`: for errors. `row`: as the file has it. `asked`: a text, or a conversation."""

    place: str
    row: Row
    asked: str | Chat


def read_prompts(option: str, file: Path, system: str | None) -> list[Prompt]:
    """Read all prompts. JSON, one a line or a list, and tables have rows; another file has a text a line.

    A row has a ``prompt``, which is a text, or a conversation in any form of a fine-tuning's data, with its
    system, tools, documents, images, and variables of the template.

    `option`: with which the file was given. `system`: begins each conversation that has no such message.

    Raises `Refused` for a file that cannot be read, a row that is no prompt, and a file that has none.
    """
    found = [_prompt(option, place, row, system, file.parent) for place, row in _rows(option, file)]
    if not found:
        raise Refused(f"{option} {file} has no prompts")
    return found


def _rows(option: str, file: Path) -> Iterator[tuple[str, object]]:
    is_json = kind_of(file) in JSON_LINES | {JSON}
    if not is_json and (rows := rows_of(option, file, DataNotes())) is not None:
        yield from rows
        return
    text = decoded(option, str(file), content(option, file)).replace("\r\n", "\n")
    if kind_of(file) == JSON and text.lstrip().startswith("["):
        members: list[object] = read_json(f"{option} {file} must be a list of prompts", text)
        yield from ((f"{file}, object {number}", member) for number, member in enumerate(members, 1))
        return
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            place = f"{file}:{number}"
            yield place, read_json(f"{option} {place} must be JSON", line) if is_json else line


def _prompt(option: str, place: str, read: object, system: str | None, folder: Path) -> Prompt:
    where = f"{option} {place}"
    if not isinstance(read, str | dict):
        raise Refused(f"{where} must be an object with 'prompt' or 'messages', but is a {type(read).__name__}")
    row = cast("Row", {"prompt": read} if isinstance(read, str) else read)
    given = cast("Row", without_nulls(row)[0])
    name = next((one for one in _CONVERSATIONS if given.get(one)), None)
    if name is None:
        raise Refused(f"{where} must have 'prompt', a text, or 'messages' with 'role' and 'content', but does not")
    if isinstance(given.get("prompt"), str) and given["prompt"]:
        _check_text(where, given, system)
        return Prompt(where, row, given["prompt"])
    if system is not None:
        begun = _beginning(where, given, name, system)
        row, given = {**row, name: begun}, {**given, name: begun}
    chat = conversation_of(option, place, given, name)
    if chat.messages[-1]["role"] == ASSISTANT:
        raise Refused(f"{where} must end with what is asked, but ends with the assistant's words; leave these out")
    return Prompt(where, row, seeing(option, given, chat, folder))


def _check_text(where: str, row: Row, system: str | None) -> None:
    if system is not None:
        raise Refused(f"--system begins conversations, but {where} is a text; give JSON lines with 'messages'")
    if names := columns(row):
        raise Refused(
            f"{where} has images or videos, which need a conversation; write it as 'messages', or leave "
            f"{names[0]!r} out"
        )


def _beginning(where: str, row: Row, name: str, system: str) -> object:
    """Return the messages of a row after the system's, unless they have one of their own."""
    said = parsed(where, name, row[name])
    messages = cast("list[object]", said if isinstance(said, list) else [said])
    first = cast("Row", messages[0] if messages and isinstance(messages[0], dict) else {})
    if row.get("system") or first.get("role", first.get("from")) == SYSTEM:
        return messages
    return [{"from": SYSTEM, "value": system} if "from" in first else says(SYSTEM, system), *messages]
