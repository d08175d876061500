"""Whether a decoder trains on smaller GPUs: one process, one GPU with a cap, one JSON line for each M.

    python benchmarks/capped.py --cap-gb 24 --microbatches 8 32 64 --compile --chunked-head
    python benchmarks/capped.py --devices cpu:1 --model tiny --batch 16 --sequence 16 --microbatches 2 4

The first number given is the model's first call, of which nothing is measured yet. `tokens_per_s` is from the
median call after `--warmup`; `foreseen_gb` is what the plan in use then was expected to take on the device,
`peak_gb` what torch had allocated at most in the calls that count, `retreats` the warnings about calls that ran
out of memory and were cut smaller, and `error` what a call raised.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import warnings
from typing import Any

import roundpipe
import torch
from decoder import SIZES, batches, decoder
from gpus import attend_by_cudnn, cap
from loops import Workload, loss_of
from roundpipe import RoundPipe, RoundPipeRunConfig, Runtime


def main() -> None:
    args = _arguments()
    cuda = args.devices.startswith("cuda")
    cap(args.cap_gb if cuda else None)
    attend_by_cudnn()
    size = SIZES[args.model]
    with Runtime(args.devices, strict=False) as runtime:
        options = {"compile_layers": True} if args.compile else {}
        layers = decoder(size, with_loss=args.chunked_head)
        model = RoundPipe(layers, torch.float32, "bench", runtime=runtime, **options)
        optimizer = roundpipe.optim.AdamW(model.optim_parameters(), lr=1e-5)
        for microbatches in args.microbatches:
            found = {"cap_gb": args.cap_gb, "compile": args.compile, "loss_inside": args.chunked_head}
            found |= {"microbatches": microbatches, **_train(model, optimizer, microbatches, args, cuda)}
            print(json.dumps(found), flush=True)


def _train(
    model: RoundPipe, optimizer: Any, microbatches: int, args: argparse.Namespace, cuda: bool
) -> dict[str, Any]:
    batch = batches(SIZES[args.model], args.batch, args.sequence)
    config = RoundPipeRunConfig(num_microbatch=microbatches)
    loss_fn = loss_of(_workload(args, microbatches))
    ends: list[float] = []
    losses: list[float] = []
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", roundpipe.DeviceMemoryWarning)
        try:
            for call in range(args.warmup + args.calls):
                if call == args.warmup and cuda:
                    torch.cuda.reset_peak_memory_stats(args.devices)
                tokens = batch()
                loss = model.forward_backward(
                    input_args=(tokens,), label=tokens, loss_fn=loss_fn, run_config=config
                )
                model.step(lambda: (optimizer.step(), optimizer.zero_grad()))
                losses.append(round(loss.item(), 4))
                ends.append(time.perf_counter())
        except Exception as error:
            model.reset()
            return {"error": f"{type(error).__name__}: {error}"[:300], "losses": losses}
    report = model.memory_report(optimizer)
    seconds = [after - before for before, after in zip(ends[args.warmup - 1 :], ends[args.warmup :], strict=False)]
    call_time = next(one for one in model.call_times() if f"of {microbatches} micro" in one.what)
    return {
        "tokens_per_s": round(args.batch * args.sequence / statistics.median(seconds)),
        "foreseen_gb": None if report.predicted_bytes is None else round(report.predicted_bytes / 1e9, 2),
        "peak_gb": round(torch.cuda.max_memory_allocated(args.devices) / 1e9, 2) if cuda else None,
        "retreats": sum(issubclass(one.category, roundpipe.DeviceMemoryWarning) for one in told),
        "seconds": [round(s, 2) for s in seconds],
        "stages": repr(call_time.plan),
        "losses": losses,
    }


def _workload(args: argparse.Namespace, microbatches: int) -> Workload:
    return Workload(
        model=args.model,
        batch=args.batch,
        sequence=args.sequence,
        microbatches=microbatches,
        compile=args.compile,
        chunked_head=args.chunked_head,
        devices=args.devices,
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", default="cuda:0", help="one device, as ROUNDPIPE_DEVICES takes it")
    parser.add_argument("--cap-gb", type=float, default=None, help="device memory, in 10^9 bytes")
    parser.add_argument("--model", choices=sorted(SIZES), default="qwen3-1.7b")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--sequence", type=int, default=2048)
    parser.add_argument("--microbatches", type=int, nargs="+", default=[8, 32, 64])
    parser.add_argument("--compile", action="store_true", help="compile each block")
    parser.add_argument("--chunked-head", action="store_true", help="the last layer returns the loss")
    parser.add_argument(
        "--warmup", type=int, default=3, help="calls of each kind before those that count, at least 1"
    )
    parser.add_argument("--calls", type=int, default=2, help="calls that count")
    return parser.parse_args()


if __name__ == "__main__":
    main()
