"""How fast a weight is packed and expanded on the host, beside plain torch operations: one JSON line a format.

    python benchmarks/packing.py
    python benchmarks/packing.py --rows 25600 --columns 5120 --threads 1 nf4 mxfp4

The weight is random, (rows, columns), in bf16. `plain` is how RoundPipe packed at first: parts of 2^24 elements,
each operation on a whole part, codes by `torch.bucketize`. Both take turns; figures are medians in 10^6 elements/s
and ratios of the medians. `temporary_mb`: by how much packing raised the most that was resident of the process.
Each format has a process of its own.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import pairwise

import torch
from roundpipe import PackedWeight
from rp_packing.formats.by_name import FORMATS, format_of
from rp_packing.formats.nf4 import VALUES

WINDOW = 1 << 24
MIDDLES = torch.tensor([(one + other) / 2 for one, other in pairwise(VALUES)])
PAIRS = torch.tensor([[VALUES[byte >> 4], VALUES[byte & 15]] for byte in range(256)])
MXFP4_VALUES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
MXFP4_PAIRS = torch.cat([MXFP4_VALUES, -MXFP4_VALUES])[torch.arange(256).view(-1, 1) >> torch.tensor([0, 4]) & 15]

Tensor = torch.Tensor


def plain_nf4(part: Tensor, codes: Tensor, scales: Tensor) -> None:
    numbers = part.float().view(-1, 64)
    scales.copy_(numbers.abs().amax(1))
    scaled = numbers / scales.where(scales > 0, 1.0).unsqueeze(1)
    pairs = torch.bucketize(scaled, MIDDLES).to(torch.uint8).view(-1, 2)
    codes.copy_(pairs[:, 0] << 4 | pairs[:, 1])


def expand_nf4(codes: Tensor, scales: Tensor, part: Tensor) -> None:
    values = PAIRS.index_select(0, codes.int()).view(-1)
    part.view(-1).copy_(values.mul_(scales.repeat_interleave(64)))


def plain_mxfp4(part: Tensor, codes: Tensor, scales: Tensor) -> None:
    numbers = part.float().view(-1, 32)
    exponent = torch.frexp(numbers.abs().amax(-1)).exponent - 3
    scales.copy_((exponent + 127).clamp(0, 254))
    scaled = numbers / torch.exp2(scales.float() - 127).unsqueeze(-1)
    size = scaled.abs()
    step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
    found = torch.bucketize(((size / step).round() * step).clamp(max=6.0), MXFP4_VALUES)
    found = torch.where(scaled < 0, found | 8, found).to(torch.uint8)
    codes.copy_((found[:, 1::2] << 4 | found[:, ::2]).view(-1))


def expand_mxfp4(codes: Tensor, scales: Tensor, part: Tensor) -> None:
    values = MXFP4_PAIRS.index_select(0, codes.int()).view(-1, 32)
    part.view(-1, 32).copy_(values.mul_(torch.exp2(scales.float() - 127).unsqueeze(-1)))


def plain_int8(part: Tensor, codes: Tensor, scales: Tensor) -> None:
    numbers = part.float()
    factor = numbers.abs().amax(-1) / 127
    scales.copy_(factor.where(factor > 0, 1.0))
    rounded = (numbers / scales.unsqueeze(-1)).round().clamp(-127, 127)
    codes.copy_(rounded.to(torch.int8).view(torch.uint8).view(-1))


def expand_int8(codes: Tensor, scales: Tensor, part: Tensor) -> None:
    part.copy_(codes.view(torch.int8).view(part.shape).float() * scales.unsqueeze(-1))


def plain_fp8(part: Tensor, codes: Tensor, scales: Tensor) -> None:
    numbers = part.float()
    padded = torch.zeros_like(numbers)
    padded[:] = numbers.abs()
    factor = padded.view(len(part) // 128, 128, -1, 128).amax((1, 3)) / 448
    scales.copy_(factor.where(factor > 0, 1.0).view(-1))
    scaled = (numbers / spread(scales, part)).clamp(-448, 448)
    codes.copy_(scaled.to(torch.float8_e4m3fn).view(torch.uint8).view(-1))


def expand_fp8(codes: Tensor, scales: Tensor, part: Tensor) -> None:
    numbers = codes.view(torch.float8_e4m3fn).view(part.shape).float()
    part.copy_(numbers.mul_(spread(scales, part)))


def spread(scales: Tensor, part: Tensor) -> Tensor:
    blocks = scales.view(len(part) // 128, -1)
    return blocks.repeat_interleave(128, 1).repeat_interleave(128, 0)


Plain = Callable[[Tensor, Tensor, Tensor], None]
PLAIN: dict[str, tuple[Plain, Plain]] = {
    "fp8": (plain_fp8, expand_fp8),
    "int8": (plain_int8, expand_int8),
    "nf4": (plain_nf4, expand_nf4),
    "mxfp4": (plain_mxfp4, expand_mxfp4),
}


def in_windows(body: Plain, weight: Tensor, codes: Tensor, scales: Tensor, *, expands: bool = False) -> None:
    rows = max(WINDOW // weight.shape[1] // 128, 1) * 128
    parts = weight.split(rows)
    for number, part in enumerate(parts):
        some, theirs = (
            one.view(-1)[one.numel() * rows * number // len(weight) :][: one.numel() * len(part) // len(weight)]
            for one in (codes, scales)
        )
        body(*((some, theirs, part) if expands else (part, some, theirs)))


def measure(name: str, weight: Tensor, rounds: int) -> dict[str, float]:
    form = format_of(name)
    # Tables are made once.
    PackedWeight.of(form, weight[:128])
    codes_shape, scales_shape, dtype = form.specs(weight.shape)
    codes, scales = torch.zeros(codes_shape, dtype=torch.uint8), torch.zeros(scales_shape, dtype=dtype)
    out = torch.zeros_like(weight)
    pack, expand = PLAIN[name]
    ways: dict[str, Callable[[], object]] = {
        "pack": lambda: form.pack(weight, codes, scales),
        "plain_pack": lambda: in_windows(pack, weight, codes, scales),
        "expand": lambda: form.expand(codes, scales, out),
        "plain_expand": lambda: in_windows(expand, out, codes, scales, expands=True),
    }
    temporary_mb, results = {}, []
    for way, run in ways.items():
        before = resident_most()
        run()
        temporary_mb[way] = round((resident_most() - before) / 1e6)
        results.append((codes.clone(), scales.clone(), out.clone()))
    same = all(map(torch.equal, results[0][:2], results[1][:2])) and torch.equal(results[2][2], results[3][2])
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(rounds):
        for way, run in ways.items():
            began = time.perf_counter()
            run()
            seconds[way].append(time.perf_counter() - began)
    speed = {way: weight.numel() / 1e6 / statistics.median(taken) for way, taken in seconds.items()}
    return {
        "same_bits": same,
        **{way: round(one) for way, one in speed.items()},
        **{f"{way}_ratio": round(speed[way] / speed[f"plain_{way}"], 1) for way in ("pack", "expand")},
        "temporary_mb": temporary_mb["pack"],
        "plain_temporary_mb": temporary_mb["plain_pack"],
    }


def resident_most() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    args = arguments()
    if len(args.formats) != 1 or "all" in args.formats:
        given = [one for one in sys.argv[1:] if one not in (*FORMATS, "all")]
        for name in FORMATS if "all" in args.formats else args.formats:
            # The most that was resident counts from a process's beginning.
            subprocess.run([sys.executable, __file__, name, *given], check=True)
        return
    if args.threads:
        torch.set_num_threads(args.threads)
    weight = torch.empty(args.rows, args.columns, dtype=torch.bfloat16)
    weight.normal_(std=0.02, generator=torch.Generator().manual_seed(0))
    found = measure(args.formats[0], weight, args.rounds)
    print(json.dumps({"format": args.formats[0], "threads": torch.get_num_threads(), **found}), flush=True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("formats", choices=[*FORMATS, "all"], nargs="*", default="all")
    parser.add_argument("--rows", type=int, default=25600, help="a multiple of 128")
    parser.add_argument("--columns", type=int, default=5120, help="a multiple of 128")
    parser.add_argument("--threads", type=int, default=None, help="torch's; default: as it chooses")
    parser.add_argument("--rounds", type=int, default=5)
    return parser.parse_args()


if __name__ == "__main__":
    main()
