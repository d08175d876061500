"""Find the file that is to blame when transformers cannot load a checkpoint."""

from __future__ import annotations

import os
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rp_presets.errors import DamagedFile
from rp_presets.files.checked import weight_files
from rp_presets.files.whole import read_header

# What transformers raises in its own words, or for a machine that lacks something.
_TOLD = (ValueError, OSError, ImportError, MemoryError, NotImplementedError)
# Of a message of another library, so many characters are shown, and of a list of weights so many.
_MOST_TOLD = 300
_NAMES_SHOWN = 3


@contextmanager
def explained(directory: str | os.PathLike[str], loader: Any, options: Mapping[str, Any]) -> Generator[None]:
    """While a checkpoint is loaded, raise `DamagedFile` for an error whose reason is in its files.

    `loader`, `options`: what loads it, and how. Other errors are raised as they are.
    """
    try:
        yield
    except _TOLD:
        raise
    except Exception as error:  # transformers and safetensors raise errors of many kinds
        folder = Path(directory) / str(options.get("subfolder") or "")
        fault = _fault(folder, loader, options, error)
        if fault is None:
            raise
        raise fault from error


def _fault(folder: Path, loader: Any, options: Mapping[str, Any], error: Exception) -> DamagedFile | None:
    from safetensors import SafetensorError

    if isinstance(error, TypeError) and "unexpected keyword argument" in str(error):
        return None  # an option of the caller
    if isinstance(error, SafetensorError):
        return DamagedFile(f"the weights in {folder} cannot be read: {brief(error)}; download them again")
    model = _on_meta(folder, loader, options)
    if isinstance(model, DamagedFile):
        return model
    wrong = [] if model is None else _other_shapes(folder, model)
    if not wrong:
        return None
    shown = ", ".join(wrong[:_NAMES_SHOWN])
    more = f" and {len(wrong) - _NAMES_SHOWN} more" if len(wrong) > _NAMES_SHOWN else ""
    return DamagedFile(
        f"the weights in {folder} do not fit its config.json: {shown}{more}; take both from the same model"
    )


def _on_meta(folder: Path, loader: Any, options: Mapping[str, Any]) -> nn.Module | DamagedFile | None:
    """Return the model of a checkpoint's configuration, without memory; None if the caller has another one."""
    from transformers import AutoConfig

    if options.get("config") is not None:
        return None
    reader: Any = AutoConfig
    is_trusted = options.get("trust_remote_code") is True
    try:
        config = reader.from_pretrained(os.fspath(folder), local_files_only=True, trust_remote_code=is_trusted)
        with torch.device("meta"):
            if hasattr(loader, "from_config"):
                return loader.from_config(config, trust_remote_code=is_trusted)
            return loader(config)
    except Exception as error:  # foreign code
        words = f"{folder / 'config.json'} cannot be used: {brief(error)}; take that of the model"
        return DamagedFile(words)


def _other_shapes(folder: Path, model: nn.Module) -> list[str]:
    """Return what is said of weights that have the model's names, but other shapes."""
    wanted = {name: list(weight.shape) for name, weight in model.state_dict().items()}
    found = {name: entry["shape"] for file in weight_files(folder) for name, entry in read_header(file).items()}
    return [
        f"{name} has the shape {found[name]}, not {shape}"
        for name, shape in wanted.items()
        if name in found and list(found[name]) != shape
    ]


def brief(error: BaseException) -> str:
    """Return the beginning of an error's message in one line, after its class unless that says nothing more.

    >>> brief(KeyError("nix"))
    "KeyError: 'nix'"
    """
    name = "" if isinstance(error, ValueError | OSError | ImportError) else f"{type(error).__name__}: "
    text = " ".join(f"{name}{error}".split())
    return text if len(text) <= _MOST_TOLD else f"{text[:_MOST_TOLD].rpartition(' ')[0]} ..."
