"""Threads that work on the pieces of a weight, each with its own memory, which it reuses for later pieces."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TypeVar

import torch

from rp_packing.services import lent

_Piece = TypeVar("_Piece")

# More would wait for the GIL: a piece has a dozen operations of about ten microseconds.
_MOST_THREADS = 8


class Scratch:
    """A thread's memory for temporary tensors, reused for later pieces: new memory would cost page faults.

    >>> scratch = Scratch(torch.device("cpu"))
    >>> one = scratch.take("numbers", (2, 3), torch.float32)
    >>> one.data_ptr() == scratch.take("numbers", (5,), torch.float32).data_ptr()
    True
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._kept: dict[str, torch.Tensor] = {}

    def take(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor with any values, in the memory that this name had before; use one dtype for a name."""
        numel = math.prod(shape)
        kept = self._kept.get(name)
        if kept is None or kept.numel() < numel:
            kept = self._kept[name] = torch.empty(numel, dtype=dtype, device=self._device)
        return kept[:numel].view(shape)


def each_piece(pieces: Iterable[_Piece], body: Callable[[_Piece, Scratch], None], like: torch.Tensor) -> None:
    """Call `body` with every piece; for tensors on the host, on as many threads as torch may use
    and `Services.run_on_threads` has.

    `like`: a tensor on the device. If a mode watches the caller's operations, they stay on the caller's thread.

    Torch's own threads would synchronize after each operation on a piece. With small pieces that costs more than
    the operations, and if other programs use the cores, too, a time slice each time.
    """
    todo = deque(pieces)
    count = _num_threads(like, len(todo))
    if count == 1:
        _work(todo, body, like.device)
        return
    lent().run_on_threads(count, partial(_work, todo, body, like.device), todo.clear)


def _num_threads(like: torch.Tensor, num_pieces: int) -> int:
    if like.device.type != "cpu" or type(like) is not torch.Tensor or is_watched():
        return 1
    return max(min(torch.get_num_threads(), num_pieces, _MOST_THREADS), 1)


def is_watched() -> bool:
    """Return whether a mode on the calling thread sees each torch operation, such as one that counts memory."""
    return torch._C._len_torch_dispatch_stack() > 0  # pyright: ignore[reportPrivateUsage] - there is no public way


def _work(todo: deque[_Piece], body: Callable[[_Piece, Scratch], None], device: torch.device) -> None:
    scratch = Scratch(device)
    while True:
        try:
            piece = todo.popleft()
        except IndexError:
            return
        with torch.no_grad():
            body(piece, scratch)
