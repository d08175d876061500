"""Train large models on the GPUs you own: weights stay in host memory, layers stream to the devices.

Importing this opens no device and starts no thread; a `Runtime` or the first model does.
"""

# First: under ``python -m roundpipe`` it handles Ctrl-C from here on.
import roundpipe_command as _command  # noqa: F401 # pyright: ignore[reportMissingTypeStubs, reportUnusedImport]

# isort: split
from roundpipe import optim
from roundpipe.checkpoints.load import LoadedCheckpoint, load_checkpoint
from roundpipe.checkpoints.manager import CheckpointManager
from roundpipe.checkpoints.save import SavingCheckpoint, save_checkpoint
from roundpipe.context import (
    OptimizerCtx,
    doing_optimizer,
    doing_recompute,
    get_recompute_data,
    save_for_recompute,
)
from roundpipe.engine.memory.forecast import MemoryForecast
from roundpipe.engine.memory.report import MemoryReport
from roundpipe.errors import (
    AloneOnly,
    Busy,
    CheckpointDamaged,
    CheckpointError,
    CheckpointMismatch,
    CheckpointWarning,
    DeviceMemoryWarning,
    GradientsIncomplete,
    HostMemoryShort,
    HostMemoryWarning,
    KernelWarning,
    MachineFailed,
    RoundPipeError,
    Stale,
    StepFailed,
    TrainingWarning,
    TrainsNothing,
)
from roundpipe.execution.packed_data import RoundPipePackedData
from roundpipe.garbage import ShortCollections
from roundpipe.loading import from_pretrained
from roundpipe.models.auto import AutoRoundPipe
from roundpipe.models.calls.own_loss import OwnLoss
from roundpipe.models.calls.token_mean import TokenMean, token_mean
from roundpipe.models.roundpipe import RoundPipe
from roundpipe.models.wrap import wrap_model_to_roundpipe
from roundpipe.optimizer.scaler import GradScaler
from roundpipe.packing.frozen import pack_frozen, unpack_frozen
from roundpipe.packing.weight import PackedWeight
from roundpipe.planning.call_log import CallTime
from roundpipe.runtime.runtime import Runtime
from roundpipe.settings.execute_plan import ModelExecutePlan
from roundpipe.settings.run_config import RoundPipeRunConfig
from roundpipe.telemetry.profiling import profile

__version__ = "0.1.0"

__all__ = [
    "AloneOnly",
    "AutoRoundPipe",
    "Busy",
    "CallTime",
    "CheckpointDamaged",
    "CheckpointError",
    "CheckpointManager",
    "CheckpointMismatch",
    "CheckpointWarning",
    "DeviceMemoryWarning",
    "GradScaler",
    "GradientsIncomplete",
    "HostMemoryShort",
    "HostMemoryWarning",
    "KernelWarning",
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
