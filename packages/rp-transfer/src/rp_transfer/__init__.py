"""Devices, streams, events, pinned host memory and the order of access to it.

Importing it opens nothing: no device, stream, thread or context.

>>> backend = open_backend("cpu:2")
>>> [device.name for device in backend.devices]
['cpu:0', 'cpu:1']
>>> backend.close()
"""

from rp_transfer.api import (
    Abilities,
    Backend,
    Capture,
    Device,
    Event,
    Graph,
    GraphPool,
    HostUse,
    MemoryUse,
    Stream,
)
from rp_transfer.cpu.backend import CpuBackend
from rp_transfer.errors import (
    BackendUnavailable,
    Closed,
    DeviceStringError,
    NotCapturable,
    NotConforming,
    PinningWarning,
    TransferError,
    Unordered,
    is_out_of_memory,
)
from rp_transfer.memory.blocks import BlockGroup, Kind, Layout, TensorExtent, group, inner_tensors, tensors_of
from rp_transfer.memory.files import FileRange, GivingBack, MappedFiles, is_written
from rp_transfer.memory.given_limit import current_limit, parse_bytes
from rp_transfer.memory.limits import HostLimit, host_limits, resident_bytes, tightest
from rp_transfer.memory.pages import give_back_freed
from rp_transfer.memory.raw import bytes_of
from rp_transfer.memory.strides import Strides, gaps, in_order, laid_out, strided
from rp_transfer.order.conveyor import Conveyor
from rp_transfer.order.read_ahead import ByteSource, Expected, Piece, Reading
from rp_transfer.order.retain import Retainer
from rp_transfer.order.turns import Ticket, Turns
from rp_transfer.select import default_devices, local_processes, open_backend, parse_devices

__version__ = "0.1.0"

__all__ = [
    "Abilities",
    "Backend",
    "BackendUnavailable",
    "BlockGroup",
    "ByteSource",
    "Capture",
    "Closed",
    "Conveyor",
    "CpuBackend",
    "Device",
    "DeviceStringError",
    "Event",
    "Expected",
    "FileRange",
    "GivingBack",
    "Graph",
    "GraphPool",
    "HostLimit",
    "HostUse",
    "Kind",
    "Layout",
    "MappedFiles",
    "MemoryUse",
    "NotCapturable",
    "NotConforming",
    "Piece",
    "PinningWarning",
    "Reading",
    "Retainer",
    "Stream",
    "Strides",
    "TensorExtent",
    "Ticket",
    "TransferError",
    "Turns",
    "Unordered",
    "bytes_of",
    "current_limit",
    "default_devices",
    "gaps",
    "give_back_freed",
    "group",
    "host_limits",
    "in_order",
    "inner_tensors",
    "is_out_of_memory",
    "is_written",
    "laid_out",
    "local_processes",
    "open_backend",
    "parse_bytes",
    "parse_devices",
    "resident_bytes",
    "strided",
    "tensors_of",
    "tightest",
]
