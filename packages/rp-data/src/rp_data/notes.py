"""Notes on what was not read as it stands in the data: bad rows that were skipped, nulls, fields left out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from rp_trainer.errors import Refused

_Result = TypeVar("_Result")
_SHOWN = 3
_MOST_NAMES, _NAMES_SHOWN = 1000, 8


@dataclass(slots=True)
class DataNotes:
    """Notes of one option's data. `skips`: whether bad rows are omitted, instead of refused.

    `skipped`, `nulls`, `empty` and `unknown` count rows, keys, answers and tokens, `decoded`, `encoded` and
    `controlling` conversations; `control` is the first word in them that stands for a control token;
    `reasons` are what is wrong with the first bad rows, `first_null` is the place of a key.
    `templates`, `folders`: lines about these.
    `left_out`: how many rows have each field that nothing reads; `left_out_of_chats`: conversations, for names
    that their template does not read; `roles`: those without a message of the assistant's, by the roles that they
    have; `files_left_out`: files in folders, by their suffixes.
    """

    skips: bool = False
    skipped: int = 0
    reasons: list[str] = field(default_factory=list[str])
    nulls: int = 0
    first_null: str = ""
    decoded: int = 0
    encoded: int = 0
    controlling: int = 0
    control: str = ""
    empty: int = 0
    unknown: int = 0
    templates: list[str] = field(default_factory=list[str])
    folders: list[str] = field(default_factory=list[str])
    left_out: dict[str, int] = field(default_factory=dict[str, int])
    left_out_of_chats: dict[str, int] = field(default_factory=dict[str, int])
    roles: dict[str, int] = field(default_factory=dict[str, int])
    files_left_out: dict[str, int] = field(default_factory=dict[str, int])

    def attempt(self, make: Callable[[], _Result]) -> _Result | None:
        """Return what `make` makes of a row; None for one that is omitted. Raises `Refused` where none are."""
        try:
            return make()
        except Refused as refusal:
            if not self.skips:
                raise
            self.skipped += 1
            if len(self.reasons) < _SHOWN:
                self.reasons.append(str(refusal))
            return None

    def dropped_nulls(self, place: str, count: int) -> None:
        """Note that so many keys of a row were null."""
        if count and not self.nulls:
            self.first_null = place
        self.nulls += count

    def ignored(self, names: Iterable[str]) -> None:
        """Note the fields of a row that nothing reads."""
        _count(self.left_out, names)

    def passed_over(self, suffixes: Iterable[str]) -> None:
        """Note files in a folder that are not read, for each its suffix."""
        _count(self.files_left_out, suffixes)

    def unread(self, names: Iterable[str]) -> None:
        """Note the names of a conversation that its chat template does not read."""
        _count(self.left_out_of_chats, names)

    def unanswered(self, roles: Iterable[str]) -> None:
        """Note the roles of a conversation in which none is the assistant's."""
        _count(self.roles, roles)

    def controls(self, place: str, word: str) -> None:
        """Note that a conversation says a control token."""
        self.control = self.control or f"first {word!r:.60} in {place}"
        self.controlling += 1

    def template(self, line: str) -> None:
        """Note something about a chat template, once."""
        if line not in self.templates:
            self.templates.append(line)

    def folder(self, line: str) -> None:
        """Note something about a folder, once."""
        if line not in self.folders:
            self.folders.append(line)

    def lines(self, option: str) -> Iterator[str]:
        """Yield what users are told.

        >>> notes = DataNotes()
        >>> notes.dropped_nulls("a.jsonl:3", 2)
        >>> print(*notes.lines("--data"))
        --data: 2 keys were null and count as absent, the first in a.jsonl:3
        """
        if self.skipped:
            more = f"; and {self.skipped - len(self.reasons)} more" if self.skipped > len(self.reasons) else ""
            yield f"{option}: {self.skipped:,} bad rows are skipped: {'; '.join(self.reasons)}{more}"
        if self.nulls:
            yield f"{option}: {self.nulls:,} keys were null and count as absent, the first in {self.first_null}"
        if self.decoded:
            yield (
                f"{option}: arguments of tools were text in {self.decoded:,} conversations, and are decoded, "
                "since the chat template encodes them itself"
            )
        if self.encoded:
            yield (
                f"{option}: arguments of tools were objects in {self.encoded:,} conversations, and are written as "
                "JSON, since the chat template takes text"
            )
        if self.controlling:
            yield (
                f"{option}: messages say control tokens of the tokenizer in {self.controlling:,} conversations, "
                f"{self.control}; the model reads them as its own, as with TRL: such text is not told from what "
                "the chat template writes"
            )
        if self.unknown:
            yield f"{option}: {_number(self.unknown, 'tokens')} stand for letters that the tokenizer does not know"
        if self.empty:
            yield f"{option}: the assistant says nothing in {_number(self.empty, 'messages')}, as is learned"
        yield from (f"{option}: {line}" for line in (*self.templates, *self.folders))
        if self.files_left_out:
            yield f"{option}: files in folders that are not read: {_counted(self.files_left_out, 'files')}"
        if self.left_out:
            yield f"{option}: fields that are not read: {_counted(self.left_out, 'rows')}"
        if self.left_out_of_chats:
            found = _counted(self.left_out_of_chats, "conversations")
            yield f"{option}: the chat template does not read {found}"
        if self.roles:
            found = _counted(self.roles, "conversations")
            yield f"{option}: without a message of the assistant's, by their roles: {found}"


def _count(counts: dict[str, int], names: Iterable[str]) -> None:
    for name in names:
        # Keys may be as many as rows.
        if name in counts or len(counts) < _MOST_NAMES:
            counts[name] = counts.get(name, 0) + 1


def _counted(counts: Mapping[str, int], what: str) -> str:
    """Return names with their counts, the most frequent first."""
    names = sorted(counts, key=lambda name: -counts[name])
    shown = ", ".join(f"{name!r:.60} ({_number(counts[name], what)})" for name in names[:_NAMES_SHOWN])
    return f"{shown}, and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else shown


def _number(count: int, what: str) -> str:
    return f"1 {what.removesuffix('s')}" if count == 1 else f"{count:,} {what}"
