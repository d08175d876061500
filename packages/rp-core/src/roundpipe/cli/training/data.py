"""The text that a job trains on, and the part of it that is held out."""

from __future__ import annotations

import hashlib
import os
import random
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from roundpipe.cli.errors import Refused

HELD_OUT_LEAST = 0.05
HELD_OUT_MOST = 0.10

MOST_TEXT_BYTES = 2**30
_PART_BYTES = 2**20

# Third-party packages are not the library's own; its test folders are mostly tables of odd inputs.
_NOT_THE_LIBRARY = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "lib-dynload"})


@dataclass(frozen=True, slots=True)
class Text:
    """The content of a file; `digest` is its SHA-256, by which files are chosen to be held out."""

    digest: str
    content: bytes


@dataclass(frozen=True, slots=True)
class Corpus:
    """Bytes to train on, and bytes never trained on; each of whole files, one after the other in order of path."""

    training: bytes
    held_out: bytes


def read_corpus(paths: Sequence[Path] | None) -> Corpus:
    """Read files and folders, or the standard library's source if paths are None, and hold a part out.

    The same content always falls in the same part, whatever its name and however often it is there; it counts
    once. Folders are searched to any depth; hidden files and binary ones (with a zero byte) are left out.

    Raises `Refused` if a path is missing or cannot be read, or if nothing readable or more than 1 GiB was found.
    """
    texts = _distinct(_library() if paths is None else _contents(paths))
    if not texts:
        raise Refused(f"no text was found in {_named(paths)}; name text files, or folders that hold some")
    return hold_out(texts)


def hold_out(texts: Sequence[Text]) -> Corpus:
    """Take whole files out, in order of their digest, until they are a twentieth of the bytes.

    A file that would make them more than a tenth is passed over. If that leaves none, as with a single file, the
    last tenth of the largest file is held out instead.

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


def check_size(corpus: Corpus, *, batch_size: int, seq_len: int) -> None:
    """Refuse a corpus that cannot fill one batch, or whose held-out part cannot fill one sequence."""
    wanted, found = batch_size * seq_len + 1, len(corpus.training)
    if found < wanted:
        raise Refused(
            f"one batch of {batch_size} sequences of {seq_len} bytes takes {wanted} bytes of text, but there are "
            f"{found} to train on; give more text, or lower --batch-size or --seq-len"
        )
    if len(corpus.held_out) <= seq_len:
        raise Refused(
            f"a sequence takes {seq_len + 1} bytes of held-out text, but there are {len(corpus.held_out)} beside "
            f"the {found} to train on; give more text, or lower --seq-len"
        )


def training_starts(text_bytes: int, *, seed: int, step: int, batch_size: int, seq_len: int) -> list[int]:
    """Where the sequences of one step begin; it depends on the arguments alone, not on devices or earlier steps.

    >>> training_starts(100, seed=0, step=3, batch_size=2, seq_len=8)
    [7, 67]
    """
    # A string seeds by its SHA-512, so neighbouring seeds and steps have nothing in common.
    numbers = random.Random(f"{seed} {step}")
    return [numbers.randrange(text_bytes - seq_len) for _ in range(batch_size)]


def held_out_starts(text_bytes: int, *, count: int, seq_len: int) -> list[int]:
    """Where the held-out sequences begin: evenly spaced, overlapping if the text is short.

    >>> held_out_starts(101, count=4, seq_len=10)
    [0, 30, 60, 90]
    """
    last = text_bytes - seq_len - 1
    return [index * last // max(1, count - 1) for index in range(count)]


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


def _distinct(contents: Iterable[bytes]) -> list[Text]:
    texts: dict[str, Text] = {}
    found = 0
    for content in contents:
        text = Text(hashlib.sha256(content).hexdigest(), content)
        found += 0 if text.digest in texts else len(content)
        _check_most(found)
        texts[text.digest] = text
    return list(texts.values())


def _library() -> Iterator[bytes]:
    paths = _files_in(Path(sysconfig.get_path("stdlib")), without=_NOT_THE_LIBRARY)
    return _readable(path for path in paths if path.suffix == ".py")


def _contents(paths: Sequence[Path]) -> Iterator[bytes]:
    # os.path here and below, since pathlib raises where a folder on the way is not ours to read.
    for path in paths:
        if os.path.isdir(path):
            yield from _readable(_files_in(path))
        else:
            yield _named_file(path)


def _named_file(path: Path) -> bytes:
    if os.path.exists(path) and not os.path.isfile(path):
        raise Refused(f"--data {path} must be a file or a folder, but is neither; write what it holds to a file")
    try:
        content = _text(path)
    except OSError as error:
        raise Refused(f"--data {path} cannot be read ({error.strerror}); name text files or folders") from error
    if content is None:
        raise Refused(f"--data {path} must be text, but holds zero bytes; name text files or folders")
    return content


def _text(path: Path) -> bytes | None:
    """What a file holds, or None if there is a zero byte in it; no more is read than there may be."""
    content = bytearray()
    with path.open("rb") as file:
        while part := file.read(_PART_BYTES):
            if b"\0" in part:
                return None
            content += part
            _check_most(len(content))
    return bytes(content)


def _check_most(found: int) -> None:
    if found > MOST_TEXT_BYTES:
        raise Refused(
            f"the text must have at most {MOST_TEXT_BYTES} bytes, since memory holds it several times, but has "
            "more; name a part of it with --data"
        )


def _readable(paths: Iterable[Path]) -> Iterator[bytes]:
    """The texts among files that nobody named one by one; whatever else lies in a folder is passed over."""
    # A pipe in a folder would never end: regular files only.
    for path in filter(os.path.isfile, paths):
        try:
            content = _text(path)
        except OSError:
            continue
        if content:
            yield content


def _files_in(folder: Path, *, without: frozenset[str] = frozenset()) -> Iterator[Path]:
    for parent, folders, names in os.walk(folder):
        # Changed in place: this is how os.walk is told where to go, and in which order.
        folders[:] = sorted(name for name in folders if name not in without and not name.startswith("."))
        yield from (Path(parent, name) for name in sorted(names) if not name.startswith("."))


def _named(paths: Sequence[Path] | None) -> str:
    return "the standard library" if paths is None else ", ".join(str(path) for path in paths)
