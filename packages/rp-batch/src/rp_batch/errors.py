"""The errors and the warning of this package, and where in a tree they happened.

BatchError(ValueError)
  ├── SpecError        a spec that cannot be used, or not there
  ├── SizeError        batch sizes that disagree, or that nothing decides
  ├── SplitError       a leaf that torch, or a user's function, did not split
  ├── MergeError       parts that do not fit together
  └── DepthError       a tree that holds itself, or is nested too deep
FewerParts(UserWarning)  a batch smaller than the number of parts asked for
"""

from __future__ import annotations

__all__ = ["BatchError", "DepthError", "FewerParts", "MergeError", "SizeError", "SpecError", "SplitError"]


class BatchError(ValueError):
    """A tree that cannot be split or merged as asked; `path` leads to the leaf or node.

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
    """A spec that cannot be used, or not at this place."""


class SizeError(BatchError):
    """Batch sizes that disagree, or that nothing decides."""


class SplitError(BatchError):
    """A leaf that torch, or a user's function, did not split."""


class MergeError(BatchError):
    """Parts that do not fit together."""


class DepthError(BatchError):
    """A tree that holds itself, or is nested too deep.

    >>> import rp_batch
    >>> endless = {"items": [1, 2]}
    >>> endless["items"].append(endless)
    >>> try:
    ...     rp_batch.flatten(endless)
    ... except rp_batch.DepthError as error:
    ...     print(error)
    ['items'][2]: must not be the whole tree again, which holds it; break the cycle
    """


class FewerParts(UserWarning):
    """A batch smaller than the number of parts asked for."""
