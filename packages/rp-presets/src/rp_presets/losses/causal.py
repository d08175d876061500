"""Next-token loss of a causal language model that never converts all logits to fp32 at once."""

from __future__ import annotations

from typing import Literal, Protocol, cast, get_args

import torch
from torch import Tensor
from torch.nn import functional

from rp_presets.losses.lazy_logits import LazyLogits
from rp_presets.once import once_differentiable, tie

Reduction = Literal["sum", "mean"]


class HasLogits(Protocol):
    """The output object of a language model."""

    @property
    def logits(self) -> Tensor | None:
        """The logits, (batch, positions, vocabulary), or None if the model returned none."""
        ...


def causal_lm_loss(
    outputs: HasLogits | Tensor,
    labels: Tensor,
    *,
    reduction: Reduction,
    aligned: bool = False,
    ignore_index: int = -100,
    chunk_positions: int = 256,
) -> Tensor:
    """Compute the next-token cross entropy.

    >>> import torch
    >>> tokens = torch.tensor([[3, 1, 2], [1, 0, -100]])
    >>> logits = torch.zeros(2, 3, 4, requires_grad=True)
    >>> causal_lm_loss(logits, tokens, reduction="sum") / 3  # three tokens are predicted, each 1 in 4
    tensor(1.3863, grad_fn=<DivBackward0>)

    By default the labels are the input tokens, as in transformers: position t is scored against the label at
    t + 1, and the last position of a sequence is not scored. With `aligned` the labels are already shifted:
    position t is scored against the label at t.

    The reduction has no default, since either may be wrong. "mean" divides by the number of scored labels in
    *this* call. If microbatches have different numbers, the mean of their means is not the mean over all tokens.
    For the mean over all tokens, use "sum" and divide by the number of labels in the whole batch. As in torch, the
    mean over no labels is NaN.

    Shapes:
        outputs: (..., positions, vocabulary), floating point; or an object with such `logits`.
        labels: (..., positions), integers; positions with `ignore_index` are not scored.
        returns: a scalar, fp32 (fp64 for fp64 logits).

    Logits of `lazy_logits` are never all computed; `chunk_positions` does not apply to them.

    Memory: `chunk_positions` positions at a time are computed in fp32. That takes one buffer of
    `chunk_positions * vocabulary * 4` bytes in forward and two in backward. The gradient has the logits' dtype.

    Raises:
        TypeError: logits are missing or not floating point, or labels are not integers.
        ValueError: shapes do not match, or reduction or chunk_positions is not an allowed value.
    """
    _check_options(reduction, chunk_positions)
    logits = _logits_of(outputs)
    _check_tensors(logits, labels)
    targets = (labels if aligned else _next(labels, ignore_index)).reshape(-1).to(logits.device, torch.int64)
    counted = targets != ignore_index
    rows = logits.reshape(-1, logits.shape[-1])
    if isinstance(rows, LazyLogits):
        return functional.cross_entropy(
            rows.to(_wide(rows)), targets, ignore_index=ignore_index, reduction=reduction
        )
    # `apply` is untyped in torch.
    total = cast(Tensor, _SumOfChunks.apply(rows, targets, counted, chunk_positions))
    return total if reduction == "sum" else total / counted.sum()


class _Context(Protocol):
    """The autograd context of `_SumOfChunks`."""

    chunk_positions: int
    saved_tensors: tuple[Tensor, ...]

    def save_for_backward(self, *tensors: Tensor) -> None: ...


class _SumOfChunks(torch.autograd.Function):
    """Sum of `-log_softmax(logits)[target]` over counted positions; its gradient is `softmax - one_hot`.

    Both are one kernel call, which reads the logits in their dtype and computes in fp32 (fp64 for fp64).
    """

    @staticmethod
    def forward(ctx: _Context, logits: Tensor, targets: Tensor, counted: Tensor, chunk_positions: int) -> Tensor:
        tie(ctx, logits)
        # An ignored target may be any number, but `gather` needs a valid index.
        targets = targets.where(counted, 0)[:, None]
        ctx.save_for_backward(logits, targets, counted[:, None])
        ctx.chunk_positions = chunk_positions
        losses = [
            logits[part].log_softmax(-1, dtype=_wide(logits)).gather(-1, targets[part])
            for part in _parts(len(logits), chunk_positions)
        ]
        return _joined(losses, logits).neg().squeeze(-1).where(counted, 0).sum()

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] - the decorator hides the names
        ctx: _Context, grad_total: Tensor
    ) -> tuple[Tensor, None, None, None]:
        logits, targets, counted = ctx.saved_tensors
        grad = torch.empty_like(logits)
        for part in _parts(len(logits), ctx.chunk_positions):
            chunk = _gradient(logits[part], targets[part])
            torch.mul(chunk.where(counted[part], 0), grad_total, out=grad[part])
        return grad, None, None, None


def _parts(positions: int, size: int) -> list[slice]:
    return [slice(start, start + size) for start in range(0, positions, size)]


def _joined(losses: list[Tensor], logits: Tensor) -> Tensor:
    return torch.cat(losses) if losses else logits.new_empty((0, 1), dtype=_wide(logits))


def _gradient(logits: Tensor, targets: Tensor) -> Tensor:
    gradient = logits.softmax(-1, dtype=_wide(logits))
    return gradient.scatter_add_(-1, targets, gradient.new_full((), -1).expand_as(targets))


def _wide(logits: Tensor) -> torch.dtype:
    return torch.promote_types(logits.dtype, torch.float32)


def _next(labels: Tensor, ignore_index: int) -> Tensor:
    # Shift the labels, not the logits: a slice of the logits would have to be copied.
    return functional.pad(labels[..., 1:], (0, 1), value=ignore_index)


def _logits_of(outputs: HasLogits | Tensor) -> Tensor:
    logits = outputs if isinstance(outputs, Tensor) else getattr(outputs, "logits", None)
    if not isinstance(logits, Tensor):
        raise TypeError(
            f"outputs must be a tensor of logits or an object with logits, but is a {type(outputs).__name__}"
        )
    return logits


def _check_tensors(logits: Tensor, labels: Tensor) -> None:
    if not logits.is_floating_point():
        raise TypeError(f"logits must be floating point, but are {logits.dtype}")
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise TypeError(f"labels must be integers, but are {labels.dtype}")
    if logits.ndim < 2 or labels.shape != logits.shape[:-1]:
        raise ValueError(
            f"labels must have the shape of the logits without the vocabulary, {tuple(logits.shape[:-1])}, "
            f"but have {tuple(labels.shape)}"
        )


def _check_options(reduction: str, chunk_positions: int) -> None:
    if reduction not in get_args(Reduction):
        raise ValueError(f"reduction must be 'sum' or 'mean', but is {reduction!r}")
    if chunk_positions < 1:
        raise ValueError(f"chunk_positions must be at least 1, but is {chunk_positions}")
