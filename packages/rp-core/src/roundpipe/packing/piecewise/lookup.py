"""Codes of fp32 numbers by table: the upper 16 bits choose one, or two that the lower 16 bits decide between."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import cast

import torch

from roundpipe.packing.piecewise.threads import Scratch

_UPPER, _LOWER = 1 << 16, 0xFFFF
# Of a pair of states an index is made.
_STATES = 64


@dataclass(frozen=True, slots=True)
class PairLookup:
    """Makes a byte of the codes of two neighbours.

    A state stands for a code, and the next state for the code beyond a boundary. `starts`, int32, for each upper
    half of an fp32 number: what to add to its bits, so that the upper half of the sum is its state; a lower half
    beyond the boundary carries into it. `bytes_`, uint8, for each two states.
    """

    starts: torch.Tensor
    bytes_: torch.Tensor

    def __call__(self, numbers: torch.Tensor, scratch: Scratch) -> torch.Tensor:
        """Bytes in the memory of `scratch`. `numbers`: fp32 in a row, of an even number."""
        numel = numbers.numel()
        bits = numbers.view(torch.int32)
        index, states = (scratch.take(name, (numel,), torch.int32) for name in ("index", "states"))
        torch.bitwise_right_shift(bits, 16, out=index).bitwise_and_(_LOWER)
        torch.index_select(self.starts, 0, index, out=states).add_(bits).bitwise_right_shift_(16)
        pairs = torch.add(states[1::2], states[::2], alpha=_STATES, out=index[: numel // 2])
        return torch.index_select(self.bytes_, 0, pairs, out=scratch.take("bytes", pairs.shape, torch.uint8))


@cache
def pair_lookup(
    code_of: Callable[[torch.Tensor], torch.Tensor], device: torch.device, *, first_is_high: bool
) -> PairLookup:
    """A table that gives what `code_of` does, for every fp32 number, in the same bits.

    `code_of`: 4-bit codes, uint8, of fp32 numbers on the host. Of numbers with the same upper 16 bits it changes
    at one boundary at most, and is the same beyond. `first_is_high`: whether the first of two codes is in the high
    half of a byte.
    """
    with torch.inference_mode(False), torch.no_grad():
        upper = torch.arange(_UPPER, dtype=torch.int32, device="cpu") << 16
        low, high = code_of(_number(upper)), code_of(_number(upper | _LOWER))
        first, codes = _states(list(zip(_listed(low), _listed(high), strict=True)))
        # In int64, then wrapped: the sum of both is a small number again.
        starts = (first << 16) + _LOWER - _boundaries(code_of, upper, low, high) - upper
        one, other = codes.unsqueeze(1), codes.unsqueeze(0)
        bytes_ = (one << 4 | other) if first_is_high else (other << 4 | one)
        return PairLookup(starts.to(torch.int32).to(device), bytes_.flatten().to(device))


def _listed(codes: torch.Tensor) -> list[int]:
    return cast("list[int]", codes.tolist())  # pyright: ignore[reportUnknownMemberType] - torch says no more of it


def _number(bits: torch.Tensor) -> torch.Tensor:
    return bits.view(torch.float32)


def _states(codes: list[tuple[int, int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """For each two codes of an upper half the first state, int64; and the codes of all states."""
    first: dict[tuple[int, int], int] = {}
    found: list[int] = []
    for pair in codes:
        if pair not in first:
            first[pair] = len(found)
            found += sorted(set(pair), key=pair.index)
    assert len(found) <= _STATES
    found += [0] * (_STATES - len(found))
    states = torch.tensor([first[pair] for pair in codes], dtype=torch.int64, device="cpu")
    return states, torch.tensor(found, dtype=torch.uint8, device="cpu")


def _boundaries(
    code_of: Callable[[torch.Tensor], torch.Tensor], upper: torch.Tensor, low: torch.Tensor, high: torch.Tensor
) -> torch.Tensor:
    """The last lower half before each upper half's boundary; 65535 where there is none."""
    has_one = low != high
    upper, low = upper[has_one], low[has_one]
    last, beyond = torch.zeros_like(upper), torch.full_like(upper, _LOWER)
    for _ in range(16):
        middle = (last + beyond) // 2
        is_low = code_of(_number(upper | middle)) == low
        last, beyond = middle.where(is_low, last), beyond.where(is_low, middle)
    found = torch.full_like(has_one, _LOWER, dtype=torch.int32)
    found[has_one] = last
    return found
