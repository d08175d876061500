"""What rp-engine's entry point leads to: machines that torchrun has started, or the caller has connected."""

from __future__ import annotations

import os

import torch
from rp_dist import Machines
from rp_engine.errors import RoundPipeError

from rp_machines.several import Several


def open_peers(machines: Machines | bool | None) -> Several:
    """Return the machines of a runtime.

    Args:
        machines: connected ones, which the caller closes; True or None connects those of torchrun's environment.

    Raises `RoundPipeError` if True is given outside of torchrun.
    """
    if machines is True and not {"RANK", "WORLD_SIZE"} <= os.environ.keys() and not _has_process_group():
        raise RoundPipeError(
            "machines=True needs torchrun, which says who takes part; start the program with torchrun, or leave "
            "machines out"
        )
    if machines is None or machines is True:
        return Several(Machines.open(), is_own=True)
    assert machines is not False, "one machine alone needs nothing opened"
    return Several(machines, is_own=False)


def _has_process_group() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()
