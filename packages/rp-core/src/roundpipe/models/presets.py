"""What knows a model library's own models and files; packages provide it under an entry point."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.metadata import entry_points
from os import PathLike
from pathlib import Path
from typing import Any, Protocol

import torch
from rp_checkpoint import Conversion
from torch import nn

GROUP = "roundpipe.presets"
_INSTALL = "install rp-presets: pip install 'rp-core[hf]'"


class StoredPacked(Protocol):
    """A packed weight as a checkpoint stores it; see `rp_presets.StoredPacked`."""

    format: str
    codes: torch.Tensor
    scales: torch.Tensor


class SavedLayout(Protocol):
    """The names under which a model saves its tensors; see `rp_presets.SavedLayout`."""

    @property
    def names(self) -> Mapping[str, str]:
        """Maps names in the files to names in the model."""
        ...

    @property
    def conversions(self) -> tuple[Conversion, ...]:
        """What makes those that are not in the model as they are saved."""
        ...


class Presets(Protocol):
    """What an entry point of the group ``roundpipe.presets`` leads to; the module `rp_presets` is one."""

    UnsupportedModel: type[NotImplementedError]

    def to_sequential(self, model: nn.Module, *, example_inputs: Mapping[str, Any] | None = None) -> nn.Sequential:
        """Return a model as a row of layers that share its parameters; raise `UnsupportedModel` if it is none."""
        ...

    def load_pretrained(
        self, directory: str | PathLike[str], model_class: type[Any] | None = None, **options: Any
    ) -> nn.Module:
        """Load a checkpoint, whose weights stay in mapped files."""
        ...

    def load_packed(
        self, directory: str | PathLike[str], model_class: type[Any] | None = None, **options: Any
    ) -> tuple[nn.Module, Mapping[str, StoredPacked]]:
        """Load a checkpoint of packed weights: a model without them, and these by name."""
        ...

    def checkpoint_bytes(
        self, directory: str | PathLike[str], dtype: torch.dtype | None = None, *, subfolder: str = ""
    ) -> int:
        """Return the bytes of a checkpoint's weights once they are loaded."""
        ...

    def saves_itself(self, model: nn.Module) -> bool:
        """Return whether a model has a `save_pretrained` whose layout `saved_layout` knows."""
        ...

    def saved_layout(self, model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> SavedLayout:
        """Return the layout in which the model saves these tensors."""
        ...

    def write_configuration(self, model: nn.Module, folder: Path) -> None:
        """Write the files beside the weights."""
        ...


@cache
def presets() -> Presets | None:
    """Return the presets that are installed, which are imported now; None without any.

    >>> presets().__name__
    'rp_presets'
    """
    found = sorted(entry_points(group=GROUP), key=lambda point: point.name)
    return found[0].load() if found else None


def presets_for(purpose: str) -> Presets:
    """Return the presets. Raises `ImportError`, which says what to install, without any."""
    found = presets()
    if found is None:
        raise ImportError(f"{purpose}, {_INSTALL}")
    return found


def row_of_preset(
    model: nn.Module, example_inputs: Mapping[str, Any] | None, *, required: bool
) -> nn.Sequential | None:
    """Return the model as a row of layers; None if it is none.

    Raises `NotImplementedError` in its place if a row is `required`, and `ImportError`, with what to install, for
    a model of transformers without presets.
    """
    if presets() is None and not required and not _is_of_transformers(model):
        return None
    found = presets_for(f"to wrap a {type(model).__name__} without use_sequential_preset=False")
    try:
        return found.to_sequential(model, example_inputs=example_inputs)
    except found.UnsupportedModel:
        if required:
            raise
        return None


def presets_that_save(model: nn.Module) -> Presets | None:
    """Return the presets that know how this model is saved; None if it has no layout of its own.

    Raises `ImportError`, with what to install, for a model of transformers without presets.
    """
    found = presets_for(f"to save a {type(model).__name__}") if _is_of_transformers(model) else presets()
    return None if found is None or not found.saves_itself(model) else found


def _is_of_transformers(model: nn.Module) -> bool:
    return any(each.__module__.partition(".")[0] == "transformers" for each in type(model).__mro__)
