"""The folder of a run: found again where it was moved to, made anew where it was removed."""

from __future__ import annotations

import logging
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from rp_trainer.errors import Refused, Unwritable
from rp_trainer.finetuning.files import (
    OPTIONS,
    Lock,
    check_output,
    finished_files,
    is_marked,
    locked,
    mark,
    writing,
)
from rp_trainer.finetuning.settings import Names
from rp_trainer.processes import ALONE, Processes

_LOG = logging.getLogger(__name__)
# So many names are tried for a folder beside one that cannot be used.
_MOST_BESIDE = 100


class OthersFolder:
    """The folder of a run in which another process, the first one, writes the common files."""

    # How often it was found elsewhere, or made anew.
    changes = 0
    # The first process tells of a folder beside.
    beside = ""

    def __init__(self, folder: Path, names: Names, *, resume: bool) -> None:
        self.folder, self.names, self.resume = folder, names, resume

    def note_options(self) -> None:
        """Nothing: the first process has them."""

    def keep(self) -> None:
        """Nothing: the first process keeps it."""

    def ready(self) -> Path:
        """Return the folder."""
        return self.folder

    def move_beside(self) -> Path:
        """Return the folder: the first process moves."""
        return self.folder

    def to_resume(self) -> str:
        """Return what is to be done to go on with the run, in words."""
        return f"{self.names.same_call} {self.names.resume}"


class RunFolder:
    """The folder of a run, of which `lock` is held. `folder`: where it is now. `resume`: a run in it goes on."""

    def __init__(self, lock: Lock, *, resume: bool) -> None:
        self._lock, self.names, self.resume = lock, lock.names, resume
        self._given = lock.folder
        self._options = b""
        # How often it was found elsewhere, or made anew.
        self.changes = 0
        # Why a folder beside is used instead; empty if none is.
        self.beside = ""
        self._told = ""

    @property
    def folder(self) -> Path:
        """Where the folder is, or was when it was last seen."""
        return self._lock.folder

    def note_options(self) -> None:
        """Remember the options file, without which the folder could not be resumed."""
        with writing(f"{self.names.folder} {self.folder}"):
            self._options = (self.folder / OPTIONS).read_bytes()

    def keep(self) -> None:
        """As `ready`; what cannot be done is told, once, and tried again the next time."""
        try:
            self.ready()
        except Unwritable as error:
            self._tell(f"{error}; the training continues")

    def ready(self) -> Path:
        """Return the folder, with its lock and its options file.

        Where it was moved to, if the system tells; a new one if it was removed. Raises `Unwritable` if something
        else has its name now, or if it cannot be written to.
        """
        with writing(f"{self.names.folder} {self.folder}"):
            if not self._lock.is_in(self.folder):
                self._find_again()
            if not (self.folder / OPTIONS).exists():
                self._write_options(self.folder)
        return self.folder

    def _find_again(self) -> None:
        was, moved = self.folder, self._lock.moved_to()
        if moved is not None:
            self._lock.folder = moved
            self.changes += 1
            self._tell(f"{self.names.folder} {was} was moved: the run goes on in {moved}")
            return
        self._check_free(was)
        try:
            self._lock.take_again(was, self._write_options)
        except Refused as error:
            raise Unwritable(str(error)) from error
        self.changes += 1
        self._tell(f"{self.names.folder} {was} was removed: it is made anew, without what was in it")

    def _check_free(self, folder: Path) -> None:
        if not folder.exists():
            return
        if not folder.is_dir():
            raise Unwritable(f"{self.names.folder} {folder} is a file now; move it away")
        options = folder / OPTIONS
        is_own = options.is_file() and options.read_bytes() == self._options
        if not is_own and any(not path.name.startswith(".") for path in folder.iterdir()):
            raise Unwritable(f"{self.names.folder} {folder} is another folder now; move it away")

    def _write_options(self, folder: Path) -> None:
        with finished_files(folder) as unfinished:
            (unfinished / OPTIONS).write_bytes(self._options)

    def move_beside(self) -> Path:
        """Go on in a new folder beside this one, unless this one can be used; return the folder.

        A full disk would be full there, too, so it is no reason. Raises `Unwritable` if there cannot be one.
        """
        try:
            self._check_usable()
        except Unwritable as error:
            why = str(error)
        else:
            return self.folder
        near = self._given.absolute()
        with writing(f"a folder beside {self.names.folder} {self._given}"):
            free = (near.with_name(f"{near.name}-{number}") for number in range(1, _MOST_BESIDE))
            chosen = next(path for path in free if not path.exists())
            self._lock.take_again(chosen, self._write_options)
            self.changes += 1
        self.beside = why
        return chosen

    def _check_usable(self) -> None:
        folder = self.ready()
        with writing(f"{self.names.folder} {folder}"), TemporaryDirectory(prefix=".unfinished-", dir=folder):
            pass

    def to_resume(self) -> str:
        """Return what is to be done to go on with the run, in words."""
        place = "" if self.folder == self._given else f"{self.names.folder} {self.folder} and "
        return f"{self.names.same_call} {place}{self.names.resume}"

    def _tell(self, words: str) -> None:
        if words != self._told:
            self._told = words
            _LOG.warning("%s", words)


Folder = RunFolder | OthersFolder


@contextmanager
def taken(
    folder: Path,
    *,
    overwrite: bool = False,
    resume: bool = False,
    names: Names | None = None,
    processes: Processes = ALONE,
) -> Generator[Folder]:
    """Create the folder of a run and keep other processes out of it; `processes` share it.

    `overwrite`: an earlier run in it is replaced. `resume`: it goes on from its newest whole checkpoint.

    >>> with TemporaryDirectory() as parent, taken(Path(parent, "run")) as folder:
    ...     folder.to_resume()
    'the same call with resume=True'

    Raises `Refused` for a folder that has other files, or a run that may neither be replaced nor resumed, and for
    one that another process has, or that not all processes see.
    """
    names = names or Names()
    with ExitStack() as stack:

        def take() -> Folder:
            if not processes.is_first:
                return OthersFolder(folder, names, resume=resume)
            check_output(folder, names, overwrite=overwrite, resume=resume)
            lock = stack.enter_context(locked(folder, names))
            # The process that had the lock may have written there.
            check_output(folder, names, overwrite=overwrite, resume=resume)
            return RunFolder(lock, resume=resume)

        own = processes.all(take)
        word = processes.lead(lambda: mark(folder, names))
        processes.see(lambda: is_marked(folder, word), f"{names.folder} {folder}")
        yield own
