"""What the threads of calls on several devices cost each other under the GIL: one line of JSON for each setting.

    python benchmarks/contention.py --model qwen3-1.7b --compile --batch 64 --microbatches 16 --devices cuda:0,1

A model trains with asynchronous steps, call after call, as it is; without steps; with synchronous ones; and
with other switch intervals of the GIL than the runtime sets. `ms`: a call, the mean of `--calls` in a row, the
median of `--rounds`, which take turns. `held`: the part of the time for which some thread held the GIL.
`switches`: how often it changed hands in a call. Before that, for each thread, in a call as it is: ms of a
processor in the program and in the kernel, and how often it slept and was stopped. `--trace` writes a profile
of three calls.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import roundpipe
import torch
from decoder import SIZES, batches, decoder
from gil import held, switches
from gpus import attend_by_cudnn
from loops import Workload, loss_of

_TICK_MS = 10


@dataclass(frozen=True)
class Setting:
    """How calls are made. `interval_s`: the GIL's switch interval; None: the runtime's own."""

    name: str
    steps: str = "asynchronous"
    interval_s: float | None = None


SETTINGS = (
    Setting("as it is"),
    Setting("interval 5 ms", interval_s=5e-3),
    Setting("interval 1 ms", interval_s=1e-3),
    Setting("interval 0.05 ms", interval_s=5e-5),
    Setting("no steps", steps="none"),
    Setting("synchronous steps", steps="synchronous"),
)


def training(options: argparse.Namespace, runtime: roundpipe.Runtime) -> Callable[[int, str], None]:
    """A function that makes so many calls with steps of a kind, and waits for their end."""
    size = SIZES[options.model]
    compiling = {"compile_layers": True} if options.compile else {}
    model = roundpipe.RoundPipe(decoder(size), torch.float32, "bench", runtime=runtime, **compiling)
    optimizer = roundpipe.optim.AdamW(model.optim_parameters(), lr=1e-5)
    config = roundpipe.RoundPipeRunConfig(num_microbatch=options.microbatches, launch="eager")
    draw = batches(size, options.batch, options.sequence)
    loss_fn = loss_of(
        Workload(
            model=options.model,
            batch=options.batch,
            sequence=options.sequence,
            microbatches=options.microbatches,
            compile=options.compile,
        )
    )

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()

    def calls(count: int, steps: str) -> None:
        for _ in range(count):
            tokens = draw()
            model.forward_backward((tokens,), label=tokens, loss_fn=loss_fn, run_config=config)
            model.step(optimizer.zero_grad if steps == "none" else update, is_async=steps == "asynchronous")
        model.synchronize()

    return calls


def measure(calls: Callable[[int, str], None], setting: Setting, count: int) -> tuple[float, float, float]:
    """Ms of a call, the part of the time for which the GIL was held, and how often it changed hands in a call."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(before if setting.interval_s is None else setting.interval_s)
    try:
        calls(1, setting.steps)
        begun = switches()
        took, with_gil = held(partial(calls, count, setting.steps))
        return 1e3 * took / count, with_gil / took, (switches() - begun) / count
    finally:
        sys.setswitchinterval(before + 5e-7)


def usage() -> dict[int, tuple[str, list[int]]]:
    """By thread, its name, and: ticks in the program and in the kernel, how often it slept and was stopped."""
    names = {thread.native_id: thread.name for thread in threading.enumerate()}
    found: dict[int, tuple[str, list[int]]] = {}
    for folder in Path("/proc/self/task").iterdir():
        number, (name, _, rest) = int(folder.name), (folder / "stat").read_text().partition("(")[2].rpartition(")")
        fields = rest.split()
        status = (folder / "status").read_text().splitlines()
        counts = [int(line.split()[1]) for line in status if "ctxt_switches" in line]
        found[number] = names.get(number, name), [int(fields[11]), int(fields[12]), *counts]
    return found


def by_thread(calls: Callable[[int, str], None], count: int) -> list[dict[str, object]]:
    """What each thread does in a call, those first that use a processor for longest."""
    before = usage()
    calls(count, "asynchronous")
    rows: list[tuple[str, list[float]]] = []
    for number, (name, after) in usage().items():
        begun = before.get(number, (name, [0] * 4))[1]
        rows.append((name, [(one - other) / count for one, other in zip(after, begun, strict=True)]))
    return [
        {
            "thread": name,
            "program_ms": round(_TICK_MS * program, 1),
            "kernel_ms": round(_TICK_MS * kernel, 1),
            "sleeps": round(sleeps),
            "stops": round(stops),
        }
        for name, (program, kernel, sleeps, stops) in sorted(rows, key=lambda row: -sum(row[1][:2]))
        if program + kernel + sleeps > 1
    ]


def main() -> None:
    options = _arguments()
    attend_by_cudnn()
    with roundpipe.Runtime(options.devices, strict=False) as runtime:
        calls = training(options, runtime)
        calls(options.warmup, "asynchronous")
        for row in by_thread(calls, options.calls):
            print(json.dumps(row), flush=True)
        found: dict[Setting, list[tuple[float, float, float]]] = {setting: [] for setting in SETTINGS}
        for _ in range(options.rounds):
            for setting in SETTINGS:
                found[setting].append(measure(calls, setting, options.calls))
                ms, share, changes = map(statistics.median, zip(*found[setting], strict=True))
                row = {"setting": setting.name, "ms": round(ms, 1), "held": round(share, 3)}
                print(json.dumps({**row, "switches": round(changes)}), flush=True)
        if options.trace is not None:
            with roundpipe.profile(options.trace) as taken:
                calls(3, "asynchronous")
            print(taken.summary, file=sys.stderr)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=sorted(SIZES), default="tiny")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--sequence", type=int, default=2048)
    parser.add_argument("--microbatches", type=int, default=16)
    parser.add_argument("--devices", default="cpu:2", help="as ROUNDPIPE_DEVICES takes them")
    parser.add_argument("--compile", action="store_true", help="compile each block")
    parser.add_argument("--warmup", type=int, default=12, help="calls before those that count")
    parser.add_argument("--calls", type=int, default=5, help="calls in a row of one setting")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--trace", default=None, metavar="FILE")
    return parser.parse_args()


if __name__ == "__main__":
    main()
