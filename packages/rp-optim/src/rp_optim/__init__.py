"""Optimizers that run on the host, and the thread that runs them."""

from rp_optim.adam import Adam, AdamW
from rp_optim.worker import OptimizerThread

__version__ = "0.1.0"

__all__ = ["Adam", "AdamW", "OptimizerThread"]
