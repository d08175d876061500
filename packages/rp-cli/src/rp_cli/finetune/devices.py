"""Choose the devices and the dtype of a training job, and open a runtime on them."""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace

import torch
from roundpipe import Runtime
from rp_strangers.refusing import refusing
from rp_trainer.processes import Processes
from rp_transfer import BackendUnavailable, default_devices, parse_devices

from rp_cli.finetune.options import FineTuning


def fitted(options: FineTuning) -> FineTuning:
    """Fill in the devices and the dtype.

    Devices: the option's, else those of ``ROUNDPIPE_DEVICES``, else all GPUs, else two CPU devices;
    of several processes that torchrun started on this machine, each has its share of the GPUs. Dtype: the
    option's, else float32 on CPU devices and bfloat16 on GPUs.

    Raises `Refused` for a devices string that cannot be parsed, and for fewer GPUs than processes.
    """
    devices, dtype = chosen(options.devices, options.dtype)
    return replace(options, devices=devices, dtype=dtype)


def chosen(devices: str | None, dtype: str | None) -> tuple[str, str]:
    """Return the devices and the dtype that are given or, where None is, those of `fitted`."""
    devices = _default_devices() if devices is None else devices
    return devices, dtype or ("float32" if _cpu_devices(devices) else "bfloat16")


@contextmanager
def opened(devices: str, processes: Processes) -> Generator[Runtime, None, None]:
    """Open a runtime on the devices, and close it on exit. Raises `Refused` if a device is not available.

    Each CPU device keeps one core busy, so torch's intra-op threads are reduced by as many inside the context.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(max(1, threads - _cpu_devices(devices)))
    try:
        runtime = _runtime(devices, processes)
        try:
            yield runtime
        except BaseException as error:
            if not processes.is_in_order(error):
                runtime.fail(error)
            raise
        finally:
            runtime.close()
    finally:
        torch.set_num_threads(threads)


def _runtime(devices: str, processes: Processes) -> Runtime:
    with refusing("", (ValueError, BackendUnavailable)):
        return Runtime(devices, machines=processes.machines or False)


def _default_devices() -> str:
    with refusing("", (ValueError, BackendUnavailable)):
        devices = default_devices()
    return "cpu:2" if devices == "cpu" and not os.environ.get("ROUNDPIPE_DEVICES") else devices


def _cpu_devices(devices: str) -> int:
    """Return the number of CPU devices that the string selects; 0 if it selects GPUs."""
    with refusing(""):
        choice = parse_devices(devices)
    return choice.count if choice.kind == "cpu" else 0
