"""One model in host memory: its weights, gradients and masters in blocks, who owns them, and how whole they are.

Nothing here runs layers or steps: whoever does enters the turns of the blocks that it reads or writes.
"""

from rp_errors import count_as_inside

from rp_state.block import Block
from rp_state.errors import GradientsIncomplete, Stale, StepFailed
from rp_state.frozen.store import FrozenDisk, FrozenStore
from rp_state.gradient import Gradient
from rp_state.health import Health
from rp_state.layers import LayerState, PinMode
from rp_state.model_state import ModelState
from rp_state.modules.habits import Habits
from rp_state.options import HostOptions, MasterKind
from rp_state.shards import OwnedSegment, Owners, Shards, Undivided

__version__ = "0.1.0"

count_as_inside("rp_state")

__all__ = [
    "Block",
    "FrozenDisk",
    "FrozenStore",
    "Gradient",
    "GradientsIncomplete",
    "Habits",
    "Health",
    "HostOptions",
    "LayerState",
    "MasterKind",
    "ModelState",
    "OwnedSegment",
    "Owners",
    "PinMode",
    "Shards",
    "Stale",
    "StepFailed",
    "Undivided",
]
