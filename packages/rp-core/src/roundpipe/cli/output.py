"""The files that a job writes: its output folder, and its trace."""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import shutil
import sys
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, cast

from roundpipe import __version__
from roundpipe.cli.errors import Refused, Unwritable

OPTIONS = "options.json"
METRICS = "metrics.jsonl"
MODEL = "model"
CHECKPOINTS = "checkpoints"
TENSORBOARD = "tensorboard"
# Results that only fine-tunings write, and those of the built-in job, whose model is in the folder itself.
OF_FINE_TUNINGS = (MODEL, CHECKPOINTS, TENSORBOARD)
_OF_THE_TOY = ("config.json", "generation_config.json", "model.safetensors")
# The options are last, since they identify a folder of this command.
ALL_RESULTS = (*OF_FINE_TUNINGS, METRICS, *_OF_THE_TOY, OPTIONS)
_LOCK = ".lock"
# The descriptors of the locks that this process has.
_LOCKS: set[int] = set()
_MARK = "roundpipe_version"
_UNFINISHED = ".unfinished"
# Far more than the options take: a larger file is not this command's and is not read.
_MOST_OPTIONS_BYTES = 2**20


def check_output(folder: Path, *, overwrite: bool = False, resume: bool = False) -> None:
    """Raise `Refused` unless the path is new, an empty folder, or has a run that may be replaced or resumed."""
    try:
        _check(folder, replaceable=overwrite or resume)
    except OSError as error:
        raise _unusable(folder, error) from error


@contextmanager
def locked(folder: Path) -> Generator[None]:
    """Create the folder and lock out other processes of this command. Removes the folder if it stays empty.

    The system frees the lock of a killed process, even if a process that it has forked, such as a DataLoader's
    worker, lives on. Raises `Refused` if another process has the lock, or if the folder cannot be written to;
    prints a warning if the file system has no locks.
    """
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = _locked_file(folder)
    except OSError as error:
        raise _unusable(folder, error) from error
    _LOCKS.add(file)
    try:
        yield
    finally:
        # A forked process has no lock to release.
        if file in _LOCKS:
            _LOCKS.remove(file)
            _unlock(folder, file, made)


def _unlock(folder: Path, file: int, made: Sequence[Path]) -> None:
    with suppress(OSError):
        (folder / _LOCK).unlink()
    os.close(file)
    with suppress(OSError):
        # Folders that are not empty stay.
        for path in made:
            path.rmdir()


def _leave_locks() -> None:
    """In a forked process, close the descriptors, which would keep the locks after the parent has ended."""
    while _LOCKS:
        os.close(_LOCKS.pop())


os.register_at_fork(after_in_child=_leave_locks)


def _locked_file(folder: Path) -> int:
    path = folder / _LOCK
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(file)
            raise Refused(
                f"--output {folder} is in use by another process; wait for its end, or name another folder"
            ) from None
        except OSError as error:
            problem = f"{folder} cannot be locked ({error.strerror}): make sure that no other process writes there"
            print(f"roundpipe: {problem}", file=sys.stderr)
            return file
        # The previous holder of the lock may just have removed this file.
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file), path.stat()):
                return file
        os.close(file)


def mark(folder: Path) -> str:
    """Write a random word to this process's lock file; return it. A machine that reads it shares the folder."""
    word = secrets.token_hex(8)
    with writing(f"--output {folder}"):
        (folder / _LOCK).write_text(word, encoding="ascii")
    return word


def is_marked(folder: Path, word: str) -> bool:
    """Return whether the folder's lock file has this word in it."""
    try:
        return (folder / _LOCK).read_text(encoding="ascii") == word
    except (OSError, ValueError):
        return False


def has_run(folder: Path) -> bool:
    """Return whether the folder is the output of an earlier run of this command."""
    return folder.is_dir() and _is_earlier_run(folder)


def earlier_options(folder: Path) -> dict[str, Any]:
    """Return the options of the run whose output the folder is."""
    options: dict[str, Any] = json.loads((folder / OPTIONS).read_bytes())
    return options


def remove_results(folder: Path, names: Sequence[str]) -> None:
    """Remove these results of earlier runs.

    Raises `Refused` if one cannot be removed.
    """
    try:
        for name in names:
            path = folder / name
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
    except OSError as error:
        raise _unusable(folder, error) from error


def create_output(folder: Path, options: Mapping[str, object]) -> None:
    """Create the folder and write the options file, by which later runs recognize it as this command's.

    Raises `Refused` if the folder cannot be written to.
    """
    marked = {_MARK: __version__, **options}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with finished_files(folder) as unfinished:
            unfinished.joinpath(OPTIONS).write_text(json.dumps(marked, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise _unusable(folder, error) from error


def check_profile(path: Path, *, replaceable: bool) -> None:
    """Raise `Refused` for a file that is not empty, unless it may be replaced."""
    if not replaceable and path.is_file() and path.stat().st_size:
        raise Refused(f"--profile {path} exists already; name another file, or replace it by --overwrite")


def create_profile(path: Path) -> None:
    """Create the file for the trace; raise `Refused` if it cannot be written."""
    try:
        path.open("w", encoding="utf-8").close()
    except OSError as error:
        raise Refused(
            f"--profile {path} cannot be written ({error.strerror}); name a file in a folder that exists"
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
            path.replace(folder / path.name)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _sync(path: Path) -> None:
    """Wait until the file is on disk: some file systems notice only then that they are full."""
    with path.open("rb+") as file:
        os.fsync(file.fileno())


def _check(folder: Path, *, replaceable: bool) -> None:
    if folder.exists() and not folder.is_dir():
        raise Refused(f"--output {folder} must be a folder, but is a file; name a new folder")
    if not folder.is_dir() or all(path.name == _LOCK for path in folder.iterdir()):
        return
    if not _is_earlier_run(folder):
        raise Refused(f"--output {folder} has other files in it; name a new or empty folder")
    if not replaceable:
        raise Refused(
            f"--output {folder} has a run already; continue it by --resume, replace it by --overwrite, or name "
            "another folder"
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


def _unusable(folder: Path, error: OSError) -> Refused:
    return Refused(f"--output {folder} cannot be written to ({error.strerror}); name another folder")
