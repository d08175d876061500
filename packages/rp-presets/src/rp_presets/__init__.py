"""Convert Hugging Face language models to `nn.Sequential` rows of layers."""

from rp_presets.carry import Carry
from rp_presets.errors import UnsupportedModel
from rp_presets.losses import LazyLogits, causal_lm_loss, lazy_logits
from rp_presets.registry import supported, to_sequential

__version__ = "0.1.0"

__all__ = [
    "Carry",
    "LazyLogits",
    "UnsupportedModel",
    "__version__",
    "causal_lm_loss",
    "lazy_logits",
    "supported",
    "to_sequential",
]
