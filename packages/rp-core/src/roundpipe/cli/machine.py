"""What a job takes from the machine that it runs on."""

from __future__ import annotations

import os
from dataclasses import replace

import torch
from rp_transfer import BackendUnavailable, parse_devices

from roundpipe import Runtime
from roundpipe.cli.errors import Refused
from roundpipe.cli.options import Options


def fitted(options: Options) -> Options:
    """The options with devices and dtype filled in.

    Devices are those of the option, else of ``ROUNDPIPE_DEVICES``, else all GPUs, else two CPU devices.

    Raises `Refused` for devices that cannot be read.
    """
    devices = os.environ.get("ROUNDPIPE_DEVICES") or _default_devices()
    if options.devices is not None:
        devices = options.devices
    dtype = options.dtype or ("bfloat16" if _kind(devices) == "cuda" else "float32")
    return replace(options, devices=devices, dtype=dtype)


def open_runtime(devices: str | None) -> Runtime:
    """Open the devices; raises `Refused` for devices that are not here."""
    try:
        return Runtime(devices)
    except (ValueError, BackendUnavailable) as error:
        raise Refused(str(error)) from error


def _default_devices() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu:2"


def _kind(devices: str) -> str:
    try:
        return parse_devices(devices).kind
    except ValueError as error:
        raise Refused(str(error)) from error
