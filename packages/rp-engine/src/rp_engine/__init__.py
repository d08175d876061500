"""Runs a row of layers task by task on any devices, with weights, gradients and optimizer on the host.

What runs models is here; what foresees memory and time is in `rp_engine.estimates`, what may go wrong in
`rp_engine.errors`, what layers may ask in `rp_engine.context`.
"""

from rp_errors import count_as_inside
from rp_sched import LaunchDecision
from rp_state.options import HostOptions
from rp_telemetry.calls.call_time import CallTime
from rp_telemetry.profiling import profile

from rp_engine.engine.engine import Engine
from rp_engine.engine.host.resident import Resident
from rp_engine.engine.memory.report import MemoryReport
from rp_engine.engine.step_during import StepDuring
from rp_engine.engine.whole_model import WholeModel
from rp_engine.execution.call import LossFn
from rp_engine.execution.packed_data import Arrivals, RoundPipePackedData
from rp_engine.optimizer.scaler import GradScaler
from rp_engine.runtime.runtime import Runtime, default_runtime
from rp_engine.settings.execute_plan import ModelExecutePlan
from rp_engine.settings.run_config import RoundPipeRunConfig

__version__ = "0.1.0"

# rp-optim, too: it runs steps for the engine, and knows nothing of it.
for _package in ("rp_engine", "rp_optim"):
    count_as_inside(_package)

__all__ = [
    "Arrivals",
    "CallTime",
    "Engine",
    "GradScaler",
    "HostOptions",
    "LaunchDecision",
    "LossFn",
    "MemoryReport",
    "ModelExecutePlan",
    "Resident",
    "RoundPipePackedData",
    "RoundPipeRunConfig",
    "Runtime",
    "StepDuring",
    "WholeModel",
    "default_runtime",
    "profile",
]
