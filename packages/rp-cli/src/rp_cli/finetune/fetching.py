"""Put folders and files of the hub's cache in the place of names on the hub."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rp_sources.data_sets import fetched_split
from rp_sources.models import SMALL_FILES, WEIGHTS, fetched
from rp_sources.names import data_named, model_named
from rp_sources.sources import adapter_in, model_in
from rp_trainer.errors import Refused

from rp_cli.finetune.options import FineTuning


def without_names(given: FineTuning) -> FineTuning:
    """Return the options with paths instead of names. Of the model all but the weights is there then.

    Raises `Refused` for what can neither be downloaded nor found in the cache.
    """
    counts = [len(_files("--data", path)) for path in given.data or ()] if given.data_weights else []
    weights = [
        weight for weight, count in zip(given.data_weights or (), counts, strict=True) for _ in range(count)
    ]
    return replace(
        given,
        data_weights=tuple(weights) or None,
        model=_model("--model", given.model),
        init_adapter=None if given.init_adapter is None else adapter_in("--init-adapter", given.init_adapter),
        tokenizer=None if given.tokenizer is None else _model("--tokenizer", given.tokenizer),
        data=_data("--data", given.data),
        eval_data=_data("--eval-data", given.eval_data),
    )


def is_on_hub(given: FineTuning) -> bool:
    """Return whether the model is given by its name on the hub."""
    return model_named(given.model) is not None


def fetch_weights(given: FineTuning, folder: Path) -> None:
    """Download the weights of a model on the hub, of the same commit as the files in its folder of the cache.

    Raises `Refused` if it has none in safetensors files: others are not read.
    """
    name = model_named(given.model)
    if name is None:
        return
    fetched("--model", replace(name, revision=folder.name), WEIGHTS)
    if not any(folder.glob("*.safetensors")):
        raise Refused(
            f"--model {name.repository} has no safetensors files on the hub, and others are not read; name a "
            "model that has"
        )


def _model(option: str, path: Path) -> Path:
    name = model_named(path)
    return model_in(option, path) if name is None else fetched(option, name, SMALL_FILES)


def _data(option: str, paths: Sequence[Path] | None) -> tuple[Path, ...] | None:
    return None if paths is None else tuple(file for path in paths for file in _files(option, path))


def _files(option: str, path: Path) -> Sequence[Path]:
    name = data_named(path)
    return (path,) if name is None else fetched_split(option, name)
