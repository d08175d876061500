"""The states of the process's random number generators.

The engine has no generator: each training call draws its seed from torch's CPU generator.
"""

from __future__ import annotations

import random
import sys
from typing import Any

import torch
from rp_errors import warn_user

from rp_checkpoint.errors import CheckpointWarning


def random_states() -> dict[str, Any]:
    """Return the states of torch's and Python's generators, and of NumPy's if it is imported."""
    states: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if torch.cuda.is_initialized():
        states["cuda"] = [state.cpu() for state in torch.cuda.get_rng_state_all()]
    if (numpy := sys.modules.get("numpy")) is not None:
        kind, keys, *rest = numpy.random.get_state()
        states["numpy"] = (kind, torch.tensor(keys.tolist(), dtype=torch.uint32), *rest)
    return states


def restore_random_states(states: dict[str, Any]) -> None:
    """Restore the generators' states; warn with `CheckpointWarning` if there are fewer GPUs than states."""
    torch.set_rng_state(states["torch"])
    random.setstate(states["python"])
    if "numpy" in states and (numpy := sys.modules.get("numpy")) is not None:
        kind, keys, *rest = states["numpy"]
        numpy.random.set_state((kind, keys.numpy(), *rest))
    _restore_cuda(states.get("cuda", []))


def _restore_cuda(states: list[torch.Tensor]) -> None:
    count = torch.cuda.device_count() if states else 0
    for index, state in enumerate(states[:count]):
        torch.cuda.set_rng_state(state, index)
    if count < len(states):
        warn_user(
            f"the checkpoint has the generators of {len(states)} GPUs, but this machine has {count}; layers do "
            "not use them, but code outside of the model may draw other numbers",
            CheckpointWarning,
        )
