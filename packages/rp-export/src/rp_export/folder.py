"""Make a folder that is either whole or not there."""

from __future__ import annotations

import shutil
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from rp_checkpoint.files.disk import new_folder_for, put_in_place, remove_leftovers
from rp_trainer.errors import Refused, Unwritable


@contextmanager
def made_whole(target: Path) -> Generator[Path]:
    """Give a folder to write into, which becomes `target` at the end; after an error it is removed.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as place:
    ...     with made_whole(Path(place, "new")) as folder:
    ...         size = (folder / "a").write_text("a")
    ...     [path.name for path in Path(place).iterdir()]
    ['new']

    Raises `Unwritable` for errors of the file system.
    """
    new: Path | None = None
    try:
        target = target.absolute()
        remove_leftovers(target.parent)
        new = new_folder_for(target)
        yield new
        if target.is_dir():
            target.rmdir()
        put_in_place(new, target)
    except OSError as error:
        raise Unwritable(f"--output {target} cannot be written: {error}") from error
    finally:
        if new is not None:
            shutil.rmtree(new, ignore_errors=True)


def check_output(folder: Path) -> None:
    """Raise `Refused` unless the folder is new or empty."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise Refused(f"--output {folder} must be a new or empty folder, but is there already; name another")
