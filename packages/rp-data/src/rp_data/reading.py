"""Read and tokenize all data in a process with limits, which stop tokenizers and templates that do not end."""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rp_strangers.limited import Budget, limited
from rp_trainer.errors import Refused

from rp_data.documents import Counts, Document, Documents
from rp_data.gathered import Gathered, InFile
from rp_data.images.pictures import PicturedText, Spool, seen_of
from rp_data.images.processor import Sight
from rp_data.notes import DataNotes
from rp_data.prepared import PreparedFrom, fingerprint, prepared_in, read_prepared
from rp_data.rows.documents import read_samples
from rp_data.tokens import Reader

# An option with paths, such as --data.
Given = tuple[str, Sequence[Path]]
_LENGTH = "q"
_HINT = "name another --tokenizer, or leave this out of the data"


@dataclass(frozen=True, slots=True)
class Manner:
    """How data is read. `clock`: the time that chat templates see. `skips_bad_rows`: instead of refusing them.

    `placeholders`: tokens that the model replaces by what it sees or hears.
    """

    sequence: int
    completions_only: bool
    skips_bad_rows: bool = False
    clock: datetime | None = None
    placeholders: frozenset[int] = frozenset()

    def made(self, tokenizer: str) -> PreparedFrom:
        """Return how data is made with a tokenizer, given by its fingerprint."""
        clock = "" if self.clock is None else self.clock.isoformat()
        return PreparedFrom(self.sequence, self.completions_only, tokenizer, clock)


@dataclass(frozen=True, slots=True)
class Eyes:
    """How images are read. `load`: returns the processor, or says why there is none. `spool`: keeps images."""

    load: Callable[[], Sight | str]
    spool: Spool = field(default_factory=Spool)


def read_all(
    load: Callable[[], Any],
    given: Sequence[Given],
    manner: Manner,
    gather: Callable[[], Gathered | InFile] = Gathered,
    eyes: Eyes | None = None,
) -> tuple[Any, str, list[Documents]]:
    """Return the tokenizer with its fingerprint, and the documents of each of the given options.

    `load`: returns the tokenizer; called in the limited process first, then, if that could load it, in this one.
    The tokenizer works in the limited process only. `gather`: makes what keeps the documents of an option. `eyes`:
    read images; without, these are refused.

    Raises `Refused` for data that cannot be used, and for a tokenizer or a template that exceeds the limits.
    """

    def work(budget: Budget) -> Iterator[bytes]:
        # Tokenizers have up to tens of megabytes, in files of several forms.
        budget.allow("--tokenizer", 2**22)
        tokenizer = load()
        yield fingerprint(tokenizer).encode()
        for option, paths in given:
            if prepared_in(option, paths) is not None:
                continue
            yield from _sent(_reader(tokenizer, manner, budget, eyes), option, paths, budget)

    messages = limited("the tokenizer, or its chat template,", _HINT, work)
    known = next(messages).decode()
    tokenizer = load()
    folders = [(option, prepared_in(option, paths)) for option, paths in given]
    read = [
        _received(messages, gather(), eyes)
        if folder is None
        else read_prepared(option, folder, manner.made(known))
        for option, folder in folders
    ]
    for _ in messages:
        raise AssertionError("messages are left")
    return tokenizer, known, read


def check_some(what: str, sequence: int, documents: Documents) -> None:
    """Raise `Refused` for data that leaves nothing to learn, with what would help. `what`: the data, for that."""
    if documents.all:
        return
    counts, notes = documents.counts, documents.notes
    if counts.needs is not None:
        least, most = counts.needs
        raise Refused(
            f"{what}: what is learned begins after {sequence} tokens in all {counts.samples:,} samples, "
            f"where they are cut; --sequence {least} leaves something of one of them, --sequence {most} of all"
        )
    if notes.skipped:
        raise Refused(f"{what} has no samples that can be used: {notes.skipped:,} bad rows, {notes.reasons[0]}")
    raise Refused(f"{what} has no samples; name files that hold some")


def _reader(tokenizer: Any, manner: Manner, budget: Budget, eyes: Eyes | None) -> Reader:
    seeing = {} if eyes is None else {"sight": partial(_alone, eyes)}
    return Reader(
        tokenizer,
        sequence=manner.sequence,
        completions_only=manner.completions_only,
        clock=manner.clock,
        budget=budget,
        notes=DataNotes(manner.skips_bad_rows),
        placeholders=manner.placeholders,
        **seeing,
    )


def _alone(eyes: Eyes) -> Sight | str:
    # This process is a copy of one whose threads torch may have used; here there are none.
    torch.set_num_threads(1)
    return eyes.load()


def _sent(reader: Reader, option: str, paths: Sequence[Path], budget: Budget) -> Iterator[bytes]:
    counts, sources, images = Counts(), [0] * len(paths), 0
    for number, path in enumerate(paths):
        for documents in reader.pieces(read_samples(option, [path], budget, reader.notes), counts):
            if documents:
                sources[number] += len(documents)
                images += sum(len(one.seen.pictures) for one in documents if one.seen)
                yield _encoded(documents, reader.inline)
                reader.inline.clear()
    yield b""
    facts = {
        "counts": asdict(counts),
        "notes": asdict(reader.notes),
        "has_end": reader.has_end,
        "sources": sources,
        "images": images,
        "shaped": sorted(reader.shaped),
    }
    yield json.dumps(facts).encode()


def _received(messages: Iterator[bytes], gathered: Gathered | InFile, eyes: Eyes | None) -> Documents:
    while message := next(messages):
        gathered.add(list(_decoded(message, eyes)))
    documents = gathered.table()
    facts: dict[str, Any] = json.loads(next(messages))
    counts, notes = Counts(**facts["counts"]), DataNotes(**facts["notes"])
    read = Documents.of(documents, counts, has_end=facts["has_end"], notes=notes)
    return replace(read, sources=facts["sources"], images=facts["images"], shaped=facts["shaped"])


def _encoded(documents: Sequence[Document], inline: Mapping[str, bytes]) -> bytes:
    """Return documents as bytes: numbers, tokens, what they show as JSON, and images without files."""
    lengths = array(_LENGTH, map(len, documents))
    parts = [len(lengths).to_bytes(8, "little"), lengths.tobytes()]
    for document in documents:
        parts += [document.tokens.tobytes(), document.learned]
    seen = [None if one.seen is None else asdict(one.seen) for one in documents]
    shown = json.dumps([seen, {digest: len(one) for digest, one in inline.items()}]).encode()
    return b"".join([*parts, len(shown).to_bytes(8, "little"), shown, *inline.values()])


def _decoded(content: bytes, eyes: Eyes | None) -> Iterator[Document]:
    texts, at = _tokens(content)
    start = at + 8
    end = start + int.from_bytes(content[at:start], "little")
    seen, inline = json.loads(content[start:end])
    images: dict[str, bytes] = {}
    for digest, nbytes in inline.items():
        images[digest], end = content[end : end + nbytes], end + nbytes
    for document, fields in zip(texts, seen, strict=True):
        if fields is None:
            yield document
        else:
            assert eyes is not None
            yield replace(document, seen=_kept(seen_of(fields), images, eyes.spool))


def _kept(seen: PicturedText, images: Mapping[str, bytes], spool: Spool) -> PicturedText:
    pictures = (spool.kept(one, None if one.path else images[one.digest]) for one in seen.pictures)
    return replace(seen, pictures=tuple(pictures))


def _tokens(content: bytes) -> tuple[list[Document], int]:
    """Return the documents without what they show, and where they end."""
    documents: list[Document] = []
    count = int.from_bytes(content[:8], "little")
    lengths = array(_LENGTH)
    at = 8 + count * lengths.itemsize
    lengths.frombytes(content[8:at])
    for length in lengths:
        tokens = array("i")
        end = at + length * tokens.itemsize
        tokens.frombytes(content[at:end])
        at = end + length
        documents.append(Document(tokens, content[end:at]))
    return documents, at
