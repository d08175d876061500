"""Read a file of prompts: JSON lines with 'prompt' or 'messages', or a text with a prompt a line."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from rp_data.images.decoding import decoded
from rp_data.images.sources import Source
from rp_data.rows.images import columns, with_images
from rp_data.rows.messages import IMAGE, Message, messages_of
from rp_strangers.refusing import refusing
from rp_trainer.errors import Refused

_JSON = (".jsonl", ".ndjson")


@dataclass(frozen=True, slots=True)
class Prompt:
    """A row of the file. `place`: for messages. `text`: a prompt; None if the row has messages.

    `messages`: those of the row, in which a part stands for each of the `images`.
    """

    place: str
    row: dict[str, Any]
    text: str | None
    messages: Sequence[Message] = ()
    images: Sequence[Source] = ()

    @property
    def kind(self) -> tuple[bool, bool]:
        """What prompts that are completed together have in common: whether they are texts, and have images."""
        return self.text is not None, bool(self.images)

    def pictures(self) -> list[Any]:
        """Return its images in RGB. Raises `Refused`, with the place, for one that cannot be read."""
        return [decoded(image.place, image.content()[0]) for image in self.images]


def prompts_in(file: Path, system: str | None) -> list[Prompt]:
    """Read all prompts. `system`: begins each conversation that has no such message.

    Raises `Refused` for a file that cannot be read, a row that is no prompt, and a file that has none.
    """
    with refusing(f"--prompts {file} cannot be read: ", (OSError, UnicodeDecodeError)):
        lines = file.read_text(encoding="utf-8").split("\n")
    is_json = file.suffix in _JSON
    if system is not None and not is_json:
        raise Refused("--system begins conversations, but --prompts has texts; give JSON lines with 'messages'")
    found = [
        _of_json(place, line, system, file.parent) if is_json else Prompt(place, {"prompt": line}, line)
        for place, line in ((f"--prompts {file}:{number}", line) for number, line in enumerate(lines, 1))
        if line.strip()
    ]
    if not found:
        raise Refused(f"--prompts {file} has no prompts")
    return found


def _of_json(place: str, line: str, system: str | None, folder: Path) -> Prompt:
    with refusing(f"{place} is no JSON: "):
        read: Any = json.loads(line)
    if isinstance(read, str):
        read = {"prompt": read}
    if not isinstance(read, dict):
        raise Refused(f"{place} must be an object with 'prompt' or 'messages', but is a {type(read).__name__}")
    row = cast("dict[str, Any]", read)
    if isinstance(row.get("prompt"), str) and row["prompt"]:
        return Prompt(place, row, row["prompt"])
    messages = row.get("messages")
    if not isinstance(messages, list) or not messages or not all(_is_message(each) for each in _items(messages)):
        raise Refused(f"{place} must have 'prompt', a text, or 'messages' with 'role' and 'content', but does not")
    if system is not None and messages[0]["role"] != "system":
        row = {**row, "messages": [{"role": "system", "content": system}, *_items(messages)]}
    if not _shows(row):
        return Prompt(place, row, None, row["messages"])
    messages, images = with_images(place, row, messages_of(place, "messages", row["messages"]), folder)
    return Prompt(place, row, None, messages, images)


def _shows(row: dict[str, Any]) -> bool:
    contents = [message["content"] for message in row["messages"]]
    parts = [part for content in contents if isinstance(content, list) for part in _items(content)]
    kinds = [str(cast("Message", part).get("type")) for part in parts if isinstance(part, dict)]
    return bool(columns(row)) or any(IMAGE in kind for kind in kinds)


def _items(messages: Any) -> Iterator[Any]:
    yield from messages


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and "role" in value and "content" in value
