"""A folder for MLX, made by mlx_lm's own converter."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import torch
from rp_checkpoint.files.tensor_file import Stored, catalogue
from rp_trainer.errors import Refused, Unwritable

_LINES_SHOWN = 3


def check_converter() -> None:
    """Raise `Refused` if mlx_lm is missing."""
    if importlib.util.find_spec("mlx_lm") is None:
        raise Refused("--format mlx needs mlx_lm: pip install mlx-lm, on Linux 'mlx[cpu]' as well")


def write_folder(model: Path, folder: Path, *, unchecked: bool) -> str:
    """Convert a model's folder to a new one; return what to tell of the comparison with it.

    Raises `Unwritable` if the converter fails, or if a tensor of the same name has other values.
    """
    command = [sys.executable, "-m", "mlx_lm", "convert", "--hf-path", str(model), "--mlx-path", str(folder)]
    ran = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    if ran.returncode:
        last = " | ".join(ran.stderr.strip().splitlines()[-_LINES_SHOWN:])
        raise Unwritable(f"mlx_lm cannot convert the model: {last}")
    return "not compared with the model's" if unchecked else _compared(_tensors(folder), _tensors(model))


def _tensors(folder: Path) -> dict[str, Stored]:
    return {name: one for file in sorted(folder.glob("*.safetensors")) for name, one in catalogue(file).items()}


def _compared(theirs: dict[str, Stored], ours: dict[str, Stored]) -> str:
    common = [name for name in ours if name in theirs and ours[name].shape == theirs[name].shape]
    other = [
        name for name in common if not torch.equal(ours[name].read().to(theirs[name].dtype), theirs[name].read())
    ]
    if other or not common:
        names = ", ".join(other[:_LINES_SHOWN]) or "all"
        raise Unwritable(
            f"the folder for MLX must have the model's values, but {names} differ; --unchecked keeps the folder"
        )
    left = len(ours) - len(common)
    return f"{len(common)} tensors are the model's" + (
        f"; {left} have other names or shapes there" if left else ""
    )
