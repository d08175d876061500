"""Lets layers of 16-bit weights compute in fp32, to show what 16 bits would hide."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, TypeGuard

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_NARROW = (torch.bfloat16, torch.float16)


def is_narrow(value: object) -> TypeGuard[torch.Tensor]:
    """Return whether a value is a tensor of 16-bit floating-point numbers.

    >>> is_narrow(torch.ones(1)), is_narrow(torch.ones(1).bfloat16()), is_narrow(1)
    (False, True, False)
    """
    return isinstance(value, torch.Tensor) and value.dtype in _NARROW


def widened(value: Any) -> Any:
    """Return a tensor of 16-bit floating-point numbers in fp32, and anything else itself."""
    return value.float() if is_narrow(value) else value


class Widening:
    """The layers of a call whose weights are fp32 while they run. `rounds_to`: dtypes in which some round even so.

    >>> layer, widening = torch.nn.Linear(2, 2).bfloat16(), Widening()
    >>> with torch.no_grad(), widening.of(layer):
    ...     layer(torch.ones(1, 2)).dtype
    torch.float32
    >>> layer.weight.dtype, widening.rounds_to
    (torch.bfloat16, set())

    A layer that makes 16-bit numbers itself, such as by ``x.bfloat16()``, rounds. It may also raise, where it has
    tensors that are neither parameters nor buffers.
    """

    def __init__(self) -> None:
        self.rounds_to: set[torch.dtype] = set()

    @contextmanager
    def of(self, module: torch.nn.Module) -> Generator[None]:
        """Run a layer inside, without gradients. What it writes into buffers is kept."""
        narrow = dict.fromkeys(filter(is_narrow, (*module.parameters(), *module.buffers())))
        originals = [(tensor, tensor.data, tensor._version) for tensor in narrow]
        try:
            for tensor, data, _ in originals:
                tensor.data = data.float()
            with _Rounding(self.rounds_to):
                yield
        finally:
            for tensor, data, version in originals:
                wide, tensor.data = tensor.data, data
                if tensor._version != version:
                    data.copy_(wide)


class _Rounding(TorchDispatchMode):
    """Notes the 16-bit dtypes of what operations return."""

    def __init__(self, found: set[torch.dtype]) -> None:
        super().__init__()  # pyright: ignore[reportUnknownMemberType]
        self._found = found

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        several = output if type(output) in (tuple, list) else (output,)
        self._found.update(one.dtype for one in several if is_narrow(one))
        return output
