"""The text of the benchmarks: the standard library's source, a part of it held out."""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

HELD_OUT_LEAST = 0.05
HELD_OUT_MOST = 0.10

# Folders to skip: third-party packages are not part of the library; its tests are mostly tables of odd inputs.
_NOT_THE_LIBRARY = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "lib-dynload"})


@dataclass(frozen=True, slots=True)
class Text:
    """The content of a file. `digest`: its SHA-256, by which held-out files are chosen."""

    digest: str
    content: bytes


@dataclass(frozen=True, slots=True)
class Corpus:
    """Bytes to train on, and held-out bytes, never trained on; each joins files in the order of reading."""

    training: bytes
    held_out: bytes


def library_corpus() -> Corpus:
    """Read the standard library's source, and hold a part out. Equal contents count once."""
    texts: dict[str, Text] = {}
    for content in _library():
        text = Text(hashlib.sha256(content).hexdigest(), content)
        texts[text.digest] = text
    return hold_out(list(texts.values()))


def hold_out(texts: Sequence[Text]) -> Corpus:
    """Hold out whole files, in order of their digest, until they make up a twentieth of the bytes.

    Skip a file that would make them more than a tenth. If no file is chosen, as with a single file, hold out the
    last tenth of the largest file instead.

    >>> hold_out([Text(digest="a", content=b"0123456789")])
    Corpus(training=b'012345678', held_out=b'9')
    """
    chosen = _chosen(texts)
    if not chosen:
        return _without_tail(texts)
    return Corpus(
        training=b"".join(text.content for text in texts if text.digest not in chosen),
        held_out=b"".join(text.content for text in texts if text.digest in chosen),
    )


def _chosen(texts: Sequence[Text]) -> frozenset[str]:
    total = sum(len(text.content) for text in texts)
    chosen: set[str] = set()
    size = 0
    for text in sorted(texts, key=lambda text: text.digest):
        if size >= HELD_OUT_LEAST * total:
            break
        if size + len(text.content) <= HELD_OUT_MOST * total:
            chosen.add(text.digest)
            size += len(text.content)
    return frozenset(chosen)


def _without_tail(texts: Sequence[Text]) -> Corpus:
    largest = max(texts, key=lambda text: len(text.content))
    cut = len(largest.content) - int(HELD_OUT_MOST * len(largest.content))
    kept = (text.content[:cut] if text is largest else text.content for text in texts)
    return Corpus(training=b"".join(kept), held_out=largest.content[cut:])


def _library() -> Iterator[bytes]:
    for path in _files_in(Path(sysconfig.get_path("stdlib"))):
        content = path.read_bytes()
        if content and b"\0" not in content:
            yield content


def _files_in(folder: Path) -> Iterator[Path]:
    for parent, folders, names in os.walk(folder):
        # Changed in place: os.walk then visits these folders only, in this order.
        folders[:] = sorted(name for name in folders if name not in _NOT_THE_LIBRARY and not name.startswith("."))
        yield from (Path(parent, name) for name in sorted(names) if name.endswith(".py") and name[0] != ".")
