"""Logits that are computed only where something other than a cross entropy asks for them."""
# The stand-in's own attributes are private to this file, not to its class; torch types few of its own:
# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.utils import _pytree as pytree

from rp_presets.losses.cross_entropy import Head, cross_entropy
from rp_presets.losses.recording import RECORDED
from rp_presets.losses.row_chunks import Options

# Any: arguments and results of torch's functions, of which there are many.
Function = Callable[..., Any]


def lazy_logits(linear: nn.Linear, hidden: Tensor) -> Tensor:
    """Stand for `linear(hidden)` without computing it, for a cross entropy in chunks of rows.

    >>> head, hidden = nn.Linear(8, 1000), torch.randn(2, 5, 8)
    >>> logits = lazy_logits(head, hidden)
    >>> logits.shape
    torch.Size([2, 5, 1000])
    >>> loss = functional.cross_entropy(logits.float().view(-1, 1000), torch.arange(10))
    >>> type(logits).__name__, type(loss).__name__
    ('LazyLogits', 'Tensor')

    What heads of language models do to logits is recorded: casts to a floating dtype, products with and quotients
    by a number, tanh, indexing and reshaping of the positions, contiguous, detach. A cross entropy over (rows,
    vocabulary) and class indices, with any of torch's options, then never holds all logits: see
    `rp_presets.losses.cross_entropy`. Every other operation computes the logits, once, and goes on with them:
    the same numbers, more memory.

    The result is `linear(hidden)` itself where the layer is not a plain `nn.Linear` (a subclass, hooks), and while
    `torch.compile` traces, which fuses the loss by itself.

    Shapes:
        hidden: (..., features), floating point. returns: (..., vocabulary).
    """
    if torch.compiler.is_dynamo_compiling() or not _is_plain(linear):
        return linear(hidden)
    return _stand_for(Head(*_as_autocast(hidden, linear.weight, linear.bias)))


class LazyLogits(torch.Tensor):
    """A tensor of logits that were not computed; `lazy_logits` makes it.

    >>> logits = lazy_logits(nn.Linear(2, 3), torch.ones(4, 2))
    >>> isinstance(logits, LazyLogits), type(logits.materialize()) is Tensor
    (True, True)
    """

    _head: Head
    # The node that `_stand_for` made. Another function that returns this object, such as a checkpoint of torch's
    # reentrant kind, puts its own in its place: gradients must then enter there.
    _node: Any
    # The computed logits. Everything reads them from then on, since they may be written in place.
    _real: Tensor | None
    # How many stand for the same memory, as views do in torch.
    _aliases: list[int]
    _hooks: list[Callable[[], None]]

    def materialize(self) -> Tensor:
        """Compute the logits as an ordinary tensor, with autograd; once."""
        if self._real is None:
            with torch._C.DisableTorchFunctionSubclass(), torch.set_grad_enabled(_plain(self).requires_grad):
                self._real = self._computed()
        return self._real

    def on_backward(self, hook: Callable[[], None]) -> None:
        """Call `hook` when backward reaches these logits, which may have no gradient of their own by then."""
        self._hooks.append(hook)

    def _computed(self) -> Tensor:
        if not self._is_mine():
            return cast(Tensor, cast(Any, _Adopted).apply(self))
        real = self._head.logits()
        if real.requires_grad:
            _call_on_backward(real, self._hooks)
        return real

    def _is_mine(self) -> bool:
        with torch._C.DisableTorchFunctionSubclass():
            return self.grad_fn is self._node

    def _recorded(self, func: Function, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor | None:
        if func is functional.cross_entropy:
            return _cross_entropy(*args, **kwargs)
        if func not in RECORDED or sum(isinstance(each, LazyLogits) for each in args) > 1:
            return None
        head = RECORDED[func](*(self._head if each is self else each for each in args), **kwargs)
        return self if head is self._head else None if head is None else _stand_for(head, self)

    @classmethod
    def __torch_function__(
        cls,
        func: Function,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Answer from the record if that is possible, otherwise from the computed logits."""
        del types
        kwargs = kwargs or {}
        first = args[0] if args else kwargs.get("input")
        if isinstance(first, LazyLogits) and first._real is None:
            if func in _DESCRIBING:
                with torch._C.DisableTorchFunctionSubclass():
                    return func(*args, **kwargs)
            found = first._recorded(func, args, kwargs) if first._is_mine() else None
            if found is not None:
                return found
        if _writes(func, kwargs):
            _refuse_torn(func, (*args[:1], kwargs.get("out")))
        return func(*_real_in(tuple(args)), **_real_in(dict(kwargs)))

    @classmethod
    def __torch_dispatch__(
        cls,
        func: Function,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """What comes here has passed by `__torch_function__`, as C++ does: autograd is done already."""
        del types
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            lazy = cast(LazyLogits, args[0])
            return _bare(lazy._head) if lazy._real is None else lazy._real.detach()
        values: Any = pytree.tree_map_only(LazyLogits, _value, (tuple(args), dict(kwargs or {})))
        return func(*values[0], **values[1])

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        """Do not compute the logits to show them in a debugger."""
        del tensor_contents
        return f"LazyLogits(shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device})"


# Making


def _is_plain(linear: nn.Linear) -> bool:
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    own = type(linear) is nn.Linear and "forward" not in vars(linear)
    return (
        own and not any(getattr(linear, each) for each in hooks) and type(linear.weight) in (Tensor, nn.Parameter)
    )


def _as_autocast(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """The tensors in the dtype in which autocast would multiply them, if it is on."""
    device = hidden.device.type
    if not torch.is_autocast_enabled(device) or torch.float64 in (hidden.dtype, weight.dtype):
        return hidden, weight, bias
    dtype = torch.get_autocast_dtype(device)
    return hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)


def _stand_for(head: Head, source: LazyLogits | None = None) -> LazyLogits:
    """Make the stand-in. `source`: what it was made from."""
    # `apply` is untyped in torch.
    made = cast(LazyLogits, cast(Any, _Standing).apply(head, *head.tensors()))
    made._head = head
    made._real = None
    made._hooks = [] if source is None else source._hooks
    # Torch would have made a view, unless each number has changed.
    is_view = source is not None and source._head.steps == head.steps
    made._aliases = source._aliases if source is not None and is_view else [0]
    made._aliases[0] += 1
    with torch._C.DisableTorchFunctionSubclass():
        made._node = made.grad_fn
    return made


def _bare(head: Head) -> LazyLogits:
    """A stand-in without a graph."""
    made = cast(Any, LazyLogits)._make_wrapper_subclass(
        LazyLogits, head.shape, dtype=head.dtype, device=head.hidden.device
    )
    made._head, made._node, made._real, made._aliases, made._hooks = head, None, None, [1], []
    return made


class _Standing(torch.autograd.Function):
    """Ties a stand-in to its head, for code below `__torch_function__` that takes it for an ordinary tensor."""

    @staticmethod
    def forward(ctx: Any, head: Head, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> LazyLogits:
        ctx.save_for_backward(hidden, weight, bias)
        ctx.steps = head.steps
        return _bare(head)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] - the decorator hides the names
        ctx: Any, grad: Tensor
    ) -> tuple[Tensor | None, ...]:
        # Not the saved tensors themselves: they have a graph of their own.
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


class _Adopted(torch.autograd.Function):
    """The logits of a stand-in that another function returned: their gradient goes there."""

    @staticmethod
    def forward(ctx: Any, lazy: LazyLogits) -> Tensor:
        del ctx
        return _value(lazy)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        del ctx
        return grad


def _value(lazy: LazyLogits) -> Tensor:
    """The logits, without a graph."""
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


# Computing all


def _real_in(tree: Any) -> Any:
    return pytree.tree_map_only(LazyLogits, LazyLogits.materialize, tree)


def _plain(lazy: LazyLogits) -> Any:
    """The stand-in itself, for its own attributes; use it with torch functions of subclasses disabled."""
    return lazy


def _writes(func: Function, kwargs: Mapping[str, Any]) -> bool:
    name = getattr(func, "__name__", "")
    in_place = name.endswith("_") and not name.endswith("__")
    return in_place or name in _WRITING or isinstance(kwargs.get("out"), LazyLogits)


def _refuse_torn(func: Function, targets: Sequence[Any]) -> None:
    for lazy in targets:
        if isinstance(lazy, LazyLogits) and lazy._aliases[0] > 1 and lazy._real is None:
            raise RuntimeError(
                f"{getattr(func, '__name__', func)} writes logits in place of which there are views, but the "
                "logits were not computed yet, so the views would not change; call .materialize() before making "
                "views, or write a copy"
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
    """The loss in chunks; None if the arguments ask for what that does not do."""
    plain = size_average is None and reduce is None and reduction in ("none", "sum", "mean")
    if not plain or not isinstance(input, LazyLogits) or not _are_rows(input, target, weight, label_smoothing):
        return None
    options = Options(cast(Any, reduction), ignore_index, label_smoothing, _loss_dtype(input))
    loss = cross_entropy(input._head, target, weight, options)
    if input._hooks and loss.requires_grad:
        _call_on_backward(loss, input._hooks)
    return loss


def _are_rows(lazy: LazyLogits, target: Any, weight: Any, label_smoothing: float) -> bool:
    """Whether the arguments are (rows, vocabulary) and class indices; torch tells what is wrong with others."""
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
    """Autocast computes losses in fp32."""
    narrow = lazy.dtype.itemsize < 4
    is_cast = torch.is_autocast_enabled(lazy._head.hidden.device.type)
    return torch.float32 if narrow and is_cast else lazy.dtype


# What the stand-in itself knows. Any: torch types a property of a tensor as its value.
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
