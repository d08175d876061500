"""Convert Hugging Face models to `nn.Sequential` rows of layers."""

from rp_presets.convert import to_sequential
from rp_presets.errors import NotARow, UnknownLoss, UnsupportedModel
from rp_presets.loading import checkpoint_bytes, load_pretrained
from rp_presets.losses import LazyLogits, OwnLoss, OwnLosses, Share, causal_lm_loss, lazy_logits, observe_loss
from rp_presets.observing.candidates import lists_of_layers
from rp_presets.packed import StoredPacked, load_packed, packed_kind
from rp_presets.saving import Conversion, SavedLayout, saved_layout, saves_itself, write_configuration

__version__ = "0.1.0"

__all__ = [
    "Conversion",
    "LazyLogits",
    "NotARow",
    "OwnLoss",
    "OwnLosses",
    "SavedLayout",
    "Share",
    "StoredPacked",
    "UnknownLoss",
    "UnsupportedModel",
    "__version__",
    "causal_lm_loss",
    "checkpoint_bytes",
    "lazy_logits",
    "lists_of_layers",
    "load_packed",
    "load_pretrained",
    "observe_loss",
    "packed_kind",
    "saved_layout",
    "saves_itself",
    "to_sequential",
    "write_configuration",
]
