"""Lets layers compute in more bits than their weights have, to show what few bits would hide."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, TypeGuard

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_NARROW = (torch.bfloat16, torch.float16)
_NARROWER = {torch.float32: _NARROW, torch.float64: (*_NARROW, torch.float32)}


def is_narrow(value: object, than: torch.dtype = torch.float32) -> TypeGuard[torch.Tensor]:
    """Return whether a value is a tensor of floating-point numbers of fewer bits, by default of 16.

    >>> is_narrow(torch.ones(1)), is_narrow(torch.ones(1).bfloat16()), is_narrow(1)
    (False, True, False)
    >>> is_narrow(torch.ones(1), torch.float64)
    True
    """
    return isinstance(value, torch.Tensor) and value.dtype in _NARROWER[than]


def widened(value: Any, to: torch.dtype = torch.float32) -> Any:
    """Return a tensor of floating-point numbers of fewer bits in a dtype, and anything else itself."""
    return value.to(to) if is_narrow(value, to) else value


class Widening:
    """The layers of a call whose weights are of a dtype while they run, by default fp32.

    `rounds_to`: dtypes of fewer bits in which some compute even so.

    >>> layer, widening = torch.nn.Linear(2, 2).bfloat16(), Widening()
    >>> with torch.no_grad(), widening.of(layer):
    ...     layer(torch.ones(1, 2)).dtype
    torch.float32
    >>> layer.weight.dtype, widening.rounds_to
    (torch.bfloat16, set())

    In fp64 what a layer casts to fp32, as norms do, stays fp64. A layer that makes 16-bit numbers itself, such as
    by ``x.bfloat16()``, rounds. It may also raise, where it has tensors that are neither parameters nor buffers.
    """

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        self.dtype = dtype
        self.rounds_to: set[torch.dtype] = set()

    @contextmanager
    def of(self, module: torch.nn.Module) -> Generator[None]:
        """Run a layer inside, without gradients. What it writes into buffers is kept."""
        narrow = dict.fromkeys(
            one for one in (*module.parameters(), *module.buffers()) if is_narrow(one, self.dtype)
        )
        originals = [(tensor, tensor.data, tensor._version) for tensor in narrow]
        try:
            for tensor, data, _ in originals:
                tensor.data = data.to(self.dtype)
            with _Rounding(self):
                yield
        finally:
            for tensor, data, version in originals:
                wide, tensor.data = tensor.data, data
                if tensor._version != version:
                    data.copy_(wide)


class _Rounding(TorchDispatchMode):
    """Notes dtypes of fewer bits of what operations return. What is to be fp32 is as wide as the rest."""

    def __init__(self, widening: Widening) -> None:
        super().__init__()  # pyright: ignore[reportUnknownMemberType]
        self._widening = widening

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        given = dict(kwargs or {})
        if given.get("dtype") == torch.float32:
            given["dtype"] = self._widening.dtype
        output = func(*args, **given)
        several = output if type(output) in (tuple, list) else (output,)
        narrow = (one.dtype for one in several if is_narrow(one, self._widening.dtype))
        self._widening.rounds_to.update(narrow)
        return output
