"""Convert Hugging Face models to `nn.Sequential` rows of layers."""

from rp_presets.convert import to_sequential
from rp_presets.errors import DamagedFile, NotARow, UnknownLoss, UnsupportedModel
from rp_presets.files.checked import check_checkpoint, check_tokenizer
from rp_presets.files.faults import brief
from rp_presets.files.folders import check_config, check_folder
from rp_presets.files.whole import read_object, special_kind
from rp_presets.loading import checkpoint_bytes, load_pretrained, unasked
from rp_presets.losses import LazyLogits, LossShare, OwnLoss, OwnLosses, causal_lm_loss, lazy_logits, observe_loss
from rp_presets.observing.candidates import lists_of_layers
from rp_presets.packed import StoredPacked, load_packed, packed_kind
from rp_presets.saving import Conversion, SavedLayout, saved_layout, saves_itself, write_configuration
from rp_presets.streamed import Streamed, StreamedWeights, streamed

__version__ = "0.1.0"

__all__ = [
    "Conversion",
    "DamagedFile",
    "LazyLogits",
    "LossShare",
    "NotARow",
    "OwnLoss",
    "OwnLosses",
    "SavedLayout",
    "StoredPacked",
    "Streamed",
    "StreamedWeights",
    "UnknownLoss",
    "UnsupportedModel",
    "__version__",
    "brief",
    "causal_lm_loss",
    "check_checkpoint",
    "check_config",
    "check_folder",
    "check_tokenizer",
    "checkpoint_bytes",
    "lazy_logits",
    "lists_of_layers",
    "load_packed",
    "load_pretrained",
    "observe_loss",
    "packed_kind",
    "read_object",
    "saved_layout",
    "saves_itself",
    "special_kind",
    "streamed",
    "to_sequential",
    "unasked",
    "write_configuration",
]
