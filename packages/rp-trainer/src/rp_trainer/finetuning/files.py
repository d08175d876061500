"""The files that a run writes: its folder, with a lock, and its trace."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import secrets
import shutil
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

from rp_trainer.errors import Refused, Unwritable
from rp_trainer.finetuning.settings import Names

_LOG = logging.getLogger(__name__)
OPTIONS = "options.json"
METRICS = "metrics.jsonl"
MODEL = "model"
CHECKPOINTS = "checkpoints"
TENSORBOARD = "tensorboard"
REPORT = "report.html"
# What trackers call the run, and what they keep in its folder.
TRACKERS = "trackers.json"
_TRACKED = ("wandb", "mlflow.db")
# The options are last, since they identify a run's folder.
ALL_RESULTS = (MODEL, CHECKPOINTS, TENSORBOARD, REPORT, *_TRACKED, TRACKERS, METRICS, OPTIONS)
_LOCK = ".lock"
# The descriptors of the locks that this process has.
_LOCKS: set[int] = set()
NAMES = Names()
_MARK = "roundpipe_version"
_UNFINISHED = ".unfinished"
# Far more than the options take: a larger file is not a run's and is not read.
_MOST_OPTIONS_BYTES = 2**20


def check_output(folder: Path, names: Names = NAMES, *, overwrite: bool = False, resume: bool = False) -> None:
    """Raise `Refused` unless the path is new, an empty folder, or has a run that may be replaced or resumed."""
    try:
        _check(folder, names, replaceable=overwrite or resume)
    except OSError as error:
        raise _unusable(folder, names, error) from error


class Lock:
    """A folder that this process has locked. `folder`: where it is. `names`: what messages call it."""

    def __init__(self, folder: Path, file: int, made: Sequence[Path], names: Names) -> None:
        self.folder, self.names = folder, names
        self._file = file
        self._made = made
        _LOCKS.add(file)

    def is_in(self, folder: Path) -> bool:
        """Return whether the folder has this very lock."""
        try:
            return os.path.samestat(os.fstat(self._file), (folder / _LOCK).stat())
        except (FileNotFoundError, NotADirectoryError):
            return False

    def moved_to(self) -> Path | None:
        """Return where the locked folder is now; None if it was removed, or if the system does not tell."""
        try:
            path = Path(os.readlink(f"/proc/self/fd/{self._file}"))
        except OSError:
            return None
        return path.parent if path.name == _LOCK and self.is_in(path.parent) else None

    def take_again(self, folder: Path, prepare: Callable[[Path], None]) -> None:
        """Create and lock a folder instead, once `prepare` has written to it; after an error all is as before.

        Raises `Refused` if another process has it, `OSError` if it cannot be written to.
        """
        made = [path for path in (folder, *folder.parents) if not path.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        new = Lock(folder, _locked_file(folder, self.names), made, self.names)
        try:
            prepare(folder)
        except BaseException:
            new.leave()
            raise
        self.leave()
        self.folder, self._file, self._made = folder, new._file, made

    def leave(self) -> None:
        """Unlock; remove the folders that were made for it and are empty."""
        # A forked process has no lock to release.
        if self._file not in _LOCKS:
            return
        if self.is_in(self.folder):
            with suppress(OSError):
                (self.folder / _LOCK).unlink()
        self._close()
        with suppress(OSError):
            # Folders that are not empty stay.
            for path in self._made:
                path.rmdir()

    def _close(self) -> None:
        if self._file in _LOCKS:
            _LOCKS.remove(self._file)
            os.close(self._file)


@contextmanager
def locked(folder: Path, names: Names = NAMES) -> Generator[Lock]:
    """Create the folder and lock out other processes. Removes the folder if it stays empty.

    The system frees the lock of a killed process, even if a process that it has forked, such as a DataLoader's
    worker, lives on. Raises `Refused` if another process has the lock, or if the folder cannot be written to;
    prints a warning if the file system has no locks.
    """
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = Lock(folder, _locked_file(folder, names), made, names)
    except OSError as error:
        raise _unusable(folder, names, error) from error
    try:
        yield lock
    finally:
        with suppress(OSError):
            lock.leave()


def _leave_locks() -> None:
    """In a forked process, close the descriptors, which would keep the locks after the parent has ended."""
    while _LOCKS:
        os.close(_LOCKS.pop())


os.register_at_fork(after_in_child=_leave_locks)


def _locked_file(folder: Path, names: Names) -> int:
    path = folder / _LOCK
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(file)
            raise Refused(
                f"{names.folder} {folder} is in use by another process; wait for its end, or name another folder"
            ) from None
        except OSError as error:
            _LOG.warning(
                "%s cannot be locked (%s): make sure that no other process writes there", folder, error.strerror
            )
            return file
        # The previous holder of the lock may just have removed this file.
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file), path.stat()):
                return file
        os.close(file)


def mark(folder: Path, names: Names = NAMES) -> str:
    """Write a random word to this process's lock file; return it. A machine that reads it shares the folder."""
    word = secrets.token_hex(8)
    with writing(f"{names.folder} {folder}"):
        (folder / _LOCK).write_text(word, encoding="ascii")
    return word


def is_marked(folder: Path, word: str) -> bool:
    """Return whether the folder's lock file has this word in it."""
    try:
        return (folder / _LOCK).read_text(encoding="ascii") == word
    except (OSError, ValueError):
        return False


def has_run(folder: Path) -> bool:
    """Return whether the folder is the folder of an earlier run."""
    return folder.is_dir() and _is_earlier_run(folder)


def earlier_options(folder: Path) -> dict[str, Any]:
    """Return the options of the run whose output the folder is."""
    options: dict[str, Any] = json.loads((folder / OPTIONS).read_bytes())
    return options


def earlier_model(steps: int | str) -> str:
    """Return the name of the model that a run had after so many steps, before it was extended."""
    return f"{MODEL}-after-step-{steps}"


def remove_results(folder: Path, names: Names) -> None:
    """Remove the results of an earlier run.

    Raises `Refused` if one cannot be removed.
    """
    try:
        for path in (*folder.glob(earlier_model("*")), *(folder / name for name in ALL_RESULTS)):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
    except OSError as error:
        raise _unusable(folder, names, error) from error


def create_output(folder: Path, options: Mapping[str, object], names: Names) -> None:
    """Create the folder and write the options file, by which later runs recognize it as a run's.

    Raises `Refused` if the folder cannot be written to.
    """
    marked = {_MARK: version("rp-trainer"), **options}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with finished_files(folder) as unfinished:
            unfinished.joinpath(OPTIONS).write_text(json.dumps(marked, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise _unusable(folder, names, error) from error


def check_profile(path: Path, names: Names, *, replaceable: bool) -> None:
    """Raise `Refused` for a file that is not empty, unless it may be replaced, or that cannot be there."""
    if not replaceable and path.is_file() and path.stat().st_size:
        raise Refused(
            f"{names.profile} {path} exists already; name another file, or replace it by {names.overwrite}"
        )
    _check_place(path, names)


def _check_place(path: Path, names: Names) -> None:
    if path.is_dir() or not path.parent.is_dir():
        problem = os.strerror(errno.EISDIR if path.is_dir() else errno.ENOENT)
        raise Refused(f"{names.profile} {path} cannot be written ({problem}); name a file in a folder that exists")


def create_profile(path: Path, names: Names) -> None:
    """Create the file for the trace; raise `Refused` if it cannot be written."""
    try:
        path.open("w", encoding="utf-8").close()
    except OSError as error:
        raise Refused(
            f"{names.profile} {path} cannot be written ({error.strerror}); name a file in a folder that exists"
        ) from error


@contextmanager
def writing(what: str) -> Generator[None, None, None]:
    """Raise `Unwritable` if a write inside the context fails, for example because the disk is full.

    `what` names the output in the error message.
    """
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, SafetensorError) as error:
        raise Unwritable(f"{what} cannot be written ({error}); make room, or name another place") from error


@contextmanager
def finished_files(folder: Path) -> Generator[Path, None, None]:
    """Yield a temporary folder; when the context ends without error, move its files into `folder`.

    Files of the same names are replaced. After an error the temporary folder is removed with all its files.
    """
    unfinished = folder / _UNFINISHED
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        unfinished.mkdir()
        yield unfinished
        made = sorted(unfinished.iterdir())
        for path in filter(Path.is_file, unfinished.rglob("*")):
            _sync(path)
        for path in made:
            if (there := folder / path.name).is_dir() and not there.is_symlink():
                # A folder replaces only an empty one. Left for the removal of all that is unfinished.
                there.replace(unfinished / f".replaced-{path.name}")
            path.replace(there)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _sync(path: Path) -> None:
    """Wait until the file is on disk: some file systems notice only then that they are full."""
    with path.open("rb+") as file:
        os.fsync(file.fileno())


def _check(folder: Path, names: Names, *, replaceable: bool) -> None:
    if folder.exists() and not folder.is_dir():
        raise Refused(f"{names.folder} {folder} must be a folder, but is a file; name a new folder")
    if not folder.is_dir() or all(path.name == _LOCK for path in folder.iterdir()):
        return
    if not _is_earlier_run(folder):
        raise Refused(f"{names.folder} {folder} has other files in it; name a new or empty folder")
    if not replaceable:
        raise Refused(
            f"{names.folder} {folder} has a run already; continue it by {names.resume}, replace it by "
            f"{names.overwrite}, or name another folder"
        )


def _is_earlier_run(folder: Path) -> bool:
    path = folder / OPTIONS
    # Regular files only: reading a pipe of this name would never end.
    if not path.is_file() or path.stat().st_size > _MOST_OPTIONS_BYTES:
        return False
    try:
        content: Any = json.loads(path.read_bytes())  # Any: whatever the file holds
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(content, dict) and _MARK in cast("dict[Any, Any]", content)


def _unusable(folder: Path, names: Names, error: OSError) -> Refused:
    return Refused(f"{names.folder} {folder} cannot be written to ({error.strerror}); name another folder")
