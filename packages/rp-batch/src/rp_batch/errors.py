"""Errors and the warning that rp_batch raises; each error has the path of the leaf or node.

::

    BatchError (ValueError)
    ├── SpecError        an invalid spec, or one that does not suit the value at its path
    ├── SizeError        inconsistent or ambiguous batch sizes
    ├── SplitError       a leaf that torch cannot split, or a wrong result of a user's split function
    ├── MergeError       parts that cannot be merged
    └── DepthError       a tree that contains itself or is nested too deeply
    FewerParts (UserWarning)  fewer parts than requested
"""

from __future__ import annotations

__all__ = ["BatchError", "DepthError", "FewerParts", "MergeError", "SizeError", "SpecError", "SplitError"]


class BatchError(ValueError):
    """Base class: a tree cannot be split or merged as requested. `path`: the leaf or node.

    >>> import torch, rp_batch
    >>> try:
    ...     rp_batch.split(((torch.zeros(4), torch.zeros(6)), {}), 2)
    ... except rp_batch.BatchError as error:
    ...     print(error.path)
    args[1]
    """

    path: str

    def __init__(self, path: str, message: str) -> None:
        super().__init__(f"{path}: {message}")
        self.path = path
        self._message = message

    def __reduce__(self) -> tuple[type[BatchError], tuple[str, str]]:
        return type(self), (self.path, self._message)


class SpecError(BatchError):
    """Invalid spec, or one that does not suit the value at its path."""


class SizeError(BatchError):
    """Inconsistent or ambiguous batch sizes."""


class SplitError(BatchError):
    """A leaf that torch cannot split, or a wrong result of a user's split function."""


class MergeError(BatchError):
    """Parts that cannot be merged."""


class DepthError(BatchError):
    """A tree that contains itself or is nested too deeply.

    >>> import rp_batch
    >>> endless = {"items": [1, 2]}
    >>> endless["items"].append(endless)
    >>> try:
    ...     rp_batch.flatten(endless)
    ... except rp_batch.DepthError as error:
    ...     print(error)
    ['items'][2]: must not be the whole tree, which contains it; break the cycle
    """


class FewerParts(UserWarning):
    """Warns that there are fewer parts than requested: the batch is too small, or nothing is split."""
