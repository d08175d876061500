"""How fast rp_optim's Muon takes bf16 gradients to bf16 weights, beside torch's Muon on the CPU and beside AdamW.

In one process, in turns, many times; the middle time of each:

    torch     gradient cast to fp32, torch.optim.Muon, parameter cast to bf16; buffers made before
    ours      rp_optim.Muon on linked masters, the Newton-Schulz iteration in bf16 as torch's
    in fp32   the same with the iteration in fp32
    passes    ours without the iteration: momentum, the update written in bf16, the step
    AdamW     rp_optim.AdamW on the same masters

The matrices are those of some layers of a decoder. Run it with

    python benchmarks/muon.py [--width 1024] [--layers 2] [--threads 2] [--rounds 9]

`ONEDNN_MAX_CPU_ISA=AVX512_CORE` before it shows a processor without bf16 instructions. The last line tells how far
the moves of ten steps are from torch's, by norm.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable

import rp_optim
import torch
from rp_optim.optimizers.muon import iteration_of
from side_by_side import side_by_side
from torch import nn

Matrices = list[tuple[rp_optim.Master, torch.Tensor, torch.Tensor]]


def shapes_of(width: int, layers: int) -> list[tuple[int, int]]:
    return [*[(width, width)] * 4, *[(3 * width, width)] * 2, (width, 3 * width)] * layers


def make(shapes: list[tuple[int, int]]) -> Matrices:
    generator = torch.Generator().manual_seed(0)
    return [
        (
            rp_optim.Master(torch.randn(shape, generator=generator) / shape[1] ** 0.5),
            torch.randn(shape, generator=generator).mul_(1e-3).bfloat16(),
            torch.zeros(shape, dtype=torch.bfloat16),
        )
        for shape in shapes
    ]


def linked(matrices: Matrices, optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    def step() -> None:
        for master, grad, weight in matrices:
            rp_optim.link(master, lambda grad=grad: grad, lambda weight=weight: weight)
        optimizer.step()
        for master, _, _ in matrices:
            rp_optim.unlink(master)

    return step


def baseline(matrices: Matrices) -> tuple[list[nn.Parameter], Callable[[], None]]:
    parameters = [nn.Parameter(master.data.clone()) for master, _, _ in matrices]
    weights = [torch.empty_like(weight) for _, _, weight in matrices]
    optimizer = torch.optim.Muon(parameters)
    for parameter in parameters:
        parameter.grad = torch.empty_like(parameter)

    def step() -> None:
        for parameter, (_, grad, _) in zip(parameters, matrices, strict=True):
            assert parameter.grad is not None
            parameter.grad.copy_(grad)
        optimizer.step()
        for parameter, weight in zip(parameters, weights, strict=True):
            weight.copy_(parameter.data)

    return parameters, step


def distance(shapes: list[tuple[int, int]], dtype: torch.dtype) -> float:
    matrices = make(shapes)
    parameters, theirs = baseline(matrices)
    ours = linked(matrices, rp_optim.Muon([master for master, _, _ in matrices], ns_dtype=dtype))
    starts = [parameter.data.clone() for parameter in parameters]
    for _ in range(10):
        ours()
        theirs()
    moves = zip(parameters, matrices, starts, strict=True)
    return max(
        float((one.data - other.data).norm() / (one.data - start).norm()) for one, (other, _, _), start in moves
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    shapes = shapes_of(options.width, options.layers)
    matrices = make(shapes)
    masters = [master for master, _, _ in matrices]
    bf16, fp32 = torch.bfloat16, torch.float32
    muon = rp_optim.Muon(masters, ns_dtype=bf16)
    ways = {
        "torch": baseline(matrices)[1],
        "ours": linked(matrices, muon),
        "in fp32": linked(matrices, rp_optim.Muon(masters, ns_dtype=fp32)),
        "passes": linked(matrices, rp_optim.Muon(masters, ns_dtype=bf16, ns_steps=0)),
        "AdamW": linked(matrices, rp_optim.AdamW(masters)),
    }
    count = sum(rows * cols for rows, cols in shapes)
    flops = sum(map(iteration_of(muon.param_groups[0]).flops, shapes))
    print(
        f"{count / 1e6:.3g} million parameters, {options.threads} threads of {os.cpu_count()}, "
        f"torch {torch.__version__}, kernel {rp_optim.kernel_in_use()}, {flops / count:.0f} operations a parameter"
    )
    print(f"{'':10} {'ms':>9} {'ns a parameter':>15} {'10^9/s':>9}")
    for name, each in side_by_side(ways, rounds=options.rounds, warmup=1).items():
        rate = f"{flops / each / 1e9:9.0f}" if name in ("torch", "ours", "in fp32") else ""
        print(f"{name:10} {each * 1e3:9.2f} {each / count * 1e9:15.2f} {rate}")
    few = shapes_of(128, 1)
    print(f"distance from torch's moves: in bf16 {distance(few, bf16):.1e}, in fp32 {distance(few, fp32):.1e}")


if __name__ == "__main__":
    main()
