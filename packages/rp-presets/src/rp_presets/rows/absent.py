"""Placeholders for the results of layers that have not run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from rp_presets.rows.trees import leaves, mapped
from rp_presets.truths import writes


class Spec:
    """The shape and dtype of a tensor that is not available. A leaf in trees of tensors."""

    __slots__ = ("dtype", "shape")

    def __init__(self, shape: torch.Size, dtype: torch.dtype) -> None:
        self.shape = shape
        self.dtype = dtype

    @classmethod
    def of(cls, leaf: Any) -> Any:
        """Return a tensor's shape and dtype; return other leaves unchanged."""
        return cls(leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else leaf

    @classmethod
    def shaped_like(cls, tensor: Tensor) -> Tensor:
        """Return a stand-in for a tensor, on its device, that takes no memory."""
        return cls(torch.Size(), tensor.dtype).stand_in(tensor.device).expand(tensor.shape)

    def stand_in(self, device: torch.device) -> Tensor:
        """Return a `AbsentTensor` of this shape and dtype, filled with NaN or zeros."""
        floating = self.dtype.is_floating_point or self.dtype.is_complex
        filled = torch.full(self.shape, float("nan") if floating else 0, dtype=self.dtype, device=device)
        return filled.as_subclass(AbsentTensor)


def standing_in(tree: Any, device: torch.device) -> Any:
    """Return the tree with its `Spec` leaves replaced by stand-ins."""
    return mapped(lambda leaf: leaf.stand_in(device) if isinstance(leaf, Spec) else leaf, tree)


class AbsentTensor(torch.Tensor):
    """Has the shape and dtype of a tensor that is not available. Results computed from it are stand-ins, too.

    >>> made = Spec(torch.Size([2]), torch.float32).stand_in(torch.device("cpu")) * torch.ones(3, 1)
    >>> type(made).__name__, made.shape
    ('AbsentTensor', torch.Size([3, 2]))
    """

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operation, and mark a tensor that it writes as a stand-in."""
        # Torch leaves the types of this method open.
        result = super().__torch_function__(func, types, args, kwargs or {})  # pyright: ignore
        if writes(func) and type(args[0]) is Tensor:
            args[0].__class__ = AbsentTensor
        return cast(Any, result)


class Absent(torch.Tensor):
    """Stands for a layer's result, and refuses operations.

    A model may pass it on, compare it with None, and read its shape, dtype and device if they are known. `spec`:
    its shape and dtype; None if unknown. `touched(operation)`: called for every other operation; raises. `key`: a
    number that its creator sets.
    """

    spec: Spec | None
    place: torch.device
    touched: Callable[[str], Any]
    key: int | None

    @staticmethod
    def make(spec: Spec | None, device: torch.device, touched: Callable[[str], Any]) -> Absent:
        """Create a placeholder on `device`."""
        absent = torch.empty(0).as_subclass(Absent)
        absent.spec, absent.place, absent.touched, absent.key = spec, device, touched, None
        return absent

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Answer from the known properties if possible; report every other operation."""
        del types
        first = next((arg for arg in args if isinstance(arg, Absent)), None)
        if first is not None and (read := _READS.get(func)) is not None:
            answer = read(first, *args[1:], **(kwargs or {}))
            if answer is not NotImplemented:
                return answer
        one = next(leaf for leaf in leaves((args, kwargs or {})) if isinstance(leaf, Absent))
        return one.touched(_name(func))


def _name(func: Callable[..., Any]) -> str:
    owner = getattr(func, "__self__", None)
    own = getattr(func, "__name__", repr(func))
    return getattr(owner, "__name__", own) if own == "__get__" else own


def _spec_read(read: Callable[..., Any]) -> Callable[..., Any]:
    def answer(one: Absent, *args: Any, **kwargs: Any) -> Any:
        return NotImplemented if one.spec is None else read(one.spec, *args, **kwargs)

    return answer


def _constant(value: object) -> Callable[[Absent], object]:
    return lambda one: value  # noqa: ARG005


def _place(one: Absent) -> torch.device:
    return one.place


def _is_on_gpu(one: Absent) -> bool:
    return one.place.type == "cuda"


def _shape(spec: Spec) -> torch.Size:
    return spec.shape


def _dtype(spec: Spec) -> torch.dtype:
    return spec.dtype


def _rank(spec: Spec) -> int:
    return len(spec.shape)


def _size(spec: Spec, dim: int | None = None) -> torch.Size | int:
    return spec.shape if dim is None else spec.shape[dim]


def _length(spec: Spec) -> int:
    return spec.shape[0]


def _is_floating(spec: Spec) -> bool:
    return spec.dtype.is_floating_point


def _moved(one: Absent, *args: Any, **kwargs: Any) -> Any:
    # `x.to(...)` returns `x` itself if it has that dtype and is on that device.
    wanted: set[Any] = {*args, *kwargs.values()} - {False, None}
    known: set[Any] = {one.place, str(one.place)} | (set() if one.spec is None else {one.spec.dtype})
    return one if wanted <= known else NotImplemented


def _item(one: Absent, index: Any) -> Any:
    # A slice of all elements has the same values and gradients. Some models slice so for the tokens to keep.
    parts: tuple[Any, ...] = cast("tuple[Any, ...]", index) if isinstance(index, tuple) else (index,)
    return one if all(part is Ellipsis or _is_whole(part) for part in parts) else NotImplemented


def _is_whole(part: Any) -> bool:
    return part in (slice(None), slice(0, None), slice(0, None, 1)) if isinstance(part, slice) else False


def _get(name: str) -> Any:
    return getattr(Tensor, name).__get__


_READS: dict[Any, Callable[..., Any]] = {
    _get("shape"): _spec_read(_shape),
    _get("dtype"): _spec_read(_dtype),
    _get("ndim"): _spec_read(_rank),
    Tensor.size: _spec_read(_size),
    Tensor.dim: _spec_read(_rank),
    Tensor.__len__: _spec_read(_length),
    Tensor.is_floating_point: _spec_read(_is_floating),
    torch.is_floating_point: _spec_read(_is_floating),
    Tensor.to: _moved,
    Tensor.__getitem__: _item,
    _get("device"): _place,
    _get("is_cuda"): _is_on_gpu,
    _get("layout"): _constant(torch.strided),
    **{_get(name): _constant(False) for name in ("requires_grad", "is_nested", "is_sparse", "is_quantized")},
}
