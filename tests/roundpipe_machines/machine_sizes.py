"""What each machine holds and sends."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from machine_trainings import adamw, square_error, wrapped
from roundpipe import Runtime
from rp_engine.errors import HostMemoryShort, HostMemoryWarning
from rp_state.host_bytes.needed import needed_by
from rp_state.options import HostOptions
from rp_transfer import HostLimit, group
from torch import nn


def measured(runtime: Runtime, *, double_buffer: bool) -> dict[str, Any]:
    """Memory by kind, and bytes that a step sends and receives, of a model of equal layers."""
    torch.manual_seed(0)
    layers = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(12))).bfloat16()
    planned = group(layers)
    model = wrapped(
        runtime, layers, microbatches=12, optim_dtype=torch.float32, double_buffer=double_buffer, pin_model="alloc"
    )
    optimizer = adamw(model.optim_parameters())
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(12, 64, generator=generator).bfloat16()
    shards = runtime.peers.shards()
    shards.assign([found.tensors for found in planned if found.kind == "trainable"])
    planned_bytes = needed_by(
        planned, HostOptions(optim_dtype=torch.float32), second_blocks=double_buffer, shards=shards
    )
    foreseen = model.memory_forecast(optimizer).whole
    sent: list[int] = []
    for _ in range(3):
        before = _moved(runtime)
        model.forward_backward((x,), label=x, loss_fn=square_error)
        model.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async=False)
        sent.append(_moved(runtime) - before)
    report = model.memory_report(optimizer)
    (times,) = model.call_times()
    link = {} if runtime.group is None else {"network_gb_s": runtime.group.machines.network_gb_s}
    return {
        **link,
        "network_ms": times.network_ms,
        "bound_by": times.bound_by,
        "promised_ms": times.promised_ms,
        "host": report.host,
        "foreseen": foreseen,
        "planned": planned_bytes,
        "sent": sent,
        "numel": 12 * 64 * 64,
    }


def wrapped_in(runtime: Runtime, *, free_bytes_a_parameter: float) -> str:
    """Whether a model that will be trained is refused where so much memory is free."""
    layers = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(12))).bfloat16()
    nbytes = int(free_bytes_a_parameter * 12 * 64 * 64)
    runtime.host_limit = lambda: HostLimit("the given limit", nbytes, nbytes)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", HostMemoryWarning)
        try:
            wrapped(runtime, layers, optim_dtype=torch.float32, pin_model="alloc")
        except HostMemoryShort:
            return "short"
    return "fits"


def _moved(runtime: Runtime) -> int:
    return 0 if runtime.group is None else runtime.group.machines.sent_bytes
