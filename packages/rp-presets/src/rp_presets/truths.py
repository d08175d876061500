"""Truth tests of tensors, as in `if (mask == 0).all():`, without waiting for the device where possible."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

# Tensors made from nothing but numbers, and operations on these whose result depends on nothing else.
_CREATED = {torch.arange, torch.full, torch.ones, torch.zeros}
_OPERATORS = (
    *("add", "and", "eq", "ge", "getitem", "gt", "invert", "le", "lt", "mul", "ne", "or", "radd", "rmul", "rsub"),
    "sub",
)
_METHODS = (
    *("add", "all", "any", "bool", "cumsum", "diff", "eq", "expand", "expand_as", "flatten", "float", "ge", "gt"),
    *("int", "le", "long", "lt", "max", "min", "mul", "ne", "repeat", "reshape", "squeeze", "sub", "sum", "to"),
    *("transpose", "unsqueeze", "view"),
)
_IN_PLACE = ("add", "and", "floordiv", "lshift", "mod", "mul", "or", "pow", "rshift", "sub", "truediv", "xor")
_COMPUTED = {
    *(getattr(Tensor, f"__{name}__") for name in _OPERATORS),
    *(getattr(Tensor, name) for name in _METHODS),
    *(getattr(torch, name) for name in _METHODS if hasattr(torch, name)),
}

# `x += 1` is a call of `__iadd__`, and `x.data = y` one of `__set__`.
_WRITES = {"__setitem__", "__set__", *(f"__i{name}__" for name in _IN_PLACE)}
# What these return may be written without torch.
_LENDERS = ("__array__", "__dlpack__", "data_ptr", "numpy", "storage", "untyped_storage")
_LENT = {getattr(Tensor, name) for name in _LENDERS}


class _Computation:
    """How a tensor is computed from numbers alone. `answer`: to its truth test, once it was read."""

    __slots__ = ("answer",)

    def __init__(self) -> None:
        self.answer: bool | None = None


# By function and arguments, in which other computations stand for tensors.
_COMPUTATIONS: dict[object, _Computation] = {}
_MOST_COMPUTATIONS = 10_000


@dataclass(frozen=True, slots=True)
class _Known:
    """A tensor as it was computed. `version`: how often torch had written it."""

    tensor: weakref.ref[Tensor]
    version: int
    computation: _Computation


class Truths(TorchFunctionMode):
    """Answers truth tests inside its context. A test that reads a tensor on a GPU waits for all work queued there.

    Of a tensor that is computed from numbers alone, such as the positions of unpadded tokens, the answer is
    remembered by its computation. Where a forward runs again, `before` has the answers of its first run, in order.
    `given`: those of this run.

    >>> with Truths() as first:
    ...     if (torch.arange(3) < 3).all():
    ...         print("all")
    all
    >>> first.given
    [True]
    """

    def __init__(self, before: Sequence[bool] = ()) -> None:
        super().__init__()
        self.given: list[bool] = []
        self._before = before
        self._is_paused = False
        # By id, which may be another tensor's by now.
        self._known: dict[int, _Known] = {}

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run an operation, or answer a test."""
        del types
        # The compiler traces this method, too. `is_compiling` may be true because of another thread.
        if torch.compiler.is_dynamo_compiling():
            return func(*args, **(kwargs or {}))
        if func is Tensor.__bool__ and not self._is_paused:
            return self._answer(args[0])
        result = func(*args, **(kwargs or {}))
        if writes(func) or func in _LENT or (kwargs and "out" in kwargs):
            self._known.clear()
        elif type(result) is Tensor and (func in _CREATED or func in _COMPUTED):
            self._note(result, func, args, kwargs or {})
        return result

    @contextmanager
    def paused(self) -> Generator[None]:
        """Leave tests inside the context alone: they are not run again."""
        before, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = before

    def _answer(self, tensor: Tensor) -> bool:
        place = len(self.given)
        self.given.append(self._before[place] if place < len(self._before) else self._read(tensor))
        return self.given[-1]

    def _read(self, tensor: Tensor) -> bool:
        computation = self._computation(tensor)
        if computation is None:
            return bool(tensor)
        if computation.answer is None:
            computation.answer = bool(tensor)
        return computation.answer

    def _computation(self, tensor: Tensor) -> _Computation | None:
        """How a tensor is computed; None if that is unknown, or it was written since."""
        known = self._known.get(id(tensor))
        if known is None or known.tensor() is not tensor or known.version != _version(tensor):
            return None
        return known.computation

    def _note(self, result: Tensor, func: object, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        # Torch does not count what writes a tensor that was made in inference mode.
        if result.is_inference():
            return
        try:
            # Torch's default dtype and device, and autocast, show in the result's.
            how = func, self._encoded(args), self._encoded(sorted(kwargs.items())), result.dtype, result.device
        except _Unknown:
            return
        if len(_COMPUTATIONS) >= _MOST_COMPUTATIONS:
            _COMPUTATIONS.clear()
        computation = _COMPUTATIONS.setdefault(how, _Computation())
        self._known[id(result)] = _Known(weakref.ref(result), _version(result), computation)

    def _encoded(self, value: Any) -> object:
        """What tells a value from others, hashable; raises `_Unknown` for what may change."""
        if isinstance(value, Tensor):
            if (computation := self._computation(value)) is None:
                raise _Unknown
            return computation
        if isinstance(value, slice):
            cut = cast("slice[Any, Any, Any]", value)
            return slice, self._encoded(cut.start), self._encoded(cut.stop), self._encoded(cut.step)
        if isinstance(value, tuple | list):
            items = cast("Sequence[Any]", value)
            return isinstance(value, list), *map(self._encoded, items)
        # With its type, since 1, 1.0 and True are equal.
        if isinstance(value, bool | int | float | str | torch.dtype | torch.device | None):
            return type(value), value
        if value is Ellipsis:
            return value
        raise _Unknown


def writes(func: Callable[..., Any]) -> bool:
    """Whether an operation writes its first argument.

    >>> writes(Tensor.add_), writes(Tensor.add)
    (True, False)
    """
    name = getattr(func, "__name__", "")
    return name in _WRITES or (name.endswith("_") and not name.endswith("__"))


def _version(tensor: Tensor) -> int:
    return tensor._version  # pyright: ignore[reportPrivateUsage] - torch has no public name for it


class _Unknown(Exception):
    """A tensor is computed from what may differ from call to call."""
