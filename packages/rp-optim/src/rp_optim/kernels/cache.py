"""The cache folder of compiled kernels: only this user may write to it, and file names contain content hashes."""

from __future__ import annotations

import hashlib
import os
import stat
from contextlib import suppress
from pathlib import Path

from rp_optim.kernels.build import CCompiler, cache_key, compiled


def cache_folder() -> Path:
    """Create the cache folder and return its path with symbolic links resolved.

    It is ``RP_OPTIM_CACHE``, else ``rp-optim`` in ``XDG_CACHE_HOME``, else in ``~/.cache``.

    Raises `OSError` if it cannot be created, or if other users may write to it or replace it.
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
        raise OSError(
            f"there is no home folder to cache the kernels in: HOME must be absolute, but is {home!r}; "
            "correct it, or set RP_OPTIM_CACHE"
        )
    return Path(home, ".cache", "rp-optim")


def check_trusted(path: Path) -> None:
    """Raise `PermissionError` if any user but this one and root may change or replace the file at `path`.

    `path`: absolute, without symbolic links. As sshd does for keys, this checks owner and mode of the path and of
    all folders above it. A folder above may be writable by others if it is sticky, such as ``/tmp``: others cannot
    replace our files there.

    >>> check_trusted(Path("/"))
    """
    for place in (path, *path.parents):
        status = place.lstat()
        if status.st_uid not in (0, os.geteuid()):
            raise PermissionError(
                f"{place} must belong to this user or root, but belongs to user {status.st_uid}; choose another "
                "folder with RP_OPTIM_CACHE"
            )
        sticky = place != path and status.st_mode & stat.S_ISVTX
        if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not sticky:
            raise PermissionError(f"{place} must not be writable by others; run chmod go-w on it")


def build_cached(compiler: CCompiler, folder: Path) -> Path:
    """Compile the kernels into `folder`; return the path, whose name has the cache key and the content hash.

    Raises as `build` does.
    """
    with compiled(compiler, folder) as made:
        library = folder / f"kernels-{cache_key(compiler)}-{_digest(made)}.so"
        os.replace(made, library)
    return library


def find_cached(compiler: CCompiler, folder: Path) -> Path | None:
    """Find a library that `build_cached` made in `folder`; remove those that others may change or have changed.

    The checks come before loading, since loading runs the library's code, and a truncated library kills the
    process.
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
