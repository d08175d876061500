"""Documents of tokens, their counts, and which are held out."""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import overload

import torch
from rp_trainer.errors import Refused
from rp_trainer.finetuning.batches import IGNORED
from torch import Tensor

from rp_data.images.pictures import PicturedText
from rp_data.notes import DataNotes


@dataclass(frozen=True, slots=True)
class Document:
    """Tokens that attend to each other. `learned`: 1 for each token that is a label, otherwise 0.

    `seen`: its images, if it shows some.
    """

    tokens: array[int]
    learned: bytes
    seen: PicturedText | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def digest(self) -> bytes:
        """The SHA-256 of the document."""
        images = b"" if self.seen is None else self.seen.digest
        return hashlib.sha256(self.tokens.tobytes() + self.learned + images).digest()

    @property
    def labels(self) -> int:
        """The number of tokens that are learned; the first is not, since no token precedes it."""
        return sum(self.learned[1:])

    def tensors(self) -> tuple[Tensor, Tensor]:
        """Tokens and labels, each (tokens,) int64; labels are -100 where nothing is learned."""
        # A copy of each, since torch warns about read-only memory.
        tokens = torch.frombuffer(bytearray(self.tokens.tobytes()), dtype=torch.int32).to(torch.int64)
        learned = torch.frombuffer(bytearray(self.learned), dtype=torch.uint8).to(torch.bool)
        learned[:1] = False
        return tokens, tokens.where(learned, torch.tensor(IGNORED))


class Table(Sequence[Document]):
    """Documents of which the columns are known without reading their tokens."""

    lengths: Sequence[int]
    labels: Sequence[int]
    digests: Sequence[bytes]

    def __len__(self) -> int:
        """Return the number of documents."""
        return len(self.lengths)

    @overload
    def __getitem__(self, at: int) -> Document: ...
    @overload
    def __getitem__(self, at: slice) -> list[Document]: ...
    def __getitem__(self, at: int | slice) -> Document | list[Document]:
        """Return a document, or several."""
        if isinstance(at, slice):
            return [self.document(one) for one in range(*at.indices(len(self)))]
        if not -len(self) <= at < len(self):
            raise IndexError(at)
        return self.document(at % len(self))

    @abstractmethod
    def document(self, at: int) -> Document:
        """Return one document, which there must be."""


class Listed(Table):
    """Documents of a list, in memory."""

    def __init__(self, documents: Sequence[Document]) -> None:
        self._documents = documents
        self.lengths = [len(one) for one in documents]

    @cached_property
    def labels(self) -> Sequence[int]:  # pyright: ignore[reportIncompatibleVariableOverride] # computed when asked
        """The learned tokens of each."""
        return [one.labels for one in self._documents]

    @cached_property
    def digests(self) -> Sequence[bytes]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The digest of each."""
        return [one.digest for one in self._documents]

    def document(self, at: int) -> Document:
        """Return one document."""
        return self._documents[at]


class Selection(Table):
    """Some of the documents of a table, by number."""

    def __init__(self, table: Table, chosen: array[int]) -> None:
        self._table, self._chosen = table, chosen
        self.lengths = array("q", (table.lengths[at] for at in chosen))
        self.labels = array("q", (table.labels[at] for at in chosen))
        self.digests = [table.digests[at] for at in chosen]

    def document(self, at: int) -> Document:
        """Return one document."""
        return self._table.document(self._chosen[at])


def table_of(documents: Sequence[Document]) -> Table:
    """Return documents with their columns."""
    return documents if isinstance(documents, Table) else Listed(documents)


@dataclass(slots=True)
class Counts:
    """Counts of samples. `longer`: longer than a sequence. `lost`: those of them with nothing left to learn.

    `needs`: the shortest sequences that would leave something to learn of one of the lost samples, and of all.
    """

    samples: int = 0
    longer: int = 0
    lost: int = 0
    needs: tuple[int, int] | None = field(default=None, compare=False)

    def lose(self, needed: int) -> None:
        """Count a sample of which a sequence of `needed` tokens would leave something to learn."""
        least, most = self.needs or (needed, needed)
        self.lost += 1
        self.needs = min(least, needed), max(most, needed)

    def lines(self, sequence: int) -> Iterator[str]:
        """Yield what users are told of samples that are longer than a sequence."""
        if not self.longer:
            return
        lost = ""
        if self.needs is not None:
            lost = (
                f"; {self.lost:,} have nothing left to learn and are omitted, which --sequence {self.needs[1]} "
                "would not do"
            )
        yield (
            f"{self.longer:,} samples are longer than --sequence {sequence}: texts continue in further sequences, "
            f"others are cut{lost}"
        )


@dataclass(frozen=True, slots=True)
class Documents:
    """All documents of some files. `has_end`: whether the tokenizer has an end token.

    `sources`: how many documents each given path has, in order; empty if there is one. `images`: how many they
    show. `shaped`: what a processor has for each token of those that show some, by name.
    """

    all: Sequence[Document]
    counts: Counts
    has_end: bool = True
    largest: int = field(default=0)
    notes: DataNotes = field(default_factory=DataNotes)
    sources: Sequence[int] = ()
    images: int = 0
    shaped: Sequence[str] = ()

    @property
    def lengths(self) -> Sequence[int]:
        """The number of tokens of each document."""
        return table_of(self.all).lengths

    @property
    def tokens(self) -> int:
        """The number of tokens of all documents."""
        return sum(self.lengths)

    @property
    def labels(self) -> int:
        """The number of tokens that are learned."""
        return sum(table_of(self.all).labels)

    @property
    def shown(self) -> str:
        """How many images and videos they show, in words."""
        rows = [[picture.video for picture in one.seen.pictures] for one in self.all if one.seen]
        images, videos = sum(row.count(-1) for row in rows), sum(max(row) + 1 for row in rows)
        return f"{images:,} images and {videos:,} videos" if videos else f"{images:,} images"

    @classmethod
    def of(
        cls, documents: Sequence[Document], counts: Counts, *, has_end: bool, notes: DataNotes | None = None
    ) -> Documents:
        """Return documents with their largest token, for which all are read."""
        largest = max((max(one.tokens) for one in documents), default=0)
        return cls(documents, counts, has_end, largest, notes or DataNotes())

    def digest(self) -> str:
        """Return a checksum of all documents, in their order."""
        whole = hashlib.sha256()
        for digest in table_of(self.all).digests:
            whole.update(digest)
        return whole.hexdigest()


def repeats(training: Documents, evaluated: Documents | None) -> Iterator[str]:
    """Yield what users are told of documents that are there several times, by their contents.

    >>> one = Document(array("i", [7, 8]), b"\\1\\1")
    >>> list(repeats(Documents([one, one], Counts()), None))
    ['--data: 1 of 2 documents repeats another one']
    """
    given = table_of(training.all).digests
    known = {*given}
    if (again := len(given) - len(known)) > 0:
        yield f"--data: {again:,} of {len(given):,} documents repeat{'s' * (again == 1)} another one"
    if evaluated is not None:
        told = table_of(evaluated.all).digests
        if learned := sum(one in known for one in told):
            yield (
                f"--eval-data: {learned:,} of {len(told):,} documents are in --data, too, so the held-out loss is "
                "that of what is learned"
            )


def held_out(documents: Documents, part: float) -> tuple[Documents, Documents]:
    """Divide documents into those to train on and about this part of them, at least one, to evaluate on.

    Digests decide: equal documents stay together, and neither files' names nor their order matters.

    Raises `Refused` if nothing would be left to train on.
    """
    table = table_of(documents.all)
    digests = set(table.digests)
    wanted = max(1, round(part * len(digests)))
    if len(digests) <= wanted:
        raise Refused(
            f"--held-out {part:g} of {len(digests)} different samples leaves none to train on; provide more "
            "--data, or --eval-data"
        )
    chosen = set(sorted(digests)[:wanted])
    numbers = range(len(table))
    one, other = (
        array("q", (at for at in numbers if (table.digests[at] in chosen) is is_held)) for is_held in (False, True)
    )
    left, first = list[int](), 0
    for count in documents.sources:
        left.append(sum(table.digests[at] not in chosen for at in range(first, first + count)))
        first += count
    training = replace(documents, all=Selection(table, one), sources=left)
    return training, replace(
        documents, all=Selection(table, other), counts=Counts(), notes=DataNotes(), sources=()
    )
