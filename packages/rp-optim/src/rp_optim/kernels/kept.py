"""The formats of an optimizer's state tensors (full precision, bf16 or 8 bits): create, read and convert them.

A tensor in 8 bits is two tensors in the state: ``exp_avg_codes``, of the parameter's shape, and
``exp_avg_scales``. So an optimizer that does not know the format misses ``exp_avg`` and raises an error. Only
torch's SGD does not: it starts with a new buffer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from rp_optim.checks import is_plain, resolved
from rp_optim.errors import InvalidOption, InvalidParameter
from rp_optim.kernels.packed import (
    KINDS,
    Draw,
    StateKind,
    nearest,
    num_groups,
    pack_roots,
    pack_signed,
    to_bfloat16,
    unpack_roots,
    unpack_signed,
)

State = dict[str, Any]
Shapes = Mapping[str, Sequence[int]]

CODES, SCALES = "_codes", "_scales"
# Second moments, which are stored as square roots; all other tensors have a sign.
_SQUARES = frozenset(("exp_avg_sq", "max_exp_avg_sq", "variance", "row_var", "col_var"))
# Tensors that are stored in units of the root of another tensor, if there is one.
_IN_ROOTS_OF = {"exp_avg": "exp_avg_sq"}
_SMALL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def check_kind(optimizer: str, kind: str) -> StateKind:
    """Return `kind` if it names a format. Raises `InvalidOption` otherwise."""
    for known in KINDS:
        if kind == known:
            return known
    raise InvalidOption(f"{optimizer} needs state to be one of {', '.join(KINDS)}, but has {kind!r} instead")


def check_can_be_small(kind: StateKind, parameter: torch.Tensor) -> None:
    """Raise `InvalidParameter` for a parameter whose state cannot have the format `kind`."""
    if kind != "fp32" and parameter.dtype not in _SMALL_DTYPES:
        raise InvalidParameter(
            f"state={kind!r} needs parameters of 32 or 16 bits, but one is {parameter.dtype}; omit state"
        )


def has_codes(state: Mapping[str, Any]) -> bool:
    """Return whether a state has tensors in 8 bits."""
    return any(name.endswith(CODES) for name in state)


def is_missing(state: Mapping[str, Any], name: str) -> bool:
    """Return whether a state lacks this tensor in any format."""
    return state.get(name) is None and state.get(name + CODES) is None


def as_whole(state: Mapping[str, Any], name: str) -> torch.Tensor | None:
    """Return the values of a state tensor in any format; None if it is missing. Only 8 bits are copied."""
    codes: torch.Tensor | None = state.get(name + CODES)
    if codes is None:
        return state.get(name)
    flat, scales = codes.reshape(-1), state[name + SCALES]
    if name in _SQUARES:
        return unpack_roots(flat, scales).square_().view(codes.shape)
    values = unpack_signed(flat, scales)
    roots = _IN_ROOTS_OF.get(name, "")
    if roots + CODES in state:
        values *= unpack_roots(state[roots + CODES].reshape(-1), state[roots + SCALES])
    return values.view(codes.shape)


def keep(
    state: State, name: str, values: torch.Tensor, kind: StateKind, draw: Draw = nearest, array: int = 0
) -> None:
    """Store values in the state in the format `kind`, rounded by `draw`; "fp32" stores the tensor itself."""
    state.pop(name + CODES, None)
    state.pop(name + SCALES, None)
    if kind == "fp32":
        state[name] = values
        return
    flat = values.detach().reshape(-1).float()
    draws = draw(0, flat.numel(), array)
    if kind == "bf16":
        state[name] = to_bfloat16(flat, draws).view(values.shape)
        return
    state.pop(name, None)
    roots = _IN_ROOTS_OF.get(name, "")
    if roots + CODES in state:
        units = unpack_roots(state[roots + CODES].reshape(-1), state[roots + SCALES])
        flat = torch.where(units > 0, flat / units, 0)
    codes, scales = (pack_roots if name in _SQUARES else pack_signed)(flat, draws)
    state[name + CODES], state[name + SCALES] = codes.view(values.shape), scales


def convert(state: State, names: Iterable[str], kind: StateKind, dtype: torch.dtype) -> None:
    """Convert the tensors that exist to the format `kind`. `dtype`: their dtype in the format "fp32"."""
    wrong = {name: _as_plain(whole) for name in names if (whole := _if_wrong(state, name, kind)) is not None}
    # Second moments first, since first moments may be stored in units of them.
    for name in sorted(wrong, key=lambda name: name not in _SQUARES):
        keep(state, name, wrong[name].to(dtype) if kind == "fp32" else wrong[name], kind)


def _if_wrong(state: State, name: str, kind: StateKind) -> torch.Tensor | None:
    """Return the values of a tensor whose format is not `kind`; None if it is."""
    is_8bit = state.get(name + CODES) is not None
    if is_8bit == (kind == "8bit") and (kind != "bf16" or _is_bfloat16(state.get(name))):
        return None
    return as_whole(state, name)


def _is_bfloat16(tensor: torch.Tensor | None) -> bool:
    return tensor is None or (tensor.dtype == torch.bfloat16 and is_plain(tensor))


def _as_plain(tensor: torch.Tensor) -> torch.Tensor:
    return resolved(tensor).contiguous()


@dataclass(frozen=True, slots=True)
class SmallState:
    """A small state tensor: bf16 numbers or codes, of the parameter's shape, and scales if it is codes."""

    tensor: torch.Tensor
    scales: torch.Tensor | None


def kept(state: State, name: str, shape: Sequence[int], kind: StateKind) -> SmallState:
    """Return a small state tensor; create it as zeros if it is missing."""
    if is_missing(state, name):
        for key, (own, dtype) in _tensors(name, shape, kind).items():
            state[key] = torch.zeros(tuple(own), dtype=dtype, device="cpu")
    if kind == "bf16":
        return SmallState(state[name], None)
    return SmallState(state[name + CODES], state[name + SCALES])


def check_kept(state: Mapping[str, Any], name: str, shape: Sequence[int], kind: StateKind) -> None:
    """Raise `InvalidParameter` unless a small state tensor (which users may have set) is as `kept` creates it."""
    if is_missing(state, name):
        return
    for key, (own, dtype) in _tensors(name, shape, kind).items():
        tensor = state.get(key)
        if tensor is None or not _fits(tensor, own, dtype):
            actual = "missing" if tensor is None else _described(tensor)
            raise InvalidParameter(
                f"the state {key!r} must be a contiguous {dtype} tensor of shape {tuple(own)} on the CPU, but is "
                f"{actual} instead; load the state of the same model with load_state_dict, which converts it"
            )


def _described(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} of shape {tuple(tensor.shape)} on {tensor.device}"


def _fits(tensor: torch.Tensor, shape: Sequence[int], dtype: torch.dtype) -> bool:
    return tensor.is_cpu and tensor.dtype == dtype and tuple(tensor.shape) == tuple(shape) and is_plain(tensor)


def _tensors(name: str, shape: Sequence[int], kind: StateKind) -> dict[str, tuple[Sequence[int], torch.dtype]]:
    """Return the tensors that store a small state tensor: their names in the state, with shape and dtype."""
    if kind == "bf16":
        return {name: (shape, torch.bfloat16)}
    codes = torch.uint8 if name in _SQUARES else torch.int8
    return {name + CODES: (shape, codes), name + SCALES: ((num_groups(prod(shape)),), torch.bfloat16)}


def tensors_of(
    name: str, shape: Sequence[int], kind: StateKind, dtype: torch.dtype
) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Return the tensors that store a state tensor for a parameter of this dtype: their names, shapes and dtypes.

    >>> tensors_of("exp_avg", (64,), "8bit", torch.float32)
    {'exp_avg_codes': ((64,), torch.int8), 'exp_avg_scales': ((2,), torch.bfloat16)}
    """
    if kind == "fp32":
        return {name: (tuple(shape), dtype)}
    return {key: (tuple(own), small) for key, (own, small) in _tensors(name, shape, kind).items()}
