"""The errors of rp_optim.

::

    OptimError
    ├── InvalidParameter   (ValueError)    a parameter, gradient, weight or state tensor that is not supported
    ├── InvalidOption      (ValueError)    an option out of range, or unsupported on the host
    ├── InvalidLink        (ValueError)    a master that cannot be linked, unlinked or saved in its state
    ├── NonFiniteGradients (RuntimeError)  the gradients' norm is not finite, and `error_if_nonfinite` was set
    ├── ScalerMisuse       (RuntimeError)  methods of a gradient scaler called in an invalid order
    ├── WrongThread        (RuntimeError)  a method called on a thread that must not call it
    ├── KernelUnavailable  (RuntimeError)  the requested kernel does not run on this machine
    └── DiskError          (RuntimeError)  working state on disk cannot be opened, read or written
        ├── DiskFull                       there is no space for it
        ├── DiskStalled                    a disk has not answered for long
        └── TornState                      an earlier error has left parts of two steps on disk; load a state
"""


class OptimError(Exception):
    """Base class of the errors of rp_optim."""


class InvalidParameter(OptimError, ValueError):
    """A tensor has the wrong dtype, layout, device or shape; the message names it and says what to do."""


class InvalidOption(OptimError, ValueError):
    """An option is out of range, or unsupported by optimizers on the host."""


class InvalidLink(OptimError, ValueError):
    """A master cannot be linked, unlinked or saved in its present state."""


class NonFiniteGradients(OptimError, RuntimeError):
    """The norm of the gradients is NaN or infinite, and the caller set `error_if_nonfinite`."""


class DiskError(OptimError, RuntimeError):
    """Working state on disk cannot be opened, read or written; the message names the directory and the reason."""


class DiskFull(DiskError):
    """There is no space for working state; the message names the directory and what is free there."""


class DiskStalled(DiskError):
    """A disk has not answered for long; the message names the directory."""


class TornState(DiskError):
    """An earlier error has left parts of two steps in working state; it is refused until a state is loaded."""


class ScalerMisuse(OptimError, RuntimeError):
    """`unscale_`, `step` and `update` of a gradient scaler were called in an invalid order."""


class WrongThread(OptimError, RuntimeError):
    """A method was called on the optimizer's thread that must be called on another thread, or vice versa."""


class KernelUnavailable(OptimError, RuntimeError):
    """The kernel requested by name does not run on this machine."""
