"""The errors and warnings of rp_transfer.

::

    TransferError (RuntimeError)
    ├── Unordered            two uses of the same memory conflict, and no wait orders them
    ├── Closed               the backend was closed
    ├── BackendUnavailable   the requested devices cannot be opened on this machine
    └── PinningRefused       the system refused to pin memory; handled inside this package
    PinningWarning (RuntimeWarning)  issued once per backend when pinning is refused
    DeviceStringError (ValueError)   a malformed device string
    NotConforming (AssertionError)   a backend broke a promise; raised by `rp_transfer.testing`
"""

from __future__ import annotations


class TransferError(RuntimeError):
    """Base class of the errors that devices and copies raise."""


class Unordered(TransferError):
    """Two conflicting uses of the same memory have no order: a wait between their streams is missing."""


class Closed(TransferError):
    """The backend, or the runtime that owns it, was closed."""


class BackendUnavailable(TransferError):
    """The requested devices cannot be opened on this machine; the message says what to do."""


class PinningRefused(TransferError):
    """The system refused to pin memory: over its limit, or of a kind that cannot be pinned.

    Caught inside this package: the memory is then used unpinned, and a `PinningWarning` is issued.
    """


class PinningWarning(RuntimeWarning):
    """Host memory could not be pinned, so copies from and to it are slower."""


class DeviceStringError(ValueError):
    """A device string is malformed; valid ones read like ``cuda:0,2`` or ``cpu:4``."""


class NotConforming(AssertionError):
    """A backend breaks a promise of `rp_transfer.api`; the message has the seed or promise that reproduces it."""
