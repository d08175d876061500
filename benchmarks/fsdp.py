"""Several machines beside torch's FSDP2: memory and time of the same training by the same processes, on CPUs.

    python benchmarks/fsdp.py [--machines 2] [--rounds 3]

Starts `--machines` processes on this machine, which talk by gloo over loopback and compute on their own core, one
thread each; no GPU is used. All train the same blocks from the same weights with AdamW, in bf16 with fp32 masters:

- FSDP2: `fully_shard` on each block and on the whole, bf16 parameters for computing and fp32 sums of gradients.
  Parameters, gradients and moments are divided; on CPUs they lie in host memory, as with `CPUOffloadPolicy`.
- FSDP2, recomputing: the same with `torch.utils.checkpoint` around each block.
- RoundPipe: on one CPU device a process; synchronous, asynchronous and with second blocks.

Ways take turns. Memory is what a process holds beside what it held before the model: `resident` at most in a step,
by the kernel. Losses are printed, since all must learn the same.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import socket
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.multiprocessing as mp
from roundpipe import RoundPipe, RoundPipeRunConfig, Runtime
from roundpipe.optim import AdamW
from rp_dist import Machines
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

LR = 1e-4
BF16 = torch.bfloat16


def arguments() -> argparse.Namespace:
    """What was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machines", type=int, default=2)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=768, help="a block has eight times so many weights, squared")
    parser.add_argument("--rows", type=int, default=256, help="of the batch of all machines")
    parser.add_argument("--steps", type=int, default=4, help="of one round")
    parser.add_argument("--rounds", type=int, default=3)
    return parser.parse_args()


class Block(nn.Module):
    """A residual block of two matrices."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of its input and of what it makes of it."""
        return x + self.down(nn.functional.gelu(self.up(x)))


class Recomputing(Block):
    """Keeps its input only."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """As the block."""
        out = checkpoint(super().forward, x, use_reentrant=False)
        assert isinstance(out, torch.Tensor)
        return out


def blocks(options: argparse.Namespace, kind: type[Block]) -> nn.Sequential:
    """The model, the same weights in every process."""
    torch.manual_seed(0)
    return nn.Sequential(*(kind(options.width) for _ in range(options.layers)))


def square_error(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """A loss whose sum over microbatches is that of the batch."""
    return (outputs - labels).float().square().sum() / labels.numel()


Step = Callable[[], float]


@contextmanager
def fsdp(machines: Machines, options: argparse.Namespace, *, kind: type[Block]) -> Generator[Step]:
    """A step of FSDP2; returns this machine's part of the loss."""
    mesh = init_device_mesh("cpu", (machines.size,))
    model = blocks(options, kind)
    policy = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=torch.float32)
    for layer in [*model, model]:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    assert isinstance(model, FSDPModule)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)
    begin, end = (rank * options.rows // machines.size for rank in (machines.rank, machines.rank + 1))
    x = batch(options)[begin:end]

    def step() -> float:
        # FSDP takes the mean over machines, and the loss is a sum over their rows.
        loss = square_error(model(x), torch.ones_like(x)) * (end - begin) / options.rows
        (loss * machines.size).backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    yield step


@contextmanager
def roundpipe(
    machines: Machines, options: argparse.Namespace, *, is_async: bool, double_buffer: bool
) -> Generator[Step]:
    """A step of ours; returns the machine's part of the loss, which all know."""
    with Runtime("cpu:1", machines=machines, strict=False) as runtime:
        model = RoundPipe(
            blocks(options, Block).to(BF16),
            runtime=runtime,
            optim_dtype=torch.float32,
            double_buffer=double_buffer,
            model_run_config=RoundPipeRunConfig(num_microbatch=machines.size),
        )
        optimizer = AdamW(model.optim_parameters(), lr=LR)
        x = batch(options)

        def loss_fn(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return square_error(outputs, labels) * labels.shape[0] / options.rows

        def step() -> float:
            loss = model.forward_backward((x,), label=torch.ones_like(x), loss_fn=loss_fn)
            model.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async=is_async)
            return loss.item() / machines.size

        yield step
        model.synchronize()


def batch(options: argparse.Namespace) -> torch.Tensor:
    """All machines' rows."""
    return torch.randn(options.rows, options.width, generator=torch.Generator().manual_seed(0)).to(BF16)


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


@dataclass(frozen=True)
class Measured:
    """Seconds of a step, bytes held at most in one, and the losses' first and last."""

    seconds: float
    nbytes: int
    sent: int
    losses: tuple[float, float]


def _warm_up(options: argparse.Namespace) -> None:
    """Have the libraries make what they keep."""
    model = blocks(options, Block)[:1].to(BF16)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    x = batch(options)
    square_error(model(x), x).backward()
    optimizer.step()
    del model, optimizer
    _give_back()


def _give_back() -> None:
    """Give the system what was freed, such as the weights before they were divided."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def measure(
    way: Callable[[], AbstractContextManager[Step]], machines: Machines, options: argparse.Namespace
) -> Measured:
    """Measure one way, from building the model to its end."""
    _warm_up(options)
    before = _status("VmRSS")
    with way() as step:
        losses = [step() for _ in range(2)]
        _give_back()
        # The kernel counts the most anew from here.
        Path("/proc/self/clear_refs").write_text("5")
        machines.exchange(None, channel=9)
        begin, sent = time.perf_counter(), machines.sent_bytes
        losses += [step() for _ in range(options.steps)]
        machines.exchange(None, channel=9)
        seconds = (time.perf_counter() - begin) / options.steps
        held = _status("VmHWM") - before
        sent = (machines.sent_bytes - sent) // options.steps
        first, last = (sum(machines.exchange(loss, channel=9)) for loss in (losses[0], losses[-1]))
    return Measured(seconds, held, sent, (first, last))


WAYS: dict[str, Callable[[Machines, argparse.Namespace], AbstractContextManager[Step]]] = {
    "FSDP2": partial(fsdp, kind=Block),
    "FSDP2, recomputing": partial(fsdp, kind=Recomputing),
    "RoundPipe, synchronous": partial(roundpipe, is_async=False, double_buffer=False),
    "RoundPipe, asynchronous": partial(roundpipe, is_async=True, double_buffer=False),
    "RoundPipe, second blocks": partial(roundpipe, is_async=True, double_buffer=True),
}


def _start(rank: int, port: int, name: str, options: argparse.Namespace, results: mp.SimpleQueue) -> None:
    place = {"RANK": rank, "WORLD_SIZE": options.machines, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({key: str(value) for key, value in place.items()})
    torch.set_num_threads(1)
    with Machines.open(connections=1) as machines:
        found = measure(partial(WAYS[name], machines, options), machines, options)
    if rank == 0:
        results.put(found)


def started(name: str, options: argparse.Namespace) -> Measured:
    """What one way takes, in processes of its own: what another one has freed is not counted."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    results = mp.get_context("spawn").SimpleQueue()
    mp.spawn(_start, (port, name, options, results), options.machines)
    return results.get()


def main() -> None:
    """Measure all ways in turns."""
    options = arguments()
    numel = 8 * options.width**2 * options.layers
    print(
        f"{options.machines} processes, one thread each, {numel / 1e6:.1f}M parameters, {options.rows} rows, "
        f"torch {torch.__version__}, {os.cpu_count()} cores\n"
    )
    found: dict[str, list[Measured]] = defaultdict(list)
    for _ in range(options.rounds):
        for name in WAYS:
            found[name].append(started(name, options))
            one = found[name][-1]
            print(f"  {name}: {1e3 * one.seconds:.0f} ms, {one.nbytes / 1e6:.0f} MB", flush=True)
    print(f"\n{'':26}ms a step  bytes a parameter, resident  sent     loss, first and last")
    for name, each in found.items():
        sent = f"{each[0].sent / numel:6.2f}" if each[0].sent else "     -"
        print(
            f"{name:26}{1e3 * statistics.median(one.seconds for one in each):9.0f}"
            f"{statistics.median(one.nbytes for one in each) / numel:29.1f}{sent}"
            f"     {each[0].losses[0]:.5f} {each[0].losses[1]:.5f}"
        )


if __name__ == "__main__":
    main()
