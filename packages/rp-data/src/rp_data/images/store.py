"""Values on disk by key, of which those not used for longest are removed so that all take a bounded room."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import re
import secrets
import shutil
import stat
import time
import warnings
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from rp_trainer.errors import Refused

# Locked by whoever changes what is there; it has the sum of all bytes.
LEDGER = "roundpipe-images"
_ENTRY = re.compile(r"[0-9a-f]{64}")
_UNFINISHED = "unfinished-"
# What a store has in its folder, beside the ledger.
_OWN = re.compile(rf"[0-9a-f]{{2}}|{_UNFINISHED}[0-9a-f]{{16}}|{LEDGER}")
# So many are read to tell whether a folder without a ledger is a store's.
_LOOKED_AT = 8
# Far longer than a value takes to be written.
_ABANDONED_S = 3600.0
# What is left where the room is used up, so that not each further value looks at all others.
_LEFT = 0.9
_DIGEST_BYTES = 32
# Where a system has no room for another file.
_FULL = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True, slots=True)
class _File:
    """A file of the folder. `used_ns`: when it was written or last read."""

    used_ns: int
    nbytes: int
    path: Path


class Store:
    """Values in a folder of their own, by keys of 64 hexadecimal digits, in at most `most_bytes`.

    Any number of processes may use it, of several machines and users, too. A value is there as a whole or not at
    all; one whose file was damaged counts as absent, and is removed if this user may do so.

    >>> import tempfile
    >>> store = Store("--image-cache", Path(tempfile.mkdtemp()) / "images", 1000)
    >>> store.put("a" * 64, b"value")
    >>> store.get("a" * 64), store.get("b" * 64)
    (b'value', None)

    Raises `Refused` for a folder with other files in it, or that cannot be written. `option`: names it.
    """

    def __init__(self, option: str, folder: Path, most_bytes: int) -> None:
        self._what, self._folder, self._most_bytes = f"{option} {folder}", folder, most_bytes
        self._is_broken = False
        try:
            self._open()
        except OSError as error:
            raise Refused(
                f"{self._what} cannot be used: {error.strerror or error}; name another folder"
            ) from error

    @classmethod
    def opener(cls, option: str, folder: Path | None, gigabytes: float) -> Callable[[], Store] | None:
        """Return what opens a folder; None if there is none."""
        return None if folder is None else lambda: cls(option, folder, int(gigabytes * 1e9))

    def _open(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        if not (self._folder / LEDGER).exists() and not self._is_own():
            raise Refused(f"{self._what} has other files in it; name a new or empty folder")
        with self._locked() as ledger:
            left = self._made_room(0)
            _write_sum(ledger, left)
        room = shutil.disk_usage(self._folder).free
        if left + room < self._most_bytes:
            raise Refused(
                f"{self._what} may take {self._most_bytes / 1e9:g} GB, but its disk has room for "
                f"{(left + room) / 1e9:.3g} GB; lower it, or name a folder of another disk"
            )

    def _is_own(self) -> bool:
        """Return whether a folder without a ledger is a store's, or empty: others have files by digests, too."""
        if not all(_OWN.fullmatch(path.name) for path in self._folder.iterdir()):
            return False
        some = [one.path for one in islice(self._found("*/*"), _LOOKED_AT)]
        return not some or any(_ENTRY.fullmatch(one.name) and self._value(one) is not None for one in some)

    def get(self, key: str) -> bytes | None:
        """Return the value of a key; None if there is none."""
        path = self._path(key)
        # Removed by another process, unreadable, or another user's that may only be read: no reason to end a run.
        with suppress(OSError):
            value = self._value(path)
            if value is None:
                path.unlink()
                return None
            with suppress(OSError):
                _touch(path)
            return value
        return None

    @staticmethod
    def _value(path: Path) -> bytes | None:
        """Return the value of a file; None if it is damaged."""
        content = path.read_bytes()
        value = memoryview(content)[_DIGEST_BYTES:]
        return bytes(value) if content[:_DIGEST_BYTES] == _digest(path.name, value) else None

    def put(self, key: str, value: bytes) -> None:
        """Keep a value, unless it alone would take more than all may. A disk that is full ends no run."""
        nbytes = len(value) + _DIGEST_BYTES
        if self._is_broken or nbytes > self._most_bytes or self._path(key).exists():
            return
        try:
            unfinished = self._reserve(nbytes)
            if unfinished is not None:
                self._write(unfinished, key, value)
        except OSError as error:
            self._is_broken = True
            why = "its disk is full" if error.errno in _FULL else error.strerror
            warnings.warn(f"{self._what} keeps no more images: {why}", stacklevel=2)

    def _reserve(self, nbytes: int) -> Path | None:
        """Return a file of so many bytes, after removing others if they do not fit; None if they cannot.

        It has its size before the ledger is free, so whoever adds up what is there has its bytes, too.
        """
        with self._locked() as ledger:
            total = _read_sum(ledger)
            if total is None or total + nbytes > self._most_bytes:
                total = self._made_room(nbytes)
            if total + nbytes > self._most_bytes:
                _write_sum(ledger, total)
                return None
            unfinished = self._folder / f"{_UNFINISHED}{secrets.token_hex(8)}"
            with unfinished.open("xb") as file:
                file.truncate(nbytes)
            _write_sum(ledger, total + nbytes)
        return unfinished

    def _write(self, unfinished: Path, key: str, value: bytes) -> None:
        path = self._path(key)
        try:
            path.parent.mkdir(exist_ok=True)
            with unfinished.open("r+b") as file:
                file.write(_digest(key, value))
                file.write(value)
            _touch(unfinished)
            unfinished.rename(path)
        except BaseException:
            unfinished.unlink(missing_ok=True)
            raise

    def _made_room(self, nbytes: int) -> int:
        """Remove what was not used for longest until so many more bytes fit; return the bytes of what is left."""
        total = self._unfinished_bytes()
        files = sorted(self._files(), key=lambda one: one.used_ns)
        total += sum(one.nbytes for one in files)
        if total + nbytes <= self._most_bytes:
            return total
        for one in files:
            if total + nbytes <= _LEFT * self._most_bytes:
                break
            one.path.unlink(missing_ok=True)
            total -= one.nbytes
        return total

    def _files(self) -> Iterator[_File]:
        """Yield all values."""
        return (one for one in self._found("[0-9a-f][0-9a-f]/*") if _ENTRY.fullmatch(one.path.name))

    def _found(self, pattern: str) -> Iterator[_File]:
        """Yield the files of a pattern. What is no file is none of this store's, and left alone."""
        for path in self._folder.glob(pattern):
            with suppress(FileNotFoundError):
                found = path.stat()
                if stat.S_ISREG(found.st_mode):
                    yield _File(found.st_mtime_ns, found.st_size, path)

    def _unfinished_bytes(self) -> int:
        """Return what is being written, after removing what processes that were ended have left behind."""
        abandoned_ns, total = (time.time() - _ABANDONED_S) * 1e9, 0
        for one in self._found(f"{_UNFINISHED}*"):
            total += one.nbytes
            if one.used_ns < abandoned_ns:
                with suppress(PermissionError):
                    one.path.unlink(missing_ok=True)
                    total -= one.nbytes
        return total

    def _path(self, key: str) -> Path:
        return self._folder / key[:2] / key

    @contextmanager
    def _locked(self) -> Generator[int]:
        ledger = os.open(self._folder / LEDGER, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            # Closing it gives it free, as does the end of the process.
            fcntl.flock(ledger, fcntl.LOCK_EX)
            yield ledger
        finally:
            os.close(ledger)


def _touch(path: Path) -> None:
    """Note that a file is used now. By itself, a system notes the time of its last tick, some milliseconds ago."""
    now_ns = time.time_ns()
    try:
        os.utime(path, ns=(now_ns, now_ns))
    except PermissionError:
        # Only a file's owner may name a time; whoever may write it may take that of the system.
        os.utime(path)


def _read_sum(ledger: int) -> int | None:
    text = os.pread(ledger, 32, 0)
    return int(text) if text.strip().isdigit() else None


def _write_sum(ledger: int, total: int) -> None:
    os.pwrite(ledger, f"{total:<31}\n".encode(), 0)


def _digest(key: str, value: bytes | memoryview) -> bytes:
    """Return a digest of a value under its key: a file that was moved to another name is damaged, too."""
    whole = hashlib.sha256(bytes.fromhex(key))
    whole.update(value)
    return whole.digest()
