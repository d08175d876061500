"""The errors of rp_dist.

::

    DistError
    ├── MachineLost      (RuntimeError)  a machine died, hangs, lost its link, failed or left; `rank` is its number
    ├── Disagreement     (RuntimeError)  machines that should run the same do not; the message says what and where
    ├── InvalidTransfer  (ValueError)    a block, rank or tag that cannot be transferred
    ├── InvalidSecret    (ValueError)    a secret that is too short, or that others may read
    └── Closed           (RuntimeError)  a call after `close`
"""

from __future__ import annotations


class DistError(Exception):
    """Base class of the errors of rp_dist."""


class MachineLost(DistError, RuntimeError):
    """A machine no longer takes part. Every later call raises the same error.

    `rank`: the machine. `why`: the symptom, such as "no sign of life for 60 s".

    >>> raise MachineLost(2, "its process ended")
    Traceback (most recent call last):
    rp_dist.errors.MachineLost: rank 2 is lost: its process ended
    """

    def __init__(self, rank: int, why: str) -> None:
        super().__init__(f"rank {rank} is lost: {why}")
        self.rank = rank
        self.why = why

    def __reduce__(self) -> tuple[type[MachineLost], tuple[int, str]]:
        return type(self), (self.rank, self.why)


class Disagreement(DistError, RuntimeError):
    """Machines do not agree on what they run; the message names the facts and the ranks."""


class InvalidTransfer(DistError, ValueError):
    """A block, rank or tag that cannot be transferred; the message says what is wanted."""


class InvalidSecret(DistError, ValueError):
    """A secret that proves nothing: too short, or in a file that others may use; the message says what to do."""


class Closed(DistError, RuntimeError):
    """The machines were closed already."""
