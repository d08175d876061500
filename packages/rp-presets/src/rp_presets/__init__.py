"""Convert Hugging Face models to `nn.Sequential` rows of layers."""

from rp_presets.convert import to_sequential
from rp_presets.errors import NotARow, UnsupportedModel
from rp_presets.losses import causal_lm_loss

__version__ = "0.1.0"

__all__ = ["NotARow", "UnsupportedModel", "__version__", "causal_lm_loss", "to_sequential"]
