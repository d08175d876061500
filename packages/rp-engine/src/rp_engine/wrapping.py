"""What whoever wraps modules asks of the engine: hooks, entrances, kinds of storage, and runs beside the calls."""

from rp_recompute.precision import may_use_cudnn
from rp_recompute.widening import Widening, is_narrow, widened
from rp_state.frozen.store import FrozenDisk, FrozenStore
from rp_state.layers import PinMode
from rp_state.master import unrounded
from rp_state.modules.content import named_modules
from rp_state.modules.lazy_hooks import register_lazy_hooks
from rp_state.options import MasterKind

from rp_engine.device.entrance import Entrance, entrance_of
from rp_engine.device.replica import has_hooks, hooks_of
from rp_engine.device.saved_data import prepares
from rp_engine.device.whole_process.forward_mode import is_in_level
from rp_engine.engine.beside.aside import aside
from rp_engine.execution.call import View
from rp_engine.execution.losses import check_losses
from rp_engine.planning.fp8_layers import check_compute, coded_by
from rp_engine.settings.run_config import Compute

__all__ = [
    "Compute",
    "Entrance",
    "FrozenDisk",
    "FrozenStore",
    "MasterKind",
    "PinMode",
    "View",
    "Widening",
    "aside",
    "check_compute",
    "check_losses",
    "coded_by",
    "entrance_of",
    "has_hooks",
    "hooks_of",
    "is_in_level",
    "is_narrow",
    "may_use_cudnn",
    "named_modules",
    "prepares",
    "register_lazy_hooks",
    "unrounded",
    "widened",
]
