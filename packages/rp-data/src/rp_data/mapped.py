"""Documents in an Arrow file that is mapped to memory: there may be more of them than memory holds."""

from __future__ import annotations

import importlib
import json
from array import array
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rp_trainer.errors import Refused

from rp_data.documents import Document, Table
from rp_data.images.pictures import PicturedText, seen_of

_DIGEST_BYTES = 32
# A batch is written when it has so many bytes of tokens.
_BATCH_BYTES = 2**24
_NEEDED = "which needs pyarrow: pip install datasets"


def arrow(what: str) -> Any:
    """Import pyarrow. Raises `Refused` if it is missing; `what` needs it."""
    try:
        return importlib.import_module("pyarrow")
    except ImportError:
        raise Refused(f"{what}, {_NEEDED}") from None


def _schema(arrow: Any) -> Any:
    columns = {
        "tokens": arrow.large_list(arrow.field("item", arrow.int32(), nullable=False)),
        "learned": arrow.large_binary(),
        "digest": arrow.binary(_DIGEST_BYTES),
        "labels": arrow.int32(),
    }
    fields = [arrow.field(name, kind, nullable=False) for name, kind in columns.items()]
    # What it shows, as JSON; null without images.
    return arrow.schema([*fields, arrow.field("seen", arrow.large_string())])


class DocumentWriter:
    """Writes documents to a new file, from which `Mapped` reads them. Each is gone from memory soon."""

    def __init__(self, path: Path) -> None:
        self._arrow = arrow(f"{path} is an Arrow file")
        self._schema = _schema(self._arrow)
        self._file = importlib.import_module("pyarrow.ipc").new_file(str(path), self._schema)
        self._waiting: list[Document] = []
        self._bytes = 0

    def add(self, documents: Sequence[Document]) -> None:
        """Write documents after those before."""
        self._waiting += documents
        self._bytes += sum(map(len, documents)) * 4
        if self._bytes >= _BATCH_BYTES:
            self._write()

    def close(self) -> None:
        """Write what is left, and the file's end."""
        self._write()
        self._file.close()

    def _write(self) -> None:
        documents, self._waiting, self._bytes = self._waiting, [], 0
        if documents:
            self._file.write_batch(self._batch(documents))

    def _batch(self, documents: Sequence[Document]) -> Any:
        ends = array("q", [0])
        for document in documents:
            ends.append(ends[-1] + len(document))
        tokens, learned = (b"".join(parts) for parts in zip(*map(_bytes, documents), strict=True))
        buffer, kinds = self._arrow.py_buffer, [field.type for field in self._schema]
        values = self._arrow.Array.from_buffers(self._arrow.int32(), ends[-1], [None, buffer(tokens)])
        columns = [
            self._arrow.Array.from_buffers(kinds[0], len(documents), [None, buffer(ends)], children=[values]),
            self._arrow.Array.from_buffers(kinds[1], len(documents), [None, buffer(ends), buffer(learned)]),
            self._arrow.array([one.digest for one in documents], kinds[2]),
            self._arrow.array([one.labels for one in documents], kinds[3]),
            self._arrow.array(
                [None if one.seen is None else json.dumps(asdict(one.seen)) for one in documents], kinds[4]
            ),
        ]
        return self._arrow.RecordBatch.from_arrays(columns, schema=self._schema)


def _bytes(document: Document) -> tuple[bytes, bytes]:
    return document.tokens.tobytes(), document.learned


class Mapped(Table):
    """The documents of a file of a `DocumentWriter`. The system reads what is asked for, and may forget it.

    `images`: a file with the content of all images; None: they are where the documents say.

    Raises `Refused` for a file of another kind.
    """

    def __init__(self, path: Path, images: Path | None = None) -> None:
        self.path = path
        self._images = images
        library = arrow(f"{path} is an Arrow file")
        # Arrow has errors of its own, which are of several classes.
        try:
            self._batches = _batches(library, path)
        except (library.ArrowException, OSError, ValueError) as error:
            raise Refused(f"{path} is damaged ({error}); prepare the data again") from error
        self._offsets = [memoryview(batch.column(0).buffers()[1]).cast("q") for batch in self._batches]
        self._starts = [0]
        for batch in self._batches:
            self._starts.append(self._starts[-1] + batch.num_rows)
        self.lengths = array("q", (n for at in range(len(self._batches)) for n in self._lengths(at)))
        self.labels = array("q", (n for one in self._batches for n in one.column(3).to_pylist()))
        self.digests = [digest for one in self._batches for digest in one.column(2).to_pylist()]

    def _lengths(self, number: int) -> array[int]:
        offsets, count = self._offsets[number], self._batches[number].num_rows
        return array("q", (offsets[at + 1] - offsets[at] for at in range(count)))

    def document(self, at: int) -> Document:
        """Read one document."""
        number = bisect_right(self._starts, at) - 1
        batch, row = self._batches[number], at - self._starts[number]
        start, end = self._offsets[number][row], self._offsets[number][row + 1]
        tokens = array("i")
        tokens.frombytes(memoryview(batch.column(0).values.buffers()[1])[4 * start : 4 * end])
        learned = bytes(memoryview(batch.column(1).buffers()[2])[start:end])
        return Document(tokens, learned, self._seen(batch.column(4)[row].as_py()))

    def _seen(self, shown: str | None) -> PicturedText | None:
        if shown is None:
            return None
        try:
            seen = seen_of(json.loads(shown))
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise Refused(f"{self.path} is damaged ({error}); prepare the data again") from error
        if self._images is None:
            return seen
        return replace(seen, pictures=tuple(replace(one, path=str(self._images)) for one in seen.pictures))

    def check(self) -> int:
        """Read all of it; return the largest token. Raises `Refused` if it is damaged."""
        compute: Any = importlib.import_module("pyarrow.compute")
        if any(self.document(at).digest != digest for at, digest in enumerate(self.digests)):
            raise Refused(f"{self.path} is damaged: a document is not what it was; prepare the data again")
        ends = [compute.min_max(batch.column(0).values).as_py() for batch in self._batches]
        if any(one["min"] < 0 for one in ends):
            raise Refused(f"{self.path} is damaged: a token is negative; prepare the data again")
        return max((one["max"] for one in ends), default=0)


def _batches(library: Any, path: Path) -> list[Any]:
    reader = importlib.import_module("pyarrow.ipc").open_file(library.memory_map(str(path)))
    if reader.schema != _schema(library):
        raise ValueError("it has other columns")
    batches = [reader.get_batch(number) for number in range(reader.num_record_batches)]
    for batch in batches:
        batch.validate(full=True)
    return batches
