"""Every error this package raises on purpose.

::

    TransferError (RuntimeError)
    ├── Unordered            memory was touched before the work that owns it was waited for
    ├── Closed               the backend was closed
    ├── BackendUnavailable   the devices asked for cannot be opened here
    └── PinningRefused       the system does not let memory be pinned; caught here, and memory is used as it is
    PinningWarning (RuntimeWarning)  said once where that happens
    DeviceStringError (ValueError)   a device string nobody can read
    NotConforming (AssertionError)   a backend broke a promise; raised by `rp_transfer.testing`
"""

from __future__ import annotations


class TransferError(RuntimeError):
    """Base of the errors that devices and copies raise."""


class Unordered(TransferError):
    """Two uses of one memory have no order: a wait between their streams is missing."""


class Closed(TransferError):
    """The backend, or the runtime that owns it, was closed."""


class BackendUnavailable(TransferError):
    """The devices asked for cannot be opened on this machine; the message says what to do."""


class PinningRefused(TransferError):
    """Memory cannot be pinned: a limit of the system, or memory of a kind that never can."""


class PinningWarning(RuntimeWarning):
    """Copies are slower than they could be, because memory could not be pinned."""


class DeviceStringError(ValueError):
    """A device string such as ``cuda:0,2`` or ``cpu:4`` was expected."""


class NotConforming(AssertionError):
    """A backend does not do what `rp_transfer.api` promises; the message holds what shows it again."""
