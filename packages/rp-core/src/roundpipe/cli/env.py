"""The command `roundpipe env`: tells of this machine and installation what a report of a problem needs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import rp_optim
import torch

from roundpipe.cli.environment.facts import as_json, as_text
from roundpipe.cli.environment.hardware import hardware
from roundpipe.cli.environment.software import CUPY, installed, kernels, settings, software

_DRIVER = Path("/proc/driver/nvidia/version")


def env(devices: str | None, *, json: bool) -> None:
    """Print versions, memory, devices, rates, kernels, and what is missing with the command that mends it.

    Raises `Refused` for a devices string or a limit of memory that cannot be parsed.
    """
    machine, problems = hardware(devices)
    sections = [software(), *machine, kernels(), settings()]
    show = as_json if json else as_text
    print(show(sections, [*_missing(), *problems]), flush=True)


def _missing() -> Iterator[str]:
    """What is not there, and what to do."""
    if _DRIVER.exists() and torch.version.cuda is None:
        yield "a torch built for CUDA, for the NVIDIA GPUs here: choose one at pytorch.org/get-started/locally"
    elif _DRIVER.exists() and not torch.cuda.is_available():
        yield "GPUs that torch can use: compare nvidia-smi with CUDA_VISIBLE_DEVICES and torch's version of CUDA"
    if torch.cuda.is_available() and not any(map(installed, CUPY)):
        yield f"CuPy, for CUDA devices: pip install 'rp-core[cuda{(torch.version.cuda or '13').split('.')[0]}]'"
    if rp_optim.available_kernels() == ("torch",):
        yield "a C compiler, for fast optimizer steps: apt install gcc, or set CC to the command of one"
