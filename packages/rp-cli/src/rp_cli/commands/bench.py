"""The command `roundpipe bench`: measure this machine, and print the line that calibrates `roundpipe plan`."""

from __future__ import annotations

import torch
from rp_estimate.calibrating import calibrate
from rp_trainer.processes import ALONE

from rp_cli.environment.options import BenchOptions
from rp_cli.finetune.devices import chosen, opened
from rp_cli.telling.status import status


def bench(options: BenchOptions) -> None:
    """Train a small model, and print one line. Raises `Refused` for devices that are not there."""
    devices, dtype = chosen(options.devices, None)
    with status() as say, opened(devices, ALONE) as runtime:
        print(calibrate(runtime, getattr(torch, dtype), say).line, flush=True)
