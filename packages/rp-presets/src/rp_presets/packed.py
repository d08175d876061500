"""Load a transformers checkpoint with packed weights, and keep them packed."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import nn

from rp_presets.bitsandbytes import bitsandbytes_kind, take_int8, take_nf4, taken
from rp_presets.errors import DamagedFile
from rp_presets.files.checked import weight_files
from rp_presets.files.faults import explained
from rp_presets.files.folders import read_config
from rp_presets.loading import check_loading, is_trusted, one_by_one, unasked

_FP8_BLOCK = [128, 128]
_SCALE = "_scale_inv"
# Options that are not passed to the model.
_OWN = frozenset(
    {"config", "dtype", "torch_dtype", "subfolder", "trust_remote_code", "use_safetensors", "local_files_only"}
)
_BLOCKS, _SCALES = "_blocks", "_scales"
# The names in FP8 checkpoints of expert weights that models stack.
_EXPERT = re.compile(r"(?P<stack>.*\.experts)\.(?P<number>\d+)\.(?P<own>gate|up|down)_proj\.weight")


StoredFormat = Literal["fp8", "mxfp4", "nf4", "int8"]


@dataclass(frozen=True, slots=True)
class StoredPacked:
    """A packed weight as stored: its bytes (`codes`, uint8) and the `scales` of its blocks.

    ``fp8``: E4M3 numbers in the weight's shape; fp32 scales for blocks of 128 by 128. ``mxfp4``: codes (experts,
    out, in / 32, 16) and uint8 scales (experts, out, in / 32) for a weight (experts, in, out). ``nf4``: two codes
    per byte; fp32 scales for each 64 elements in memory order. ``int8``: integers in the weight's shape; fp32
    scales for rows.
    """

    format: StoredFormat
    codes: torch.Tensor
    scales: torch.Tensor


def load_packed(
    directory: str | os.PathLike[str], model_class: type[Any] | None = None, **options: Any
) -> tuple[nn.Module, dict[str, StoredPacked]]:
    """Load a model and, separately by parameter name, the weights that its checkpoint stores packed.

    Args:
        directory: a checkpoint in FP8 with blocks of 128 by 128, as DeepSeek-V3 and Qwen3 are published, in MXFP4,
            as GPT-OSS is, or in bitsandbytes' NF4 or int8.
        model_class: as for `load_pretrained`.
        options: as for `load_pretrained`.

    The model's parameters for packed weights have the right shape and dtype, but no values and no memory; the
    caller replaces them. All tensors stay memory-mapped, except experts that the model stacks but the files do
    not.

    Raises what `load_pretrained` raises, and `ValueError` for a checkpoint that is not packed, or in another
    format.
    """
    folder = Path(directory) / str(options.get("subfolder") or "")
    loader = check_loading(directory, model_class, options, may_be_packed=True)
    kind = packed_kind(folder)
    if kind is None:
        raise ValueError(f"{directory} has no packed weights: its config.json has no quantization_config")
    with explained(directory, loader, options):
        return _loaded(directory, folder, kind, loader, options)


def _loaded(
    directory: str | os.PathLike[str], folder: Path, kind: StoredFormat, loader: Any, options: Mapping[str, Any]
) -> tuple[nn.Module, dict[str, StoredPacked]]:
    with unasked(is_trusted=is_trusted(options)):
        config, rest = _plain_config(folder, options)
        meta = _on_meta(loader, config, options)
    shapes = {name: one.shape for name, one in meta.named_parameters()}
    tensors = _without_ignored(_tensors(folder), meta, shapes)
    stored = _STORED[kind](tensors, shapes)
    dtype = _dtype(config, options)
    for name in stored:
        tensors[name] = torch.zeros(1, dtype=dtype).expand(shapes[name])
    with one_by_one(), unasked(is_trusted=is_trusted(options)):
        maker: Any = type(meta)
        model = maker.from_pretrained(
            None,
            config=config,
            state_dict=tensors,
            dtype=dtype,
            trust_remote_code=is_trusted(options),
            use_safetensors=True,
            local_files_only=True,
            **rest,
        )
    # Set the path as loading from the folder would: adapters save it.
    model.name_or_path = model.config.name_or_path = os.fspath(directory)
    _read_generation_config(model, folder)
    return model, stored


def packed_kind(folder: Path) -> StoredFormat | None:
    """Return the format of a checkpoint's packed weights; None if they are not packed.

    Raises `ValueError` for a format that `load_packed` does not support.
    """
    content: object = read_config(folder).get("quantization_config")
    if not content:
        return None
    if not isinstance(content, dict):
        raise DamagedFile(
            f"{folder / 'config.json'}: quantization_config must be a JSON object, but is {content!r:.100}"
        )
    quantization = cast("Mapping[str, Any]", content)
    method = quantization.get("quant_method")
    if method == "mxfp4":
        return "mxfp4"
    if method == "fp8" and quantization.get("weight_block_size") == _FP8_BLOCK:
        return "fp8"
    if method == "bitsandbytes" and (kind := bitsandbytes_kind(quantization)) is not None:
        return kind
    raise ValueError(
        f"{folder} is packed as {method!r}{_details(quantization)}, which is not read: only fp8 with "
        f"weight_block_size {_FP8_BLOCK}, mxfp4, and bitsandbytes' nf4 and int8 are; load it with transformers, "
        "dequantized, then call pack_frozen"
    )


def _details(quantization: Mapping[str, Any]) -> str:
    """Describe the details of an unsupported format, for the error message."""
    match quantization.get("quant_method"):
        case "fp8":
            return f" with weight_block_size {quantization.get('weight_block_size')}"
        case "bitsandbytes":
            return f" of {quantization.get('bnb_4bit_quant_type', 'fp4')}"
        case _:
            return ""


def plain_on_meta(folder: Path, loader: Any, options: Mapping[str, Any]) -> nn.Module:
    """Return the model of a checkpoint on the meta device, with ordinary weights in place of packed ones."""
    config, _ = _plain_config(folder, options)
    return _on_meta(loader, config, options)


def packed_names(
    kind: StoredFormat, outlines: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]
) -> dict[str, list[str]]:
    """Return the names of the stored tensors of each packed weight, by its name in the model.

    `outlines`: all stored tensors, `wanted`: the model's, both perhaps on the meta device.
    """
    owners: dict[str, list[str]] = {}
    for key in outlines:
        owner = _owner(key, wanted)
        if owner is not None:
            owners.setdefault(owner, []).append(key)
    is_packed = partial(_is_packed, kind, outlines)
    return {name: keys for name, keys in owners.items() if any(is_packed(key) for key in keys)}


def _owner(key: str, wanted: Mapping[str, torch.Tensor]) -> str | None:
    """Return the model's weight that a stored tensor is of, or belongs to."""
    expert = _EXPERT.fullmatch(key.removesuffix(_SCALE))
    if expert is not None and key.removesuffix(_SCALE) not in wanted:
        own = "down_proj" if expert["own"] == "down" else "gate_up_proj"
        stack = f"{expert['stack']}.{own}"
        return stack if stack in wanted else None
    # Of a row-wise int8 weight: layer.SCB beside layer.weight.
    beside = [f"{key.rpartition('.')[0]}.weight"] if key.endswith((".SCB", ".weight_format")) else []
    parts = key.split(".")
    starts = [".".join(parts[:count]) for count in range(len(parts), 0, -1)]
    ends = [key.removesuffix(end) for end in (_SCALE, _BLOCKS, _SCALES) if key.endswith(end)]
    return next((name for name in (*beside, *ends, *starts) if name in wanted), None)


def _is_packed(kind: StoredFormat, outlines: Mapping[str, torch.Tensor], key: str) -> bool:
    match kind:
        case "fp8":
            return outlines[key].dtype == torch.float8_e4m3fn or key.endswith(_SCALE)
        case "mxfp4":
            return _is_mxfp4(key)
        case "nf4":
            return ".quant_state." in key
        case "int8":
            return key.endswith(".SCB")


def stored_in(
    kind: StoredFormat, tensors: dict[str, torch.Tensor], shapes: Mapping[str, torch.Size]
) -> dict[str, StoredPacked]:
    """Return the packed weights in these tensors, by their names in the model, whose shapes are given."""
    return _STORED[kind](tensors, shapes)


def _plain_config(folder: Path, options: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return the config, with options applied as transformers does, and the options that are left."""
    from transformers import AutoConfig  # importing transformers takes seconds

    loader: Any = AutoConfig
    config = options.get("config")
    if config is None:
        config = loader.from_pretrained(
            os.fspath(folder), local_files_only=True, trust_remote_code=is_trusted(options)
        )
    # Otherwise transformers would create its own modules for packed weights.
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    rest = {name: value for name, value in options.items() if name not in _OWN}
    for name in [name for name in rest if hasattr(config, name)]:
        setattr(config, name, rest.pop(name))
    return config, rest


def _without_ignored(
    tensors: dict[str, torch.Tensor], meta: nn.Module, shapes: Mapping[str, torch.Size]
) -> dict[str, torch.Tensor]:
    """Drop tensors that the model's class declares as unused, such as DeepSeek-V3's 62nd layer."""
    ignored: list[str] = getattr(meta, "_keys_to_ignore_on_load_unexpected", None) or []
    patterns = [one for one in ignored if not any(re.search(one, name) for name in shapes)]
    return {name: one for name, one in tensors.items() if not any(re.search(each, name) for each in patterns)}


def _on_meta(loader: Any, config: Any, options: Mapping[str, Any]) -> nn.Module:
    with torch.device("meta"):
        if hasattr(loader, "from_config"):
            return loader.from_config(config, trust_remote_code=is_trusted(options))
        return loader(config)


def _dtype(config: Any, options: Mapping[str, Any]) -> torch.dtype:
    dtype = options.get("dtype", options.get("torch_dtype", "auto"))
    if dtype in (None, "auto"):
        dtype = getattr(config, "dtype", None) or torch.bfloat16
    return cast(torch.dtype, getattr(torch, dtype) if isinstance(dtype, str) else dtype)


def _tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Return all tensors of a checkpoint, memory-mapped."""
    from safetensors import safe_open

    tensors: dict[str, torch.Tensor] = {}
    for file in weight_files(folder):
        with cast(Any, safe_open)(file, framework="pt") as opened:
            tensors |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - not a mapping
    return tensors


def _stored_mxfp4(tensors: dict[str, torch.Tensor], shapes: Mapping[str, torch.Size]) -> dict[str, StoredPacked]:
    names = sorted({name.removesuffix(_BLOCKS).removesuffix(_SCALES) for name in tensors if _is_mxfp4(name)})
    for name in names:
        _check_known(name, shapes)
    return {
        name: StoredPacked("mxfp4", taken(tensors, name + _BLOCKS), taken(tensors, name + _SCALES))
        for name in names
    }


def _is_mxfp4(name: str) -> bool:
    return name.endswith((_BLOCKS, _SCALES))


def _stored_fp8(tensors: dict[str, torch.Tensor], shapes: Mapping[str, torch.Size]) -> dict[str, StoredPacked]:
    # A weight without scales must raise an error: otherwise its numbers would be used as they are.
    in_fp8 = {name for name, one in tensors.items() if one.dtype == torch.float8_e4m3fn}
    names = sorted(in_fp8 | {name.removesuffix(_SCALE) for name in tensors if name.endswith(_SCALE)})
    single = {name: _fp8(tensors, name) for name in names}
    packed = {name: one for name, one in single.items() if name in shapes}
    stacks: dict[str, dict[tuple[int, str], StoredPacked]] = {}
    for name in names:
        if name not in shapes:
            expert = _EXPERT.fullmatch(name)
            if expert is None:
                _check_known(name, shapes)
                continue
            own = "down_proj" if expert["own"] == "down" else "gate_up_proj"
            stack = stacks.setdefault(f"{expert['stack']}.{own}", {})
            stack[int(expert["number"]), expert["own"]] = single[name]
    for name, experts in stacks.items():
        _check_known(name, shapes)
        packed[name] = _stacked(name, experts)
    return packed


def _fp8(tensors: dict[str, torch.Tensor], name: str) -> StoredPacked:
    codes, scales = taken(tensors, name), taken(tensors, name + _SCALE)
    return StoredPacked("fp8", codes.view(torch.uint8), scales.to(torch.float32))


def _stacked(name: str, experts: Mapping[tuple[int, str], StoredPacked]) -> StoredPacked:
    numbers = range(1 + max(number for number, _ in experts))
    owns = ("down",) if name.endswith("down_proj") else ("gate", "up")
    missing = next((one for one in product(numbers, owns) if one not in experts), None)
    if missing is not None:
        raise ValueError(f"the checkpoint's files have no {missing[1]}_proj of expert {missing[0]} of {name}")
    if len(owns) > 1 and experts[numbers[0], "gate"].codes.shape[0] % _FP8_BLOCK[0]:
        raise ValueError(
            f"{name} is stored in parts whose rows end within a block of {_FP8_BLOCK[0]}, so they cannot be "
            "stacked packed; load the checkpoint with transformers, dequantized, then call pack_frozen"
        )
    rows = [[experts[number, own] for own in owns] for number in numbers]
    codes = torch.stack([torch.cat([one.codes for one in row]) for row in rows])
    return StoredPacked("fp8", codes, torch.stack([torch.cat([one.scales for one in row]) for row in rows]))


def _stored_nf4(tensors: dict[str, torch.Tensor], shapes: Mapping[str, torch.Size]) -> dict[str, StoredPacked]:
    return {name: _whole("nf4", name, shapes, *parts) for name, parts in take_nf4(tensors).items()}


def _stored_int8(tensors: dict[str, torch.Tensor], shapes: Mapping[str, torch.Size]) -> dict[str, StoredPacked]:
    return {name: _whole("int8", name, shapes, *parts) for name, parts in take_int8(tensors).items()}


def _whole(
    kind: StoredFormat,
    name: str,
    shapes: Mapping[str, torch.Size],
    codes: torch.Tensor,
    scales: torch.Tensor,
    shape: tuple[int, ...],
) -> StoredPacked:
    _check_known(name, shapes)
    if shape != tuple(shapes[name]):
        raise ValueError(f"{name} is stored in the shape {shape}, but the model's has {tuple(shapes[name])}")
    return StoredPacked(kind, codes, scales)


_STORED: Mapping[StoredFormat, Callable[..., dict[str, StoredPacked]]] = {
    "fp8": _stored_fp8,
    "mxfp4": _stored_mxfp4,
    "nf4": _stored_nf4,
    "int8": _stored_int8,
}


def _check_known(name: str, shapes: Mapping[str, torch.Size]) -> None:
    if name not in shapes:
        raise ValueError(
            f"the checkpoint has a packed weight {name}, but the model has no parameter of this name; load it "
            "with transformers, dequantized, then call pack_frozen"
        )


def _read_generation_config(model: Any, folder: Path) -> None:
    from transformers import GenerationConfig

    if (folder / "generation_config.json").is_file():
        model.generation_config = cast(Any, GenerationConfig).from_pretrained(
            os.fspath(folder), local_files_only=True
        )
