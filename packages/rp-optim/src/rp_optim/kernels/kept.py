"""An optimizer's state tensors as they are kept: whole, in bf16 or in 8 bits; how they are made and converted.

A tensor in 8 bits is two in the state: ``exp_avg_codes``, of the parameter's shape, and ``exp_avg_scales``. So an
optimizer that does not know the format misses ``exp_avg`` and says so; torch's SGD alone begins anew.
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
# Second moments, which are kept as square roots; all others have a sign.
_SQUARES = frozenset(("exp_avg_sq", "max_exp_avg_sq", "variance", "row_var", "col_var"))
# Kept in units of the root of another tensor, if that is there.
_IN_ROOTS_OF = {"exp_avg": "exp_avg_sq"}
_SMALL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def check_kind(optimizer: str, kind: str) -> StateKind:
    """Return the kind. Raises `InvalidOption` if there is none of this name."""
    for known in KINDS:
        if kind == known:
            return known
    raise InvalidOption(f"{optimizer} needs state to be one of {', '.join(KINDS)}, but has {kind!r} instead")


def check_can_be_small(kind: StateKind, parameter: torch.Tensor) -> None:
    """Raise `InvalidParameter` for a parameter whose state cannot be kept so."""
    if kind != "fp32" and parameter.dtype not in _SMALL_DTYPES:
        raise InvalidParameter(
            f"state={kind!r} needs parameters of 32 or 16 bits, but one is {parameter.dtype}; leave state out"
        )


def nbytes_of(kind: StateKind, shape: Sequence[int], dtype: torch.dtype) -> int:
    """Bytes of one state tensor of a parameter of this dtype.

    >>> [nbytes_of(kind, (64,), torch.float32) for kind in ("fp32", "bf16", "8bit")]
    [256, 128, 68]
    """
    if kind == "8bit":
        return prod(shape) + 2 * num_groups(prod(shape))
    return prod(shape) * (2 if kind == "bf16" else dtype.itemsize)


def has_codes(state: Mapping[str, Any]) -> bool:
    """Whether a state has tensors in 8 bits."""
    return any(name.endswith(CODES) for name in state)


def is_missing(state: Mapping[str, Any], name: str) -> bool:
    """Whether a state does not have this tensor, however it is kept."""
    return state.get(name) is None and state.get(name + CODES) is None


def as_whole(state: Mapping[str, Any], name: str) -> torch.Tensor | None:
    """The values of a state tensor, however it is kept, a copy only if that is 8 bits; None if it is missing."""
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
    """Put the values into the state, kept as `kind`. Rounds as `draw` says; "fp32" keeps the tensor itself."""
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
    """Keep those tensors that are there as `kind`, unless they are already. `dtype`: of whole ones."""
    wrong = {name: _as_plain(whole) for name in names if (whole := _if_wrong(state, name, kind)) is not None}
    # Second moments first: first ones may be kept in units of them.
    for name in sorted(wrong, key=lambda name: name not in _SQUARES):
        keep(state, name, wrong[name].to(dtype) if kind == "fp32" else wrong[name], kind)


def _if_wrong(state: State, name: str, kind: StateKind) -> torch.Tensor | None:
    """The values of a tensor that is kept as another kind."""
    is_8bit = state.get(name + CODES) is not None
    if is_8bit == (kind == "8bit") and (kind != "bf16" or _is_bfloat16(state.get(name))):
        return None
    return as_whole(state, name)


def _is_bfloat16(tensor: torch.Tensor | None) -> bool:
    return tensor is None or (tensor.dtype == torch.bfloat16 and is_plain(tensor))


def _as_plain(tensor: torch.Tensor) -> torch.Tensor:
    return resolved(tensor).contiguous()


@dataclass(frozen=True, slots=True)
class Kept:
    """A small state tensor: bf16 numbers or codes, of the parameter's shape, and scales if it is codes."""

    tensor: torch.Tensor
    scales: torch.Tensor | None


def kept(state: State, name: str, shape: Sequence[int], kind: StateKind) -> Kept:
    """A small state tensor, which is made, as zeros, if it is not there."""
    if is_missing(state, name):
        for key, (own, dtype) in _tensors(name, shape, kind).items():
            state[key] = torch.zeros(tuple(own), dtype=dtype, device="cpu")
    if kind == "bf16":
        return Kept(state[name], None)
    return Kept(state[name + CODES], state[name + SCALES])


def check_kept(state: Mapping[str, Any], name: str, shape: Sequence[int], kind: StateKind) -> None:
    """Raise `InvalidParameter` unless a small state tensor, which may have been set, is as `kept` makes it."""
    if is_missing(state, name):
        return
    for key, (own, dtype) in _tensors(name, shape, kind).items():
        found = state.get(key)
        if found is None or not _fits(found, own, dtype):
            told = "missing" if found is None else f"{found.dtype} of shape {tuple(found.shape)} on {found.device}"
            raise InvalidParameter(
                f"the state {key!r} must be a contiguous {dtype} tensor of shape {tuple(own)} on the CPU, but is "
                f"{told} instead; load the state of the same model with load_state_dict, which converts it"
            )


def _fits(found: torch.Tensor, shape: Sequence[int], dtype: torch.dtype) -> bool:
    return found.is_cpu and found.dtype == dtype and tuple(found.shape) == tuple(shape) and is_plain(found)


def _tensors(name: str, shape: Sequence[int], kind: StateKind) -> dict[str, tuple[Sequence[int], torch.dtype]]:
    """Names in the state of a small tensor's own tensors, with shape and dtype."""
    if kind == "bf16":
        return {name: (shape, torch.bfloat16)}
    codes = torch.uint8 if name in _SQUARES else torch.int8
    return {name + CODES: (shape, codes), name + SCALES: ((num_groups(prod(shape)),), torch.bfloat16)}
