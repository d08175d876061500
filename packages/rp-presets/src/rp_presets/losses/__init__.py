"""Losses: over logits, over a head that never holds all logits, and the model's own, however a batch is split."""

from rp_presets.losses.causal import causal_lm_loss
from rp_presets.losses.lazy_logits import LazyLogits, lazy_logits

__all__ = ["LazyLogits", "causal_lm_loss", "lazy_logits"]
