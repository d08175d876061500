"""Create and remove folders durably and atomically."""

from __future__ import annotations

import os
import shutil
import socket
import uuid
from pathlib import Path

# Name prefixes of folders that are being written or removed, beside the finished ones.
_MAKING = ".saving-"
_REMOVING = ".removing-"


def new_folder_for(target: Path) -> Path:
    """Create the folder in which the contents of `target` are written, on the same file system."""
    target.parent.mkdir(parents=True, exist_ok=True)
    new = target.parent / f"{_MAKING}{target.name}-{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
    new.mkdir()
    return new


def put_in_place(new: Path, target: Path) -> None:
    """Rename a finished folder to `target`, durably."""
    sync_tree(new)
    os.rename(new, target)
    sync_folder(target.parent)


def write_durably(path: Path, content: bytes) -> None:
    """Write a file and force it to the disk."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def sync_file(path: Path) -> None:
    """Force a file to the disk."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def sync_tree(folder: Path) -> None:
    """Force the directory entries of a folder, and of the folders in it, to the disk."""
    for inner in sorted(path for path in folder.rglob("*") if path.is_dir()):
        sync_folder(inner)
    sync_folder(folder)


# Folders are synced like files.
sync_folder = sync_file


def remove(folder: Path) -> None:
    """Remove a folder; it is renamed first, so that a half-removed folder has another name."""
    gone = folder.parent / f"{_REMOVING}{folder.name}-{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
    os.rename(folder, gone)
    shutil.rmtree(gone)


def remove_leftovers(parent: Path) -> None:
    """Remove what ended processes of this machine left half written or removed, and what this one half removed."""
    own = f"-{socket.gethostname()}-{os.getpid()}-"
    for path in parent.glob(".*"):
        is_own = path.name.startswith(_REMOVING) and own in path.name
        if is_own or (path.name.startswith((_MAKING, _REMOVING)) and _is_left(path.name)):
            shutil.rmtree(path, ignore_errors=True)


def _is_left(name: str) -> bool:
    rest, _, process = name.rpartition("-")[0].rpartition("-")
    if not rest.endswith(f"-{socket.gethostname()}") or not process.isdigit():
        return False
    try:
        os.kill(int(process), 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return False
