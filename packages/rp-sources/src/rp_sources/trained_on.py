"""Which model an adapter was trained with: noted beside the adapter, and compared where it is put on a model."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rp_presets import DamagedFile, read_object
from rp_presets.files.checked import weight_files
from rp_presets.files.whole import read_header
from rp_strangers.refusing import refusing
from rp_trainer.errors import Refused

# In the folder of an adapter, and the key in the options of a run.
FILE, KEY = "trained_on.json", "trained_on"
_CLASSES, _WEIGHTS = "classes", "weights"
_SAMPLE_BYTES = 1024


def identity_of(model: Path) -> dict[str, Any]:
    """Return what tells a model in a folder from others: its classes, and a digest of its weights.

    The digest is of each tensor's name, dtype, shape and the first, middle and last 1024 bytes, in the order of
    the names: three short reads a tensor, however large the model. How tensors are divided into files, and what
    else is in the folder, does not count; neither does what differs only between the samples.

    Raises `Refused` for files that are damaged.
    """
    with refusing("", (DamagedFile,)):
        config = read_object(model / "config.json")
        return {_CLASSES: config.get("architectures"), _WEIGHTS: _digest(model)}


def write_beside(adapter: Path, identity: Mapping[str, Any]) -> None:
    """Note in the folder of an adapter which model it was trained with."""
    (adapter / FILE).write_text(json.dumps(identity, indent=2) + "\n")


def noted(adapter: Path, recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Return which model an adapter was trained with, by its folder or the options of its run; empty if unknown.

    Raises `Refused` for a note that cannot be read.
    """
    if not (adapter / FILE).is_file():
        return recipe.get(KEY) or {}
    with refusing("", (DamagedFile,)):
        return read_object(adapter / FILE)


def is_other(model: Path, note: Mapping[str, Any]) -> bool:
    """Return whether a model is not the noted one; without a note it is taken to be.

    Raises `Refused` for files that are damaged.
    """
    return bool(note) and identity_of(model) != {name: note.get(name) for name in (_CLASSES, _WEIGHTS)}


def refuse_other(model: Path, adapter: Path, note: Mapping[str, Any]) -> None:
    """Raise `Refused` if an adapter was trained with another model than the one that it is to be put on."""
    if is_other(model, note):
        raise Refused(
            f"the adapter in {adapter} was trained with another model than the one in {model}: the weights there "
            "have been replaced, or it is the wrong one, and the adapter is worth nothing on it; name the model "
            "that it was trained for with --base, or give --other-base to use this one all the same"
        )


def _digest(model: Path) -> str:
    digests = {name: one for file in weight_files(model) for name, one in _digests(file)}
    whole = hashlib.sha256()
    for name in sorted(digests):
        whole.update(digests[name])
    return whole.hexdigest()


def _digests(file: Path) -> Iterator[tuple[str, bytes]]:
    """Yield the name of each tensor in a file, and a digest of what is looked at."""
    tensors = read_header(file)
    with refusing(f"{file} cannot be read: ", (OSError,)), file.open("rb") as opened:
        # Offsets count from the end of the header, which begins with its length.
        data = 8 + int.from_bytes(opened.read(8), "little")
        for name, entry in tensors.items():
            facts = [name, str(entry["dtype"]), [int(size) for size in entry["shape"]]]
            digest = hashlib.sha256(json.dumps(facts).encode())
            first, end = (data + int(offset) for offset in entry["data_offsets"])
            for place in (first, (first + end) // 2, max(first, end - _SAMPLE_BYTES)):
                digest.update(os.pread(opened.fileno(), min(_SAMPLE_BYTES, end - place), place))
            yield name, digest.digest()
