"""How near plans' promises come to what calls take: a table of errors, for one model on one or more devices.

    python benchmarks/promises.py --devices cuda:0 --devices cuda:0,1 --compile
    python benchmarks/promises.py --devices cpu:1 --devices cpu:2 --model tiny --batch 16 --sequence 16

For each string of devices and each number of microbatches: the plan that the engine finds, round robin (nothing is
divided) and, on several devices, the whole model on each with the microbatches divided. `promised` is simulated
with what the engine has measured of layers, launching, links and host; `measured` is the median of eight calls
that follow each other (`RoundPipe.call_times`). On CPU devices only layers and links are planned with, while
devices, optimizer and launching threads share the cores: there the table shows only that the benchmark works.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Iterator, Sequence

import roundpipe
import rp_sched
import torch
from decoder import SIZES, batches, decoder
from gpus import attend_by_cudnn
from loops import Workload, loss_of
from roundpipe import CallTime, RoundPipe, RoundPipeRunConfig, Runtime
from rp_sched import Plan
from rp_sched.problem import spans

COLUMNS = ("devices", "M", "plan", "promised", "measured", "error", "bound by", "stages")


def main() -> None:
    """Print the table."""
    args = _arguments()
    logging.basicConfig(level=logging.INFO if args.verbose else logging.WARNING, format="%(message)s")
    attend_by_cudnn()
    print("| " + " | ".join(COLUMNS) + " |\n|" + "---|" * len(COLUMNS), flush=True)
    for devices in args.devices:
        for row in rows(args, devices):
            print("| " + " | ".join(row) + " |", flush=True)


def rows(args: argparse.Namespace, devices: str) -> Iterator[Sequence[str]]:
    """One row for each number of microbatches and plan, on these devices."""
    size = SIZES[args.model]
    with Runtime(devices, strict=False) as runtime:
        options = {"compile_layers": True} if args.compile else {}
        model = RoundPipe(
            decoder(size, with_loss=args.chunked_head), torch.float32, "bench", runtime=runtime, **options
        )
        optimizer = roundpipe.optim.AdamW(model.optim_parameters(), lr=1e-5)
        batch, count = batches(size, args.batch, args.sequence), len(runtime.lanes)
        loss_fn = loss_of(_workload(args))

        def train(microbatches: int, plan: Plan | None, calls: int) -> CallTime:
            config = RoundPipeRunConfig(num_microbatch=microbatches, execute_plan=plan)
            for _ in range(calls):
                tokens = batch()
                model.forward_backward(input_args=(tokens,), label=tokens, loss_fn=loss_fn, run_config=config)
                model.step(lambda: (optimizer.step(), optimizer.zero_grad()))
            model.synchronize()
            return next(one for one in model.call_times() if f"of {microbatches} micro" in one.what)

        for microbatches in args.microbatches:
            # The first calls are measured; then the search for a plan goes on while calls run.
            yield _row(devices, microbatches, "found", train(microbatches, None, args.warmup + args.calls))
            plans = {} if args.found else _plans(model, microbatches, count)
            for name, plan in plans.items():
                yield _row(devices, microbatches, name, train(microbatches, plan, args.calls))


def _plans(model: RoundPipe, microbatches: int, devices: int) -> dict[str, Plan]:
    costs = model.layer_costs()
    how = {"devices": devices, "microbatches": microbatches, "mode": "fused"}
    found = {"round robin": rp_sched.plan(costs, strategy="roundrobin", **how)}
    if devices > 1 and microbatches >= devices:
        groups = tuple(spans.divide(microbatches, devices))
        found["divided"] = Plan(fused=range(len(costs)), groups=groups, in_turn=False)
    return found


def _row(devices: str, microbatches: int, name: str, time: CallTime) -> Sequence[str]:
    promised, measured = ("-" if ms is None else f"{ms:.1f} ms" for ms in (time.promised_ms, time.measured_ms))
    error = "-" if time.error is None else f"{time.error:+.1%}"
    return devices, str(microbatches), name, promised, measured, error, time.bound_by or "-", repr(time.plan)


def _workload(args: argparse.Namespace) -> Workload:
    return Workload(
        model=args.model,
        batch=args.batch,
        sequence=args.sequence,
        microbatches=0,
        compile=args.compile,
        chunked_head=args.chunked_head,
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", action="append", required=True, help="as ROUNDPIPE_DEVICES takes them")
    parser.add_argument("--model", choices=sorted(SIZES), default="qwen3-1.7b")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--sequence", type=int, default=2048)
    parser.add_argument("--microbatches", type=int, nargs="+", default=[4, 8, 16])
    parser.add_argument("--compile", action="store_true", help="compile each block")
    parser.add_argument("--found", action="store_true", help="only the plan that the engine finds")
    parser.add_argument("--chunked-head", action="store_true", help="the last layer computes the loss, in chunks")
    parser.add_argument("--warmup", type=int, default=15, help="calls of each kind before those that count")
    parser.add_argument("--calls", type=int, default=12, help="calls under each plan, at least 9")
    parser.add_argument("--verbose", action="store_true", help="log what the engine plans and measures")
    return parser.parse_args()


if __name__ == "__main__":
    main()
