"""The checksums of a checkpoint's files, and the marker file that shows that it is complete."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rp_checkpoint.errors import CheckpointDamaged, CheckpointError
from rp_checkpoint.files.disk import sync_file, sync_tree, write_durably
from rp_checkpoint.files.tensor_file import STRIDE_BYTES

# The version of what is in a checkpoint.
FORMAT = 1
# The folder of a checkpoint's own files, beside those of `save_pretrained`.
OWN = "roundpipe"
DESCRIPTION = f"{OWN}/training.json"
_MANIFEST = f"{OWN}/manifest.json"
_MARKER = f"{OWN}/complete"
_READERS = 4


@dataclass(frozen=True, slots=True)
class Checksum:
    """A file's size, and the SHA-256 of each stride of `STRIDE_BYTES` bytes."""

    nbytes: int
    strides: tuple[str, ...]


def digest(content: bytes | memoryview) -> str:
    """Return the SHA-256 of these bytes, in hexadecimal."""
    return hashlib.sha256(content).hexdigest()


def seal(folder: Path, known: Mapping[str, Checksum]) -> None:
    """Write the manifest, then the marker, when all else is on the disk. `known`: checksums by relative path."""
    sums = dict(known)
    for name in _files(folder):
        if name not in sums:
            sync_file(folder / name)
            sums[name] = _summed(folder / name)
    content = json.dumps({name: asdict(sums[name]) for name in sorted(sums)}, indent=1).encode()
    write_durably(folder / _MANIFEST, content)
    sync_tree(folder)
    write_durably(folder / _MARKER, digest(content).encode())
    sync_tree(folder)


def _files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def _summed(path: Path) -> Checksum:
    nbytes, strides = 0, list[str]()
    with path.open("rb") as file:
        while piece := file.read(STRIDE_BYTES):
            nbytes += len(piece)
            strides.append(digest(piece))
    return Checksum(nbytes, tuple(strides))


def is_finished(folder: Path) -> bool:
    """Return whether the folder has the marker, which is written last; its files are not checked."""
    return (folder / _MARKER).is_file()


def description_of(folder: Path) -> dict[str, Any]:
    """Return what a checkpoint says of itself; its ``facts`` have the step, `data`, the metric and the model's.

    The file is not checked. Raises `OSError` or `ValueError` if it cannot be read.
    """
    return json.loads((folder / DESCRIPTION).read_bytes())


def digest_of(folder: Path) -> str:
    """Return the SHA-256 of a finished checkpoint's manifest, which identifies it."""
    return _read(folder / _MARKER).decode()


def check(folder: Path) -> tuple[str, ...]:
    """Read all files and compare them with the manifest; return their names.

    Raises `CheckpointDamaged`, which names the first file that differs from the manifest, and `CheckpointError`
    for a file that cannot be read and for a folder that contains checkpoints.
    """
    _refuse_several(folder)
    sums = _manifest(folder)
    with ThreadPoolExecutor(_READERS, "roundpipe-verify") as pool:
        for error in pool.map(_compared, [folder / name for name in sums], sums.values()):
            if error is not None:
                raise error
    return tuple(sums)


def _refuse_several(folder: Path) -> None:
    inside = [] if is_finished(folder) else [marker.parents[1] for marker in folder.glob(f"*/{_MARKER}")]
    if inside:
        newest = max(inside, key=lambda path: (path / _MARKER).stat().st_mtime_ns)
        raise CheckpointError(
            f"{folder} is a folder of checkpoints, not one of them; load the newest with "
            f"CheckpointManager({str(folder)!r}).load_latest(model, optimizer), or name one, such as {newest}"
        )


def _manifest(folder: Path) -> dict[str, Checksum]:
    marker, content = _read(folder / _MARKER), _read(folder / _MANIFEST)
    if marker != digest(content).encode():
        raise CheckpointDamaged(f"{folder / _MANIFEST} is not the one that {_MARKER} was written for")
    listed: dict[str, Any] = json.loads(content)
    return {name: Checksum(entry["nbytes"], tuple(entry["strides"])) for name, entry in listed.items()}


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError as error:
        raise CheckpointDamaged(f"{path} is missing, so this is not a finished checkpoint") from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def _compared(path: Path, wanted: Checksum) -> CheckpointError | None:
    try:
        if (size := path.stat().st_size) != wanted.nbytes:
            return CheckpointDamaged(f"{path} must have {wanted.nbytes} bytes, but has {size}")
        with path.open("rb", buffering=0) as file:
            for index, stride in enumerate(wanted.strides):
                if digest(_whole_read(file)) != stride:
                    first = index * STRIDE_BYTES
                    return CheckpointDamaged(f"{path} was changed: its bytes from {first} on are not as written")
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return CheckpointDamaged(f"{path} is missing")
    except OSError as error:
        return CheckpointError(f"{path} cannot be read: {error}")
    return None


def _whole_read(file: Any) -> bytes:
    """Read the next stride, in as many reads as needed."""
    pieces: list[bytes] = []
    left = STRIDE_BYTES
    while left and (piece := file.read(left)):
        pieces.append(piece)
        left -= len(piece)
    return b"".join(pieces)


def checked_names(names: Iterable[str]) -> dict[str, list[str]]:
    """Return the safetensors files among these: "" for the model's, `OWN` for the engine's."""
    files: dict[str, list[str]] = {"": [], OWN: []}
    for name in names:
        if name.endswith(".safetensors"):
            files[OWN if name.startswith(f"{OWN}/") else ""].append(name)
    return files
