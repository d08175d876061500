"""Work on what strangers wrote, in a process of its own with limits of processor time and memory.

Templates in a model's folder and expressions of its tokenizer can run without end, or take all memory, within one
call of C code. No signal handler and no check between calls stops that; limits of the system do.
"""

from __future__ import annotations

import ctypes
import gc
import json
import mmap
import os
import resource
import select
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

from rp_trainer.errors import Refused

# Processor time: some 50 times what slow tokenizers take, 1 MB/s, and templates, 300 us a conversation.
_LEAST_S = 20.0
_S_PER_BYTE = 1 / 20_000
_S_PER_ITEM = 0.02
# Memory beside what the process has when it begins: some 10 times what tokenizers take for each byte.
_LEAST_BYTES = 2**30
_BYTES_PER_BYTE = 512
# A process that sleeps for as long waits for what does not come.
_MOST_IDLE_S = 120.0
_LOOK_S = 5.0
_ALMOST = 0.7
_NOTE_BYTES = 4096
_MOST_PLACE = 500
_MOST_COMPLAINTS_BYTES = 2**16
_GB = 1e9
_PR_SET_PDEATHSIG = 1

_MESSAGE, _REFUSED, _SHORT, _FAILED, _DONE = b"m", b"r", b"s", b"f", b"d"
_LENGTH_BYTES = 8


class Unlimited:
    """The budget of work in this process: none."""

    def allow(self, place: str, nbytes: int, items: int = 1) -> None:
        """Raise the limits by what is right for so many more bytes or items, which are worked on next."""

    def at(self, place: str) -> None:
        """Note what is worked on next, for the error message."""


class Budget(Unlimited):
    """What a limited process may use, by the work that it was given so far."""

    def __init__(self, note: mmap.mmap) -> None:
        self._note = note
        self._seconds = _LEAST_S + _used_s()
        self._begun_bytes, self._most_bytes = _data_bytes(), 0
        self.allow("", 0, 0)

    def allow(self, place: str, nbytes: int, items: int = 1) -> None:
        """Raise the limits by what is right for so many more bytes or items, which are worked on next."""
        self._seconds += nbytes * _S_PER_BYTE + items * _S_PER_ITEM
        self._most_bytes = max(self._most_bytes, nbytes)
        # No more than is free: otherwise the system might end another process.
        self._room_bytes = min(_LEAST_BYTES + _BYTES_PER_BYTE * self._most_bytes, free_bytes())
        self._limit_s = _limit(resource.RLIMIT_CPU, int(self._seconds) + 1)
        _limit(resource.RLIMIT_DATA, self._begun_bytes + self._room_bytes)
        self.at(place)

    def at(self, place: str) -> None:
        """Note what is worked on next; the other process reads it if this one is ended."""
        fields = {"place": place[:_MOST_PLACE], "seconds": self._limit_s, "room_bytes": self._room_bytes}
        note = json.dumps(fields).encode() + b"\n"
        self._note[: len(note)] = note


def _limit(kind: int, soft: int) -> int:
    """Set a limit, or the session's if that is lower; return it."""
    hard = resource.getrlimit(kind)[1]
    soft = soft if hard == resource.RLIM_INFINITY else min(soft, hard)
    resource.setrlimit(kind, (soft, hard))
    return soft


def _used_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _data_bytes() -> int:
    """Return the private memory of this process, about as RLIMIT_DATA counts it."""
    return int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()


def free_bytes() -> int:
    """Return how much memory is free."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))


def limited(what: str, hint: str, work: Callable[[Budget], Iterable[bytes]]) -> Iterator[bytes]:
    """Yield what `work` yields, which runs in a forked process with limits.

    >>> list(limited("the example", "write another one", lambda budget: [b"one", b"two"]))
    [b'one', b'two']

    Args:
        what: what is at fault if a limit is exceeded, for the error message.
        hint: what the user can do then.
        work: called with the budget, by which it says what it works on next. It must not use torch's threads or
            devices: a forked process has neither.

    What the process writes to stdout and stderr goes to this one's stderr when the work is done.

    Raises `Refused` as `work` does, and if it exceeds a limit, crashes or stops.
    """
    with _Process(what, hint, work) as process:
        yield from process.messages()


class _Process:
    """A forked process that does the work. Leaving the context ends it."""

    def __init__(self, what: str, hint: str, work: Callable[[Budget], Iterable[bytes]]) -> None:
        self._what, self._hint = what, hint
        self._note = mmap.mmap(-1, _NOTE_BYTES)
        self._complaints = os.memfd_create("complaints")
        self._reader, writer = os.pipe()
        self._unread = bytearray()
        self._pid = _forked()
        if not self._pid:
            _run(work, self._note, writer, self._complaints)
        os.close(writer)

    def messages(self) -> Iterator[bytes]:
        """Yield the messages until the last. Raises `Refused`, also if the process ends before."""
        while True:
            kind, content = self._message()
            match kind:
                case b"m":
                    yield content
                case b"d":
                    self._tell_complaints()
                    return
                case b"r":
                    raise Refused(content.decode())
                case b"f":
                    raise RuntimeError(f"reading failed in a process of its own:\n{content.decode()}")
                case b"s":
                    raise Refused(self._too_much_memory())
                case _:
                    raise Refused(self._why_it_ended())

    def _message(self) -> tuple[bytes, bytes]:
        """Return the next message and its kind, which is empty if the process has ended before its last one."""
        head = self._read(1 + _LENGTH_BYTES)
        content = None if head is None else self._read(int.from_bytes(head[1:], "little"))
        return (b"", b"") if head is None or content is None else (head[:1], content)

    def _read(self, nbytes: int) -> bytes | None:
        while len(self._unread) < nbytes:
            self._wait()
            if not (part := os.read(self._reader, 1 << 20)):
                return None
            self._unread += part
        content = bytes(self._unread[:nbytes])
        del self._unread[:nbytes]
        return content

    def _wait(self) -> None:
        """Wait for something to read. Raises `Refused` if the process sleeps and nothing wakes it."""
        slept_s, before = 0.0, _activity(self._pid)
        while not select.select([self._reader], [], [], _LOOK_S)[0]:
            now = _activity(self._pid)
            slept_s = slept_s + _LOOK_S if now == before and now[0] == "S" else 0.0
            before = now
            if slept_s >= _MOST_IDLE_S:
                raise Refused(f"{self._place()}: {self._what} must come to an end, but waits; {self._hint}")

    def _why_it_ended(self) -> str:
        _, status, used = os.wait4(self._pid, 0)
        self._pid = 0
        number = -os.waitstatus_to_exitcode(status)
        seconds = self._noted()["seconds"]
        # Where the session has the same limit (ulimit -t), it ends by another signal; figures differ by ticks.
        is_over = used.ru_utime + used.ru_stime > _ALMOST * seconds
        if number == signal.SIGXCPU or (number == signal.SIGKILL and is_over):
            return (
                f"{self._place()}: {self._what} must take at most {seconds:.0f} s of processor time up to here, "
                f"but takes more, perhaps without an end; {self._hint}"
            )
        # The system ends a process if memory is short; libraries abort theirs.
        if number == signal.SIGKILL or b"allocation" in self._complained():
            return self._too_much_memory()
        name = signal.Signals(number).name if number in set(signal.Signals) else f"exit code {-number}"
        return f"{self._place()}: {self._what} crashed ({name}); {self._hint}"

    def _too_much_memory(self) -> str:
        room_gb = self._noted()["room_bytes"] / _GB
        return (
            f"{self._place()}: {self._what} must take at most {room_gb:.1f} GB of memory, but takes more; "
            f"{self._hint}"
        )

    def _noted(self) -> dict[str, Any]:
        try:
            noted: dict[str, Any] = json.loads(self._note[:].partition(b"\n")[0])
        except ValueError:  # it was ended while it wrote
            noted = {}
        return {"place": "the data", "seconds": _LEAST_S, "room_bytes": _LEAST_BYTES, **noted}

    def _place(self) -> str:
        return self._noted()["place"]

    def _complained(self) -> bytes:
        return os.pread(self._complaints, _MOST_COMPLAINTS_BYTES, 0)

    def _tell_complaints(self) -> None:
        if text := self._complained().decode(errors="backslashreplace"):
            sys.stderr.write(text)

    def __enter__(self) -> _Process:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pid:
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)
        os.close(self._reader)
        os.close(self._complaints)
        self._note.close()


def _activity(pid: int) -> tuple[str, int]:
    """Return a process's state, such as S for sleeping, and the processor time that it has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return fields[0], int(fields[11]) + int(fields[12])


def _forked() -> int:
    with warnings.catch_warnings():
        # Python warns of the locks of other threads. The new process uses nothing of theirs.
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def _run(work: Callable[[Budget], Iterable[bytes]], note: mmap.mmap, writer: int, complaints: int) -> NoReturn:
    """Do the work in the new process, send its messages, and end without what the interpreter does at exit."""
    try:
        _leave_all(writer, complaints)
        for message in work(Budget(note)):
            _send(writer, _MESSAGE, message)
        _send(writer, _DONE, b"")
    except Refused as refusal:
        _send(writer, _REFUSED, str(refusal).encode())
    except MemoryError:
        _send(writer, _SHORT, b"")
    except BaseException:
        _send(writer, _FAILED, traceback.format_exc().encode(errors="backslashreplace"))
    finally:
        os._exit(0)


def _leave_all(*kept: int) -> None:
    """Give up what belongs to the first process: signals, descriptors, and objects that would close others."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # If the first process is killed, this one ends, too.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # Connections to other machines, for example, must end with the first process. The numbers stay in use, since
    # objects of the first process may yet close theirs.
    nowhere = os.open(os.devnull, os.O_RDWR)
    for number in map(int, os.listdir("/proc/self/fd")):
        if number not in (*kept, nowhere):
            os.dup2(nowhere, number)
    os.dup2(kept[-1], 1)
    os.dup2(kept[-1], 2)
    sys.stdout = sys.stderr = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
    # Collections leave the first process's objects alone: their finalizers are not for this one.
    gc.freeze()


def _send(writer: int, kind: bytes, content: bytes) -> None:
    left = memoryview(kind + len(content).to_bytes(_LENGTH_BYTES, "little") + content)
    while left:
        left = left[os.write(writer, left) :]
