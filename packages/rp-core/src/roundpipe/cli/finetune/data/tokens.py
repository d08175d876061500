"""Documents as tokens: what is learned of each, what was cut, and which are held out."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from roundpipe.cli.errors import Refused
from roundpipe.cli.finetune.data.chat import ChatTemplate
from roundpipe.cli.finetune.data.documents import Chat, Completion, Sample, Text

IGNORED = -100
_AT_ONCE = 256


@dataclass(frozen=True, slots=True)
class Document:
    """Tokens that attend to each other. `learned`: one for each token that is a label, otherwise zero."""

    tokens: array[int]
    learned: bytes

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def digest(self) -> bytes:
        """The SHA-256 of all of it."""
        return hashlib.sha256(self.tokens.tobytes() + self.learned).digest()

    @property
    def labels(self) -> int:
        """How many tokens are learned: the first has nothing before it that could tell it."""
        return sum(self.learned[1:])

    def tensors(self) -> tuple[Tensor, Tensor]:
        """Tokens and labels, each (tokens,) int64; labels are -100 where nothing is learned."""
        # A copy of each, since torch warns about read-only memory.
        tokens = torch.frombuffer(bytearray(self.tokens.tobytes()), dtype=torch.int32).to(torch.int64)
        learned = torch.frombuffer(bytearray(self.learned), dtype=torch.uint8).to(torch.bool)
        learned[:1] = False
        return tokens, tokens.where(learned, torch.tensor(IGNORED))


@dataclass(slots=True)
class Counts:
    """What happened to samples: `longer`, than a sequence; `lost`, of these those with nothing left to learn."""

    samples: int = 0
    longer: int = 0
    lost: int = 0


@dataclass(frozen=True, slots=True)
class Documents:
    """All documents of some files. `has_end`: whether the tokenizer ends texts with a token of its own."""

    all: Sequence[Document]
    counts: Counts
    has_end: bool = True
    largest: int = field(default=0)

    @property
    def lengths(self) -> list[int]:
        """The tokens of each."""
        return [len(document) for document in self.all]

    @property
    def tokens(self) -> int:
        """The tokens of all."""
        return sum(self.lengths)

    @property
    def labels(self) -> int:
        """The tokens that are learned."""
        return sum(document.labels for document in self.all)

    def digest(self) -> str:
        """A checksum of all tokens and what is learned of them, in their order."""
        whole = hashlib.sha256()
        for document in self.all:
            whole.update(document.digest)
        return whole.hexdigest()


class Reader:
    """Makes documents of samples. `sequence`: the tokens that a document may have.

    `completions_only`: learn completions, and what the assistant says, instead of everything.
    """

    def __init__(self, tokenizer: Any, *, sequence: int, completions_only: bool) -> None:
        self._tokenizer = tokenizer
        self._sequence = sequence
        self._completions_only = completions_only
        self._end: int | None = tokenizer.eos_token_id
        self._begin: int | None = tokenizer.bos_token_id
        self._template: ChatTemplate | None = None

    def read(self, samples: Iterable[Sample]) -> Documents:
        """Raises `Refused`, with the sample's place, for one that has nothing to learn."""
        counts = Counts()
        found = [
            document for sample, whole in self._whole(samples) for document in self._cut(sample, whole, counts)
        ]
        largest = max((max(document.tokens) for document in found), default=0)
        return Documents(found, counts, self._end is not None, largest)

    def _whole(self, samples: Iterable[Sample]) -> Iterator[tuple[Sample, Document]]:
        """Each sample's tokens, uncut; plain texts are tokenized many at once, which is faster."""
        waiting = iter(samples)
        while group := list(islice(waiting, _AT_ONCE)):
            texts = [sample.text for sample in group if isinstance(sample, Text)]
            tokenized = iter(self._tokenized(texts) if texts else [])
            for sample in group:
                yield sample, self._document(sample, tokenized)

    def _document(self, sample: Sample, tokenized: Iterator[list[int]]) -> Document:
        if isinstance(sample, Chat):
            return self._of_chat(sample)
        if isinstance(sample, Completion):
            return self._of_completion(sample)
        if self._completions_only:
            raise Refused(
                f"{sample.place} is text without a completion, so --completions-only learns nothing of it"
            )
        tokens = self._ended(next(tokenized))
        return _document(tokens, [True] * len(tokens))

    def _of_chat(self, chat: Chat) -> Document:
        self._template = template = self._template or ChatTemplate(self._tokenizer)
        if not self._completions_only:
            tokens = template.tokens(chat)
            return _document(tokens, [True] * len(tokens))
        return _document(*template.tokens_and_assistant(chat))

    def _of_completion(self, sample: Completion) -> Document:
        """The completion begins with the first token that the prompt alone does not have."""
        prompt, whole = self._tokenized([sample.prompt, sample.prompt + sample.completion])
        start = next(
            (at for at, (one, other) in enumerate(zip(prompt, whole, strict=False)) if one != other), None
        )
        start = min(len(prompt), len(whole)) if start is None else start
        tokens = self._ended(whole)
        if not sample.completion:
            start = len(tokens)
        return _document(tokens, [not self._completions_only or at >= start for at in range(len(tokens))])

    def _tokenized(self, texts: list[str]) -> list[list[int]]:
        """Without a second token for the beginning, where a text begins with the first one itself."""
        found: list[list[int]] = self._tokenizer(texts, verbose=False)["input_ids"]
        return [self._begun_once(text, tokens) for text, tokens in zip(texts, found, strict=True)]

    def _begun_once(self, text: str, tokens: list[int]) -> list[int]:
        if self._begin is None or tokens[:2] != [self._begin] * 2:
            return tokens
        mark: str = self._tokenizer.bos_token
        # Where the text itself has two, the tokenizer put none before them.
        was_added = text.startswith(mark) and not text.startswith(mark * 2)
        return tokens[1:] if was_added else tokens

    def _ended(self, tokens: list[int]) -> list[int]:
        return tokens if self._end is None or tokens[-1:] == [self._end] else [*tokens, self._end]

    def _cut(self, sample: Sample, whole: Document, counts: Counts) -> Iterator[Document]:
        """A text in pieces, all of which are learned; of other samples the beginning."""
        if not whole.labels or not _says_something(sample):
            raise Refused(f"{sample.place} has nothing to learn: {_why(sample, self._completions_only)}")
        counts.samples += 1
        size = self._sequence
        counts.longer += len(whole) > size
        starts = range(0, len(whole), size) if isinstance(sample, Text) else [0]
        pieces = [Document(whole.tokens[at : at + size], whole.learned[at : at + size]) for at in starts]
        kept = [piece for piece in pieces if piece.labels]
        counts.lost += not kept
        yield from kept


def _says_something(sample: Sample) -> bool:
    if isinstance(sample, Text):
        return bool(sample.text)
    return isinstance(sample, Chat) or bool(sample.completion)


def _why(sample: Sample, completions_only: bool) -> str:
    if isinstance(sample, Chat):
        return "the assistant says nothing" if completions_only else "its messages are a single token"
    if isinstance(sample, Completion):
        return "its completion is empty"
    return "it is empty" if not sample.text else "it is a single token"


def _document(tokens: Sequence[int], learned: Sequence[bool]) -> Document:
    return Document(array("i", tokens), bytes(learned))


def held_out(documents: Documents, part: float) -> tuple[Documents, Documents]:
    """Documents to train on, and about this part of them, one at least, to evaluate.

    By their digests: equal documents stay together, and neither files' names nor their order counts.

    Raises `Refused` if nothing would be left to train on.
    """
    digests = {document.digest for document in documents.all}
    wanted = max(1, round(part * len(digests)))
    if len(digests) <= wanted:
        raise Refused(
            f"--held-out {part:g} of {len(digests)} different samples leaves none to train on; give more --data, "
            "or --eval-data"
        )
    chosen = set(sorted(digests)[:wanted])
    one, other = ([d for d in documents.all if (d.digest in chosen) is given] for given in (False, True))
    has_end, largest = documents.has_end, documents.largest
    return Documents(one, documents.counts, has_end, largest), Documents(other, Counts(), has_end, largest)
