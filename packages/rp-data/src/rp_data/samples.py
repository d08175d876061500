"""Samples as they are before they are tokens: texts, completions and conversations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from rp_data.images.sources import ImageSource


@dataclass(frozen=True, slots=True)
class Text:
    """Text whose tokens are all learned. `place`: its file and line, for errors."""

    place: str
    text: str


@dataclass(frozen=True, slots=True)
class Completion:
    """A prompt and its completion."""

    place: str
    prompt: str
    completion: str


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation. `messages`: at least one, each with a ``role``.

    `tools`, `documents`: as chat templates take them. `prompted`: so many messages are a prompt, of which nothing
    counts as a completion. `plain`: what takes its place where the tokenizer has no chat template. `options`:
    further variables of the template. `images`: those that parts of contents stand for, in their order. `marks`:
    of messages that say so, by number, whether they are learned.
    """

    place: str
    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Any] | None = None
    documents: Sequence[Any] | None = None
    prompted: int = 0
    plain: Completion | None = None
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    images: Sequence[ImageSource] = ()
    marks: Mapping[int, bool] = field(default_factory=dict[int, bool])


Sample = Text | Completion | Chat


def bytes_of(sample: Sample) -> int:
    """Return about how many bytes of text a sample has, with names and marks.

    >>> bytes_of(Text("a:1", "one")), bytes_of(Chat("a:1", [{"role": "user", "content": "one"}]))
    (3, 18)
    """
    match sample:
        case Text():
            return len(sample.text)
        case Completion():
            return len(sample.prompt) * 2 + len(sample.completion)
        case Chat():
            return _letters([sample.messages, sample.tools, sample.documents])


def _letters(value: object) -> int:
    letters, waiting = 0, [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, str):
            letters += len(one)
        elif isinstance(one, list):
            waiting += cast("list[object]", one)
        elif isinstance(one, dict):
            fields = cast("dict[object, object]", one)
            waiting += [*fields, *fields.values()]
    return letters
