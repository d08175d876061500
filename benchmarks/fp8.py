"""What FP8 is worth: the products of linear layers, a compiled decoder layer, and the loss of training with it.

    python benchmarks/fp8.py products --models qwen3-1.7b qwen3-4b qwen3-8b
    python benchmarks/fp8.py loss --seeds 3 --steps 1000
    python benchmarks/fp8.py products --models tiny --tokens 256 --rounds 2 --device cpu
    python benchmarks/fp8.py loss --workload decoder-1m --seeds 1 --steps 20 --device cpu

`products` times forward, gradients of inputs and of weights of the linear layers of one decoder layer, all
tokens in one microbatch: in bf16, by the scaled product alone, and with casts compiled apart; then a compiled
decoder layer in bf16 and in FP8, where the compiler fuses casts with what makes the activations. From a layer's
time that of the rest, which is the bf16 layer's without its products, is taken, so each line tells how many
times as fast as bf16 the linear layers are: what is lost between one line and the next is what that line adds.

`loss` trains a workload of `late/workloads.py` through RoundPipe with each of `--ways`, with equal seeds, and
tells the loss on held-out text, computed in bf16, and the last losses, beside those of bf16.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable, Iterator
from itertools import product as pairs
from typing import Any

import torch
from decoder import SIZES, Block, Size
from rp_packing import Fp8, Fp8Linear, become
from rp_packing.products.casts import cast_gradient, cast_input
from rp_packing.products.scaled import product, transposed
from rp_packing.rows import Rows, cast_columns, cast_rows
from torch import Tensor, nn

Way = Callable[[], object]
WAYS: dict[str, Fp8 | None] = {
    "bf16": None,
    "fp8": Fp8(),
    "fp8, gradients in e5m2": Fp8(inputs="e5m2", weights="e5m2"),
    "fp8, weights' gradients in bf16": Fp8(weights="bf16"),
    "fp8, first and last layer in bf16": Fp8(skip_ends=1),
    "fp8, fast sums": Fp8(fast_sums=True),
    "fp8, weights uploaded in bf16": Fp8(uploads="bf16"),
}


# Products


def products(options: argparse.Namespace) -> None:
    """A table for each model."""
    device = torch.device(options.device)
    for model in options.models:
        times = {name: timed(way, options.rounds, device) for name, way in _products(SIZES[model], options)}
        layers = {name: timed(way, options.rounds, device) for name, way in _layers(SIZES[model], options)}
        print(table(model, times, layers), flush=True)
        print(json.dumps({"model": model, "tokens": options.tokens, "ms": times, "layer_ms": layers}), flush=True)


def timed(way: Way, rounds: int, device: torch.device) -> float:
    """Median milliseconds of one call."""
    found: list[float] = []
    for number in range(3 + rounds):
        taken = _on_cuda(way) if device.type == "cuda" else _on_host(way)
        if number >= 3:
            found.append(taken)
    return statistics.median(found)


def _on_cuda(way: Way) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    # A pause on the device, so that it finds all kernels queued.
    torch.cuda._sleep(2_000_000)
    begin.record()
    way()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def _on_host(way: Way) -> float:
    began = time.perf_counter()
    way()
    return 1000 * (time.perf_counter() - began)


def table(model: str, times: dict[str, float], layers: dict[str, float]) -> str:
    """How many times as fast as bf16 the linear layers are, by what is counted.

    >>> print(table("m", {"bf16": 4.0, "scaled alone": 2.0}, {"bf16": 5.0, "fp8": 3.5}))
    m: linear layers, times bf16
    | scaled alone | 2.00 ms | 2.00 |
    | compiled layer, fp8 | 2.50 ms | 1.60 | the layer 5.00 -> 3.50 ms, 1.43 |
    """
    lines = [f"{model}: linear layers, times bf16"]
    for name, taken in times.items():
        if name != "bf16":
            lines.append(f"| {name} | {taken:.2f} ms | {times['bf16'] / taken:.2f} |")
    rest = layers["bf16"] - times["bf16"]
    for name, taken in layers.items():
        if name != "bf16":
            linear, whole = taken - rest, layers["bf16"]
            lines.append(
                f"| compiled layer, {name} | {linear:.2f} ms | {times['bf16'] / linear:.2f} "
                f"| the layer {whole:.2f} -> {taken:.2f} ms, {whole / taken:.2f} |"
            )
    return "\n".join(lines)


def _linears(size: Size) -> list[tuple[int, int, int]]:
    """Outputs and inputs of a layer's linear layers, and which input they have: some share one."""
    heads, kv_heads = size.heads * size.head, size.kv_heads * size.head
    of_hidden = [(heads, size.hidden, 0), (kv_heads, size.hidden, 0), (kv_heads, size.hidden, 0)]
    mlp = [(size.inner, size.hidden, 2), (size.inner, size.hidden, 2), (size.hidden, size.inner, 3)]
    return [*of_hidden, (size.hidden, heads, 1), *mlp]


def _products(size: Size, options: argparse.Namespace) -> Iterator[tuple[str, Way]]:
    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, device=options.device, dtype=torch.bfloat16)

    inputs = {which: random(options.tokens, columns) for _, columns, which in _linears(size)}
    sides = [
        (inputs[which], random(out, columns), random(options.tokens, out))
        for out, columns, which in _linears(size)
    ]
    yield "bf16", lambda: [(x @ w.t(), g @ w, g.t() @ x) for x, w, g in sides]
    cast = [_codes(x, w, g) for x, w, g in sides]
    for name, fast in (("scaled alone", False), ("scaled alone, fast sums", True)):
        yield (
            name,
            lambda fast=fast: [
                product(*factors, torch.bfloat16, fast_sums=fast) for three in cast for factors in three
            ],
        )
    yield (
        "scaled alone, weights' gradients in bf16",
        lambda: [
            (product(*forward, torch.bfloat16), product(*back, torch.bfloat16), g.t() @ x)
            for (forward, back, _), (x, _, g) in zip(cast, sides, strict=True)
        ],
    )
    ones = [
        [(Rows(left.codes, left.scales[:1, :1]), Rows(right.codes, right.scales[:1, :1])) for left, right in three]
        for three in cast
    ]
    if options.device != "cpu":
        yield (
            "scaled alone, one scale a tensor",
            lambda: [product(*factors, torch.bfloat16) for three in ones for factors in three],
        )
    of_input = torch.compile(_both, dynamic=False)
    of_gradient = torch.compile(_gradient_codes, dynamic=False)
    of_weight = torch.compile(_both, dynamic=False)
    scales = [(three[0][0].scales, three[0][1].scales) for three in cast]

    def casts() -> None:
        for x in inputs.values():
            of_input(x)
        for (_, _, g), (of_x, of_w) in zip(sides, scales, strict=True):
            of_gradient(g, of_x, of_w)

    def by_kernels() -> None:
        for x in inputs.values():
            cast_input(x, turned=True)
        for (_, _, g), (of_x, of_w) in zip(sides, scales, strict=True):
            cast_gradient(g, of_w, of_x, (torch.float8_e4m3fn, torch.float8_e4m3fn))

    def weights() -> None:
        for _, w, _ in sides:
            of_weight(w)

    def all_products() -> None:
        for three in cast:
            for factors in three:
                product(*factors, torch.bfloat16)

    yield "and casts of activations and gradients, compiled apart", lambda: (casts(), all_products())
    yield "and casts of activations and gradients, by kernels", lambda: (by_kernels(), all_products())
    yield "casts of activations and gradients alone, by kernels", by_kernels
    yield "and casts of weights, once a microbatch", lambda: (casts(), weights(), all_products())


def _codes(x: Tensor, w: Tensor, g: Tensor) -> list[tuple[Rows, Rows]]:
    """The factors of the three products."""
    of_x, of_w = cast_rows(x), cast_rows(w)
    for_inputs, for_weights = _gradient_codes(g, of_x.scales, of_w.scales)
    return [(of_x, of_w), (for_inputs, transposed(of_w.codes)), (for_weights, transposed(of_x.codes))]


def _both(numbers: Tensor) -> tuple[Rows, Rows]:
    rows = cast_rows(numbers)
    return rows, transposed(rows.codes)


def _gradient_codes(g: Tensor, of_x: Tensor, of_w: Tensor) -> tuple[Rows, Rows]:
    return cast_rows(g * of_w.t().to(g.dtype)), cast_columns(g * of_x.to(g.dtype))


def _layers(size: Size, options: argparse.Namespace) -> Iterator[tuple[str, Way]]:
    sequence = min(2048, options.tokens)
    shape = (options.tokens // sequence, sequence)
    for name in options.ways:
        recipe = WAYS[name]
        if recipe is None or not recipe.skip_ends:
            yield name, _layer(size, shape, recipe, options.device, cast_before=True)
    yield "fp8, weights cast in the layer", _layer(size, shape, Fp8(), options.device, cast_before=False)


def _layer(size: Size, shape: tuple[int, int], recipe: Fp8 | None, device: str, *, cast_before: bool) -> Way:
    torch.manual_seed(0)
    block = Block(size).to(device, torch.bfloat16)
    for linear in [one for one in block.modules() if isinstance(one, nn.Linear)] if recipe else ():
        become(linear)
        assert isinstance(linear, Fp8Linear)
        linear.recipe = recipe
        if cast_before:
            linear.cast(backward=True)
    torch._dynamo.reset()
    gc.collect()
    block.compile()
    x = torch.randn(*shape, size.hidden, device=device, dtype=torch.bfloat16, requires_grad=True)
    tables = [torch.randn(1, shape[1], size.head, device=device, dtype=torch.bfloat16) for _ in range(2)]
    grad = torch.randn_like(x)

    def way() -> None:
        out = block((x, *tables))[0]
        out.backward(grad)
        x.grad = None
        for parameter in block.parameters():
            parameter.grad = None

    return way


# Loss


def loss(options: argparse.Namespace) -> None:
    """All ways with the first seed, then all with the next."""
    # Products need nothing but torch and rp_packing.
    import roundpipe
    from late.loops import engine_run
    from late.variants import VARIANTS, Run
    from late.workloads import workload

    chosen, lines = workload(options.workload, torch.device(options.device)), list[dict[str, Any]]()
    is_on_gpu = chosen.device.type == "cuda"
    steps = options.steps or chosen.steps
    with roundpipe.Runtime(str(chosen.device)) as runtime:
        seeds = range(options.first_seed, options.first_seed + options.seeds)
        for seed, way in pairs(seeds, options.ways):
            run = Run(VARIANTS["synchronous"], seed, steps, chosen.rate, 0.95)
            began = time.perf_counter()
            found, _ = engine_run(
                chosen,
                run,
                runtime,
                dtype=torch.bfloat16,
                evaluates=True,
                compute=WAYS[way] or "bf16",
                compile_layers=is_on_gpu,
            )
            line = {"workload": chosen.name, "way": way, "seed": seed, "steps": steps}
            measured = {
                "held_out": found.held_out[-1][1],
                "last_losses": statistics.mean(found.losses[-max(1, steps // 20) :]),
                "median_step_seconds": statistics.median(found.step_seconds),
                "seconds": time.perf_counter() - began,
            }
            lines.append(line | measured)
            print(json.dumps(lines[-1]), flush=True)
    print(beside_bf16(lines))


def beside_bf16(lines: list[dict[str, Any]]) -> str:
    """Each way's mean losses over the seeds beside those of bf16, in percent; the range over the seeds.

    >>> one = {"way": "bf16", "seed": 0, "held_out": 2.0, "last_losses": 4.0}
    >>> print(beside_bf16([one, one | {"way": "fp8", "held_out": 2.01}]))
    fp8: held_out +0.500 % (+0.500 to +0.500), last_losses +0.000 % (+0.000 to +0.000)
    """
    of_bf16 = {line["seed"]: line for line in lines if line["way"] == "bf16"}
    told: list[str] = []
    for way in dict.fromkeys(line["way"] for line in lines if line["way"] != "bf16"):
        mine = [line for line in lines if line["way"] == way and line["seed"] in of_bf16]
        told += [f"{way}: " + ", ".join(_difference(name, mine, of_bf16) for name in ("held_out", "last_losses"))]
    return "\n".join(told)


def _difference(name: str, lines: list[dict[str, Any]], of_bf16: dict[int, dict[str, Any]]) -> str:
    found = [100 * (line[name] / of_bf16[line["seed"]][name] - 1) for line in lines]
    mean = statistics.mean(found) if found else float("nan")
    return f"{name} {mean:+.3f} % ({min(found, default=mean):+.3f} to {max(found, default=mean):+.3f})"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    one = commands.add_parser("products")
    one.set_defaults(run=products)
    one.add_argument("--models", nargs="+", choices=SIZES, default=["qwen3-1.7b", "qwen3-4b", "qwen3-8b"])
    one.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), help="of the compiled layer")
    one.add_argument("--tokens", type=int, default=16384)
    one.add_argument("--rounds", type=int, default=20)
    other = commands.add_parser("loss")
    other.set_defaults(run=loss)
    other.add_argument("--workload", default="decoder-100m", help="of late/workloads.py: such as finetune, lora")
    other.add_argument("--ways", nargs="+", choices=WAYS, default=["bf16", "fp8"])
    other.add_argument("--seeds", type=int, default=3)
    other.add_argument("--first-seed", type=int, default=0)
    other.add_argument("--steps", type=int, help="of a run (the workload's)")
    for command in (one, other):
        command.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args()


if __name__ == "__main__":
    chosen_options = _options()
    chosen_options.run(chosen_options)
