"""Check a checkpoint's folder, which may be a stranger's, before transformers reads it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, cast

from rp_presets.files.whole import check_is_stored, read_object

_WHOLE_LINE = "fetch the model again, or remove it"


def check_folder(folder: str | os.PathLike[str], *, trust_remote_code: bool = False) -> None:
    """Check that reading a model's folder neither waits nor runs code. Opens only JSON files, of bounded size.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     os.mkfifo(f"{folder}/config.json")
    ...     try:
    ...         check_folder(folder)
    ...     except ValueError as error:
    ...         print(str(error).removeprefix(folder))
    /config.json must be a file, but is a pipe; fetch it again, or copy it again from where it is whole

    Args:
        folder: files of a model, of a tokenizer, or both.
        trust_remote_code: whether the configuration may name code, such as kernels for attention.

    Raises:
        ValueError: a pipe, a socket or a device is in the folder, or a link to one; an index names files that are
            no safetensors or outside the folder; the configuration names other weights, or code.
    """
    for path in _entries(Path(folder)):
        check_is_stored(path)
    for index in sorted(Path(folder).glob("*.index.json")):
        if not index.name.endswith(".bin.index.json"):
            indexed_files(index)
    check_config(read_config(Path(folder)), Path(folder) / "config.json", trust_remote_code=trust_remote_code)


def _entries(folder: Path) -> Iterator[Path]:
    """Yield what is in a folder and in its subfolders, such as ``additional_chat_templates``."""
    for path in sorted(folder.iterdir()):
        yield path
        if path.is_dir() and os.access(path, os.R_OK | os.X_OK):
            yield from sorted(path.iterdir())


def indexed_files(index: Path) -> list[Path]:
    """Return the files that an index of weights names.

    Raises `ValueError` unless all are safetensors files in the index's folder: transformers would unpickle others.
    """
    content = read_object(index)
    names: object = content.get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in cast("Any", names).values()):
        raise ValueError(f"{index} must have a 'weight_map' with the file of each weight; {_WHOLE_LINE}")
    files = sorted(set(cast("dict[str, str]", names).values()))
    for name in files:
        _check_name(index, name)
    return [index.parent / name for name in files]


def _check_name(index: Path, name: str) -> None:
    if not name.endswith(".safetensors"):
        raise ValueError(
            f"{index} names {name!r:.100}, which is not read: only safetensors are; load the model with "
            "transformers and save it again with save_pretrained"
        )
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or "\0" in name:
        raise ValueError(f"{index} must name files in its own folder, but names {name!r:.100}; {_WHOLE_LINE}")


def read_config(folder: Path) -> Mapping[str, Any]:
    """Return the content of a checkpoint's ``config.json``; empty if there is none."""
    file = folder / "config.json"
    return read_object(file) if file.exists() else {}


def check_config(content: Mapping[str, Any], file: Path, *, trust_remote_code: bool = False) -> None:
    """Check that a configuration names no pickled weights and, unless trusted, no kernels that would be fetched.

    >>> try:
    ...     check_config({"transformers_weights": "adapter_model.bin"}, Path("config.json"))
    ... except ValueError as error:
    ...     print(str(error).partition(",")[0])
    config.json names the weights 'adapter_model.bin'
    """
    weights: Any = content.get("transformers_weights")
    if isinstance(weights, str):
        _check_weights_name(file, weights)
    if trust_remote_code:
        return
    for name, value in _implementations(content):
        if "/" in value or "\\" in value:
            raise ValueError(
                f"{file} names code, {value!r:.100} as its {name}, which runs only with "
                "trust_remote_code=True; remove the line"
            )


def _check_weights_name(file: Path, name: str) -> None:
    if not name.endswith((".safetensors", ".safetensors.index.json")):
        raise ValueError(
            f"{file} names the weights {name!r:.100}, which are not read: only safetensors are; load the model "
            "with transformers and save it again with save_pretrained"
        )


def _implementations(content: object) -> Iterator[tuple[str, str]]:
    """Yield what a configuration, or one inside it, chooses as an implementation of attention or experts."""
    waiting = [content]
    while waiting:
        value = waiting.pop()
        if isinstance(value, list):
            waiting += cast("list[object]", value)
        elif isinstance(value, dict):
            for name, inner in cast("dict[str, object]", value).items():
                waiting.append(inner)
                if "implementation" in name:
                    yield from ((name, text) for text in _texts(inner))


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from (text for text in cast("dict[str, object]", value).values() if isinstance(text, str))
