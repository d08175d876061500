"""Refuse objects that each part would get whole, though they look like the data of a batch."""

from __future__ import annotations

from typing import Any

import torch

from rp_batch import tree
from rp_batch.arrays import has_dimensions
from rp_batch.errors import SplitError
from rp_batch.hidden import is_plain, tensors_inside
from rp_batch.splitting.infer import Decided, SplitSubject, Why

__all__ = ["refuse_indivisible"]

# What has a length has rows, but not these.
_WITHOUT_ROWS = (str, bytes, bytearray, memoryview, torch.Size, type, set, frozenset)


def refuse_indivisible(subject: SplitSubject, decided: Decided) -> None:
    """Raise `SplitError` for a leaf without a spec that has a length, or a tensor of the batch inside."""
    for index, (value, why) in enumerate(zip(subject.leaves, decided.reasons, strict=True)):
        if why is not Why.OBJECT or is_plain(value) or tree.is_marked(value):
            continue
        if (found := _found(value, decided.batch_size)) is not None:
            raise _refused(subject.paths()[index], value, found)


def _refused(path: str, value: object, found: str) -> SplitError:
    return SplitError(
        path,
        f"must be a tensor, an array, or a tree of them, but is a {type(value).__name__} {found}, which every "
        "part would get whole; give a tuple, list, dict or dataclass, register the class with torch's pytree, or "
        "give the spec Replicate() (split_input, split_label) if every part needs all of it",
    )


def _found(value: Any, batch_size: int | None) -> str | None:
    """Return in words what of the batch a value may have; None if nothing."""
    if (length := _length(value)) > 0:
        return f"of length {length}"
    for step, inside in tensors_inside(value):
        if has_dimensions(inside) and inside.shape[:1] == (batch_size,):
            return f"with a {type(inside).__name__} of shape {tuple(inside.shape)} at {step}"
    return None


def _length(value: Any) -> int:
    if isinstance(value, _WITHOUT_ROWS):
        return 0
    try:
        return len(value)
    except Exception:  # most objects have none, and a user's class may raise anything
        return 0
