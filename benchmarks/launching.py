"""How long launching holds the GIL: milliseconds a layer and microbatch, and what the rest of a call holds it.

    python benchmarks/launching.py --model qwen3-1.7b --sequence 256 --microbatches 4 16 --devices cuda:0

A model with few tokens trains on one device, so that launching is what takes the time, and a thread in C looks
if the GIL is held (`gil.py`). Calls of few and of many microbatches are compared: the difference is launching,
the rest of a call that of weights and gradients, which travel once. `took_ms` is time that passes, `held_ms` that
for which some thread held the GIL.

Engines: layers of `eager` are not compiled; those of `python` and `cpp` are, and launch from Python or from C++.
Layers of `graphs` are not compiled, and CUDA graphs launch all but the first and the last microbatch of a call.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
from collections.abc import Callable
from functools import partial

import roundpipe
import torch
from decoder import SIZES, batches, decoder
from gil import held
from rp_sched import Plan
from torch import Tensor

COMPILE: dict[str, object] = {"eager": False, "python": {}, "cpp": True, "graphs": False}


def training(engine: str, options: argparse.Namespace, runtime: roundpipe.Runtime) -> Callable[[int], None]:
    """A function that makes calls of so many microbatches, all layers in one fused stage."""
    size = dataclasses.replace(SIZES[options.model], layers=options.layers)
    model = decoder(size)
    plan = Plan(fused=range(len(model)))
    wrapped = roundpipe.RoundPipe(
        model, torch.float32, engine, runtime=runtime, compile_layers=COMPILE[engine], double_buffer=False
    )
    draw = batches(size, max(options.microbatches), options.sequence)

    def mean(logits: Tensor, labels: Tensor) -> Tensor:
        del labels
        return logits[:, -1].float().mean()

    def calls(microbatches: int) -> None:
        tokens = draw()[:microbatches]
        launch = "graphs" if engine == "graphs" else "eager"
        config = roundpipe.RoundPipeRunConfig(num_microbatch=microbatches, execute_plan=plan, launch=launch)
        wrapped.forward_backward((tokens,), label=tokens, loss_fn=mean, run_config=config)
        wrapped.synchronize()

    return calls


def measure(engine: str, options: argparse.Namespace, runtime: roundpipe.Runtime) -> dict[str, float | str]:
    """Milliseconds of one engine."""
    calls = training(engine, options, runtime)
    counts = options.microbatches
    for _ in range(options.warmup):
        for count in counts:
            calls(count)
    rounds = {count: [held(partial(calls, count)) for _ in range(options.calls)] for count in counts}
    found: dict[str, float | str] = {"engine": engine}
    for number, name in enumerate(("took_ms", "held_ms")):
        few, many = (1e3 * statistics.median(one[number] for one in rounds[count]) for count in counts)
        each = (many - few) / (counts[1] - counts[0])
        found[f"{name}_a_layer_and_microbatch"] = round(each / options.layers, 3)
        found[f"{name}_a_call_beside"] = round(few - each * counts[0], 2)
    size = dataclasses.replace(SIZES[options.model], layers=options.layers)
    found["gb_carried_a_call"] = round(2 * 2 * size.matmul_parameters() / 1e9, 2)
    return found


def main() -> None:
    options = _arguments()
    with roundpipe.Runtime(options.devices, strict=False) as runtime:
        for engine in options.engines:
            print(json.dumps(measure(engine, options, runtime)), flush=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=sorted(SIZES), default="tiny")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--sequence", type=int, default=16, help="tokens a microbatch")
    parser.add_argument("--microbatches", type=int, nargs=2, default=[4, 12])
    parser.add_argument("--engines", choices=list(COMPILE), nargs="+", default=list(COMPILE))
    parser.add_argument("--devices", default="cpu:1", help="as ROUNDPIPE_DEVICES takes them")
    parser.add_argument("--calls", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=16, help="calls of each kind before: the first are measured")
    return parser.parse_args()


if __name__ == "__main__":
    main()
