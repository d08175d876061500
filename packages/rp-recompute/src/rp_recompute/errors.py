"""What is wrong with a module whose forward cannot be run again.

::

    rp_errors.RoundPipeError (RuntimeError)
    └── ImpureLayer   a layer changes more than its output, or does not compute the same again
"""

from __future__ import annotations

from rp_errors import RoundPipeError


class ImpureLayer(RoundPipeError):
    """A layer changed more than its output and buffers, or gave another output from the same inputs and seeds."""
