"""What others may have written: files and YAML with bounds, work in a process with limits, visible output.

Nothing here imports torch, but `code`, which says what a model's folder needs that nobody runs.
"""

from rp_strangers.files import bounded_bytes, check_stored
from rp_strangers.limited import Budget, Unlimited, free_bytes, limited
from rp_strangers.plain_yaml import read_plain
from rp_strangers.refusing import refusing, refusing_all
from rp_strangers.visible import visible, visible_output

__version__ = "0.1.0"

__all__ = [
    "Budget",
    "Unlimited",
    "bounded_bytes",
    "check_stored",
    "free_bytes",
    "limited",
    "read_plain",
    "refusing",
    "refusing_all",
    "visible",
    "visible_output",
]
