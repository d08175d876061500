"""How fast one engine trains one decoder on this machine: one process, one JSON line.

    python benchmarks/train.py roundpipe --model qwen3-1.7b --batch 64 --microbatches 8 --compile

Engines, all on the same `nn.Sequential` (see `decoder.py`), bf16 weights, AdamW on fp32 masters, no clipping:

    roundpipe   this library
    resident    everything on one GPU, gradients of M microbatches added up; `--checkpoint` recomputes each block
    fsdp2       PyTorch's fully_shard with CPU offload; under torchrun for several GPUs
    deepspeed   ZeRO-3 with CPU offload, where it is installed; under its launcher

The last two keep a second embedding for the head, since they cannot share one.

The line has tokens/s (from the median step after warm-up), model TFLOP/s a GPU (6 FLOPs a parameter and token, and
attention; recomputation does not count), the peaks of device and host memory, and the losses of all steps, by
which runs are compared. `roundpipe` adds what its plan promised that a step takes and what steps took; for many
plans `promises.py` does that. `--cap-gb` limits what torch and we take on each GPU, as a smaller card would.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import resource
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from itertools import pairwise

import torch
from decoder import SIZES, batches, decoder
from gpus import attend_by_cudnn, cap
from loops import ENGINES, Workload


def main() -> None:
    args = _arguments()
    cap(args.cap_gb)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    attend_by_cudnn()
    if args.compile:
        torch._dynamo.config.recompile_limit = 64
        torch._dynamo.config.fail_on_recompile_limit_hit = True
    workload = Workload(**{name: getattr(args, name) for name in Workload.__dataclass_fields__})
    size = SIZES[workload.model]
    model = decoder(size, with_loss=workload.chunked_head)
    for index in range(torch.cuda.device_count()):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(index)
    step, finish, devices = ENGINES[args.engine](workload, model)
    losses, first, seconds = _measure(step, batches(size, workload.batch, workload.sequence), args)
    found = finish()
    tokens = workload.batch * workload.sequence
    rate = tokens / statistics.median(seconds)
    print(
        json.dumps(
            {
                "engine": args.engine,
                **asdict(workload),
                "cap_gb": args.cap_gb,
                "gpus": devices,
                "tokens_per_s": round(rate),
                "warmup_seconds": [round(s, 2) for s in first],
                "seconds": [round(s, 4) for s in seconds],
                "model_tflops_per_gpu": round(rate * size.flops_per_token(workload.sequence) / devices / 1e12, 1),
                "peak_device_gb": _device_peaks(),
                **{name: round(value, 2) for name, value in found.items()},
                "peak_host_gb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9, 2),
                "losses": [round(loss, 4) for loss in losses],
                "torch": torch.__version__,
            }
        )
    )
    sys.stdout.flush()
    # Libraries of the engines compared may leave threads behind.
    os._exit(0)


def _measure(
    step: Callable[[torch.Tensor], float], batch: Callable[[], torch.Tensor], args: argparse.Namespace
) -> tuple[list[float], list[float], list[float]]:
    losses: list[float] = []
    ends = [time.perf_counter()]
    for _ in range(args.warmup + args.steps):
        losses.append(step(batch()))
        ends.append(time.perf_counter())
    taken = [after - before for before, after in pairwise(ends)]
    return losses, taken[: args.warmup], taken[args.warmup :]


def _device_peaks() -> list[float]:
    return [round(torch.cuda.max_memory_allocated(index) / 1e9, 2) for index in range(torch.cuda.device_count())]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", choices=sorted(ENGINES))
    parser.add_argument("--model", choices=sorted(SIZES), default="qwen3-1.7b")
    parser.add_argument("--batch", type=int, default=64, help="sequences a step, over all GPUs")
    parser.add_argument("--sequence", type=int, default=2048, help="tokens a sequence")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--devices", default=None, help="as ROUNDPIPE_DEVICES takes them; roundpipe only")
    parser.add_argument("--checkpoint", action="store_true", help="recompute each block; resident only")
    parser.add_argument("--compile", action="store_true", help="compile each block")
    parser.add_argument("--chunked-head", action="store_true", help="logits and loss of some tokens at a time")
    parser.add_argument("--sync", action="store_true", help="synchronous steps; roundpipe only")
    parser.add_argument("--master", default="whole", help="or split, or disk:DIR; roundpipe only")
    parser.add_argument("--optimizer-state", default="fp32", help="or bf16, 8bit, 8bit disk:DIR; roundpipe only")
    parser.add_argument("--step-in-backward", action="store_true", help="no step after it; roundpipe only")
    parser.add_argument("--launch", choices=["auto", "eager", "graphs"], default="auto", help="roundpipe only")
    parser.add_argument("--compute", choices=["bf16", "fp8"], default="bf16", help="roundpipe only")
    parser.add_argument("--profile", default=None, metavar="FILE", help="trace of two more steps; roundpipe only")
    parser.add_argument("--cap-gb", type=float, default=None, help="device memory, in 10^9 bytes")
    parser.add_argument("--steps", type=int, default=10, help="steps that count")
    parser.add_argument("--warmup", type=int, default=5, help="steps before, at least 1")
    return parser.parse_args()


if __name__ == "__main__":
    main()
