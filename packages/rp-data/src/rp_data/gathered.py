"""Gather documents as they are made: in memory or, if they would take too much of it, in a file that is mapped."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from rp_strangers.limited import free_bytes

from rp_data.documents import Document
from rp_data.mapped import DocumentWriter, Mapped

# Tokens in memory may take this part of what is free; the model needs the rest.
_PART = 1 / 4
_BYTES_PER_TOKEN = 5
_BYTES_PER_DOCUMENT = 250


class Gathered:
    """Documents in memory, until they take more than `most_bytes`; then in a file of `folder` without a name.

    None for `most_bytes`: a quarter of the memory that is free; for `folder`: that of temporary files. The system
    removes the file when this process ends. Without pyarrow, all stay in memory.
    """

    def __init__(self, folder: Path | None = None, most_bytes: float | None = None) -> None:
        self._folder = folder
        most = free_bytes() * _PART if most_bytes is None else most_bytes
        self._most_bytes = most if find_spec("pyarrow") else float("inf")
        self._documents: list[Document] = []
        self._bytes = 0
        self._writer: DocumentWriter | None = None

    def add(self, documents: Sequence[Document]) -> None:
        """Take documents after those before."""
        if self._writer is not None:
            self._writer.add(documents)
            return
        self._documents += documents
        self._bytes += sum(len(one) * _BYTES_PER_TOKEN + _BYTES_PER_DOCUMENT for one in documents)
        if self._bytes > self._most_bytes:
            self._move()

    def _move(self) -> None:
        # Python closes it when nothing refers to it, and its place in /proc is then another one's.
        self._unnamed = tempfile.TemporaryFile(dir=self._folder)  # noqa: SIM115
        self._path = Path(f"/proc/self/fd/{self._unnamed.fileno()}")
        self._writer = DocumentWriter(self._path)
        self._writer.add(self._documents)
        self._documents = []

    def table(self) -> Sequence[Document]:
        """Return all, as they were added."""
        if self._writer is None:
            return self._documents
        self._writer.close()
        with self._unnamed:
            return Mapped(self._path)


class InFile:
    """Documents in a file, from the first on."""

    def __init__(self, path: Path) -> None:
        self._path, self._writer = path, DocumentWriter(path)

    def add(self, documents: Sequence[Document]) -> None:
        """Take documents after those before."""
        self._writer.add(documents)

    def table(self) -> Sequence[Document]:
        """Return all, as they were added."""
        self._writer.close()
        return Mapped(self._path)
