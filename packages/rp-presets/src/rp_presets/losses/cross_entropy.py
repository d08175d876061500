"""Cross entropy of a linear head, in chunks of rows: no tensor has a logit for every row."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.util import find_spec
from typing import Any, Literal, Protocol, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from rp_presets.losses.elementwise import Cast, Step, apply, differentiate, traced

Reduction = Literal["none", "sum", "mean"]

# Rows of a chunk. The gradient of the weight is read and written once a chunk, so a chunk should have about half
# as many rows as features, or as many with the kernel, which needs a quarter of the memory. With 2048 features, as
# below: 256 rows 79 ms and 1.8 GiB, 512 rows 56 ms and 2.4 GiB, 1024 rows 46 ms and 3.5 GiB, 2048 rows 42 ms and
# 5.9 GiB on an H100. With the kernel on an H200: 512 rows 33 ms and 1.8 GiB, 1024 rows 28 ms and 1.8 GiB, 2048
# rows 26 ms and 2.4 GiB, 4096 rows 25 ms and 3.5 GiB; 1024 rows without it 40 ms and 3.0 GiB.
_FEWEST_ROWS, _MOST_ROWS = 256, 2048


@dataclass(frozen=True, slots=True)
class Head:
    """Logits that were not computed: of a linear layer, then `steps`.

    Shapes:
        hidden: (..., features); weight: (vocabulary, features); bias: (vocabulary) or None.
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    steps: tuple[Step, ...] = ()

    def tensors(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """What the logits are computed from."""
        return self.hidden, self.weight, self.bias

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the logits."""
        return (*self.hidden.shape[:-1], len(self.weight))

    @property
    def dtype(self) -> torch.dtype:
        """Of the logits."""
        casts = (step.dtype for step in reversed(self.steps) if isinstance(step, Cast))
        return next(casts, self.hidden.dtype)

    def cast(self, dtype: torch.dtype) -> Head:
        """The same logits in another dtype; itself if they have it."""
        return self if dtype == self.dtype else replace(self, steps=(*self.steps, Cast(dtype)))

    def logits(self) -> Tensor:
        """Compute them."""
        with torch.autocast(self.hidden.device.type, enabled=False):
            return apply(self.steps, functional.linear(*self.tensors()))


@dataclass(frozen=True, slots=True)
class Options:
    """The arguments of torch's cross entropy. `dtype`: of the loss."""

    reduction: Reduction
    ignore_index: int
    label_smoothing: float
    dtype: torch.dtype


def cross_entropy(head: Head, targets: Tensor, class_weight: Tensor | None, options: Options) -> Tensor:
    """Torch's cross entropy of the head's logits, with gradients for hidden states, weight and bias.

    >>> head = Head(torch.ones(3, 2), torch.zeros(4, 2), None)
    >>> cross_entropy(head, torch.tensor([0, 3, -100]), None, Options("sum", -100, 0.0, torch.float32))
    tensor(2.7726)

    Shapes:
        head.hidden: (rows, features). targets: (rows), int64. class_weight: (vocabulary).
        returns: (rows) for "none", otherwise a scalar. As in torch, the mean over no target is NaN, and its
        gradient zero.

    Gradients are computed in forward, for an incoming gradient of one, and scaled in backward, unless the
    reduction is "none": the rows' incoming gradients are not known before. Computing them in backward would
    project each chunk a second time and save nothing where backward follows at once: the gradients, (rows,
    features) and (vocabulary, features), are what backward needs room for anyway. For 8192 rows of 2048 bf16
    features and 151,936 classes, an H100 takes 46 ms so, 63 ms with recomputation, 41 ms with all logits; and
    3.5, 3.5 and 16.2 GiB. The sums are in fp32 for 16-bit heads and rounded once, after scaling.
    """
    if options.reduction == "none":
        return _run(_PerRow, head, targets, class_weight, options)
    if class_weight is None and _torch_has_it(head, options):
        return _by_torch(head, targets, options)
    return _run(_Reduced, head, targets, class_weight, options)


def _run(
    function: type[torch.autograd.Function],
    head: Head,
    targets: Tensor,
    class_weight: Tensor | None,
    options: Options,
) -> Tensor:
    work = _Work(_needed(head), targets, class_weight, options, torch.is_grad_enabled())
    with torch.autocast(head.hidden.device.type, enabled=False):
        # `apply` is untyped in torch.
        return cast(Tensor, cast(Any, function).apply(*head.tensors(), work))


def _needed(head: Head) -> tuple[Step, ...]:
    """The steps without a last cast to the wide dtype: the softmax reads narrow logits and computes in that."""
    is_idle = head.steps and head.steps[-1] == Cast(_wide(head.weight.dtype))
    return head.steps[:-1] if is_idle else head.steps


# torch's own


def _torch_has_it(head: Head, options: Options) -> bool:
    """Whether torch's chunked operation, new in 2.13, gives the same numbers.

    Not for 16-bit heads: it rounds the loss to 16 bits, where models upcast their logits first. Nor where there is
    anything between the projection and the loss, or with label smoothing, which it does not do in chunks.
    """
    same = head.hidden.dtype == head.weight.dtype == options.dtype and options.dtype.itemsize >= 4
    has = hasattr(functional, "linear_cross_entropy")
    return has and same and not head.steps and not options.label_smoothing and len(head.hidden) > 0


def _by_torch(head: Head, targets: Tensor, options: Options) -> Tensor:
    # Any: torch 2.11 has none of it. Its "mean" gives gradients of NaN where no target counts, the usual one zero.
    chunks: Any = importlib.import_module("torch.nn").LinearCrossEntropyOptions(
        allow_retain_graph=True,
        batch_chunk_size=chunk_rows(head.hidden.shape[-1]),
        chunking_method=None,
    )
    total: Tensor = cast(Any, functional).linear_cross_entropy(
        head.hidden,
        head.weight,
        targets,
        linear_bias=head.bias,
        reduction="sum",
        ignore_index=options.ignore_index,
        options=chunks,
    )
    if options.reduction == "sum":
        return total
    count = (targets != options.ignore_index).sum()
    return torch.where(count == 0, torch.nan, total / count.clamp(min=1))


# In chunks


def chunk_rows(features: int) -> int:
    """How many rows are computed at a time: half as many as there are features, within bounds."""
    return min(max(features // 2, _FEWEST_ROWS), _MOST_ROWS)


@dataclass(frozen=True, slots=True)
class _Work:
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


class _Context(Protocol):
    """The autograd context of the functions below."""

    work: _Work
    dtypes: tuple[torch.dtype, ...]
    needs_input_grad: tuple[bool, ...]
    saved_tensors: tuple[Tensor | None, ...]

    def save_for_backward(self, *tensors: Tensor | None) -> None: ...


class _Reduced(torch.autograd.Function):
    """The sum or mean over the rows, with the gradients computed in forward."""

    @staticmethod
    def forward(ctx: _Context, hidden: Tensor, weight: Tensor, bias: Tensor | None, work: _Work) -> Tensor:
        needs = [work.with_grad and needed for needed in ctx.needs_input_grad[:3]]
        sums = _Sums.of(hidden, weight, bias, needs)
        dtype = _wide(hidden.dtype)
        counts, weights = work.factors(dtype)
        total = torch.zeros((), dtype=dtype, device=hidden.device)
        for chunk in _chunks(hidden, weight, bias, work, counts, weights):
            if any(needs):
                losses, grad = chunk.differentiated()
                sums.add(chunk, grad)
            else:
                losses = chunk.losses()
            total += losses.sum()
        divisor = weights.sum() if work.options.reduction == "mean" else None
        scale = None if divisor is None else torch.where(divisor == 0, 0, 1 / divisor)
        ctx.save_for_backward(*sums.all(), scale)
        ctx.dtypes = tuple(tensor.dtype for tensor in (hidden, weight, weight if bias is None else bias))
        return (total if divisor is None else total / divisor).to(work.options.dtype)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] - the decorator hides the names
        ctx: _Context, grad: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        *sums, scale = ctx.saved_tensors
        factor = grad if scale is None else grad.to(scale.dtype) * scale
        hidden, weight, bias = (
            None if each is None else _scaled(each, factor, dtype)
            for each, dtype in zip(sums, ctx.dtypes, strict=True)
        )
        return hidden, weight, bias, None


class _PerRow(torch.autograd.Function):
    """The loss of each row; backward computes the chunks' logits again, since each row has its own gradient."""

    @staticmethod
    def forward(ctx: _Context, hidden: Tensor, weight: Tensor, bias: Tensor | None, work: _Work) -> Tensor:
        ctx.save_for_backward(hidden, weight, bias)
        ctx.work = work
        losses = hidden.new_empty(len(hidden), dtype=work.options.dtype)
        for chunk in _chunks(hidden, weight, bias, work, *work.factors(_wide(hidden.dtype))):
            losses[chunk.rows] = chunk.losses().to(losses.dtype)
        return losses

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] - the decorator hides the names
        ctx: _Context, grad: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        hidden, weight, bias = ctx.saved_tensors
        assert hidden is not None
        assert weight is not None
        sums = _Sums.of(hidden, weight, bias, ctx.needs_input_grad[:3])
        with torch.autocast(hidden.device.type, enabled=False):
            counts, weights = (factor * grad for factor in ctx.work.factors(_wide(hidden.dtype)))
            for chunk in _chunks(hidden, weight, bias, ctx.work, counts, weights):
                sums.add(chunk, chunk.differentiated()[1])
        pairs = zip(sums.all(), (hidden, weight, bias), strict=True)
        of_hidden, of_weight, of_bias = (
            None if total is None or tensor is None else total.to(tensor.dtype) for total, tensor in pairs
        )
        return of_hidden, of_weight, of_bias, None


@dataclass(slots=True)
class _Chunk:
    """Some rows. `trace`: their logits as projected, and after each step.

    `counts` and `weights`: `_Work.factors`, times the gradient of each row's loss where that is not one.
    """

    rows: slice
    work: _Work
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
        return self.trace[-1].log_softmax(-1, dtype=_wide(self.trace[-1].dtype))

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


def _has_kernel(logits: Tensor, work: _Work) -> bool:
    """Whether `softmax_kernel` can do it: on a GPU, of up to 32 bits, where Triton is installed."""
    fits = logits.is_cuda and logits.element_size() <= 4 and not work.options.label_smoothing
    return fits and _has_triton()


@cache
def _has_triton() -> bool:
    # Torch brings it along on Linux alone.
    return find_spec("triton") is not None


def _chunks(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, work: _Work, counts: Tensor, weights: Tensor
) -> Iterator[_Chunk]:
    size = chunk_rows(hidden.shape[-1]) * (2 if _has_kernel(hidden, work) else 1)
    targets = work.safe_targets()[:, None]
    for start in range(0, len(hidden), size):
        rows = slice(start, start + size)
        trace = traced(work.steps, functional.linear(hidden[rows], weight, bias))
        yield _Chunk(rows, work, hidden[rows], weight, trace, targets[rows], counts[rows], weights[rows])


@dataclass(slots=True)
class _Sums:
    """The gradients of hidden states, weight and bias, summed over the chunks in the wide dtype."""

    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None
    # The weight in the wide dtype, where the device has no product of 16-bit matrices with a wide result.
    widened: Tensor | None

    @classmethod
    def of(cls, hidden: Tensor, weight: Tensor, bias: Tensor | None, needs: Sequence[bool]) -> _Sums:
        """Zeros for the gradients that are needed."""
        zeros = [
            torch.zeros_like(tensor, dtype=_wide(tensor.dtype)) if needed and tensor is not None else None
            for tensor, needed in zip((hidden, weight, bias), needs, strict=True)
        ]
        widened = weight.to(_wide(weight.dtype)) if needs[0] and not weight.is_cuda else None
        return cls(zeros[0], zeros[1], zeros[2], widened)

    def all(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """In the order of the arguments."""
        return self.hidden, self.weight, self.bias

    def add(self, chunk: _Chunk, grad: Tensor) -> None:
        """Add a chunk's part. grad: (rows, vocabulary), of its projected logits."""
        if self.hidden is not None:
            weight = chunk.weight if self.widened is None else self.widened
            self.hidden[chunk.rows] = _product(grad, weight)
        if self.weight is not None:
            _add_product(self.weight, grad.T, chunk.hidden)
        if self.bias is not None:
            self.bias += grad.sum(0, dtype=self.bias.dtype)


def _product(left: Tensor, right: Tensor) -> Tensor:
    """`left @ right` in the wide dtype, without rounding to 16 bits."""
    wide = _wide(left.dtype)
    if left.dtype == wide:
        return left @ right
    if left.is_cuda:
        return torch.mm(left, right, out_dtype=wide)
    return left.to(wide) @ right.to(wide)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    if left.dtype != total.dtype and left.is_cuda:
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total.addmm_(left.to(total.dtype), right.to(total.dtype))


def _scaled(total: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.mul(total, factor, out=torch.empty_like(total, dtype=dtype))


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
