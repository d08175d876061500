"""Convert Hugging Face language models to `nn.Sequential` rows of layers."""

from rp_presets.carry import Carry
from rp_presets.errors import UnknownLoss, UnsupportedModel
from rp_presets.losses import LazyLogits, OwnLoss, OwnLosses, Share, causal_lm_loss, lazy_logits, observe_loss
from rp_presets.registry import supported, to_sequential

__version__ = "0.1.0"

__all__ = [
    "Carry",
    "LazyLogits",
    "OwnLoss",
    "OwnLosses",
    "Share",
    "UnknownLoss",
    "UnsupportedModel",
    "__version__",
    "causal_lm_loss",
    "lazy_logits",
    "observe_loss",
    "supported",
    "to_sequential",
]
