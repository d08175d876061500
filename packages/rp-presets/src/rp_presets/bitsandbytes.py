"""Weights as bitsandbytes stores them: NF4 with one or two levels of scales, and LLM.int8's rows."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal, cast

import torch

_STATE = ".quant_state.bitsandbytes__"
_NF4_BLOCK = 64
_INT8_MOST = 127
# What belongs to a weight in int8 beside its rows' scales.
_INT8_REST = "weight_format"


# Codes, scales in fp32, and the weight's shape.
Parts = tuple[torch.Tensor, torch.Tensor, tuple[int, ...]]


def bitsandbytes_kind(config: Mapping[str, Any]) -> Literal["nf4", "int8"] | None:
    """How a ``quantization_config`` of bitsandbytes says its weights are packed; None for another way.

    >>> bitsandbytes_kind({"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"})
    'nf4'
    """
    if config.get("load_in_8bit", config.get("_load_in_8bit")):
        return "int8"
    return "nf4" if config.get("bnb_4bit_quant_type") == "nf4" else None


def take_nf4(tensors: dict[str, torch.Tensor]) -> dict[str, Parts]:
    """Take all weights in NF4 out of a checkpoint's tensors: by name codes, fp32 scales and the weight's shape.

    Codes are the bytes of the file, (elements / 2). Scales, (elements / 64), are those of the file, or computed
    from two levels: then the file has 4.13 bits an element, and this 4.5.

    Raises `ValueError` for a weight of another type or block, or one of whose parts there is none.
    """
    names = [name.partition(_STATE)[0] for name in tensors if _STATE in name]
    return {name: _nf4(tensors, name) for name in names}


def take_int8(tensors: dict[str, torch.Tensor]) -> dict[str, Parts]:
    """Take all weights in int8 out of a checkpoint's tensors: by name codes, fp32 scales and the weight's shape.

    Raises `ValueError` for a weight without scales, or scales without a weight.
    """
    in_int8 = {name for name, one in tensors.items() if one.dtype == torch.int8}
    names = sorted(in_int8 | {f"{name.removesuffix('SCB')}weight" for name in tensors if name.endswith(".SCB")})
    for name in names:
        tensors.pop(name.removesuffix("weight") + _INT8_REST, None)
    return {name: _int8(tensors, name) for name in names}


def taken(tensors: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    """Take a tensor out. Raises `ValueError` if there is none."""
    if name not in tensors:
        raise ValueError(f"the checkpoint's files have no {name}, though they have what belongs to it")
    return tensors.pop(name)


def _int8(tensors: dict[str, torch.Tensor], name: str) -> Parts:
    codes, most = taken(tensors, name), taken(tensors, f"{name.removesuffix('weight')}SCB")
    return codes.view(torch.uint8), most.to(torch.float32) / _INT8_MOST, tuple(codes.shape)


def _nf4(tensors: dict[str, torch.Tensor], name: str) -> Parts:
    key = next(key for key in tensors if key.startswith(name + _STATE))
    said: Mapping[str, Any] = json.loads(bytes(cast("list[int]", tensors.pop(key).tolist())))  # pyright: ignore[reportUnknownMemberType]
    if (said["quant_type"], said["blocksize"]) != ("nf4", _NF4_BLOCK):
        raise ValueError(
            f"{name} is stored as {said['quant_type']} with blocks of {said['blocksize']}, which is not read: "
            f"only nf4 with blocks of {_NF4_BLOCK} is; load it with transformers, dequantized, then call "
            "pack_frozen"
        )
    codes, scales = taken(tensors, name), taken(tensors, f"{name}.absmax")
    tensors.pop(f"{name}.quant_map", None)
    if "nested_blocksize" in said:
        scales = _joined(tensors, name, scales, said)
    return codes.reshape(-1).view(torch.uint8), scales.to(torch.float32), tuple(said["shape"])


def _joined(
    tensors: dict[str, torch.Tensor], name: str, scales: torch.Tensor, said: Mapping[str, Any]
) -> torch.Tensor:
    """The scales that are themselves stored in 8 bits, with scales of their own and one offset for all."""
    values, most = taken(tensors, f"{name}.nested_quant_map"), taken(tensors, f"{name}.nested_absmax")
    found = values.to(torch.float32)[scales.long()]
    found *= most.to(torch.float32).repeat_interleave(said["nested_blocksize"])[: len(found)]
    return found + said["nested_offset"]
