"""Cross entropy of rows of logits and its gradient, in one Triton kernel. Importing this needs Triton."""

# Triton compiles the kernel's source, to which Python's types do not apply; it has no type stubs.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUntypedFunctionDecorator=false
# pyright: reportUnknownVariableType=false, reportUnknownParameterType=false, reportMissingParameterType=false
# pyright: reportUnknownArgumentType=false, reportOperatorIssue=false, reportPrivateImportUsage=false, reportCallIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# How many logits a program reads at a time, and with how many warps.
_BLOCK = 4096
_WARPS = 8


def differentiate_in_place(logits: Tensor, targets: Tensor, counts: Tensor, weights: Tensor) -> Tensor:
    """Return the rows' losses; overwrite the logits by the gradient of the sum of losses.

    Shapes:
        logits: (rows, classes), of up to 32 bits, each row contiguous. targets: (rows), int64, a valid class even
        where it does not count. counts: (rows), fp32, 1 for a target that counts, otherwise 0. weights: (rows),
        fp32, the weights of the losses. returns: (rows), fp32.
    """
    rows, classes = logits.shape
    losses = torch.empty(rows, dtype=torch.float32, device=logits.device)
    # Triton launches on the calling thread's current device, which may be another one.
    with torch.cuda.device_of(logits):
        if rows:
            _softmax[(rows,)](
                logits, logits.stride(0), targets, counts, weights, losses, classes, block=_BLOCK, num_warps=_WARPS
            )
    return losses


@triton.jit
def _softmax(logits, stride, targets, counts, weights, losses, classes, block: tl.constexpr):
    # One program per row. It reads the row twice, the second time mostly from the cache.
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    target = tl.load(targets + row)
    is_counted = tl.load(counts + row) != 0
    weight = tl.load(weights + row)
    hit = tl.load(logits + target).to(tl.float32)
    columns = tl.arange(0, block)

    # For each column of a block: the maximum so far, and the sum of exp(logit - maximum).
    most = tl.full((block,), float("-inf"), tl.float32)
    total = tl.zeros((block,), tl.float32)
    for start in range(0, classes, block):
        part = tl.load(logits + start + columns, mask=start + columns < classes, other=float("-inf")).to(
            tl.float32
        )
        larger = tl.maximum(most, part)
        # While all logits are -inf, subtract nothing: -inf minus -inf is NaN.
        base = tl.where(larger == float("-inf"), 0.0, larger)
        total = total * tl.exp(most - base) + tl.exp(part - base)
        most = larger
    highest = tl.max(most, 0)
    log_sum = highest + tl.log(tl.sum(total * tl.exp(most - highest), 0))
    tl.store(losses + row, tl.where(is_counted, log_sum - hit, 0.0) * weight)

    # All threads have read the row before one of them writes it.
    tl.debug_barrier()
    for start in range(0, classes, block):
        inside = start + columns < classes
        part = tl.load(logits + start + columns, mask=inside).to(tl.float32)
        grad = tl.exp(part - log_sum) - tl.where(start + columns == target, 1.0, 0.0)
        grad = tl.where(is_counted, grad * weight, 0.0)
        tl.store(logits + start + columns, grad.to(logits.dtype.element_ty), mask=inside)
