"""Look up codes of fp32 numbers: the upper 16 bits give one code, or two between which the lower 16 decide."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import cast

import torch

from rp_packing.piecewise.threads import Scratch

_UPPER, _LOWER = 1 << 16, 0xFFFF
# The number of states; an index is formed from a pair of states.
_STATES = 64


@dataclass(frozen=True, slots=True)
class PairLookup:
    """Combines the codes of two neighbouring numbers in a byte.

    A state stands for a code, and the next state for the code beyond a boundary. `starts`, int32: for each upper
    half of an fp32 number, the summand of its bits for which the upper half of the sum is its state; a lower half
    beyond the boundary carries into it. `bytes_`, uint8: for each pair of states, the byte of their codes.
    """

    starts: torch.Tensor
    bytes_: torch.Tensor

    def __call__(self, numbers: torch.Tensor, scratch: Scratch) -> torch.Tensor:
        """Return bytes in the memory of `scratch`. `numbers`: fp32, 1-dim, an even number of them."""
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
    """Return a table that gives the codes of `code_of` for every fp32 number.

    `code_of`: returns the 4-bit codes, uint8, of fp32 numbers on the host. Among numbers with the same upper 16
    bits its result may change at one boundary only. `first_is_high`: whether the first of two codes is in the high
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
    return cast("list[int]", codes.tolist())  # pyright: ignore[reportUnknownMemberType] - torch has no exact type


def _number(bits: torch.Tensor) -> torch.Tensor:
    return bits.view(torch.float32)


def _states(codes: list[tuple[int, int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the first state, int64, for the two codes of each upper half; and the codes of all states."""
    first: dict[tuple[int, int], int] = {}
    of_states: list[int] = []
    for pair in codes:
        if pair not in first:
            first[pair] = len(of_states)
            of_states += sorted(set(pair), key=pair.index)
    assert len(of_states) <= _STATES
    of_states += [0] * (_STATES - len(of_states))
    states = torch.tensor([first[pair] for pair in codes], dtype=torch.int64, device="cpu")
    return states, torch.tensor(of_states, dtype=torch.uint8, device="cpu")


def _boundaries(
    code_of: Callable[[torch.Tensor], torch.Tensor], upper: torch.Tensor, low: torch.Tensor, high: torch.Tensor
) -> torch.Tensor:
    """Return the last lower half before each upper half's boundary; 65535 if there is none."""
    has_one = low != high
    upper, low = upper[has_one], low[has_one]
    last, beyond = torch.zeros_like(upper), torch.full_like(upper, _LOWER)
    for _ in range(16):
        middle = (last + beyond) // 2
        is_low = code_of(_number(upper | middle)) == low
        last, beyond = middle.where(is_low, last), beyond.where(is_low, middle)
    boundaries = torch.full_like(has_one, _LOWER, dtype=torch.int32)
    boundaries[has_one] = last
    return boundaries
