"""Check that all files of a checkpoint, or of a tokenizer, are whole, before anything reads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from rp_presets.files.folders import indexed_files
from rp_presets.files.whole import check_kind, damaged, is_there, read_bytes, read_header, read_json, read_object

_INDEX = "model.safetensors.index.json"
_WHOLE = "model.safetensors"
# The largest tokenizers have some 40 MB.
_MOST_TOKENIZER_BYTES = 2**29
# What tokenizers of transformers read, if it is there. A vocabulary may be a list, too.
_OBJECTS = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.json")
_VOCABULARIES = ("vocab.json", "tekken.json")
_TOKENIZER = "tokenizer.json"
_TEXTS = ("merges.txt", "vocab.txt")
_BINARIES = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "source.spm", "target.spm")
_TEMPLATE, _MORE_TEMPLATES = "chat_template.jinja", "additional_chat_templates/*.jinja"
# The conversation, as chat templates name it.
_MESSAGES = "messages"


def check_checkpoint(folder: Path) -> None:
    """Raise `DamagedFile` unless the configuration and all weights of a checkpoint are whole.

    Of the safetensors files, headers are read and compared with the files' sizes. Files that are not there are not
    missed, unless an index names them.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     size = Path(folder, "config.json").write_text("")
    ...     try:
    ...         check_checkpoint(Path(folder))
    ...     except ValueError as error:
    ...         print(str(error).removeprefix(folder))
    /config.json is empty; fetch it again, or copy it again from where it is whole
    """
    for name in ("config.json", "generation_config.json"):
        if is_there(folder / name):
            read_object(folder / name)
    for file in weight_files(folder):
        _check_weights(file)


def weight_files(folder: Path) -> list[Path]:
    """Return the files that transformers reads. Other files may hold the same weights under other names.

    Raises `ValueError` for an index that cannot be read, or that names what is not there or not in the folder.
    """
    index = folder / _INDEX
    if is_there(index):
        files = indexed_files(index)
        for file in files:
            if not is_there(file):
                raise damaged(file, f"is missing, but {index.name} names it")
        return files
    whole = folder / _WHOLE
    return [whole] if is_there(whole) else sorted(folder.glob("*.safetensors"))


def _check_weights(file: Path) -> None:
    from safetensors import SafetensorError, safe_open

    read_header(file)
    try:
        # Its own checks, of offsets and dtypes; no tensor is read.
        with cast(Any, safe_open)(file, framework="pt"):
            pass
    except (SafetensorError, OSError) as error:
        raise damaged(file, f"must be a safetensors file, but is not: {error}") from error


def check_tokenizer(folder: Path) -> None:
    """Raise `DamagedFile` unless all files of a tokenizer are whole; those that are not there are not missed.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     size = Path(folder, "merges.txt").write_text("a b")
    ...     check_tokenizer(Path(folder))
    """
    for file in _those_there(folder, _OBJECTS):
        read_object(file)
    for file in _those_there(folder, _VOCABULARIES):
        read_json(file, _MOST_TOKENIZER_BYTES)
    for file in _those_there(folder, (_TOKENIZER,)):
        _check_fields(file, "model", "added_tokens")
    for file in _those_there(folder, (*_TEXTS, *_BINARIES)):
        check_kind(file)
    for file in (*_those_there(folder, (_TEMPLATE,)), *sorted(folder.glob(_MORE_TEMPLATES))):
        _check_template(file)


def _those_there(folder: Path, names: tuple[str, ...]) -> list[Path]:
    return [folder / name for name in names if is_there(folder / name)]


def _check_fields(file: Path, *names: str) -> None:
    content = read_object(file, _MOST_TOKENIZER_BYTES)
    for name in names:
        if name not in content:
            raise damaged(file, f"must have {name!r}, but has not")


def _check_template(file: Path) -> None:
    check_kind(file)
    try:
        text = read_bytes(file).decode()
    except UnicodeDecodeError as error:
        raise damaged(file, f"must be a chat template, but is not in UTF-8 ({error})") from error
    if _MESSAGES not in text:
        raise damaged(file, f"must be a chat template, but does not use {_MESSAGES}")
