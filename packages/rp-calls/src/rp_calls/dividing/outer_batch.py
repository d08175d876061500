"""The batch size of the call of a whole module, for the parts that run in it."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import rp_batch
import torch

_SIZE: ContextVar[int | None] = ContextVar("roundpipe_outer_batch_size", default=None)


def outer_batch_size() -> int | None:
    """Return the batch size of the call in which this runs, as its shapes suggest; None if they do not."""
    return _SIZE.get()


@contextmanager
def outer_batch(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Generator[None]:
    """Inside, parts know what the batch size of a call with these arguments is likely to be.

    >>> with outer_batch((torch.zeros(3, 2),), {}):
    ...     outer_batch_size()
    3
    """
    token = _SIZE.set(_size(args, kwargs))
    try:
        yield
    finally:
        _SIZE.reset(token)


def _size(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
    try:
        return rp_batch.infer(args, kwargs).batch_size
    except rp_batch.SizeError:
        leaves, _ = rp_batch.flatten((args, kwargs))
        return next((len(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim()), None)
