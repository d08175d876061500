"""One file of working state in a directory: without a name where the file system has such files."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import secrets
import sys
import zlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from weakref import finalize

from rp_optim.disk.memory import empty_memory
from rp_optim.disk.system import PAGE, SYSTEM, System
from rp_optim.disk.watch import DiskWork, watched
from rp_optim.errors import DiskError, DiskFull

_log = logging.getLogger(__name__)

_MODE = 0o600
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# What file systems answer that have no files without a name, or no O_DIRECT.
_UNSUPPORTED = (errno.EOPNOTSUPP, errno.EINVAL, errno.EISDIR, errno.ENOENT, errno.ENOSYS)
# Transfers of less than the alignment before a disk counts as failed.
_TRIES = 8
# The bytes of one write that reserves space.
_ZEROS_BYTES = 8 << 20
_NAME = "roundpipe-{user}-{number}.working-state"


@dataclass(frozen=True, slots=True)
class Contents:
    """What a file holds, in the words of errors, and what else to do where there is no space for it."""

    name: str = "working state"
    remedy: str = "keep smaller state (state='8bit')"


WORKING_STATE = Contents()


class WorkingFile:
    """A file without a name (`O_TMPFILE`), which nobody else can open and which ends with this object or process.

    `alignment`: what addresses, offsets and sizes must be multiples of. `is_direct`: whether the system's cache is
    passed by (`O_DIRECT`).

    Raises `DiskError`, and `DiskFull` where there is no space; each names the directory.
    """

    def __init__(
        self, directory: str, descriptor: int, system: System, contents: Contents = WORKING_STATE
    ) -> None:
        self.directory = directory
        self.contents = contents
        self.descriptor = descriptor
        self._system = system
        # Never closed otherwise: a queued transfer would go to whatever file gets this number next.
        finalize(self, os.close, descriptor).atexit = False
        self.alignment, self.is_direct = PAGE, False
        self._try_direct()
        _log.info("%s is in %s: %s", contents.name, directory, self.described())

    def described(self) -> str:
        """Say in words how the file is opened."""
        how = "O_DIRECT" if self.is_direct else "through the system's cache, since it has no O_DIRECT"
        return f"{how}, aligned to {self.alignment} bytes"

    def _try_direct(self) -> None:
        alignment = self._system.alignment(self.descriptor)
        flags = fcntl.fcntl(self.descriptor, fcntl.F_GETFL)
        try:
            if alignment <= 0:
                return
            fcntl.fcntl(self.descriptor, fcntl.F_SETFL, flags | os.O_DIRECT)
            self._try_out(max(alignment, PAGE))
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise self._failed("be written", 0, error) from error
            fcntl.fcntl(self.descriptor, fcntl.F_SETFL, flags)
        else:
            self.alignment, self.is_direct = max(alignment, PAGE), True

    def _try_out(self, nbytes: int) -> None:
        memory = memoryview(empty_memory(nbytes))
        self._system.write(self.descriptor, memory, 0)
        self._system.read(self.descriptor, memory, 0)

    def reserve(self, nbytes: int, start: int = 0) -> None:
        """Reserve space for `nbytes` from `start` on, so that no later write lacks any: if need be, by zeros."""
        try:
            if nbytes:
                self._system.reserve(self.descriptor, start, nbytes)
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise self._failed(f"get {nbytes} bytes", start, error) from error
            self._fill(nbytes, start)

    def _fill(self, nbytes: int, start: int) -> None:
        zeros = memoryview(empty_memory(min(nbytes, _ZEROS_BYTES)))
        for done in range(0, nbytes, _ZEROS_BYTES):
            self.write_any(zeros[: nbytes - done], start + done)

    def read(self, memory: memoryview, offset: int) -> None:
        """Fill the memory from the file at `offset`."""
        self.read_any(memory, offset, len(memory))

    def write(self, memory: memoryview, offset: int) -> None:
        """Write all of the memory to the file at `offset`."""
        self.write_any(memory, offset)

    def read_any(self, memory: memoryview, offset: int, needed: int) -> None:
        """Fill `needed` bytes of the memory at least, from any range: the file may end there. Not checked."""
        with watched(DiskWork("read", self.directory, needed)):
            self._transfer(self._system.read, "be read", memory, offset, needed)

    def write_any(self, memory: memoryview, offset: int) -> None:
        """Write a range of which others will be read."""
        with watched(DiskWork("write", self.directory, len(memory))):
            self._transfer(self._system.write, "be written", memory, offset, len(memory))

    def _transfer(
        self,
        call: Callable[[int, memoryview, int], int],
        what: str,
        memory: memoryview,
        offset: int,
        needed: int,
    ) -> None:
        """Move `needed` bytes of the memory at least."""
        done = tries = 0
        while done < needed:
            try:
                moved = call(self.descriptor, memory[done:], offset + done)
            except OSError as error:
                raise self._failed(what, offset + done, error) from error
            before, done = done, self._aligned(done + max(moved, 0), needed)
            tries = tries + 1 if done == before else 0
            if moved <= 0 or tries > _TRIES:
                raise DiskError(
                    f"{self._place(offset + done)} cannot {what}: the system moves {max(moved, 0)} of "
                    f"{needed - done} bytes; the file was cut, or the disk fails"
                )

    def _aligned(self, moved: int, nbytes: int) -> int:
        """Round down what was moved of `nbytes`: the rest must begin aligned, so a part of it is moved twice."""
        return moved if moved >= nbytes else moved // self.alignment * self.alignment

    def _place(self, offset: int) -> str:
        return f"the {self.contents.name} in {self.directory} (at byte {offset})"

    def _failed(self, what: str, offset: int, error: OSError) -> DiskError:
        if error.errno in _NO_SPACE:
            return DiskFull(
                f"{self._place(offset)} cannot {what}: {error.strerror}; {free_bytes(self.directory)} bytes "
                f"are free. Free some, name more directories (disk:DIR,DIR), or {self.contents.remedy}"
            )
        return DiskError(f"{self._place(offset)} cannot {what}: {error.strerror or error}")


class NamedFile(WorkingFile):
    """A file with a name, locked by its process, and with a checksum of each range that was written.

    For file systems without `O_TMPFILE`, where others can write the file. What a killed process left is removed by
    the next that opens one in this directory.
    """

    def __init__(self, directory: str, system: System, contents: Contents = WORKING_STATE) -> None:
        _remove_abandoned(directory)
        self._path = Path(directory) / _NAME.format(user=os.getuid(), number=secrets.token_hex(8))
        descriptor = system.open(str(self._path), os.O_RDWR | os.O_CREAT | os.O_EXCL, _MODE)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        finalize(self, _unlink, self._path, os.getpid())
        self._checksums: dict[int, int] = {}
        super().__init__(directory, descriptor, system, contents)

    def described(self) -> str:
        """Say in words how the file is opened."""
        return f"{super().described()}, as {self._path.name} with checksums: it has no files without a name"

    def read(self, memory: memoryview, offset: int) -> None:
        """Fill the memory. Raises `DiskError` if this range, written as one, has changed since."""
        super().read(memory, offset)
        if self._checksums.get(offset) != zlib.crc32(memory):
            raise DiskError(f"{self._path} was changed at byte {offset} by another program or by its disk")

    def write(self, memory: memoryview, offset: int) -> None:
        """Write all of the memory, and note its checksum."""
        super().write(memory, offset)
        self._checksums[offset] = zlib.crc32(memory)


def open_file(directory: str, system: System = SYSTEM, contents: Contents = WORKING_STATE) -> WorkingFile:
    """Open a file of working state, or other contents, in a directory, which must exist.

    Raises `DiskError` if it cannot be, with the reason.
    """
    if sys.platform != "linux":
        raise DiskError(f"{contents.name} on disk needs Linux, but this is {sys.platform}; keep it in memory")
    try:
        # A plain file system check first: O_TMPFILE answers ENOENT both for lack of it and for no directory.
        if not Path(directory).is_dir():
            raise DiskError(f"{contents.name} needs a directory, but {directory} is none; make it first")
        return _opened(directory, system, contents)
    except OSError as error:
        raise DiskError(f"{contents.name} cannot be opened in {directory}: {error.strerror or error}") from error


def _opened(directory: str, system: System, contents: Contents) -> WorkingFile:
    try:
        descriptor = system.open(directory, os.O_TMPFILE | os.O_RDWR, _MODE)
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
        return NamedFile(directory, system, contents)
    return WorkingFile(directory, descriptor, system, contents)


def free_bytes(directory: str) -> int:
    """Return the bytes that this user may still write in a directory; 0 if that cannot be told."""
    try:
        told = os.statvfs(directory)
    except OSError:
        return 0
    return told.f_bavail * told.f_frsize


def _unlink(path: Path, process: int) -> None:
    # A forked child has this object, but not the file.
    if os.getpid() == process:
        with suppress(OSError):
            path.unlink()


def _remove_abandoned(directory: str) -> None:
    """Remove this user's files whose processes have ended: nobody holds their locks."""
    for path in Path(directory).glob(_NAME.format(user=os.getuid(), number="*")):
        with suppress(OSError):
            descriptor = os.open(path, os.O_RDWR)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
            finally:
                os.close(descriptor)
