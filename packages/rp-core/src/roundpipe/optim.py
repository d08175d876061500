"""The host optimizers of `rp_optim`, under the name that training scripts use."""

from rp_optim import Adam, AdamW

__all__ = ["Adam", "AdamW"]
