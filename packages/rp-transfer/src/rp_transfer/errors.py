"""The errors and warnings of rp_transfer.

::

    TransferError (RuntimeError)
    ├── Unordered            two uses of the same memory conflict, and no wait orders them
    ├── Closed               the backend was closed
    ├── BackendUnavailable   the requested devices cannot be opened on this machine
    ├── NotCapturable        work cannot be captured as a graph; it runs as it is
    └── PinningRefused       the system refused to pin memory; handled inside this package
    PinningWarning (RuntimeWarning)  pinning was refused; issued once by each backend
    DeviceStringError (ValueError)   a malformed device string
    NotConforming (AssertionError)   a backend breaks the contract of `rp_transfer.api`; see `rp_transfer.testing`
"""

from __future__ import annotations

import torch


class TransferError(RuntimeError):
    """Base class of the errors that devices and copies raise."""


class Unordered(TransferError):
    """Two conflicting uses of the same memory have no order: a wait between their streams is missing."""


class Closed(TransferError):
    """The backend, or the runtime that owns it, was closed."""


class BackendUnavailable(TransferError):
    """The requested devices cannot be opened on this machine; the message says what to do."""


class NotCapturable(TransferError):
    """Work cannot be captured as a graph, for the reason in the message; run it as it is."""


class PinningRefused(TransferError):
    """The system refused to pin memory: over its limit, or of a kind that cannot be pinned.

    Caught inside this package: the memory is then used unpinned, and a `PinningWarning` is issued.
    """


class PinningWarning(RuntimeWarning):
    """Host memory could not be pinned, so copies from and to it are slower."""


class DeviceStringError(ValueError):
    """A device string is malformed; valid ones read like ``cuda:0,2`` or ``cpu:4``."""


class NotConforming(AssertionError):
    """A backend breaks the contract of `rp_transfer.api`; the message has the seed or promise to reproduce it."""


# Words in the RuntimeErrors of libraries that allocate outside torch's allocator.
_OUT_OF_MEMORY = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED")


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error of torch, CuPy, cuBLAS, cuDNN or the driver means too little device memory.

    >>> is_out_of_memory(torch.OutOfMemoryError("too much"))
    True
    >>> is_out_of_memory(RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"))
    True
    >>> is_out_of_memory(RuntimeError("shapes differ"))
    False
    """
    # `type(error)` rather than `isinstance`, since a user's class may override `__class__`.
    if issubclass(type(error), torch.OutOfMemoryError) or _is_of_cupy(type(error)):
        return True
    return issubclass(type(error), RuntimeError) and any(words in _text(error) for words in _OUT_OF_MEMORY)


def _is_of_cupy(kind: type[BaseException]) -> bool:
    # By name: only the CUDA backend imports CuPy.
    return any(one.__module__.startswith("cupy.") and one.__name__ == "OutOfMemoryError" for one in kind.__mro__)


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:
        return ""
