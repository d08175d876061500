"""Cross entropy of a linear head, in chunks of rows: no tensor has a logit for every row."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, replace
from typing import Any, Protocol, cast

import torch
from torch import Tensor
from torch.nn import functional

from rp_presets.losses.elementwise import Cast, Step, apply
from rp_presets.losses.gradient_sums import ChunkSums
from rp_presets.losses.row_chunks import LossWork, Options, chunk_rows, chunks, wide
from rp_presets.once import once_differentiable, tie


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
    work = LossWork(_needed(head), targets, class_weight, options, torch.is_grad_enabled())
    with torch.autocast(head.hidden.device.type, enabled=False):
        # `apply` is untyped in torch.
        return cast(Tensor, cast(Any, function).apply(*head.tensors(), work))


def _needed(head: Head) -> tuple[Step, ...]:
    """The steps without a last cast to the wide dtype: the softmax reads narrow logits and computes in that."""
    is_idle = head.steps and head.steps[-1] == Cast(wide(head.weight.dtype))
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
    in_chunks: Any = importlib.import_module("torch.nn").LinearCrossEntropyOptions(
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
        options=in_chunks,
    )
    if options.reduction == "sum":
        return total
    count = (targets != options.ignore_index).sum()
    return torch.where(count == 0, torch.nan, total / count.clamp(min=1))


# In chunks


class _Context(Protocol):
    """The autograd context of the functions below."""

    work: LossWork
    dtypes: tuple[torch.dtype, ...]
    needs_input_grad: tuple[bool, ...]
    saved_tensors: tuple[Tensor | None, ...]

    def save_for_backward(self, *tensors: Tensor | None) -> None: ...


class _Reduced(torch.autograd.Function):
    """The sum or mean over the rows, with the gradients computed in forward."""

    @staticmethod
    def forward(ctx: _Context, hidden: Tensor, weight: Tensor, bias: Tensor | None, work: LossWork) -> Tensor:
        tie(ctx, hidden, weight, bias)
        needs = [work.with_grad and needed for needed in ctx.needs_input_grad[:3]]
        sums = ChunkSums.of(hidden, weight, bias, needs)
        dtype = wide(hidden.dtype)
        counts, weights = work.factors(dtype)
        total = torch.zeros((), dtype=dtype, device=hidden.device)
        for chunk in chunks(hidden, weight, bias, work, counts, weights):
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
    def forward(ctx: _Context, hidden: Tensor, weight: Tensor, bias: Tensor | None, work: LossWork) -> Tensor:
        tie(ctx, hidden, weight, bias)
        ctx.save_for_backward(hidden, weight, bias)
        ctx.work = work
        losses = hidden.new_empty(len(hidden), dtype=work.options.dtype)
        for chunk in chunks(hidden, weight, bias, work, *work.factors(wide(hidden.dtype))):
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
        sums = ChunkSums.of(hidden, weight, bias, ctx.needs_input_grad[:3])
        with torch.autocast(hidden.device.type, enabled=False):
            counts, weights = (factor * grad for factor in ctx.work.factors(wide(hidden.dtype)))
            for chunk in chunks(hidden, weight, bias, ctx.work, counts, weights):
                sums.add(chunk, chunk.differentiated()[1])
        pairs = zip(sums.all(), (hidden, weight, bias), strict=True)
        of_hidden, of_weight, of_bias = (
            None if total is None or tensor is None else total.to(tensor.dtype) for total, tensor in pairs
        )
        return of_hidden, of_weight, of_bias, None


def _scaled(total: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.mul(total, factor, out=torch.empty_like(total, dtype=dtype))
