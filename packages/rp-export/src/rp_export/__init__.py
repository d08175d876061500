"""A trained model for others: its adapter merged, as safetensors, GGUF or MLX, with a card, and on the hub.

`whole` writes a model whose `weights` are read piece by piece, and merged by an `adapter` that has no model in
memory.
"""

from rp_export.card import CardContent, write_card
from rp_export.exporting import Exported, ExportSettings, export, merge
from rp_export.pushing import push
from rp_export.whole import ExportedModel, write_whole

__version__ = "0.1.0"

__all__ = [
    "CardContent",
    "ExportSettings",
    "Exported",
    "ExportedModel",
    "export",
    "merge",
    "push",
    "write_card",
    "write_whole",
]
