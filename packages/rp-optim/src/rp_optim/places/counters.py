"""Step counters in optimizers' states, and the bytes of a state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch

State = dict[str, Any]

# From here on, adding one in fp32 does not change the number.
_FP32_COUNT_LIMIT = 1 << 24


def nbytes_of_state(state: State) -> int:
    """Return the bytes of the tensors in one parameter's state.

    >>> nbytes_of_state({"step": torch.zeros(()), "exp_avg": torch.zeros(3), "other": None})
    16
    """
    return sum(value.nbytes for value in list(state.values()) if isinstance(value, torch.Tensor))


def counter_dtype() -> torch.dtype:
    """Return the dtype of new counters."""
    return torch.float64 if torch.get_default_dtype() == torch.float64 else torch.float32


def count_steps(states: Sequence[State]) -> list[int]:
    """Increment the tensor "step" in each state; return the new numbers, which count from 1.

    From 2^24 on the tensor is fp64. In fp32 the number would stop growing, and the noise that rounds small state
    would repeat.
    """
    for state in states:
        if state.get("step") is None:
            state["step"] = torch.zeros((), dtype=counter_dtype(), device="cpu")
    steps: list[torch.Tensor] = [state["step"] for state in states]
    if not steps:
        return []
    numbers = _incremented(steps)
    for state, number in zip(states, numbers, strict=True):
        if number >= _FP32_COUNT_LIMIT and state["step"].dtype == torch.float32:
            state["step"] = state["step"].double()
    return numbers


def _incremented(steps: list[torch.Tensor]) -> list[int]:
    if len(set(map(id, steps))) < len(steps):
        # Several states were loaded with one shared tensor: each of them increments it.
        return [int(step.add_(1)) for step in steps]
    # One call for all: an operation per state would release the GIL each time.
    torch._foreach_add_(steps, 1)  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage] - torch's own optimizers use it
    if len({(step.dtype, step.device, step.shape) for step in steps}) > 1:
        return [int(step) for step in steps]
    return cast("list[int]", torch.stack(steps).flatten().long().tolist())  # pyright: ignore[reportUnknownMemberType]
