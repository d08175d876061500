"""Transfers of host memory between machines: sums at an owner, copies from it, and detection of lost machines."""

from rp_dist.blocks.work import Work
from rp_dist.errors import Closed, Disagreement, DistError, InvalidSecret, InvalidTransfer, MachineLost
from rp_dist.machines import Machines

__version__ = "0.1.0"

__all__ = [
    "Closed",
    "Disagreement",
    "DistError",
    "InvalidSecret",
    "InvalidTransfer",
    "MachineLost",
    "Machines",
    "Work",
]
