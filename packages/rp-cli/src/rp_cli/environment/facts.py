"""Print facts in sections, as text for people or as JSON for scripts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Fact:
    """A name such as ``memory_rate``, a value for scripts, and its text for people, if that differs."""

    name: str
    value: object
    words: str | None = None

    @property
    def label(self) -> str:
        """The name for people; an environment variable's stays as it is."""
        return self.name if self.name.isupper() else self.name.replace("_", " ")

    @property
    def text(self) -> str:
        """The value as text for people."""
        return str(self.value) if self.words is None else self.words


@dataclass(frozen=True, slots=True)
class Section:
    """Facts under a title."""

    title: str
    facts: tuple[Fact, ...]


def as_text(sections: Sequence[Section], missing: Sequence[str]) -> str:
    """Format facts as lines, with the names of a section aligned, then what is missing. Omits empty sections.

    >>> print(as_text([Section("host", (Fact("cores", 2), Fact("memory", 1024, "1.0 KiB")))], []))
    host
      cores   2
      memory  1.0 KiB
    missing
      nothing
    """
    lines = [line for section in sections if section.facts for line in _lines(section)]
    return _without_home("\n".join([*lines, "missing", *(f"  {words}" for words in missing or ["nothing"])]))


def as_json(sections: Sequence[Section], missing: Sequence[str]) -> str:
    """Format facts as one JSON object, with an object for each section and a list of what is missing.

    >>> as_json([Section("host", (Fact("cores", 2),))], [])
    '{"host": {"cores": 2}, "missing": []}'
    """
    by_section = {section.title: {fact.name: fact.value for fact in section.facts} for section in sections}
    return _without_home(json.dumps({**by_section, "missing": list(missing)}))


def _lines(section: Section) -> list[str]:
    width = max((len(fact.name) for fact in section.facts), default=0)
    return [section.title, *(f"  {fact.label.ljust(width)}  {fact.text}" for fact in section.facts)]


def _without_home(text: str) -> str:
    # The output is pasted into public issues, which should not show the user's name.
    home = str(Path.home())
    return text.replace(home, "~") if len(home) > 1 else text
