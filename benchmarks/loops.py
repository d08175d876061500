"""The engines that `train.py` compares: each makes a step function of a workload and a model on the CPU."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from rp_presets import causal_lm_loss
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True)
class Workload:
    """What is trained, and how."""

    model: str
    batch: int
    sequence: int
    microbatches: int
    checkpoint: bool = False
    compile: bool = False
    chunked_head: bool = False
    sync: bool = False
    devices: str | None = None
    profile: str | None = None
    optimizer_state: str = "fp32"
    master: str = "whole"
    step_in_backward: bool = False
    launch: Literal["auto", "eager", "graphs"] = "auto"
    compute: Literal["bf16", "fp8"] = "bf16"


Step = Callable[[Tensor], float]
# A step, what to do after the last one and what that finds out, and the number of GPUs.
Engine = tuple[Step, Callable[[], dict[str, float]], int]


def loss_of(workload: Workload) -> Callable[[Tensor, Tensor], Tensor]:
    """The loss of a workload: a mean over its tokens."""
    tokens = workload.batch * (workload.sequence - 1)

    def found(loss: Tensor, labels: Tensor) -> Tensor:
        del labels
        return loss / tokens

    def chunked(logits: Tensor, labels: Tensor) -> Tensor:
        return causal_lm_loss(logits, labels, reduction="sum", chunk_positions=2048) / tokens

    def whole(logits: Tensor, labels: Tensor) -> Tensor:
        # Compiled, the conversion to fp32 is part of the reductions: nothing of that size is written.
        rows, targets = logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten()
        return functional.cross_entropy(rows, targets, reduction="sum") / tokens

    if workload.chunked_head:
        return found
    return torch.compile(whole) if workload.compile else chunked


def roundpipe_engine(workload: Workload, model: nn.Sequential) -> Engine:
    """This library."""
    import roundpipe

    runtime = roundpipe.Runtime(workload.devices)
    config = roundpipe.RoundPipeRunConfig(num_microbatch=workload.microbatches, launch=workload.launch)
    names = ("master", "step_in_backward", "compute")
    options: dict[str, Any] = {"compile_layers": workload.compile} | {
        name: getattr(workload, name) for name in names
    }
    wrapped = roundpipe.RoundPipe(model, torch.float32, "bench", config, runtime=runtime, **options)
    optimizer = roundpipe.optim.AdamW(wrapped.optim_parameters(), lr=1e-5, state=workload.optimizer_state)
    loss_fn = loss_of(workload)

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()

    last: list[Tensor] = []

    def step(tokens: Tensor) -> float:
        last[:] = [tokens]
        during = {"optimizer": optimizer} if workload.step_in_backward else {}
        loss = wrapped.forward_backward(input_args=(tokens,), label=tokens, loss_fn=loss_fn, **during)
        if not workload.step_in_backward:
            wrapped.step(update, is_async=not workload.sync)
        return loss.item()

    def finish() -> dict[str, float]:
        if workload.profile is not None:
            with roundpipe.profile(workload.profile) as found:
                for _ in range(2):
                    step(last[0])
                wrapped.synchronize()
            print(found.summary, file=sys.stderr)
        wrapped.synchronize()
        report = wrapped.memory_report(optimizer)
        print(report, *wrapped.call_times(), sep="\n", file=sys.stderr)
        elements = sum(one.numel() for one in wrapped.optim_parameters())
        found = {"bytes_a_parameter": (report.host_bytes - report.activations_bytes) / elements}
        if report.predicted_bytes is not None:
            found["foreseen_device_gb"] = report.predicted_bytes / 1e9
        for one in wrapped.call_times():
            if one.promised_ms is not None and one.measured_ms is not None:
                found |= {"promised_ms": one.promised_ms, "measured_ms": one.measured_ms}
                found["promise_error_percent"] = 100 * one.promised_ms / one.measured_ms - 100
        return found

    return step, finish, len(runtime.lanes)


def _finish() -> dict[str, float]:
    torch.cuda.synchronize()
    return {}


def _compile(workload: Workload, model: nn.Sequential) -> None:
    for layer in model if workload.compile else ():
        layer.compile()


def _forward(workload: Workload, model: nn.Sequential, x: Tensor) -> Tensor:
    for layer in model:
        x = checkpoint(layer, x, use_reentrant=False) if workload.checkpoint else layer(x)
    return x


def resident(workload: Workload, model: nn.Sequential) -> Engine:
    """Everything on one GPU."""
    model = model.to("cuda")
    _compile(workload, model)
    weights = list(model.parameters())
    masters = [nn.Parameter(weight.detach().float()) for weight in weights]
    optimizer = torch.optim.AdamW(masters, lr=1e-5, fused=True)
    loss_fn = loss_of(workload)

    def step(tokens: Tensor) -> float:
        total = torch.zeros((), device="cuda")
        for part in tokens.to("cuda", non_blocking=True).tensor_split(workload.microbatches):
            loss = loss_fn(_forward(workload, model, part), part)
            loss.backward()
            total += loss.detach()
        with torch.no_grad():
            for weight, master in zip(weights, masters, strict=True):
                assert weight.grad is not None
                master.grad = weight.grad.float()
                weight.grad = None
            optimizer.step()
            optimizer.zero_grad()
            torch._foreach_copy_(weights, masters)
        return total.item()

    return step, _finish, 1


def fsdp2(workload: Workload, model: nn.Sequential) -> Engine:
    """PyTorch's fully sharded data parallel with everything offloaded to the host, where AdamW runs."""
    import os

    import torch.distributed as dist
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    for name, value in (
        ("RANK", "0"),
        ("WORLD_SIZE", "1"),
        ("MASTER_ADDR", "localhost"),
        ("MASTER_PORT", "29555"),
    ):
        os.environ.setdefault(name, value)
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group("cpu:gloo,cuda:nccl")
    world = dist.get_world_size()
    model = _untied(model).float()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model:
        fully_shard(layer, mp_policy=policy, offload_policy=CPUOffloadPolicy())
    fully_shard(model, mp_policy=policy, offload_policy=CPUOffloadPolicy())
    _compile(workload, model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    loss_fn = loss_of(workload)

    def step(tokens: Tensor) -> float:
        total = torch.zeros((), device="cuda")
        mine = tokens.tensor_split(world)[dist.get_rank()].cuda()
        parts = mine.tensor_split(max(workload.microbatches // world, 1))
        for number, part in enumerate(parts):
            model.set_requires_gradient_sync(number == len(parts) - 1)
            # Gradients are averaged over the ranks, the loss counts all tokens.
            loss = loss_fn(_forward(workload, model, part), part)
            (loss * world).backward()
            total += loss.detach()
        dist.all_reduce(total)
        optimizer.step()
        optimizer.zero_grad()
        return total.item()

    return step, _finish, world


def _untied(model: nn.Sequential) -> nn.Sequential:
    # Its shards belong to one module each, so a tied weight becomes two.
    head = model[-1]
    head.weight = nn.Parameter(head.weight.detach().clone())
    return model


def deepspeed_engine(workload: Workload, model: nn.Sequential) -> Engine:
    """DeepSpeed's ZeRO-3 with weights and optimizer on the host; one process for each GPU."""
    import deepspeed

    config = {
        "train_micro_batch_size_per_gpu": workload.batch // workload.microbatches,
        "gradient_accumulation_steps": workload.microbatches,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-5}},
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "cpu", "pin_memory": True},
            "offload_param": {"device": "cpu", "pin_memory": True},
        },
    }
    engine, *_ = deepspeed.initialize(model=_untied(model), config=config)
    loss_fn = loss_of(workload)

    def step(tokens: Tensor) -> float:
        total = 0.0
        for part in tokens.to(engine.device).tensor_split(workload.microbatches):
            loss = loss_fn(engine(part), part)
            # It divides by the number of microbatches itself.
            engine.backward(loss * workload.microbatches)
            engine.step()
            total += loss.item()
        return total

    return step, _finish, engine.world_size


ENGINES: Mapping[str, Callable[[Workload, nn.Sequential], Engine]] = {
    "roundpipe": roundpipe_engine,
    "resident": resident,
    "fsdp2": fsdp2,
    "deepspeed": deepspeed_engine,
}
