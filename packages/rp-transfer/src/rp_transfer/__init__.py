"""Devices, streams, events, pinned host memory and the order of access to it.

Importing this opens nothing: no device, stream, thread or context.

>>> backend = open_backend("cpu:2")
>>> [device.name for device in backend.devices]
['cpu:0', 'cpu:1']
>>> backend.close()
"""

from rp_transfer.api import Backend, Device, Event, MemoryUse, Stream
from rp_transfer.blocks import Layout, Span
from rp_transfer.cpu import CpuBackend
from rp_transfer.errors import (
    BackendUnavailable,
    Closed,
    DeviceStringError,
    NotConforming,
    TransferError,
    Unordered,
)
from rp_transfer.retain import Retainer
from rp_transfer.select import open_backend, parse_devices
from rp_transfer.turns import Ticket, Turns

__version__ = "0.1.0"

__all__ = [
    "Backend",
    "BackendUnavailable",
    "Closed",
    "CpuBackend",
    "Device",
    "DeviceStringError",
    "Event",
    "Layout",
    "MemoryUse",
    "NotConforming",
    "Retainer",
    "Span",
    "Stream",
    "Ticket",
    "TransferError",
    "Turns",
    "Unordered",
    "open_backend",
    "parse_devices",
]
