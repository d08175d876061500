"""A checkpoint whose files have been checked: its description and its tensors by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rp_checkpoint.errors import CheckpointDamaged, CheckpointError
from rp_checkpoint.files.manifest import (
    DESCRIPTION,
    FORMAT,
    OWN,
    check,
    checked_names,
    description_of,
    digest_of,
)
from rp_checkpoint.files.tensor_file import Stored, catalogue
from rp_checkpoint.files.values import Tensor, decode

# Counters and the like, which optimizers read at once.
_SMALL_BYTES = 128


class Opened:
    """A checkpoint whose files are unchanged. `description`: its ``training.json``. `digest`: identifies it.

    Raises `CheckpointDamaged`, which names the file, or `CheckpointError` if one cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        names = check(path)
        self.digest = digest_of(path)
        self.description = _description(path)
        files = checked_names(names)
        self._own = {key: stored for name in files[OWN] for key, stored in catalogue(path / name).items()}
        self._model = {key: stored for name in files[""] for key, stored in catalogue(path / name).items()}

    def stored(self, key: str) -> Stored:
        """Return the tensor with this name in the description."""
        outer, _, inner = key.partition("/")
        table, name = (self._model, inner) if outer == "model" else (self._own, key)
        if name not in table:
            raise CheckpointDamaged(f"{self.path} has no tensor {key}, which its training.json names")
        return table[name]

    def value(self, name: str) -> Any:
        """Return one entry of the description, with its tensors."""
        return self.decoded(self.description[name])

    def decoded(self, value: Any) -> Any:
        """Decode a part of the description, with its tensors read into new memory."""
        return decode(value, lambda name: self.stored(name).read())

    def decoded_later(self, value: Any) -> Any:
        """Decode a part of the description; all tensors but small ones are `Deferred`."""
        return decode(value, self._later)

    def _later(self, name: str) -> Tensor:
        stored = self.stored(name)
        return stored.read() if stored.nbytes <= _SMALL_BYTES else stored.deferred()


def _description(path: Path) -> dict[str, Any]:
    try:
        description = description_of(path)
    except (OSError, ValueError) as error:
        raise CheckpointDamaged(f"{path / DESCRIPTION} cannot be read: {error}") from error
    if (form := description.get("format")) != FORMAT:
        raise CheckpointError(
            f"{path} has format {form}, but this version of RoundPipe reads format {FORMAT}; load it with the "
            "version that wrote it"
        )
    return description
