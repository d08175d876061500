"""Answer truth tests of tensors, as in `if (mask == 0).all():`, without waiting for the device if possible."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

# Functions that create tensors from numbers only, and operations whose result depends only on their arguments.
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
# Functions whose results let other code write to the tensor without torch.
_EXPORTS = ("__array__", "__dlpack__", "data_ptr", "numpy", "storage", "untyped_storage")
_EXPORTING = {getattr(Tensor, name) for name in _EXPORTS}


class _Computation:
    """The way in which a tensor is computed from numbers only. `answer`: of its truth test, once known."""

    __slots__ = ("answer",)

    def __init__(self) -> None:
        self.answer: bool | None = None


# By function and arguments, with computations in place of tensors.
_COMPUTATIONS: dict[object, _Computation] = {}
_MOST_COMPUTATIONS = 10_000


@dataclass(frozen=True, slots=True)
class _Known:
    """A tensor and its computation. `version`: the tensor's version counter when it was computed."""

    tensor: weakref.ref[Tensor]
    version: int
    computation: _Computation


class Truths(TorchFunctionMode):
    """Answers truth tests inside its context: reading a tensor on a GPU would wait for all work queued there.

    If a tensor is computed from numbers only, such as the positions of unpadded tokens, the answer is remembered
    by its computation. If a forward runs again, `before` has the answers of its first run, in order. `given`: the
    answers of this run.

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
        # By `id`, which may belong to another tensor by now.
        self._known: dict[int, _Known] = {}

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run an operation, or answer a truth test."""
        del types
        # The compiler traces this method, too. `is_compiling` would also be true while another thread compiles.
        if torch.compiler.is_dynamo_compiling():
            return func(*args, **(kwargs or {}))
        if func is Tensor.__bool__ and not self._is_paused:
            return self._answer(args[0])
        result = func(*args, **(kwargs or {}))
        if writes(func) or func in _EXPORTING or (kwargs and "out" in kwargs):
            self._known.clear()
        elif type(result) is Tensor and (func in _CREATED or func in _COMPUTED):
            self._note(result, func, args, kwargs or {})
        return result

    @contextmanager
    def paused(self) -> Generator[None]:
        """Do not record truth tests inside the context, since they are not run again."""
        before, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = before

    def _answer(self, tensor: Tensor) -> bool:
        index = len(self.given)
        self.given.append(self._before[index] if index < len(self._before) else self._read(tensor))
        return self.given[-1]

    def _read(self, tensor: Tensor) -> bool:
        computation = self._computation(tensor)
        if computation is None:
            return bool(tensor)
        if computation.answer is None:
            computation.answer = bool(tensor)
        return computation.answer

    def _computation(self, tensor: Tensor) -> _Computation | None:
        """Return a tensor's computation; None if it is unknown, or the tensor was written since."""
        known = self._known.get(id(tensor))
        if known is None or known.tensor() is not tensor or known.version != _version(tensor):
            return None
        return known.computation

    def _note(self, result: Tensor, func: object, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        # Torch does not count writes to tensors that were created in inference mode.
        if result.is_inference():
            return
        try:
            # The result's dtype and device cover torch's defaults and autocast.
            how = func, self._encoded(args), self._encoded(sorted(kwargs.items())), result.dtype, result.device
        except _Unknown:
            return
        if len(_COMPUTATIONS) >= _MOST_COMPUTATIONS:
            _COMPUTATIONS.clear()
        computation = _COMPUTATIONS.setdefault(how, _Computation())
        self._known[id(result)] = _Known(weakref.ref(result), _version(result), computation)

    def _encoded(self, value: Any) -> object:
        """Return a hashable key for a value. Raises `_Unknown` for values that may change."""
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
        # With the type, since 1, 1.0 and True are equal.
        if isinstance(value, bool | int | float | str | torch.dtype | torch.device | None):
            return type(value), value
        if value is Ellipsis:
            return value
        raise _Unknown


def writes(func: Callable[..., Any]) -> bool:
    """Return whether an operation writes its first argument.

    >>> writes(Tensor.add_), writes(Tensor.add)
    (True, False)
    """
    name = getattr(func, "__name__", "")
    return name in _WRITES or (name.endswith("_") and not name.endswith("__"))


def _version(tensor: Tensor) -> int:
    return tensor._version  # pyright: ignore[reportPrivateUsage] - torch has no public name for it


class _Unknown(Exception):
    """A tensor is computed from values that may change from call to call."""
