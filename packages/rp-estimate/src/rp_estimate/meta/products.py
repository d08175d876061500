"""The floating-point operations of one operation of torch, grouped products included."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

_FLASH = torch.ops.aten._scaled_dot_product_flash_attention
_FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_backward
# The position of the argument `is_causal` of these operations.
_IS_CAUSAL = {_FLASH: 4, _FLASH_BACKWARD: 11}
# Operations of torch with these words in their names multiply matrices.
_MULTIPLIES = re.compile(
    r"(^|_)(\w*mm|matmul|gemm|mv|dot|linear|bilinear|conv\w*|attention|gru|lstm|rnn|cdist)(_|$)"
)
_MATRIX = 2


class UncountedWarning(UserWarning):
    """An operation that may multiply matrices is not known, so that its arithmetic is not counted."""


def flops_of(packet: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> int | None:
    """Return an operation's multiplications and additions; None for one whose formula is not known.

    `packet`: the operation, such as ``torch.ops.aten.mm``. A causal mask halves an attention's. A grouped product,
    as of experts, counts each row once, with the matrix of its group.
    """
    if packet in flop_registry:
        flops = cast(int, flop_registry[packet](*args, **kwargs, out_val=out))
        at = _IS_CAUSAL.get(packet)
        return flops // 2 if at is not None and len(args) > at and args[at] else flops
    grouped = _GROUPED.get(str(packet))
    if grouped is not None:
        return grouped(args[0], args[1])
    return None if _may_multiply(packet, args) else 0


def _grouped(left: Tensor, right: Tensor) -> int:
    """Count a product of stacks of matrices, or of matrices whose rows or columns are in groups.

    (tokens, k) by (groups, k, n); (groups, m, k) by (k, tokens); (m, tokens) by (tokens, n), which makes a matrix
    for each group; or a stack by a stack.
    """
    stacks = left.shape[0] if left.ndim == right.ndim > _MATRIX else 1
    return 2 * stacks * left.shape[-2] * left.shape[-1] * right.shape[-1]


def _twice(left: Tensor, right: Tensor) -> int:
    return 2 * _grouped(left, right)


# By names, since versions of torch and transformers have some of them.
_GROUPED: dict[str, Callable[[Tensor, Tensor], int]] = {
    "aten._grouped_mm": _grouped,
    "aten._scaled_grouped_mm": _grouped,
    "aten._scaled_grouped_mm_v2": _grouped,
    "transformers.grouped_mm_fallback": _grouped,
    "transformers.grouped_mm_fallback_backward": _twice,
}


def _may_multiply(packet: Any, args: tuple[Any, ...]) -> bool:
    """Return whether an operation takes matrices and, by its name, multiplies them or is none of torch's own."""
    library, _, name = str(packet).partition(".")
    matrices = [one for one in args if isinstance(one, Tensor) and one.ndim >= _MATRIX and one.is_floating_point()]
    return len(matrices) > 1 and (library not in ("aten", "prims", "prim") or _MULTIPLIES.search(name) is not None)
