"""Train large models on the GPUs you own: weights stay in host memory, layers stream to the devices.

Importing this opens no device and starts no thread; a `Runtime` or the first model does.
"""

from rp_calls import OwnLoss, TokenMean, declared_spec, token_mean
from rp_checkpoint import (
    CheckpointManager,
    LoadedCheckpoint,
    SavingCheckpoint,
    load_checkpoint,
    save_checkpoint,
)
from rp_checkpoint.errors import CheckpointDamaged, CheckpointError, CheckpointMismatch, CheckpointWarning
from rp_engine import (
    CallTime,
    GradScaler,
    LaunchDecision,
    MemoryReport,
    ModelExecutePlan,
    RoundPipePackedData,
    RoundPipeRunConfig,
    Runtime,
    profile,
)
from rp_engine.context import (
    OptimizerCtx,
    doing_optimizer,
    doing_recompute,
    get_recompute_data,
    save_for_recompute,
)
from rp_engine.errors import (
    AloneOnly,
    BoundaryError,
    Busy,
    DeviceMemoryWarning,
    DifferentiatedTwice,
    GradientsIncomplete,
    HostMemoryShort,
    HostMemoryWarning,
    ImpureLayer,
    MachineFailed,
    RoundPipeError,
    Stale,
    StepFailed,
    TrainingWarning,
    TrainsNothing,
)
from rp_engine.estimates import MemoryForecast
from rp_engine.wrapping import FrozenDisk
from rp_errors import count_as_inside
from rp_packing import Fp8, KernelWarning, PackedWeight, lend, pack_frozen, unpack_frozen

from roundpipe import optim
from roundpipe.garbage import ShortCollections
from roundpipe.loading import from_pretrained
from roundpipe.models.auto import AutoRoundPipe
from roundpipe.models.roundpipe import RoundPipe
from roundpipe.models.wrap import wrap_model_to_roundpipe
from roundpipe.models.wrapped.options import WrapOptions
from roundpipe.packing_services import PACKING_SERVICES

__version__ = "0.1.0"

lend(PACKING_SERVICES)
count_as_inside("roundpipe")

__all__ = [
    "AloneOnly",
    "AutoRoundPipe",
    "BoundaryError",
    "Busy",
    "CallTime",
    "CheckpointDamaged",
    "CheckpointError",
    "CheckpointManager",
    "CheckpointMismatch",
    "CheckpointWarning",
    "DeviceMemoryWarning",
    "DifferentiatedTwice",
    "Fp8",
    "FrozenDisk",
    "GradScaler",
    "GradientsIncomplete",
    "HostMemoryShort",
    "HostMemoryWarning",
    "ImpureLayer",
    "KernelWarning",
    "LaunchDecision",
    "LoadedCheckpoint",
    "MachineFailed",
    "MemoryForecast",
    "MemoryReport",
    "ModelExecutePlan",
    "OptimizerCtx",
    "OwnLoss",
    "PackedWeight",
    "RoundPipe",
    "RoundPipeError",
    "RoundPipePackedData",
    "RoundPipeRunConfig",
    "Runtime",
    "SavingCheckpoint",
    "ShortCollections",
    "Stale",
    "StepFailed",
    "TokenMean",
    "TrainingWarning",
    "TrainsNothing",
    "WrapOptions",
    "declared_spec",
    "doing_optimizer",
    "doing_recompute",
    "from_pretrained",
    "get_recompute_data",
    "load_checkpoint",
    "optim",
    "pack_frozen",
    "profile",
    "save_checkpoint",
    "save_for_recompute",
    "token_mean",
    "unpack_frozen",
    "wrap_model_to_roundpipe",
]
