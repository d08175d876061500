"""Read the text of a training job, hold a part out, and choose the sequences of each step."""

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


def read_corpus(paths: Sequence[Path] | None) -> Corpus:
    """Read files and folders, or the standard library's source if paths are None, and hold a part out.

    Equal contents count once, and file names do not affect which part a content falls in. Folders are searched to
    any depth, without hidden files and binary files (with a zero byte).

    Raises `Refused` if a path is missing, cannot be read or is a binary file, or if no text or more than 1 GiB was
    found.
    """
    texts = _distinct(_library() if paths is None else _contents(paths))
    if not texts:
        raise Refused(f"no text was found in {_named(paths)}; name text files, or folders that hold some")
    return hold_out(texts)


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


def check_size(corpus: Corpus, *, batch_size: int, seq_len: int) -> None:
    """Raise `Refused` if the training part cannot fill one batch, or the held-out part one sequence."""
    wanted, available = batch_size * seq_len + 1, len(corpus.training)
    if available < wanted:
        raise Refused(
            f"one batch of {batch_size} sequences of {seq_len} bytes takes {wanted} bytes of text, but there are "
            f"{available} to train on; provide more text, or lower --batch-size or --seq-len"
        )
    if len(corpus.held_out) <= seq_len:
        raise Refused(
            f"a sequence takes {seq_len + 1} bytes of held-out text, but there are {len(corpus.held_out)}, and "
            f"{available} to train on; provide more text, or lower --seq-len"
        )


def training_starts(text_bytes: int, *, seed: int, step: int, batch_size: int, seq_len: int) -> list[int]:
    """Draw the offsets of one step's sequences.

    They depend only on the arguments, not on devices or earlier steps.

    >>> training_starts(100, seed=0, step=3, batch_size=2, seq_len=8)
    [7, 67]
    """
    # A string seeds by its SHA-512, so neighbouring seeds and steps give unrelated numbers.
    numbers = random.Random(f"{seed} {step}")
    return [numbers.randrange(text_bytes - seq_len) for _ in range(batch_size)]


def held_out_starts(text_bytes: int, *, count: int, seq_len: int) -> list[int]:
    """Return the offsets of the held-out sequences: evenly spaced, overlapping if the text is short.

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
    nbytes = 0
    for content in contents:
        text = Text(hashlib.sha256(content).hexdigest(), content)
        nbytes += 0 if text.digest in texts else len(content)
        _check_most(nbytes)
        texts[text.digest] = text
    return list(texts.values())


def _library() -> Iterator[bytes]:
    paths = _files_in(Path(sysconfig.get_path("stdlib")), without=_NOT_THE_LIBRARY)
    return _readable(path for path in paths if path.suffix == ".py")


def _contents(paths: Sequence[Path]) -> Iterator[bytes]:
    # os.path here and below: pathlib raises an error if a parent folder may not be read.
    for path in paths:
        if os.path.isdir(path):
            yield from _readable(_files_in(path))
        else:
            yield _named_file(path)


def _named_file(path: Path) -> bytes:
    if os.path.exists(path) and not os.path.isfile(path):
        raise Refused(f"--data {path} must be a file or a folder, but is neither; write its content to a file")
    try:
        content = _text(path)
    except OSError as error:
        raise Refused(f"--data {path} cannot be read ({error.strerror}); name text files or folders") from error
    if content is None:
        raise Refused(f"--data {path} must be text, but holds zero bytes; name text files or folders")
    return content


def _text(path: Path) -> bytes | None:
    """Read a file; return None if it has a zero byte. Raises `Refused` as soon as it exceeds the limit."""
    content = bytearray()
    with path.open("rb") as file:
        while part := file.read(_PART_BYTES):
            if b"\0" in part:
                return None
            content += part
            _check_most(len(content))
    return bytes(content)


def _check_most(nbytes: int) -> None:
    if nbytes > MOST_TEXT_BYTES:
        raise Refused(
            f"the text must have at most {MOST_TEXT_BYTES} bytes, since memory holds it several times, but has "
            "more; name a part of it with --data"
        )


def _readable(paths: Iterable[Path]) -> Iterator[bytes]:
    """Read the text files among the files of a folder; skip empty, binary and unreadable ones."""
    # Regular files only: reading a pipe would never end.
    for path in filter(os.path.isfile, paths):
        try:
            content = _text(path)
        except OSError:
            continue
        if content:
            yield content


def _files_in(folder: Path, *, without: frozenset[str] = frozenset()) -> Iterator[Path]:
    for parent, folders, names in os.walk(folder):
        # Changed in place: os.walk then visits these folders only, in this order.
        folders[:] = sorted(name for name in folders if name not in without and not name.startswith("."))
        yield from (Path(parent, name) for name in sorted(names) if not name.startswith("."))


def _named(paths: Sequence[Path] | None) -> str:
    return "the standard library" if paths is None else ", ".join(str(path) for path in paths)
