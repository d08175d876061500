"""Train large models on the GPUs you own: weights live on the host, layers stream to the devices.

Importing this starts nothing: devices and threads open with a `Runtime`, or with the first model.
"""

from roundpipe import optim
from roundpipe.auto import AutoRoundPipe
from roundpipe.config import RoundPipeRunConfig
from roundpipe.context import (
    OptimizerCtx,
    doing_optimizer,
    doing_recompute,
    get_recompute_data,
    save_for_recompute,
)
from roundpipe.errors import Busy, GradientsIncomplete, RoundPipeError, Stale, StepFailed
from roundpipe.memory import MemoryReport
from roundpipe.module import RoundPipe
from roundpipe.packed import RoundPipePackedData
from roundpipe.plans import ModelExecutePlan
from roundpipe.profiling import profile
from roundpipe.runtime import Runtime
from roundpipe.scaler import GradScaler
from roundpipe.wrap import wrap_model_to_roundpipe

__version__ = "0.1.0"

__all__ = [
    "AutoRoundPipe",
    "Busy",
    "GradScaler",
    "GradientsIncomplete",
    "MemoryReport",
    "ModelExecutePlan",
    "OptimizerCtx",
    "RoundPipe",
    "RoundPipeError",
    "RoundPipePackedData",
    "RoundPipeRunConfig",
    "Runtime",
    "Stale",
    "StepFailed",
    "doing_optimizer",
    "doing_recompute",
    "get_recompute_data",
    "optim",
    "profile",
    "save_for_recompute",
    "wrap_model_to_roundpipe",
]
