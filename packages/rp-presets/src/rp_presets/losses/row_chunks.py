"""Chunks of rows of a head's logits: their losses, and the gradient of the logits."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from rp_presets.losses.elementwise import Step, differentiate, traced

Reduction = Literal["none", "sum", "mean"]

# Rows of a chunk. The gradient of the weight is read and written once a chunk, so a chunk should have about half
# as many rows as features, or as many with the kernel, which needs a quarter of the memory. With 2048 features and
# the 8192 rows of `cross_entropy`: 256 rows 79 ms and 1.8 GiB, 512 rows 56 ms and 2.4 GiB, 1024 rows 46 ms and
# 3.5 GiB, 2048 rows 42 ms and 5.9 GiB on an H100. With the kernel on an H200: 512 rows 33 ms and 1.8 GiB, 1024
# rows 28 ms and 1.8 GiB, 2048 rows 26 ms and 2.4 GiB, 4096 rows 25 ms and 3.5 GiB; 1024 rows without it 40 ms and
# 3.0 GiB.
_FEWEST_ROWS, _MOST_ROWS = 256, 2048


@dataclass(frozen=True, slots=True)
class Options:
    """The arguments of torch's cross entropy. `dtype`: of the loss."""

    reduction: Reduction
    ignore_index: int
    label_smoothing: float
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class LossWork:
    """What to compute over the logits. `with_grad`: whether gradients may be asked for."""

    steps: tuple[Step, ...]
    targets: Tensor
    class_weight: Tensor | None
    options: Options
    with_grad: bool

    def factors(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """For each row: 1 if its target counts, otherwise 0; and the weight of its target, 0 if ignored."""
        counts = (self.targets != self.options.ignore_index).to(dtype)
        if self.class_weight is None:
            return counts, counts
        return counts, counts * self.class_weight.to(dtype)[self.safe_targets()]

    def safe_targets(self) -> Tensor:
        """The targets, 0 where they are ignored: those may be any number, but gather needs an index."""
        return self.targets.where(self.targets != self.options.ignore_index, 0)


@dataclass(slots=True)
class Chunk:
    """Some rows. `trace`: their logits as projected, and after each step.

    `counts` and `weights`: `LossWork.factors`, times the gradient of each row's loss where that is not one.
    """

    rows: slice
    work: LossWork
    hidden: Tensor
    weight: Tensor
    trace: Sequence[Tensor]
    targets: Tensor
    counts: Tensor
    weights: Tensor

    def losses(self) -> Tensor:
        """The rows' losses, 0 where the target is ignored; may write over the logits."""
        # The kernel's gradient is not asked for, but takes less time and memory than a softmax of its own.
        return self._by_kernel()[0] if self._has_kernel() else self._losses(self._log_p())

    def differentiated(self) -> tuple[Tensor, Tensor]:
        """The rows' losses, and the gradient of the projected logits; may write over the logits."""
        losses, grad = self._by_kernel() if self._has_kernel() else self._by_torch()
        return losses, differentiate(self.work.steps, self.trace, grad.to(self.trace[-1].dtype))

    def _has_kernel(self) -> bool:
        return _has_kernel(self.trace[-1], self.work)

    def _log_p(self) -> Tensor:
        # Of the logits, in the wide dtype.
        return self.trace[-1].log_softmax(-1, dtype=wide(self.trace[-1].dtype))

    def _losses(self, log_p: Tensor) -> Tensor:
        smooth = self.work.options.label_smoothing
        # `where`, not times zero: the log-probability of class 0 may be infinite in an ignored row.
        losses = -log_p.gather(-1, self.targets).squeeze(-1).where(self.counts != 0, 0) * self.weights
        if not smooth:
            return losses
        spread = log_p if self.work.class_weight is None else log_p * self.work.class_weight
        spread = spread.sum(-1).where(self.counts != 0, 0)
        return (1 - smooth) * losses - smooth / log_p.shape[-1] * spread

    def _by_kernel(self) -> tuple[Tensor, Tensor]:
        # The steps' derivatives may read what they returned.
        grad = self.trace[-1].clone() if self.work.steps else self.trace[-1]
        kernel = importlib.import_module("rp_presets.losses.softmax_kernel")
        losses = kernel.differentiate_in_place(grad, self.targets.squeeze(-1), self.counts, self.weights)
        return losses, grad

    def _by_torch(self) -> tuple[Tensor, Tensor]:
        log_p = self._log_p()
        losses = self._losses(log_p)
        smooth, classes = self.work.options.label_smoothing, log_p.shape[-1]
        grad = log_p.exp_()
        hit = self.weights * (1 - smooth)
        whole = classes if self.work.class_weight is None else self.work.class_weight.to(grad.dtype).sum()
        grad.mul_((hit + self.counts * (smooth / classes * whole))[:, None])
        grad.scatter_add_(-1, self.targets, -hit[:, None])
        if smooth:
            each = 1 if self.work.class_weight is None else self.work.class_weight.to(grad.dtype)
            grad.sub_(self.counts[:, None] * (smooth / classes) * each)
        return losses, grad


def _has_kernel(logits: Tensor, work: LossWork) -> bool:
    """Whether `softmax_kernel` can do it: on a GPU, of up to 32 bits, where Triton is installed."""
    fits = logits.is_cuda and logits.element_size() <= 4 and not work.options.label_smoothing
    return fits and _has_triton()


@cache
def _has_triton() -> bool:
    # Torch brings it along on Linux alone.
    return find_spec("triton") is not None


def chunk_rows(features: int) -> int:
    """How many rows are computed at a time: half as many as there are features, within bounds."""
    return min(max(features // 2, _FEWEST_ROWS), _MOST_ROWS)


def chunks(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, work: LossWork, counts: Tensor, weights: Tensor
) -> Iterator[Chunk]:
    """Project the rows, a chunk at a time. `counts` and `weights`: see `Chunk`."""
    size = chunk_rows(hidden.shape[-1]) * (2 if _has_kernel(hidden, work) else 1)
    targets = work.safe_targets()[:, None]
    for start in range(0, len(hidden), size):
        rows = slice(start, start + size)
        trace = traced(work.steps, functional.linear(hidden[rows], weight, bias))
        yield Chunk(rows, work, hidden[rows], weight, trace, targets[rows], counts[rows], weights[rows])


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums: fp32 for 16-bit tensors, otherwise their own."""
    return torch.promote_types(dtype, torch.float32)
