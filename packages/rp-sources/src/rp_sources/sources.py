"""Where a model's weights, its tokenizer and its adapter are, given a run, a checkpoint, a folder or a name."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

from rp_presets import check_folder
from rp_strangers.files import bounded_bytes
from rp_strangers.refusing import refusing
from rp_trainer.errors import Refused

from rp_sources.models import SMALL_FILES, WEIGHTS, fetched
from rp_sources.names import model_named
from rp_sources.trained_on import noted, refuse_other

_MODEL, _ADAPTER, _OPTIONS = "config.json", "adapter_config.json", "options.json"
_WEIGHTS = "adapter_model.safetensors"
_MOST_BYTES = 2**24
# Of the options of a run: weights that are packed in the files already.
_STORED = "stored"
_STEP = "step-*"
_OF_TRAINER = "checkpoint-*"


class Asked(Protocol):
    """What options say of a source. `base`, `tokenizer`: None as the run or the folder says."""

    @property
    def run(self) -> Path:
        """A run, a checkpoint, the folder of a model or of an adapter, or a name on the hub."""
        ...

    @property
    def base(self) -> Path | None:
        """The model of an adapter."""
        ...

    @property
    def other_base(self) -> bool:
        """Whether the model may be another one than the adapter was trained with."""
        ...

    @property
    def tokenizer(self) -> Path | None:
        """Where the tokenizer is."""
        ...


@dataclass(frozen=True, slots=True)
class WantedSource:
    """What is asked for, without options of a command; see `Asked`.

    >>> WantedSource(Path("run")).other_base
    False
    """

    run: Path
    base: Path | None = None
    other_base: bool = False
    tokenizer: Path | None = None


@dataclass(frozen=True, slots=True)
class Source:
    """Folders. `model`: of the weights; `adapter`: what is put on it, if anything; `run`: theirs, if any.

    `tokenizers`: where the tokenizer may be, the likeliest first.
    """

    model: Path
    adapter: Path | None
    run: Path | None
    tokenizers: tuple[Path, ...]

    @property
    def tokenizer(self) -> Path:
        """Where the tokenizer is. Raises `Refused` if there is none."""
        found = next((each for each in self.tokenizers if has_tokenizer(each)), None)
        if found is None:
            raise Refused(
                f"there is no tokenizer in {self.tokenizers[0]}; name a folder that has one with --tokenizer"
            )
        return found

    @property
    def recipe(self) -> dict[str, Any]:
        """The options of the run; empty if there is none."""
        return {} if self.run is None else _json(self.run / _OPTIONS)

    @property
    def packing(self) -> str | None:
        """The format in which the run of an adapter had the model's weights, unless they are stored in it."""
        form: str | None = None if self.adapter is None else self.recipe.get("pack")
        return None if form == _STORED else form


def source_of(options: Asked) -> Source:
    """Find the folders; what is on the hub is downloaded, unless it is in the cache.

    Raises `Refused` if something is not there, or if an adapter was trained with another model.
    """
    folder = _found("RUN", options.run)
    run = _run_around(folder)
    folder = _of_run(folder)
    adapter = folder if (folder / _ADAPTER).is_file() else None
    if adapter is None and not (folder / _MODEL).is_file():
        raise Refused(
            f"{folder} must hold a model ({_MODEL}), an adapter ({_ADAPTER}) or a run of `roundpipe train`, but "
            f"has none of these{_instead_of(folder)}"
        )
    if adapter is None and options.base is not None:
        raise Refused(f"--base is the model of an adapter, but {folder} holds a whole model; leave it out")
    if adapter is not None:
        check_adapter(adapter)
    model = folder if adapter is None else _base(adapter, options)
    if adapter is not None and not options.other_base:
        refuse_other(model, adapter, note_of(adapter))
    return Source(model, adapter, run, tuple(_tokenizers(options, [folder, model], run)))


def _instead_of(folder: Path) -> str:
    """What may be meant in place of a folder: a checkpoint in it, as trainers of Hugging Face write them."""
    found = [each for each in folder.glob(_OF_TRAINER) if each.name.rpartition("-")[2].isdecimal()]
    last = max(found, key=lambda each: int(each.name.rpartition("-")[2]), default=None)
    return "" if last is None else f"; a trainer's checkpoints are in it, of which {last} is the last"


def model_in(option: str, path: Path) -> Path:
    """Return the model of a run, or a path as it is. Raises `Refused` for a run that has none."""
    with refusing(f"{option}: ", (Refused,)):
        return _of_run(path) if path.is_dir() else path


def adapter_in(option: str, path: Path) -> Path:
    """Return the adapter of a run, a folder or a name on the hub. Raises `Refused` if there is none."""
    folder = _of_run(_found(option, path))
    if not (folder / _ADAPTER).is_file():
        raise Refused(f"{option} {path} must hold an adapter, but there is no {_ADAPTER} in {folder}")
    with refusing(f"{option}: ", (Refused,)):
        check_adapter(folder)
    return folder


def note_of(adapter: Path) -> dict[str, Any]:
    """Return which model an adapter was trained with, by it or its run; empty if unknown. Raises `Refused`."""
    run = _run_around(adapter)
    return noted(adapter, {} if run is None else _json(run / _OPTIONS))


def check_adapter(adapter: Path) -> None:
    """Raise `Refused` unless the weights of an adapter are in a safetensors file."""
    if not (adapter / _WEIGHTS).is_file():
        raise Refused(f"{adapter} must have its weights in {_WEIGHTS}, but has no such file; others are not read")


def has_tokenizer(folder: Path) -> bool:
    """Return whether a folder has files of a tokenizer."""
    return folder.is_dir() and any(folder.glob("*token*"))


def _found(option: str, path: Path) -> Path:
    """The folder that a value names, downloaded if it is a name on the hub."""
    name = model_named(path)
    if name is not None:
        return fetched(option, name, (*SMALL_FILES, *WEIGHTS))
    if not path.is_dir():
        raise Refused(
            f"{option} must be a folder or a name on the hub such as Qwen/Qwen3-8B, but "
            + (f"{str(path)!r} is a file" if path.exists() else f"there is no folder {str(path)!r}")
        )
    with refusing(f"{option}: "):
        check_folder(path)
    return path


def _run_around(folder: Path) -> Path | None:
    return next((each for each in (folder, *folder.parents[:2]) if (each / _OPTIONS).is_file()), None)


def _of_run(folder: Path) -> Path:
    """The model of a run, or the newest checkpoint of one that has not ended; other folders are what they are."""
    if (folder / _MODEL).is_file() or (folder / _ADAPTER).is_file() or not (folder / _OPTIONS).is_file():
        return folder
    if (folder / "model").is_dir():
        return folder / "model"
    checkpoints = sorted((folder / "checkpoints").glob(_STEP))
    whole = [each for each in checkpoints if (each / "roundpipe" / "complete").is_file()]
    if not whole:
        raise Refused(
            f"the run in {folder} has neither a model nor a whole checkpoint yet; train with --save-every"
        )
    return whole[-1]


def _base(adapter: Path, options: Asked) -> Path:
    if options.base is not None:
        return _found("--base", options.base)
    said: Any = _json(adapter / _ADAPTER).get("base_model_name_or_path")
    path = Path(str(said))
    if not said or (model_named(path) is None and not path.is_dir()):
        raise Refused(f"the adapter in {adapter} is for {said!r}, which is not there; name its folder with --base")
    return _found("the adapter's model", path)


def _tokenizers(options: Asked, folders: list[Path], run: Path | None) -> list[Path]:
    if options.tokenizer is not None:
        return [_found("--tokenizer", options.tokenizer)]
    if run is None:
        return folders
    given = _json(run / _OPTIONS)
    named = [Path(str(given[name])) for name in ("tokenizer", "model") if given.get(name)]
    return [*folders, run / "model", *named]


def _json(file: Path) -> dict[str, Any]:
    with refusing(f"{file} cannot be read: ", (ValueError, OSError)):
        read: Any = json.loads(bounded_bytes(str(file), file, _MOST_BYTES))
    if not isinstance(read, dict):
        raise Refused(f"{file} must hold a JSON object, but does not")
    return cast("dict[str, Any]", read)
