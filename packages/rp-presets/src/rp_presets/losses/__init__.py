"""Losses: of given logits, of a head that never computes all logits, and the model's own for split batches."""

from rp_presets.losses.causal import causal_lm_loss
from rp_presets.losses.lazy_logits import LazyLogits, lazy_logits
from rp_presets.losses.observe_loss import observe_loss
from rp_presets.losses.own_loss import LossShare, OwnLoss, OwnLosses

__all__ = ["LazyLogits", "LossShare", "OwnLoss", "OwnLosses", "causal_lm_loss", "lazy_logits", "observe_loss"]
