"""The command `roundpipe env`: print the facts of this machine and installation that a bug report needs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import rp_optim
import torch
from rp_packing import refusal
from rp_trainer.processes import Processes

from rp_cli.environment.facts import Fact, Section, as_json, as_text
from rp_cli.environment.hardware import hardware
from rp_cli.environment.options import EnvOptions
from rp_cli.environment.software import CUPY, installed, kernels, settings, software

_DRIVER = Path("/proc/driver/nvidia/version")


def env(options: EnvOptions, processes: Processes | None = None) -> None:
    """Print versions, memory, devices, rates, kernels, and what is missing with the command that installs it.

    `processes`: the machines that torchrun started. The first prints its facts, and the network between them.

    Raises `Refused` for a devices string or a limit of memory that cannot be parsed.
    """
    machine, problems = hardware(options.devices)
    cards = [fact.name for section in machine for fact in section.facts if fact.name.startswith("cuda:")]
    refusals = {card: refusal(torch.device(card)) for card in cards}
    sections = [software(), *machine, *_network(processes), kernels(refusals), settings()]
    show = as_json if options.json else as_text
    print(show(sections, [*_missing(), *problems, *_refused(refusals)]), flush=True)


def _network(processes: Processes | None) -> Iterator[Section]:
    """Yield the rate of the network, measured when the machines connected."""
    if processes is not None and processes.machines is not None:
        rate, connections = processes.machines.network_gb_s, processes.machines.connections
        words = f"{rate:.3g} GB/s from each and as much to it, over {connections} connections to each other"
        link = {"gb_s": rate, "connections": connections}
        yield Section("machines", (Fact("number", processes.size), Fact("network", link, words)))


def _refused(refusals: Mapping[str, str | None]) -> Iterator[str]:
    for card, reason in refusals.items():
        if reason is not None:
            yield (
                f"what Triton needs to expand packed weights on {card}: pip install triton, apt install gcc, or a "
                f"TRITON_CACHE_DIR that can be written; {reason}"
            )


def _missing() -> Iterator[str]:
    """Yield what is missing, and what to do about it."""
    if _DRIVER.exists() and torch.version.cuda is None:
        yield "a torch built for CUDA, for the NVIDIA GPUs here: choose one at pytorch.org/get-started/locally"
    elif _DRIVER.exists() and not torch.cuda.is_available():
        yield "GPUs that torch can use: compare nvidia-smi with CUDA_VISIBLE_DEVICES and torch's version of CUDA"
    if torch.cuda.is_available() and not any(map(installed, CUPY)):
        yield f"CuPy, for CUDA devices: pip install 'rp-core[cuda{(torch.version.cuda or '13').split('.')[0]}]'"
    if rp_optim.available_kernels() == ("torch",):
        yield "a C compiler, for fast optimizer steps: apt install gcc, or set CC to the command of one"
