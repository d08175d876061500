"""Checkpoints: the whole state of a training in a folder, which is either complete or absent.

What can be saved is a `Saveable`: a model that an engine of rp-engine trains, and the names of its tensors. What
may go wrong is in `rp_checkpoint.errors`.
"""

from rp_errors import count_as_inside

from rp_checkpoint.files.manifest import check, description_of, is_finished
from rp_checkpoint.loading.load import LoadedCheckpoint, load_checkpoint
from rp_checkpoint.manager import CheckpointManager
from rp_checkpoint.model.facts import ModelFacts, PartFacts
from rp_checkpoint.model.layout import CheckpointLayout, Conversion, layout_of
from rp_checkpoint.model.plain import PlainModel
from rp_checkpoint.model.saveable import Saveable, SaveableModel
from rp_checkpoint.saving.save import save_checkpoint
from rp_checkpoint.saving.saving import SavingCheckpoint

__version__ = "0.1.0"

# Its name in 0.1.0, where the layout of a block in memory has the same one.
Layout = CheckpointLayout

count_as_inside("rp_checkpoint")

__all__ = [
    "CheckpointLayout",
    "CheckpointManager",
    "Conversion",
    "LoadedCheckpoint",
    "ModelFacts",
    "PartFacts",
    "PlainModel",
    "Saveable",
    "SaveableModel",
    "SavingCheckpoint",
    "check",
    "description_of",
    "is_finished",
    "layout_of",
    "load_checkpoint",
    "save_checkpoint",
]
