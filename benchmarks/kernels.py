"""How long the kernels of AdamW and Lion take in one core's cache, by kind of state: arithmetic without memory.

One thread, 60,000 parameters, processor time a parameter; rounds that take turns, and the median and the third
lowest of each. With `--against`, a folder of other kernel sources, such as those of an earlier commit, is compiled
too and takes its turns in the same run:

    git worktree add before HEAD~1
    python benchmarks/kernels.py --against before/packages/rp-optim/src/rp_optim/kernels/csrc
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from rp_optim.kernels import build
from rp_optim.kernels.native import Library, NativeKernel
from rp_optim.kernels.packed import Noise, num_groups
from rp_optim.kernels.updates import AdamNumbers, AdamUpdate, LionNumbers, LionUpdate, Small, Spot

COUNT = 60_000
KINDS = ("fp32", "bf16", "8bit")


def compiled(sources: Path, folder: Path) -> Library:
    build.SOURCES = sources
    compiler = build.find_compiler()
    if compiler is None:
        raise SystemExit("there is no C compiler")
    library = folder / f"{build.source_hash()}.so"
    build.build(compiler, library)
    return Library(library, build.source_hash())


def adam(kind: str) -> AdamUpdate:
    generator = torch.Generator().manual_seed(0)
    grad = torch.randn(COUNT, generator=generator).mul_(1e-3).bfloat16()
    spot = Spot(torch.randn(COUNT, generator=generator), grad, torch.empty(COUNT, dtype=torch.bfloat16), 1.0)
    dtypes = {"fp32": (torch.float32,) * 2, "bf16": (torch.bfloat16,) * 2, "8bit": (torch.int8, torch.uint8)}[kind]
    first, second = (torch.zeros(COUNT, dtype=dtype) for dtype in dtypes)
    numbers = AdamNumbers(l2=0.0, shrink=1 - 1e-7, rate=1e-5, beta1=0.9, beta2=0.95, root=1.0, eps=1e-8)
    return AdamUpdate(spot, numbers, first, second, None, small(kind, 2))


def lion(kind: str) -> LionUpdate:
    update = adam(kind)
    numbers = LionNumbers(shrink=1 - 1e-7, rate=1e-5, beta1=0.9, beta2=0.99)
    return LionUpdate(update.spot, numbers, update.exp_avg, small(kind, 1))


def small(kind: str, arrays: int) -> Small | None:
    if kind == "fp32":
        return None
    scales = [torch.zeros(num_groups(COUNT), dtype=torch.bfloat16) for _ in range(arrays if kind == "8bit" else 0)]
    return Small(Noise.of(1, 0), tuple(scales))


def steps(kernel: NativeKernel, one: AdamUpdate, other: LionUpdate) -> dict[str, Callable[[], None]]:
    return {"AdamW": lambda: kernel.adam([one]), "Lion": lambda: kernel.lion([other])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path, help="a folder of kernel sources")
    parser.add_argument("--kernels", nargs="+", help="such as avx512 avx2; default: all that run here but scalar")
    parser.add_argument("--rounds", type=int, default=60)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        own = build.SOURCES
        sources = {"now": own} if options.against is None else {"before": options.against, "now": own}
        libraries = {name: compiled(path, Path(folder)) for name, path in sources.items()}
        # Where arrays lie changes a time by a twentieth, so all libraries have the same ones.
        arrays = {kind: (adam(kind), lion(kind)) for kind in KINDS}
        ways = {
            (variant, optimizer, kind, name): step
            for variant in options.kernels or [one for one in libraries["now"].variants() if one != "scalar"]
            for kind in KINDS
            for name, library in libraries.items()
            for optimizer, step in steps(NativeKernel(library, variant), *arrays[kind]).items()
        }
        report(ways, options.rounds)


def report(ways: dict[tuple[str, str, str, str], Callable[[], None]], rounds: int) -> None:
    nanoseconds: dict[tuple[str, str, str, str], list[float]] = {way: [] for way in ways}
    for number in range(rounds + 5):
        # What ran just before changes a time, too.
        turns = list(ways.items())
        random.Random(number).shuffle(turns)
        for way, step in turns:
            start = time.thread_time_ns()
            for _ in range(3):
                step()
            if number >= 5:
                nanoseconds[way].append((time.thread_time_ns() - start) / 3 / COUNT)
    print(f"{'nanoseconds of a core a parameter':34} {'median':>7} {'low':>7}")
    for way, found in sorted(nanoseconds.items()):
        print(f"{' '.join(way):34} {statistics.median(found):7.2f} {sorted(found)[2]:7.2f}")


if __name__ == "__main__":
    main()
