"""Write the model of a run, with its adapter merged: as safetensors, as a GGUF file, or for MLX."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

from rp_sources.sources import Source
from rp_trainer.errors import Refused

from rp_export.card import CardContent, write_card
from rp_export.folder import check_output, made_whole
from rp_export.formats import gguf, mlx
from rp_export.whole import ExportedModel, write_whole
from rp_export.writing import TextEnds


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportSettings:
    """How a model is exported.

    `type`: of a GGUF file's numbers, as llama.cpp's converter names them. `adapter_only`: the adapter as a GGUF
    file of its own. `unchecked`: keep a file whose values are not the model's. `llama_cpp`: a checkout, None for
    that of ``ROUNDPIPE_LLAMA_CPP``. `unrounded`: of a run with packed weights, take those of the model's files.

    >>> ExportSettings(format="gguf", type="q8_0").unchecked
    False

    Raises `ValueError` for a format that is not there.
    """

    format: Literal["gguf", "safetensors", "mlx"] = "safetensors"
    type: str = "auto"
    adapter_only: bool = False
    unchecked: bool = False
    llama_cpp: Path | None = None
    unrounded: bool = False

    def __post_init__(self) -> None:
        if self.format not in ("gguf", "safetensors", "mlx"):
            raise ValueError(f"format must be gguf, safetensors or mlx, but is {self.format!r}")

    def check(self) -> Path | None:
        """Return the checkout of llama.cpp, if one is needed. Raises `Refused`, with what to install."""
        if self.format == "mlx":
            mlx.check_converter()
        return gguf.check_converter(self.llama_cpp) if self.format == "gguf" else None


@dataclass(frozen=True, slots=True)
class Exported:
    """What was written. `told`: in words, compared with what. `whole`: the model, if it was written anew."""

    told: str
    whole: ExportedModel | None = None


def merge(
    source: Source,
    output: Path,
    *,
    unrounded: bool = False,
    options: Mapping[str, Any] | None = None,
    ends: TextEnds | None = None,
) -> ExportedModel:
    """Merge the adapter of a source into its model, and write that to a new folder, which transformers loads.

    One weight at a time is in memory, beside the adapter. `unrounded`: of a run with packed weights, merge into
    those of the model's files. `options`: of the run, for the card, see `CardContent`. `ends`: see `write_whole`.

    Raises `Refused` for what cannot be merged, `Unwritable` for what cannot be written.
    """
    check_output(output)
    if source.adapter is None:
        raise Refused(f"{source.model} is a whole model, so there is nothing to merge")
    with made_whole(output) as folder:
        whole = write_whole(folder, source, is_rounded=not unrounded, ends=ends)
        write_card(folder, CardContent("merged", source, whole, options or {}))
    return whole


def export(
    source: Source,
    output: Path,
    settings: ExportSettings | None = None,
    *,
    options: Mapping[str, Any] | None = None,
    ends: TextEnds | None = None,
) -> Exported:
    """Write the model of a source, with its adapter merged, to a new folder; `options`: of the run, for the card.

    `ends`: see `write_whole`.

    Raises `Refused` for what cannot be exported, `Unwritable` for what cannot be written, or has other values.
    """
    settings = settings or ExportSettings()
    check_output(output)
    checkout = settings.check()
    if settings.adapter_only:
        _check_adapter(source)
    with made_whole(output) as folder:
        done = _written(folder, source, settings, checkout, ends)
        write_card(folder, CardContent("exported", source, done.whole, options or {}))
    return done


def _check_adapter(source: Source) -> None:
    if source.adapter is None:
        raise Refused(f"--adapter-only: {source.model} is a whole model, and no adapter")
    gguf.check_simple(source.adapter)


def _written(
    folder: Path, source: Source, settings: ExportSettings, checkout: Path | None, ends: TextEnds | None
) -> Exported:
    if settings.adapter_only and checkout is not None and source.adapter is not None:
        file, kind = folder / "adapter.gguf", settings.type
        return Exported(
            gguf.write_adapter_file(
                checkout, source.adapter, source.model, file, kind, unchecked=settings.unchecked
            )
        )
    if settings.format == "safetensors":
        whole = write_whole(folder, source, is_rounded=not settings.unrounded, ends=ends)
        return Exported(f"{whole.weights} weights in {' and '.join(whole.dtypes)}", whole)
    # Beside the output, where there is room for it.
    with TemporaryDirectory(dir=folder.parent, prefix=".exporting-") as place:
        whole = write_whole(Path(place), source, is_rounded=not settings.unrounded, ends=ends)
        return Exported(_converted(Path(place), folder, settings, checkout), whole)


def _converted(model: Path, folder: Path, settings: ExportSettings, checkout: Path | None) -> str:
    if checkout is not None:
        file = folder / "model.gguf"
        return gguf.write_model_file(checkout, model, file, settings.type, unchecked=settings.unchecked)
    # mlx_lm makes the folder itself.
    made = model / "mlx"
    told = mlx.write_folder(model, made, unchecked=settings.unchecked)
    shutil.copytree(made, folder, dirs_exist_ok=True)
    return told
