"""How fast packed weights are expanded on a device, beside a plain copy there: one JSON line a format.

    python benchmarks/expanding.py
    python benchmarks/expanding.py --device cuda:0 --rows 25600 --columns 5120 --dtype float16 nf4 fp8
    python benchmarks/expanding.py --device cpu --rows 512 --columns 512

The weight has random codes and scales. All ways take turns in one process; milliseconds are medians of `--rounds`.

    torch         torch's operations, piece by piece
    kernel        the Triton kernel; null where it does not run, `refusal` says why
    bitsandbytes  its dequantize_4bit of the same bytes; where it is installed, for nf4
    copy          a tensor of the expanded weight's size to another one

`gb_s`: bytes of codes, scales and expanded weight a second, or those that the copy reads and writes. `of_copy`:
the kernel's as a part of the copy's. `torch_by_kernel`: how many times as long torch takes. `temporary_mb`: memory
that it allocates, on CUDA devices; bitsandbytes' has the weight among it. GB is 10^9 bytes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from rp_packing.format import Format
from rp_packing.formats.by_name import FORMATS, format_of
from rp_packing.kernel.choice import expand_into, refusal

Tensor = torch.Tensor
Way = Callable[[], object]


def measure(form: Format, args: argparse.Namespace) -> dict[str, Any]:
    device, dtype = torch.device(args.device), getattr(torch, args.dtype)
    codes, scales = random_weight(form, (args.rows, args.columns), device)
    out, source = (torch.zeros(args.rows, args.columns, dtype=dtype, device=device) for _ in range(2))
    refused = "it is for CUDA devices" if device.type == "cpu" else refusal(device)
    ways: dict[str, Way] = {"torch": lambda: form.expand(codes, scales, out)}
    if refused is None:
        ways["kernel"] = lambda: expand_into(form, codes, scales, out)
    if form.name == "nf4" and find_spec("bitsandbytes") is not None:
        ways["bitsandbytes"] = by_bitsandbytes(codes, scales, out)
    results = {way: result(run, out) for way, run in ways.items()}
    temporary = {way: temporary_bytes(run, device) for way, run in ways.items()}
    ways["copy"] = lambda: source.copy_(out)
    taken: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(args.rounds):
        for way, run in ways.items():
            taken[way].append(seconds(run, device))
    median = {way: statistics.median(some) for way, some in taken.items()}
    moved = dict.fromkeys(ways, codes.nbytes + scales.nbytes + out.nbytes) | {"copy": 2 * out.nbytes}
    rate = {way: moved[way] / 1e9 / median[way] for way in ways}
    return {
        "same_numbers": {way: torch.equal(found, results["torch"]) for way, found in results.items()},
        "ms": {way: round(one * 1e3, 3) for way, one in median.items()},
        "gb_s": {way: round(one, 1) for way, one in rate.items()},
        "of_copy": round(rate["kernel"] / rate["copy"], 3) if "kernel" in rate else None,
        "torch_by_kernel": round(median["torch"] / median["kernel"], 1) if "kernel" in median else None,
        "temporary_mb": {way: round(one / 1e6, 1) for way, one in temporary.items()},
        "refusal": refused,
    }


def random_weight(form: Format, shape: tuple[int, int], device: torch.device) -> tuple[Tensor, Tensor]:
    """Finite numbers: in E4M3 two codes are none."""
    codes_shape, scales_shape, dtype = form.specs(shape)
    codes = torch.randint(0x7F if form.name == "fp8" else 256, codes_shape, dtype=torch.uint8, device=device)
    scales = (
        torch.rand(scales_shape, device=device) * 0.02
        if dtype.is_floating_point
        else torch.full(scales_shape, 120, dtype=dtype, device=device)
    )
    return codes, scales


def by_bitsandbytes(codes: Tensor, scales: Tensor, out: Tensor) -> Way:
    import bitsandbytes.functional as functional

    code = functional.get_4bit_type("nf4", device=codes.device)
    state = functional.QuantState(
        absmax=scales, shape=out.shape, code=code, blocksize=64, quant_type="nf4", dtype=out.dtype
    )
    # On CPUs it has no way to write into another tensor.
    return lambda: functional.dequantize_4bit(codes.view(-1, 1), state)


def result(run: Way, out: Tensor) -> Tensor:
    out.zero_()
    found = run()
    return (found if isinstance(found, Tensor) else out).clone()


def temporary_bytes(run: Way, device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    run()
    return torch.cuda.max_memory_allocated(device) - before


def seconds(run: Way, device: torch.device) -> float:
    if device.type != "cuda":
        began = time.perf_counter()
        run()
        return time.perf_counter() - began
    with torch.cuda.device(device):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3


def main() -> None:
    args = arguments()
    what = {"device": args.device, "rows": args.rows, "columns": args.columns, "dtype": args.dtype}
    if args.device.startswith("cuda"):
        what["device"] = torch.cuda.get_device_name(args.device)
    for name in FORMATS if "all" in args.formats else args.formats:
        print(json.dumps({"format": name, **what, **measure(format_of(name), args)}), flush=True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("formats", choices=[*FORMATS, "all"], nargs="*", default="all")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rows", type=int, default=25600)
    parser.add_argument("--columns", type=int, default=5120, help="a multiple of 32 for mxfp4")
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    parser.add_argument("--rounds", type=int, default=20)
    return parser.parse_args()


if __name__ == "__main__":
    main()
