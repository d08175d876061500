"""What foresees a model's memory and times before it runs: for plans, refusals and tables."""

from rp_state.codes.layout import coded_indices, device_nbytes
from rp_state.host_bytes.kinds import HostBytes
from rp_state.host_bytes.needed import needed_by
from rp_state.shards import Owners, Shards, Undivided
from rp_telemetry.measurements import Rates
from rp_telemetry.tables import readable_bytes
from rp_transfer import current_limit, parse_bytes

from rp_engine.device.memory.call_size import rows_of
from rp_engine.engine.memory.activation_memory import held_at_once
from rp_engine.engine.memory.forecast import MemoryForecast
from rp_engine.engine.memory.memory_check import SECOND_BLOCKS_SHARE, HostMemoryCheck
from rp_engine.planning.pricing import (
    FORWARD_PART,
    LAUNCH_MS,
    REPLAY_LAUNCH_MS,
    USABLE,
    gradient_itemsize,
    in_place,
)
from rp_engine.planning.probe import probe
from rp_engine.runtime.runtime import num_cores

# Its name in 0.1.0.
Foresight = HostMemoryCheck

__all__ = [
    "FORWARD_PART",
    "LAUNCH_MS",
    "REPLAY_LAUNCH_MS",
    "SECOND_BLOCKS_SHARE",
    "USABLE",
    "HostBytes",
    "HostMemoryCheck",
    "MemoryForecast",
    "Owners",
    "Rates",
    "Shards",
    "Undivided",
    "coded_indices",
    "current_limit",
    "device_nbytes",
    "gradient_itemsize",
    "held_at_once",
    "in_place",
    "needed_by",
    "num_cores",
    "parse_bytes",
    "probe",
    "readable_bytes",
    "rows_of",
]
