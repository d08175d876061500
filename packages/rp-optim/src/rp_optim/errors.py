"""What rp_optim raises.

OptimError
  ├── InvalidParameter   (ValueError)    a parameter, gradient or weight that the optimizers cannot take
  ├── InvalidOption      (ValueError)    an option out of range, or one that makes no sense on the host
  ├── InvalidLink        (ValueError)    a master linked to something that does not fit it, or not linked at all
  ├── NonFiniteGradients (RuntimeError)  clipping was told to refuse gradients that are not finite
  ├── ScalerMisuse       (RuntimeError)  a gradient scaler used in an order that has no meaning
  ├── WrongThread        (RuntimeError)  something asked for on a thread that must not ask for it
  └── KernelUnavailable  (RuntimeError)  the kernel that was asked for does not run here
"""


class OptimError(Exception):
    """Any error that rp_optim raises on its own account; each kind has a class of its own."""


class InvalidParameter(OptimError, ValueError):
    """A tensor has the wrong dtype, layout, device or shape; the message says which, and what to do."""


class InvalidOption(OptimError, ValueError):
    """An option is out of range, or makes no sense for an optimizer on the host."""


class InvalidLink(OptimError, ValueError):
    """A link does not fit its master."""


class NonFiniteGradients(OptimError, RuntimeError):
    """The norm of the gradients is NaN or infinite, and the caller asked to be told."""


class ScalerMisuse(OptimError, RuntimeError):
    """`unscale_`, `step` and `update` came in an order that has no meaning."""


class WrongThread(OptimError, RuntimeError):
    """The optimizer's thread was asked for what only another thread may do, or the other way round."""


class KernelUnavailable(OptimError, RuntimeError):
    """The kernel that was asked for by name does not run on this machine."""
