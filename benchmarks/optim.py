"""How fast rp_optim's AdamW takes bf16 gradients to bf16 weights, beside torch's and beside what memory allows.

In one process, in turns, many times; the middle time of each:

    torch     gradient cast to fp32, torch.optim.AdamW(fused=True), parameter cast to bf16; buffers made before
    ours      rp_optim.AdamW on a linked master
    clipped   the same after rp_optim.clip_grad_norm_, and what the norm alone takes
    rewrite   every array of the step read, changed and written in place by the same threads: 32 bytes a parameter
    traffic   the arrays moved as the step moves them, with next to no arithmetic: 28 bytes a parameter

`rewrite` and `traffic` are functions of the same C library. Run it with

    python benchmarks/optim.py [--parameters 40e6] [--tensors 10] [--threads 2] [--rounds 15] [--kernel avx2]

With `--additions`, what it costs that a second task adds to each gradient, and a third:

    one       a step on the bf16 gradients of one task
    added     a second task's fp32 gradients added to the fp32 block of the first, then a step on that
    pair      a step on the bf16 gradients of two tasks, which it adds while it reads them
    third     one more task's fp32 gradients added to an fp32 block
    to pair   one more task's bf16 gradients added to those of two, by rp_optim.add_to_pair

With `--states`, a step of optimizers whose state is kept in fp32, in bf16 and in 8 bits, beside torch's own step
and `traffic`: nanoseconds a parameter, and the bytes a parameter that a step moves.

All ways share one set of arrays, so 400 million parameters need about 8.5 GB. `--memory` measures the bytes a
parameter instead: what the process grows by when weights, gradients, masters and Adam's state are made and
stepped. `--check` ends with an error where a figure misses its aim; the others are there to be read.

What clipping costs is told in two ways: the norm alone beside a step (`norm / step`), and how much longer a
clipped step is (`clip cost`). So is the speed beside `rewrite`: in parameters (`rate / rewrite`) and in bytes
moved (`bandwidth / rewrite`; a step moves 28 where `rewrite` moves 32).
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import math
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import rp_optim
import torch
from rp_optim.kernels.kernel import current_kernel
from rp_optim.kernels.native import NativeKernel
from rp_optim.kernels.updates import Spot
from side_by_side import side_by_side

STEP_BYTES, REWRITE_BYTES = 28, 32


@dataclass(frozen=True)
class Arrays:
    """One tensor's part of the model: bf16 weights and gradients, fp32 masters and moments, an fp32 gradient."""

    weight: torch.Tensor
    grad: torch.Tensor
    master: rp_optim.Master
    wide: torch.Tensor


def make_arrays(parameters: int, tensors: int) -> list[Arrays]:
    sizes = [parameters // tensors + (index < parameters % tensors) for index in range(tensors)]
    return [
        Arrays(
            torch.zeros(size, dtype=torch.bfloat16),
            torch.empty(size, dtype=torch.bfloat16).normal_(std=1e-3),
            rp_optim.Master(torch.empty(size).normal_()),
            torch.zeros(size),
        )
        for size in sizes
    ]


def link(arrays: list[Arrays]) -> None:
    for each in arrays:
        rp_optim.link(each.master, lambda each=each: each.grad, lambda each=each: each.weight)


def ours(arrays: list[Arrays]) -> tuple[rp_optim.AdamW, Callable[[], None]]:
    optimizer = rp_optim.AdamW([each.master for each in arrays], lr=1e-5)
    return optimizer, one_state(arrays, optimizer)


def clipped(arrays: list[Arrays], optimizer: rp_optim.AdamW) -> tuple[Callable[[], None], Callable[[], None]]:
    masters = [each.master for each in arrays]

    def norm() -> None:
        link(arrays)
        rp_optim.clip_grad_norm_(masters, math.inf)
        for each in arrays:
            rp_optim.unlink(each.master)

    def step() -> None:
        link(arrays)
        # Less than the norm, so that the step has a factor to multiply with.
        rp_optim.clip_grad_norm_(masters, 1e-3)
        optimizer.step()
        for each in arrays:
            each.master.grad = None
            rp_optim.unlink(each.master)

    return norm, step


def baseline(arrays: list[Arrays], optimizer: rp_optim.AdamW) -> Callable[[], None]:
    """Torch's, on the same masters and the same moments."""
    parameters = [torch.nn.Parameter(each.master.data) for each in arrays]
    torchs = torch.optim.AdamW(parameters, lr=1e-5, fused=True)
    for parameter, each in zip(parameters, arrays, strict=True):
        state = optimizer.state[each.master]
        torchs.state[parameter] = {**state, "step": torch.tensor(1.0)}
        parameter.grad = each.wide

    def step() -> None:
        for each in arrays:
            each.wide.copy_(each.grad)
        torchs.step()
        for each in arrays:
            each.weight.copy_(each.master.data)

    return step


def floors(arrays: list[Arrays], optimizer: rp_optim.AdamW) -> dict[str, Callable[[], None]]:
    kernel = current_kernel()
    if not isinstance(kernel, NativeKernel):
        return {}
    spots = [
        (Spot(each.master, each.grad, each.weight, 1.0), state["exp_avg"], state["exp_avg_sq"])
        for each in arrays
        for state in [optimizer.state[each.master]]
    ]

    def rewrite() -> None:
        kernel.rewrite(spots)

    def traffic() -> None:
        kernel.traffic(spots)

    return {"rewrite": rewrite, "traffic": traffic}


def measure(parameters: int, tensors: int, rounds: int) -> dict[str, float]:
    arrays = make_arrays(parameters, tensors)
    optimizer, step = ours(arrays)
    norm, clipped_step = clipped(arrays, optimizer)
    ways = {"torch": baseline(arrays, optimizer), "ours": step, "clipped": clipped_step, "norm": norm}
    return side_by_side(ways | floors(arrays, optimizer), rounds=rounds)


def report(parameters: int, seconds: dict[str, float]) -> dict[str, float]:
    """Print the table and the figures; returns those."""
    step = seconds["ours"]
    figures = {
        "times torch": seconds["torch"] / step,
        "norm / step": seconds["norm"] / step,
        "clip cost": (seconds["clipped"] - step) / step,
    }
    print(f"{'':10} {'ms':>9} {'G parameters/s':>15} {'GB/s':>7}")
    for name, each in seconds.items():
        size = {"rewrite": REWRITE_BYTES, "ours": STEP_BYTES, "traffic": STEP_BYTES, "norm": 2}.get(name)
        rate = f"{size * parameters / each / 1e9:7.1f}" if size else f"{'':7}"
        print(f"{name:10} {each * 1e3:9.2f} {parameters / each / 1e9:15.3f} {rate}")
    if "rewrite" in seconds:
        figures["rate / rewrite"] = seconds["rewrite"] / step
        figures["rate / traffic"] = seconds["traffic"] / step
        figures["bandwidth / rewrite"] = seconds["rewrite"] / step * STEP_BYTES / REWRITE_BYTES
    for name, figure in figures.items():
        print(f"{name:20} {figure:6.3f}")
    return figures


def missed(figures: dict[str, float], threads: int) -> list[str]:
    times = 2.2 if threads <= 2 else 1.6
    aims = [
        ("times torch", times, True),
        ("norm / step", 0.15, False),
        ("clip cost", 0.15, False),
        ("rate / rewrite", 0.95, True),
    ]
    return [
        f"{name} is {figures[name]:.3f}, but should be at {'least' if least else 'most'} {aim}"
        for name, aim, least in aims
        if name in figures and (figures[name] < aim if least else figures[name] > aim)
    ]


# State that is kept small


def measure_states(parameters: int, tensors: int, rounds: int) -> dict[str, float]:
    arrays = make_arrays(parameters, tensors)
    optimizer, _ = ours(arrays)
    ways = {"torch": baseline(arrays, optimizer), **floors(arrays, optimizer)}
    ways.pop("rewrite", None)
    for make in (rp_optim.AdamW, rp_optim.Lion):
        for kind in ("fp32", "bf16", "8bit"):
            ways[f"{make.__name__} {kind}"] = one_state(arrays, make([each.master for each in arrays], state=kind))
    return side_by_side(ways, rounds=rounds)


def one_state(arrays: list[Arrays], optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    def step() -> None:
        link(arrays)
        optimizer.step()
        for each in arrays:
            rp_optim.unlink(each.master)

    step()
    return step


def report_states(parameters: int, seconds: dict[str, float]) -> None:
    # Gradient 2, weight 2 and master 8, and each byte of state twice.
    moved = {"traffic": STEP_BYTES, "AdamW fp32": 28, "AdamW bf16": 20, "AdamW 8bit": 12 + 4 * 1.0625}
    moved |= {"Lion fp32": 20, "Lion bf16": 16, "Lion 8bit": 12 + 2 * 1.0625}
    print(f"{'':12} {'ns a parameter':>15} {'bytes':>6} {'GB/s':>7}")
    for name, each in seconds.items():
        size = moved.get(name)
        told = f"{size:6.1f} {size * parameters / each / 1e9:7.1f}" if size else ""
        print(f"{name:12} {each / parameters * 1e9:15.3f} {told}")


# Gradients that several tasks add to


@dataclass(frozen=True)
class Tasks:
    """One tensor's part of the model, and the gradients of two tasks in both forms."""

    master: rp_optim.Master
    weight: torch.Tensor
    pair: rp_optim.GradientPair
    wide: torch.Tensor
    more: torch.Tensor


def make_tasks(parameters: int, tensors: int) -> list[Tasks]:
    return [
        Tasks(
            each.master,
            each.weight,
            rp_optim.GradientPair(each.grad, each.grad.clone()),
            each.wide,
            torch.empty_like(each.wide).normal_(std=1e-3),
        )
        for each in make_arrays(parameters, tensors)
    ]


def measure_additions(parameters: int, tensors: int, rounds: int) -> dict[str, float]:
    tasks = make_tasks(parameters, tensors)
    optimizer = rp_optim.AdamW([each.master for each in tasks], lr=1e-5)
    halves = [each.more.bfloat16() for each in tasks]

    def step(gradient: Callable[[Tasks], torch.Tensor | rp_optim.GradientPair]) -> None:
        for each in tasks:
            rp_optim.link(each.master, lambda each=each: gradient(each), lambda each=each: each.weight)
        optimizer.step()
        for each in tasks:
            rp_optim.unlink(each.master)

    def third() -> None:
        for each in tasks:
            each.wide.add_(each.more)

    def added() -> None:
        third()
        step(lambda each: each.wide)

    def to_pair() -> None:
        for each, half in zip(tasks, halves, strict=True):
            rp_optim.add_to_pair(each.pair, half)

    ways = {
        "one": lambda: step(lambda each: each.pair.first),
        "added": added,
        "pair": lambda: step(lambda each: each.pair),
        "third": third,
        "to pair": to_pair,
    }
    return side_by_side(ways, rounds=rounds)


def report_additions(parameters: int, seconds: dict[str, float]) -> None:
    moved = {"one": STEP_BYTES, "added": 12 + STEP_BYTES + 2, "pair": STEP_BYTES + 2, "third": 12, "to pair": 10}
    print(f"{'':10} {'ms':>9} {'bytes':>6} {'GB/s':>7}")
    for name, each in seconds.items():
        print(f"{name:10} {each * 1e3:9.2f} {moved[name]:6} {moved[name] * parameters / each / 1e9:7.1f}")
    print(f"{'added / pair':20} {seconds['added'] / seconds['pair']:6.3f}")
    print(f"{'pair / one':20} {seconds['pair'] / seconds['one']:6.3f}")
    print(f"{'third / to pair':20} {seconds['third'] / seconds['to pair']:6.3f}")


# Memory


def resident_bytes() -> int:
    # What was freed goes back to the system first, where the system's allocator can be told to.
    gc.collect()
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise SystemExit("this system does not tell the resident size")


def peak_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise SystemExit("this system does not tell the peak resident size")


def measure_memory(parameters: int, tensors: int) -> None:
    warm = rp_optim.Master(torch.zeros(1 << 20))
    warm.grad = torch.zeros(1 << 20)
    rp_optim.AdamW([warm]).step()
    del warm
    before = resident_bytes()
    arrays = [
        (rp_optim.Master(torch.zeros(size)), torch.zeros(size, dtype=torch.bfloat16), torch.zeros(size).bfloat16())
        for size in [parameters // tensors] * tensors
    ]
    optimizer = rp_optim.AdamW([master for master, _, _ in arrays])
    for _ in range(2):
        for master, grad, weight in arrays:
            rp_optim.link(master, lambda grad=grad: grad, lambda weight=weight: weight)
        rp_optim.clip_grad_norm_([master for master, _, _ in arrays], 1.0)
        optimizer.step()
        for master, _, _ in arrays:
            master.grad = None
            rp_optim.unlink(master)
    count = parameters // tensors * tensors
    print(f"resident {(resident_bytes() - before) / count:.3f} bytes a parameter, ", end="")
    print(f"at the most {(peak_bytes() - before) / count:.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=float, default=40e6)
    parser.add_argument("--tensors", type=int, default=10)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--kernel", help="one of rp_optim.available_kernels(); default: the fastest")
    parser.add_argument("--memory", action="store_true", help="measure bytes a parameter instead")
    parser.add_argument("--additions", action="store_true", help="measure gradients of several tasks instead")
    parser.add_argument("--states", action="store_true", help="measure state in 16 and 8 bits instead")
    parser.add_argument("--check", action="store_true", help="end with an error where a figure misses its aim")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.kernel:
        rp_optim.use_kernel(options.kernel)
    parameters = int(options.parameters)
    print(
        f"{parameters / 1e6:g} million parameters in {options.tensors} tensors, {options.threads} threads of "
        f"{os.cpu_count()}, torch {torch.__version__}, kernel {rp_optim.kernel_in_use()}"
    )
    if options.memory:
        measure_memory(parameters, options.tensors)
        return
    if options.states:
        report_states(parameters, measure_states(parameters, options.tensors, options.rounds))
        return
    if options.additions:
        report_additions(parameters, measure_additions(parameters, options.tensors, options.rounds))
        return
    figures = report(parameters, measure(parameters, options.tensors, options.rounds))
    if options.check and (misses := missed(figures, options.threads)):
        sys.exit("\n".join(misses))


if __name__ == "__main__":
    main()
