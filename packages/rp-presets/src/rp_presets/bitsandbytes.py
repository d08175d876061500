"""Read weights that bitsandbytes has stored: NF4 with one or two levels of scales, and LLM.int8."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal, cast

import torch

_STATE = ".quant_state.bitsandbytes__"
_NF4_BLOCK = 64
_INT8_MOST = 127
# The tensor that belongs to an int8 weight in addition to the scales of its rows.
_INT8_REST = "weight_format"


# A weight's codes, its scales in fp32, and its shape.
Parts = tuple[torch.Tensor, torch.Tensor, tuple[int, ...]]


def bitsandbytes_kind(config: Mapping[str, Any]) -> Literal["nf4", "int8"] | None:
    """Return the format in a ``quantization_config`` of bitsandbytes; None for a format that is not supported.

    >>> bitsandbytes_kind({"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"})
    'nf4'
    """
    if config.get("load_in_8bit", config.get("_load_in_8bit")):
        return "int8"
    return "nf4" if config.get("bnb_4bit_quant_type") == "nf4" else None


def take_nf4(tensors: dict[str, torch.Tensor]) -> dict[str, Parts]:
    """Remove all NF4 weights from a checkpoint's tensors; return their codes, fp32 scales and shape by name.

    The codes, (elements / 2), are the bytes of the file. The scales, (elements / 64), are those of the file, or
    computed from two levels of scales: then the file has 4.13 bits per element, and the result 4.5.

    Raises `ValueError` for a weight with another data type or block size, or with a missing part.
    """
    names = [name.partition(_STATE)[0] for name in tensors if _STATE in name]
    return {name: _nf4(tensors, name) for name in names}


def take_int8(tensors: dict[str, torch.Tensor]) -> dict[str, Parts]:
    """Remove all int8 weights from a checkpoint's tensors; return their codes, fp32 scales and shape by name.

    Raises `ValueError` for a weight without scales, or scales without a weight.
    """
    in_int8 = {name for name, one in tensors.items() if one.dtype == torch.int8}
    names = sorted(in_int8 | {f"{name.removesuffix('SCB')}weight" for name in tensors if name.endswith(".SCB")})
    for name in names:
        tensors.pop(name.removesuffix("weight") + _INT8_REST, None)
    return {name: _int8(tensors, name) for name in names}


def taken(tensors: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    """Remove and return a tensor. Raises `ValueError` if it is missing."""
    if name not in tensors:
        raise ValueError(f"the checkpoint's files have no {name}, but they have tensors that belong to it")
    return tensors.pop(name)


def _int8(tensors: dict[str, torch.Tensor], name: str) -> Parts:
    codes, most = taken(tensors, name), taken(tensors, f"{name.removesuffix('weight')}SCB")
    return codes.view(torch.uint8), most.to(torch.float32) / _INT8_MOST, tuple(codes.shape)


def _nf4(tensors: dict[str, torch.Tensor], name: str) -> Parts:
    key = next(key for key in tensors if key.startswith(name + _STATE))
    state = _state(name, tensors.pop(key))
    if (state["quant_type"], state["blocksize"]) != ("nf4", _NF4_BLOCK):
        raise ValueError(
            f"{name} is stored as {state['quant_type']} with blocks of {state['blocksize']}, which is not read: "
            f"only nf4 with blocks of {_NF4_BLOCK} is; load it with transformers, dequantized, then call "
            "pack_frozen"
        )
    codes, scales = taken(tensors, name), taken(tensors, f"{name}.absmax")
    tensors.pop(f"{name}.quant_map", None)
    if "nested_blocksize" in state:
        scales = _unpacked_scales(tensors, name, scales, state)
    return codes.reshape(-1).view(torch.uint8), scales.to(torch.float32), tuple(state["shape"])


def _state(name: str, stored: torch.Tensor) -> Mapping[str, Any]:
    """Return what bitsandbytes tells of a weight, in JSON."""
    try:
        state: Any = json.loads(bytes(cast("list[int]", stored.tolist())))  # pyright: ignore[reportUnknownMemberType]
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(
            f"what is stored of the weight {name} cannot be read ({error}); download it again"
        ) from error
    needed = ("quant_type", "blocksize", "shape")
    if not isinstance(state, dict) or any(key not in state for key in needed):
        raise ValueError(f"what is stored of the weight {name} must have {', '.join(needed)}; download it again")
    return cast("dict[str, Any]", state)


def _unpacked_scales(
    tensors: dict[str, torch.Tensor], name: str, scales: torch.Tensor, state: Mapping[str, Any]
) -> torch.Tensor:
    """Return scales that are stored in 8 bits, with a second level of scales and one common offset."""
    values, most = taken(tensors, f"{name}.nested_quant_map"), taken(tensors, f"{name}.nested_absmax")
    result = values.to(torch.float32)[scales.long()]
    result *= most.to(torch.float32).repeat_interleave(state["nested_blocksize"])[: len(result)]
    return result + state["nested_offset"]
