"""The errors of rp_optim.

::

    OptimError
    ├── InvalidParameter   (ValueError)    a parameter, gradient, weight or state tensor that is not supported
    ├── InvalidOption      (ValueError)    an option out of range, or unsupported on the host
    ├── InvalidLink        (ValueError)    a master that cannot be linked, unlinked or saved in its state
    ├── NonFiniteGradients (RuntimeError)  the gradients' norm is not finite, and `error_if_nonfinite` was set
    ├── ScalerMisuse       (RuntimeError)  methods of a gradient scaler called in an invalid order
    ├── WrongThread        (RuntimeError)  a method called on a thread that must not call it
    └── KernelUnavailable  (RuntimeError)  the requested kernel does not run on this machine
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


class ScalerMisuse(OptimError, RuntimeError):
    """`unscale_`, `step` and `update` of a gradient scaler were called in an invalid order."""


class WrongThread(OptimError, RuntimeError):
    """A method was called on the optimizer's thread that must be called on another thread, or vice versa."""


class KernelUnavailable(OptimError, RuntimeError):
    """The kernel requested by name does not run on this machine."""
