"""Logits that are computed only if an operation other than a cross entropy reads them."""
# The attributes of `LazyLogits` are private to this file, not to the class; torch types few of its functions:
# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils import _pytree as pytree

from rp_presets.losses.cross_entropy import Head, cross_entropy
from rp_presets.losses.recording import RECORDED
from rp_presets.losses.row_chunks import Options
from rp_presets.once import once_differentiable, tie

# Any, since these are arguments and results of many different torch functions.
Function = Callable[..., Any]


def lazy_logits(linear: nn.Linear, hidden: Tensor) -> Tensor:
    """Return a placeholder for `linear(hidden)` from which a cross entropy is computed in chunks of rows.

    >>> head, hidden = nn.Linear(8, 1000), torch.randn(2, 5, 8)
    >>> logits = lazy_logits(head, hidden)
    >>> logits.shape
    torch.Size([2, 5, 1000])
    >>> loss = functional.cross_entropy(logits.float().view(-1, 1000), torch.arange(10))
    >>> type(logits).__name__, type(loss).__name__
    ('LazyLogits', 'Tensor')

    The usual operations of language model heads are recorded: casts to a floating-point dtype, products and
    quotients with a number, tanh, indexing and reshaping of the positions, contiguous, detach. A cross entropy
    over (rows, vocabulary) and class indices, with any of torch's options, then never holds all logits; see
    `rp_presets.losses.cross_entropy`. Any other operation computes the logits once and uses them: the same
    numbers, but more memory.

    If the layer is not a plain `nn.Linear` (a subclass, or with hooks), and while `torch.compile` traces, which
    fuses the loss by itself, the result is `linear(hidden)`.

    Shapes:
        hidden: (..., features), floating point. returns: (..., vocabulary).
    """
    if torch.compiler.is_dynamo_compiling() or not _is_plain(linear):
        return linear(hidden)
    return _placeholder(Head(*_as_autocast(hidden, linear.weight, linear.bias)))


class LazyLogits(torch.Tensor):
    """A placeholder for logits that have not been computed, made by `lazy_logits`.

    >>> logits = lazy_logits(nn.Linear(2, 3), torch.ones(4, 2))
    >>> isinstance(logits, LazyLogits), type(logits.materialize()) is Tensor
    (True, True)
    """

    _head: Head
    # The autograd node that `_placeholder` created. Another autograd function that returns this object, such as
    # torch's reentrant checkpoint, replaces it by its own node, and gradients must then enter there.
    _node: Any
    # The computed logits. From then on every operation reads them, since they may be written in place.
    _real: Tensor | None
    # The number of placeholders for the same memory (torch would have made views), in a shared list.
    _aliases: list[int]
    _hooks: list[Callable[[], None]]

    def materialize(self) -> Tensor:
        """Compute the logits as an ordinary tensor, with autograd, on the first call; return them."""
        if self._real is None:
            with torch._C.DisableTorchFunctionSubclass(), torch.set_grad_enabled(_plain(self).requires_grad):
                self._real = self._computed()
        return self._real

    def on_backward(self, hook: Callable[[], None]) -> None:
        """Call `hook` when backward reaches these logits, even if their gradient is never computed as a tensor."""
        self._hooks.append(hook)

    def _computed(self) -> Tensor:
        if not self._has_own_node():
            return cast(Tensor, cast(Any, _ReturnedElsewhere).apply(self))
        real = self._head.logits()
        if real.requires_grad:
            _call_on_backward(real, self._hooks)
        return real

    def _has_own_node(self) -> bool:
        with torch._C.DisableTorchFunctionSubclass():
            return self.grad_fn is self._node

    def _recorded(self, func: Function, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor | None:
        if func is functional.cross_entropy:
            return _cross_entropy(*args, **kwargs)
        if func not in RECORDED or sum(isinstance(each, LazyLogits) for each in args) > 1:
            return None
        head = RECORDED[func](*(self._head if each is self else each for each in args), **kwargs)
        return self if head is self._head else None if head is None else _placeholder(head, self)

    @classmethod
    def __torch_function__(
        cls,
        func: Function,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Record the operation if possible, otherwise run it on the computed logits."""
        del types
        kwargs = kwargs or {}
        first = args[0] if args else kwargs.get("input")
        if isinstance(first, LazyLogits) and first._real is None:
            if func in _DESCRIBING:
                with torch._C.DisableTorchFunctionSubclass():
                    return func(*args, **kwargs)
            result = first._recorded(func, args, kwargs) if first._has_own_node() else None
            if result is not None:
                return result
        if _writes(func, kwargs):
            _refuse_separated_views(func, (*args[:1], kwargs.get("out")))
        return func(*_real_in(tuple(args)), **_real_in(dict(kwargs)))

    @classmethod
    def __torch_dispatch__(
        cls,
        func: Function,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run an operation of C++ code, which bypasses `__torch_function__`. Autograd has handled it already."""
        del types
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            lazy = cast(LazyLogits, args[0])
            return _without_graph(lazy._head) if lazy._real is None else lazy._real.detach()
        values: Any = pytree.tree_map_only(LazyLogits, _value, (tuple(args), dict(kwargs or {})))
        return func(*values[0], **values[1])

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        """Describe the placeholder without computing the logits, as for a debugger."""
        del tensor_contents
        return f"LazyLogits(shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device})"


# Creating placeholders


def _is_plain(linear: nn.Linear) -> bool:
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    own = type(linear) is nn.Linear and "forward" not in vars(linear)
    return (
        own and not any(getattr(linear, each) for each in hooks) and type(linear.weight) in (Tensor, nn.Parameter)
    )


def _as_autocast(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Cast the tensors as autocast would for the product, if it is on."""
    device = hidden.device.type
    if not torch.is_autocast_enabled(device) or torch.float64 in (hidden.dtype, weight.dtype):
        return hidden, weight, bias
    dtype = torch.get_autocast_dtype(device)
    return hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)


def _placeholder(head: Head, source: LazyLogits | None = None) -> LazyLogits:
    """Create a placeholder. `source`: the placeholder that it was derived from."""
    # `apply` is untyped in torch.
    made = cast(LazyLogits, cast(Any, _PlaceholderNode).apply(head, *head.tensors()))
    made._head = head
    made._real = None
    made._hooks = [] if source is None else source._hooks
    # Without elementwise steps, torch would have made a view of the source.
    is_view = source is not None and source._head.steps == head.steps
    made._aliases = source._aliases if source is not None and is_view else [0]
    made._aliases[0] += 1
    with torch._C.DisableTorchFunctionSubclass():
        made._node = made.grad_fn
    return made


def _without_graph(head: Head) -> LazyLogits:
    """Create a placeholder without an autograd graph."""
    made = cast(Any, LazyLogits)._make_wrapper_subclass(
        LazyLogits, head.shape, dtype=head.dtype, device=head.hidden.device
    )
    made._head, made._node, made._real, made._aliases, made._hooks = head, None, None, [1], []
    return made


class _PlaceholderNode(torch.autograd.Function):
    """Connects a placeholder to its head in autograd, for C++ code that treats it as an ordinary tensor."""

    @staticmethod
    def forward(ctx: Any, head: Head, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> LazyLogits:
        tie(ctx, hidden, weight, bias)
        ctx.save_for_backward(hidden, weight, bias)
        ctx.steps = head.steps
        return _without_graph(head)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] - the decorator hides the names
        ctx: Any, grad: Tensor
    ) -> tuple[Tensor | None, ...]:
        # Detach the saved tensors, which belong to another graph.
        held = [None if each is None else each.detach() for each in ctx.saved_tensors]
        wanted = [
            tensor.requires_grad_()
            for tensor, needed in zip(held, ctx.needs_input_grad[1:], strict=True)
            if tensor is not None and needed
        ]
        with torch.enable_grad():
            real = Head(cast(Tensor, held[0]), cast(Tensor, held[1]), held[2], ctx.steps).logits()
        grads = iter(torch.autograd.grad(real, wanted, grad))
        return None, *(next(grads) if needed else None for needed in ctx.needs_input_grad[1:])


class _ReturnedElsewhere(torch.autograd.Function):
    """The logits of a placeholder that another autograd function returned, which gets their gradient."""

    @staticmethod
    def forward(ctx: Any, lazy: LazyLogits) -> Tensor:
        del ctx
        return _value(lazy)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        del ctx
        return grad


def _value(lazy: LazyLogits) -> Tensor:
    """Return the logits without an autograd graph."""
    if lazy._real is not None:
        return lazy._real.detach()
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        return lazy._head.logits()


def _call_on_backward(tensor: Tensor, hooks: list[Callable[[], None]]) -> None:
    def call(grad: Tensor) -> None:
        del grad
        for hook in hooks:
            hook()

    tensor.register_hook(call)  # pyright: ignore[reportUnknownMemberType]


# Computing all logits


def _real_in(tree: Any) -> Any:
    return pytree.tree_map_only(LazyLogits, LazyLogits.materialize, tree)


def _plain(lazy: LazyLogits) -> Any:
    """Return the placeholder untyped, to read attributes while torch functions of subclasses are disabled."""
    return lazy


def _writes(func: Function, kwargs: Mapping[str, Any]) -> bool:
    name = getattr(func, "__name__", "")
    in_place = name.endswith("_") and not name.endswith("__")
    return in_place or name in _WRITING or isinstance(kwargs.get("out"), LazyLogits)


def _refuse_separated_views(func: Function, targets: Sequence[Any]) -> None:
    for lazy in targets:
        if isinstance(lazy, LazyLogits) and lazy._aliases[0] > 1 and lazy._real is None:
            raise RuntimeError(
                f"{getattr(func, '__name__', func)} writes in place to logits that have views, but the logits "
                "are not computed yet, so the views would not change; call .materialize() before making views, "
                "or write to a copy"
            )


_WRITING = frozenset(
    {"__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__idiv__", "__ipow__", "__set__"}
)


# The loss


def _cross_entropy(
    input: Any,
    target: Any,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor | None:
    """Compute the loss in chunks; return None if the arguments need more than that supports."""
    plain = size_average is None and reduce is None and reduction in ("none", "sum", "mean")
    if not plain or not isinstance(input, LazyLogits) or not _are_rows(input, target, weight, label_smoothing):
        return None
    options = Options(cast(Any, reduction), ignore_index, label_smoothing, _loss_dtype(input))
    loss = cross_entropy(input._head, target, weight, options)
    if input._hooks and loss.requires_grad:
        _call_on_backward(loss, input._hooks)
    return loss


def _are_rows(lazy: LazyLogits, target: Any, weight: Any, label_smoothing: float) -> bool:
    """Return whether the arguments are (rows, vocabulary) and class indices. For others torch raises the error."""
    hidden = lazy._head.hidden
    if hidden.ndim != 2 or type(target) is not Tensor or target.dtype != torch.int64:
        return False
    if target.shape != hidden.shape[:1] or target.device != hidden.device or not 0 <= label_smoothing <= 1:
        return False
    return weight is None or (
        type(weight) in (Tensor, nn.Parameter)
        and not weight.requires_grad
        and weight.shape == lazy.shape[1:]
        and weight.dtype == lazy.dtype
        and weight.device == hidden.device
    )


def _loss_dtype(lazy: LazyLogits) -> torch.dtype:
    """Return the dtype of the loss. Autocast computes losses in fp32."""
    narrow = lazy.dtype.itemsize < 4
    is_cast = torch.is_autocast_enabled(lazy._head.hidden.device.type)
    return torch.float32 if narrow and is_cast else lazy.dtype


# Functions that the placeholder answers itself. Any, since torch types a property of a tensor as its value.
_TENSOR: Any = Tensor
_DESCRIBING: frozenset[Function] = frozenset(
    {
        *(getattr(_TENSOR, name).__get__ for name in ("shape", "dtype", "device", "ndim", "layout")),
        *(
            getattr(_TENSOR, name).__get__
            for name in ("requires_grad", "is_leaf", "grad_fn", "itemsize", "nbytes")
        ),
        *(getattr(_TENSOR, name).__get__ for name in ("is_cuda", "is_cpu", "is_sparse", "is_nested")),
        *(getattr(_TENSOR, name) for name in ("size", "dim", "ndimension", "numel", "nelement", "element_size")),
        *(getattr(_TENSOR, name) for name in ("is_floating_point", "is_complex", "is_contiguous", "is_conj")),
        *(getattr(_TENSOR, name) for name in ("is_neg", "get_device", "__len__")),
        torch.is_floating_point,
        torch.is_complex,
        torch.numel,
    }
)
