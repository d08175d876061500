"""Read a checkpoint of transformers piece by piece, by the names that weights have in its model."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from rp_presets.files.checked import weight_files
from rp_presets.files.whole import read_header
from rp_presets.loading import check_loading, is_trusted, unasked
from rp_presets.packed import StoredFormat, StoredPacked, packed_kind, packed_names, plain_on_meta, stored_in

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}


@dataclass(frozen=True, slots=True)
class StreamedWeights:
    """Weights that are read together. `outlines`: on the meta device, by their names in the model.

    `read`: returns them; a packed one as it is stored. Those that need no conversion are memory-mapped, and their
    pages are given back with them.
    """

    outlines: Mapping[str, torch.Tensor]
    read: Callable[[], Mapping[str, torch.Tensor | StoredPacked]]


@dataclass(frozen=True, slots=True)
class Streamed:
    """A checkpoint that is not read yet.

    `model`: on the meta device. `unused`: names in the files of what it has no weight for.
    """

    model: nn.Module
    pieces: Sequence[StreamedWeights]
    unused: Sequence[str]


def streamed(directory: str | os.PathLike[str], model_class: type[Any] | None = None, **options: Any) -> Streamed:
    """Prepare to read a checkpoint, as `load_pretrained` or `load_packed` would load it, but one piece at a time.

    Args:
        directory: a checkpoint, plain or in one of the packed formats of `load_packed`.
        model_class: a class of transformers; default: ``AutoModelForCausalLM``.
        options: `subfolder` and `trust_remote_code`, as for `load_pretrained`.

    Weights have the dtypes of the files. Renaming and conversions, such as the stacking of experts, are
    transformers' own. Nothing is said of weights that the files lack: `model` has the names of all.

    >>> from tempfile import TemporaryDirectory
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> config = LlamaConfig(
    ...     vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    ... )
    >>> with TemporaryDirectory() as folder:
    ...     LlamaForCausalLM(config).save_pretrained(folder)
    ...     piece = streamed(folder).pieces[0]
    ...     [(name, tuple(tensor.shape)) for name, tensor in piece.read().items()]
    [('lm_head.weight', (32, 16))]

    Raises what `load_packed` raises.
    """
    folder = Path(directory) / str(options.get("subfolder") or "")
    loader = check_loading(directory, model_class, options, may_be_packed=True)
    kind = packed_kind(folder)
    with unasked(is_trusted=is_trusted(options)):
        model = plain_on_meta(folder, loader, options)
    files = _Files(folder)
    wanted: dict[str, Any] = dict(model.state_dict(keep_vars=True))
    packed = {} if kind is None else packed_names(kind, files.outlines, wanted)
    pieces = [] if kind is None else [_packed(files, kind, name, wanted, keys) for name, keys in packed.items()]
    rest = [key for key in files.outlines if not any(key in keys for keys in packed.values())]
    plain, unused = _plain(model, files, rest, wanted)
    return Streamed(model, (*pieces, *plain), _without_ignored(model, unused))


class _Files:
    """The tensors in a checkpoint's files: the `outlines` of all, on the meta device, and each when it is read."""

    def __init__(self, folder: Path) -> None:
        self.outlines: dict[str, torch.Tensor] = {}
        self._files: dict[str, Path] = {}
        for file in weight_files(folder):
            for name, entry in read_header(file).items():
                self._files[name] = file
                self.outlines[name] = torch.empty(entry["shape"], dtype=_dtype(name, entry), device="meta")

    def read(self, name: str) -> torch.Tensor:
        """Return a tensor, memory-mapped. The file is opened anew, so that pages go with the tensor."""
        from safetensors import safe_open

        with cast(Any, safe_open)(self._files[name], framework="pt") as opened:
            return opened.get_tensor(name)


def _dtype(name: str, entry: Mapping[str, Any]) -> torch.dtype:
    if entry["dtype"] not in _DTYPES:
        raise ValueError(f"{name} is stored as {entry['dtype']}, which is not read: only {', '.join(_DTYPES)} are")
    return _DTYPES[entry["dtype"]]


def _packed(
    files: _Files, kind: StoredFormat, name: str, wanted: Mapping[str, torch.Tensor], keys: Sequence[str]
) -> StreamedWeights:
    shapes = {one: tensor.shape for one, tensor in wanted.items()}

    def read() -> Mapping[str, torch.Tensor | StoredPacked]:
        return stored_in(kind, {key: files.read(key) for key in keys}, shapes)

    return StreamedWeights({name: wanted[name].detach()}, read)


def _plain(
    model: Any, files: _Files, keys: Sequence[str], wanted: Mapping[str, torch.Tensor]
) -> tuple[list[StreamedWeights], list[str]]:
    """Return the pieces of what is not packed, and the names of what the model does not have."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key

    mapping: list[Any] = cast(Any, get_model_conversion_mapping)(model)
    renamings = [one for one in mapping if isinstance(one, WeightRenaming)]
    converters = [one for one in mapping if isinstance(one, WeightConverter)]
    by_pattern: dict[str, Any] = {each: one for one in converters for each in one.source_patterns}
    unused: list[str] = []
    # By the first of the weights that a conversion makes: what it makes it of.
    parts: dict[str, list[tuple[str, str]]] = {}
    pieces: list[StreamedWeights] = []
    for key in sorted(keys, key=cast("Callable[[str], Any]", dot_natural_key)):
        name, pattern = _renamed(model, key, wanted, (renamings, converters))
        if name not in wanted:
            unused.append(key)
        elif pattern is None:
            pieces.append(StreamedWeights({name: files.outlines[key]}, partial(_read_one, files, name, key)))
        else:
            parts.setdefault(name, []).append((key, pattern))
    for name, sources in parts.items():
        convert = partial(_converted, model, by_pattern[sources[0][1]], name, sources)
        pieces.append(StreamedWeights(convert(files.outlines.__getitem__), partial(convert, files.read)))
    return pieces, unused


def _renamed(
    model: Any, key: str, wanted: Mapping[str, torch.Tensor], mapping: tuple[list[Any], list[Any]]
) -> tuple[str, str | None]:
    """Return a weight's name in the model and the pattern of its converter, as transformers' loader finds them."""
    from transformers import core_model_loading

    loading: Any = core_model_loading  # whose types have parts that are unknown
    rename = loading.rename_source_key
    found: tuple[str, str | None] = rename(key, *mapping, model.base_model_prefix, wanted)
    if found[0] not in wanted and key in wanted:
        return rename(key, [], [], model.base_model_prefix, wanted)
    return found


def _read_one(files: _Files, name: str, key: str) -> Mapping[str, torch.Tensor]:
    return {name: files.read(key)}


def _converted(
    model: Any,
    converter: Any,
    name: str,
    sources: Sequence[tuple[str, str]],
    read: Callable[[str], torch.Tensor],
) -> dict[str, torch.Tensor]:
    mapping = deepcopy(converter)
    for key, pattern in sources:
        mapping.add_tensor(name, key, pattern, partial(read, key))
    made: Mapping[str, Any] = mapping.convert(name, model=model, config=model.config)
    return {own: one[0] if isinstance(one, list) else one for own, one in made.items()}


def _without_ignored(model: nn.Module, names: Sequence[str]) -> list[str]:
    ignored: list[str] = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or []
    return list(_not_matching(names, ignored))


def _not_matching(names: Sequence[str], patterns: Sequence[str]) -> Iterator[str]:
    yield from (name for name in names if not any(re.search(pattern, name) for pattern in patterns))
