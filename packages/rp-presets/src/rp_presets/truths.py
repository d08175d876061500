"""Truth tests of tensors, as in `if (mask == 0).all():`, without waiting for the device where possible."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
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

# `x += 1` is a call of `__iadd__`.
_WRITES = {"__setitem__", *(f"__i{name}__" for name in _IN_PLACE)}

# What was found true of tensors that are computed from numbers alone, by how they are computed.
_ANSWERS: dict[object, bool] = {}
_MOST_ANSWERS = 10_000


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
        # By id: the tensor, which must live as long as its id counts, and how it is computed.
        self._known: dict[int, tuple[Tensor, object]] = {}

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run an operation, or answer a test."""
        del types
        if func is Tensor.__bool__ and not self._is_paused:
            return self._answer(args[0])
        result = func(*args, **(kwargs or {}))
        if writes(func) or (kwargs and "out" in kwargs):
            self._known.clear()
        elif isinstance(result, Tensor) and (func in _CREATED or func in _COMPUTED):
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
        _, computation = self._known.get(id(tensor), (tensor, None))
        if computation is None:
            return bool(tensor)
        if computation not in _ANSWERS:
            if len(_ANSWERS) >= _MOST_ANSWERS:
                _ANSWERS.clear()
            _ANSWERS[computation] = bool(tensor)
        return _ANSWERS[computation]

    def _note(self, result: Tensor, func: object, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        try:
            computation = (func, self._encoded(args), self._encoded(sorted(kwargs.items())))
        except _Unknown:
            return
        self._known[id(result)] = (result, computation)

    def _encoded(self, value: Any) -> object:
        """What tells a value from others, hashable; raises `_Unknown` for what may change."""
        if isinstance(value, Tensor):
            if id(value) not in self._known:
                raise _Unknown
            return self._known[id(value)][1]
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


class _Unknown(Exception):
    """A tensor is computed from what may differ from call to call."""
