"""Trains ten unlike models, one after another, and prints what each was foreseen to take and what it took.

Run as a script, in a process of its own: resident memory is measured.
"""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Callable
from typing import Any

import roundpipe
import torch
from roundpipe import RoundPipe, RoundPipeRunConfig, Runtime
from rp_transfer import give_back_freed, resident_bytes
from torch import nn

optim = roundpipe.optim
HALF = {"optim_dtype": torch.float32, "double_buffer": False}
Make = Callable[[Any], torch.optim.Optimizer]


def linear(width: int, depth: int, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(width, width, dtype=dtype) for _ in range(depth)))


def tied() -> nn.Sequential:
    made = linear(2048, 3, torch.bfloat16)
    made[2].weight = made[0].weight
    return made


def adapted() -> nn.Sequential:
    return linear(3072, 6, torch.bfloat16).requires_grad_(False).append(nn.Linear(3072, 64, dtype=torch.bfloat16))


def images() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 512, 1), nn.Conv2d(512, 768, 3), nn.BatchNorm2d(768), nn.Conv2d(768, 512, 3), nn.Flatten()
    ).to(memory_format=torch.channels_last)


def words() -> nn.Sequential:
    return nn.Sequential(
        nn.Embedding(20_000, 512, dtype=torch.bfloat16), nn.Linear(512, 512, dtype=torch.bfloat16)
    )


# Model, settings, optimizer, calls between steps.
MODELS: dict[str, tuple[Callable[[], nn.Sequential], dict[str, Any], Make, int]] = {
    "fp32, Adam": (lambda: linear(1536, 4), {"double_buffer": False}, optim.AdamW, 1),
    "bf16, masters in fp32": (lambda: linear(2048, 3, torch.bfloat16), HALF, optim.AdamW, 1),
    "bf16 all through, Lion": (lambda: linear(2048, 5, torch.bfloat16), {"double_buffer": False}, optim.Lion, 1),
    "SGD without momentum": (lambda: linear(2048, 3), {"double_buffer": False}, optim.SGD, 1),
    "Adafactor": (lambda: linear(2048, 3, torch.bfloat16), HALF, optim.Adafactor, 1),
    "torch's AdamW": (lambda: linear(2048, 3, torch.bfloat16), HALF, torch.optim.AdamW, 1),
    "second blocks, tied": (tied, HALF | {"double_buffer": True}, optim.AdamW, 1),
    "adapter": (adapted, HALF, optim.AdamW, 1),
    "images": (images, {"double_buffer": False}, lambda p: optim.SGD(p, momentum=0.9), 1),
    "words, two calls a step": (words, HALF, optim.AdamW, 2),
}


def batch(model: nn.Sequential) -> torch.Tensor:
    first = model[0]
    if isinstance(first, nn.Embedding):
        return torch.zeros(4, dtype=torch.int64)
    if isinstance(first, nn.Conv2d):
        return torch.ones(4, 3, 6, 6)
    return torch.ones(4, first.in_features, dtype=first.weight.dtype)


def settled_bytes(runtime: Runtime) -> int:
    """Resident bytes once all garbage has been freed, also in the backend, which frees when it is asked."""
    gc.collect()
    runtime.host_memory()
    give_back_freed()
    return resident_bytes()


def trained(runtime: Runtime, name: str) -> tuple[int, int]:
    """The bytes foreseen before the first call, and by how much the process has grown after a step."""
    make, settings, make_optimizer, calls = MODELS[name]
    before = settled_bytes(runtime)
    layers = make()
    model = RoundPipe(
        layers, runtime=runtime, name=name, model_run_config=RoundPipeRunConfig(num_microbatch=2), **settings
    )
    optimizer = make_optimizer(model.optim_parameters())
    foreseen = model.memory_forecast(optimizer, additions=calls).whole.total
    for _ in range(calls):
        model.forward_backward(
            input_args=(batch(layers),), label=0, loss_fn=lambda y, _: y.float().square().mean()
        )
    model.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async=False)
    model.synchronize()
    return foreseen, settled_bytes(runtime) - before


def main() -> None:
    with Runtime("cpu:1", strict=False) as runtime:
        # What is made once in a process: threads, modules, and kernels of convolutions and of products, also of
        # 16-bit layers in fp32, which trials run.
        for name in ("torch's AdamW", "images", "adapter"):
            trained(runtime, name)
        sys.stdout.write(json.dumps({name: trained(runtime, name) for name in MODELS}))


if __name__ == "__main__":
    main()
