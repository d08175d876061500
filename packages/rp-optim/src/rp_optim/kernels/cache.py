"""The folder that keeps compiled kernels: nobody else may write to it, and each file is what its name says."""

from __future__ import annotations

import hashlib
import os
import stat
from contextlib import suppress
from pathlib import Path

from rp_optim.kernels.build import Compiler, cache_key, compiled


def cache_folder() -> Path:
    """``RP_OPTIM_CACHE``, else ``rp-optim`` in the user's cache; it is made, and free of links.

    Raises `OSError` if there is none, or if others may write to it or replace it.
    """
    folder = _named_folder()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder = folder.resolve(strict=True)
    check_trusted(folder)
    return folder


def _named_folder() -> Path:
    if given := os.environ.get("RP_OPTIM_CACHE"):
        return Path(given)
    # The XDG Base Directory Specification ignores relative paths.
    shared = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if shared.is_absolute():
        return shared / "rp-optim"
    home = os.environ.get("HOME", os.path.expanduser("~"))
    if not os.path.isabs(home):
        raise OSError(f"there is no home folder to cache the kernels in: HOME must be absolute, but is {home!r}")
    return Path(home, ".cache", "rp-optim")


def check_trusted(path: Path) -> None:
    """Raise `PermissionError` if users other than this one and root may change or replace what is at `path`.

    `path` is absolute and free of links. As sshd does for keys: owners and modes of the path and of all folders
    above. Others may write to a folder above if it is sticky, such as ``/tmp``: what is ours stays in it.

    >>> check_trusted(Path("/"))
    """
    for place in (path, *path.parents):
        found = place.lstat()
        if found.st_uid not in (0, os.geteuid()):
            raise PermissionError(f"{place} must belong to this user or root, but belongs to user {found.st_uid}")
        sticky = place != path and found.st_mode & stat.S_ISVTX
        if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not sticky:
            raise PermissionError(f"{place} must not be writable by others; run chmod go-w on it")


def build_cached(compiler: Compiler, folder: Path) -> Path:
    """Compile the kernels into `folder`, under a name that says what is in the file; returns its path.

    Raises as `build` does.
    """
    with compiled(compiler, folder) as made:
        library = folder / f"kernels-{cache_key(compiler)}-{_digest(made)}.so"
        os.replace(made, library)
    return library


def find_cached(compiler: Compiler, folder: Path) -> Path | None:
    """What `build_cached` left in `folder`, if it is ours and still what its name says; what is not is removed.

    Looked at before it is loaded: loading a stranger's library runs it, and reading a mapped library past its end
    kills the process.
    """
    for library in sorted(folder.glob(f"kernels-{cache_key(compiler)}-*.so")):
        with suppress(PermissionError):
            check_trusted(library)
            if library.stem.endswith(f"-{_digest(library)}"):
                return library
        with suppress(OSError):
            library.unlink()
    return None


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()[:32]
