"""Trainings with ``compute="auto"`` whose measurements differ from machine to machine."""

from __future__ import annotations

from typing import Any

import torch
from machine_trainings import adamw, square_error, wrapped
from roundpipe import Runtime
from torch import nn


def decided(runtime: Runtime) -> list[dict[str, Any]]:
    """What is decided and trained if machines measure otherwise, if one cannot, and if the first one fails."""
    first = runtime.peers.rank == 0
    return [
        _trained(runtime, [8.0, 7.0, 6.0] if first else [8.0, 9.0, 9.0], None),
        _trained(runtime, [8.0, 7.0, 6.0], None if first else "cuda:0 is too old"),
        _trained(runtime, [0.0] if first else [8.0, 6.0, 6.0], None),
    ]


def _trained(runtime: Runtime, times: list[float], refusal: str | None) -> dict[str, Any]:
    torch.manual_seed(0)
    layers = nn.Sequential(*(nn.Linear(32, 32) for _ in range(3))).bfloat16()
    model = wrapped(runtime, layers, microbatches=4, optim_dtype=torch.float32, compute="auto")
    auto, asked = model.engine.auto_compute, list[tuple[int, int]]()

    def measure(trial: Any) -> Any:
        asked.append((trial.rows, trial.calls))
        return dict(zip(trial.recipes, times, strict=False))

    auto.measure = measure
    auto.refusal = lambda: refusal
    optimizer = adamw(model.optim_parameters())
    x = torch.randn(8, 32, generator=torch.Generator().manual_seed(1)).bfloat16()
    losses: list[float] = []
    error = None
    try:
        for _ in range(2):
            losses.append(model.forward_backward((x,), label=x, loss_fn=square_error).item())
            model.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async=False)
    except Exception as raised:
        error = f"{type(raised).__name__}: {raised}"
    decision = model.compute_decision
    return {"losses": losses, "asked": asked, "decision": decision, "error": error}
