"""Tensors that are not there: they stand for a layer's results where the layer has not run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rp_presets.rows.trees import leaves, mapped


class Spec:
    """What is known of a tensor that is not there. A leaf in trees of tensors."""

    __slots__ = ("dtype", "shape")

    def __init__(self, shape: torch.Size, dtype: torch.dtype) -> None:
        self.shape = shape
        self.dtype = dtype

    @classmethod
    def of(cls, leaf: Any) -> Any:
        """A tensor's shape and dtype; other leaves as they are."""
        return cls(leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else leaf

    def stand_in(self, device: torch.device) -> Tensor:
        """A tensor that shows where it is used: NaN if it is floating point, otherwise zeros."""
        floating = self.dtype.is_floating_point or self.dtype.is_complex
        return torch.full(self.shape, float("nan") if floating else 0, dtype=self.dtype, device=device)


def standing_in(tree: Any, device: torch.device) -> Any:
    """The tree with stand-ins for its `Spec` leaves."""
    return mapped(lambda leaf: leaf.stand_in(device) if isinstance(leaf, Spec) else leaf, tree)


class Absent(torch.Tensor):
    """Stands for a layer's result, and refuses every operation.

    Models may pass it on, compare it with None, and read its shape, dtype and device if they are known.
    `spec`: its shape and dtype; None if unknown. `touched(what)`: called for anything else, and raises. `key`: set by
    who made it.
    """

    spec: Spec | None
    place: torch.device
    touched: Callable[[str], Any]
    key: int | None

    @staticmethod
    def make(spec: Spec | None, device: torch.device, touched: Callable[[str], Any]) -> Absent:
        """A tensor that is not there, on `device`."""
        found = torch.empty(0).as_subclass(Absent)
        found.spec, found.place, found.touched, found.key = spec, device, touched, None
        return found

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Answer what is known; report everything else."""
        del types
        first = next((arg for arg in args if isinstance(arg, Absent)), None)
        if first is not None and (read := _READS.get(func)) is not None:
            found = read(first, *args[1:], **(kwargs or {}))
            if found is not NotImplemented:
                return found
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


def _moved(one: Absent, *args: Any, **kwargs: Any) -> Any:
    # `x.to(...)` returns `x` itself where it has that dtype and is on that device.
    wanted = {*args, *kwargs.values()} - {False, None}
    known = {one.place, str(one.place)} | ({one.spec.dtype} if one.spec is not None else set())
    return one if wanted <= known else NotImplemented


def _get(name: str) -> Any:
    return getattr(Tensor, name).__get__


_READS: dict[Any, Callable[..., Any]] = {
    _get("shape"): _spec_read(lambda spec: spec.shape),
    _get("dtype"): _spec_read(lambda spec: spec.dtype),
    _get("ndim"): _spec_read(lambda spec: len(spec.shape)),
    Tensor.size: _spec_read(lambda spec, dim=None: spec.shape if dim is None else spec.shape[dim]),
    Tensor.dim: _spec_read(lambda spec: len(spec.shape)),
    Tensor.__len__: _spec_read(lambda spec: spec.shape[0]),
    Tensor.is_floating_point: _spec_read(lambda spec: spec.dtype.is_floating_point),
    torch.is_floating_point: _spec_read(lambda spec: spec.dtype.is_floating_point),
    _get("device"): lambda one: one.place,
    _get("is_cuda"): lambda one: one.place.type == "cuda",
    _get("layout"): lambda one: torch.strided,  # noqa: ARG005
    _get("requires_grad"): lambda one: False,  # noqa: ARG005
    _get("is_nested"): lambda one: False,  # noqa: ARG005
    _get("is_sparse"): lambda one: False,  # noqa: ARG005
    _get("is_quantized"): lambda one: False,  # noqa: ARG005
    Tensor.to: _moved,
}
