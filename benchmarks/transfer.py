"""Copies of a 1.7B-parameter model's blocks beside plain pinned copies, in one run.

    python benchmarks/transfer.py [--devices cuda:0] [--layers 28] [--rounds 7] [--check]

Rates are medians in GB/s (1e9 bytes). The plain copy is torch's ``copy_`` of 1 GiB from and to
pinned memory.
`--check` ends with exit code 1 where a bound of the last column is missed.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from rp_optim import GradientPair, add_to_pair
from rp_transfer import Backend, Conveyor, Device, Layout, group, open_backend
from rp_transfer.order.conveyor import CHUNK_BYTES
from safetensors import safe_open
from safetensors.torch import save_file
from side_by_side import side_by_side
from torch import nn

GIB = 1 << 30
Pieces = list[tuple[torch.Tensor, torch.Tensor]]


def layer() -> nn.Module:
    """The parameters of one decoder layer of Qwen3-1.7B."""
    shapes = {"q": (2048, 2048), "k": (1024, 2048), "v": (1024, 2048), "o": (2048, 2048)}
    shapes |= {"gate": (6144, 2048), "up": (6144, 2048), "down": (2048, 6144)}
    shapes |= {"q_norm": (128,), "k_norm": (128,), "norm": (2048,), "mlp_norm": (2048,)}
    return nn.ParameterDict({name: torch.empty(shape, dtype=torch.bfloat16) for name, shape in shapes.items()})


def model(layers: int) -> list[nn.Module]:
    """All layers, between the embedding and the head that is tied to it."""
    embedding = nn.ParameterDict({"embedding": torch.empty(151936, 2048, dtype=torch.bfloat16)})
    return [embedding, *(layer() for _ in range(layers))]


class Bench:
    """One device, what is copied, and the table of results."""

    def __init__(self, backend: Backend, layers: int, rounds: int) -> None:
        self.backend = backend
        self.device: Device = backend.devices[0]
        self.device.attach_thread()
        self.inbox = Conveyor(backend, self.device, self.device.weights_in)
        self.outbox = Conveyor(backend, self.device, self.device.gradients_out)
        self.rounds = rounds
        self.layouts = [found.layout for found in group(model(layers))]
        self.nbytes = sum(layout.nbytes for layout in self.layouts)
        self.there = self.device.empty((GIB,), torch.uint8, stream=self.device.weights_in)
        self.from_there = self.device.empty((GIB,), torch.uint8, stream=self.device.gradients_out)
        self.device.synchronize()
        self.failed = False

    def row(self, what: str, value: str, bound: str = "", kept: bool = True) -> None:
        """Print one result, and whether its bound is kept."""
        self.failed |= not kept
        print(f"{what:<58} {value:>16}   {bound}{'' if kept else '   MISSED'}", flush=True)

    def rate(self, nbytes: int, way: Callable[[], object]) -> float:
        """Median GB/s of a call that ends when all is copied."""
        seconds = side_by_side({"way": lambda: (way(), self.device.synchronize())}, rounds=self.rounds)
        return nbytes / seconds["way"] / 1e9

    def pieces(self, sources: Sequence[torch.Tensor], room: torch.Tensor) -> Pieces:
        """Each source and a place for it on the device; places are used again and again."""
        return [(room[: source.nbytes].view(source.dtype), source.view(-1)) for source in sources]

    def upload(self, pieces: Pieces) -> None:
        """All of them over one conveyor."""
        for there, source in pieces:
            self.inbox.upload(there, source)

    def download(self, pieces: Pieces) -> None:
        """All of them home."""
        for there, home in pieces:
            self.outbox.download(home, there)


def plain_copies(bench: Bench) -> tuple[float, float, float]:
    """Torch's own ``copy_`` up, down, and both at once."""
    source, home = (bench.backend.host_empty((GIB,), torch.uint8).fill_(1) for _ in range(2))
    on_cuda = bench.there.is_cuda
    streams = [torch.cuda.Stream(), torch.cuda.Stream()] if on_cuda else [None, None]

    def up() -> None:
        bench.there.copy_(source, non_blocking=True)

    def down() -> None:
        home.copy_(bench.from_there, non_blocking=True)

    def both() -> None:
        for stream, way in zip(streams, (up, down), strict=True):
            with torch.cuda.stream(stream):
                way()

    def one(way: Callable[[], None]) -> Callable[[], None]:
        return lambda: (way(), torch.cuda.synchronize() if on_cuda else None)

    rates = bench.rate(GIB, one(up)), bench.rate(GIB, one(down)), bench.rate(2 * GIB, one(both))
    for name, rate in zip(("up", "down", "both ways"), rates, strict=True):
        bench.row(f"plain pinned copy_ of 1 GiB, {name}", f"{rate:.1f} GB/s")
    return rates


def blocks_alone(bench: Bench, up: float, down: float) -> tuple[float, Pieces]:
    """The model's blocks in exact pinned memory."""
    start = time.perf_counter()
    blocks = list(bench.backend.host_blocks(bench.layouts))
    seconds = time.perf_counter() - start
    bench.row("pinning the blocks", f"{bench.nbytes / seconds / 1e9:.1f} GB/s")
    for block in blocks:
        block.view(torch.uint8).random_()
    pieces = bench.pieces(blocks, bench.there)
    rate = bench.rate(bench.nbytes, lambda: bench.upload(pieces))
    bench.row(
        "blocks up (alloc)", f"{rate:.1f} GB/s", f"{rate / up:.3f} of plain, at least 0.95", rate >= 0.95 * up
    )
    homes = bench.pieces(blocks, bench.from_there)
    home = bench.rate(bench.nbytes, lambda: bench.download(homes))
    bench.row("blocks down", f"{home:.1f} GB/s", f"{home / down:.3f} of plain", True)
    return rate, pieces


def both_ways(bench: Bench, pieces: Pieces, plain: float) -> None:
    """Blocks up while others go down, each from its own thread."""
    homes = bench.pieces(list(bench.backend.host_blocks(bench.layouts)), bench.from_there)

    def down() -> None:
        bench.device.attach_thread()
        bench.download(homes)

    def both() -> None:
        thread = threading.Thread(target=down)
        thread.start()
        bench.upload(pieces)
        thread.join()

    rate = bench.rate(2 * bench.nbytes, both)
    bench.row(
        "blocks both ways at once",
        f"{rate:.1f} GB/s",
        f"{rate / plain:.3f} of plain, at least 0.90",
        rate >= 0.9 * plain,
    )


def in_place(bench: Bench, alloc: float) -> None:
    """Tensors registered where they are, and tensors of a mapped file beside pageable copies."""
    tensors = [torch.empty(layout.numel, dtype=layout.dtype).fill_(1) for layout in bench.layouts]
    held = bench.backend.register(tensors)
    pieces = bench.pieces(tensors, bench.there)
    rate = bench.rate(bench.nbytes, lambda: bench.upload(pieces))
    bench.row("register", f"{rate:.1f} GB/s", f"{rate / alloc:.3f} of alloc, at least 0.90", rate >= 0.9 * alloc)
    del held
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        save_file({str(index): tensor for index, tensor in enumerate(tensors)}, path)
        tensors.clear()
        pieces.clear()
        with safe_open(path, framework="pt") as file:
            mapped = [file.get_tensor(str(index)) for index in range(len(bench.layouts))]
        from_file(bench, mapped)


def from_file(bench: Bench, mapped: list[torch.Tensor]) -> None:
    """A memory-mapped file whose pages are warm."""
    pieces = bench.pieces(mapped, bench.there)

    def pageable() -> None:
        for there, source in pieces:
            there.copy_(source)

    pageable()
    seconds = side_by_side(
        {
            "pageable": lambda: (pageable(), bench.device.synchronize()),
            "off": lambda: (bench.upload(pieces), bench.device.synchronize()),
        },
        rounds=bench.rounds,
    )
    slow, fast = (bench.nbytes / seconds[name] / 1e9 for name in ("pageable", "off"))
    bench.row("mapped safetensors file, pageable copies", f"{slow:.1f} GB/s")
    bench.row(
        f"mapped safetensors file (off), {torch.get_num_threads()} threads",
        f"{fast:.1f} GB/s",
        f"{fast / slow:.2f} of pageable, at least 2",
        fast >= 2 * slow,
    )


def additions(bench: Bench) -> None:
    """Gradients added to a host block that has some already."""
    total = bench.backend.host_empty((GIB // 4,), torch.float32).zero_()
    sums = bench.from_there.view(torch.float32).zero_()
    bench.device.synchronize()
    if sums.is_cuda:
        torch.cuda.synchronize()
    rate = bench.rate(GIB, lambda: bench.outbox.add(total, sums))
    bench.row(f"additions on the host, {torch.get_num_threads()} threads", f"{rate:.1f} GB/s")
    pair = [bench.backend.host_empty((GIB // 4,), torch.bfloat16).zero_() for _ in range(2)]
    rate = bench.rate(
        GIB, lambda: bench.outbox.combine(pair, sums, lambda p, more: add_to_pair(GradientPair(*p), more))
    )
    bench.row("the same sums rounded, added to two 16-bit blocks", f"{rate:.1f} GB/s")
    rate = bench.rate(GIB, lambda: bench.outbox.download(pair[1], sums))
    bench.row("the same sums rounded, as a second task's block", f"{rate:.1f} GB/s")


def delays(bench: Bench, up: float) -> None:
    """An 8 MB activation upload while 2 GB of weights go up."""
    weights = bench.backend.host_empty((GIB,), torch.uint8)
    activation = bench.backend.host_empty((8_000_000,), torch.uint8)
    room = bench.device.empty((8_000_000,), torch.uint8, stream=bench.device.activations_in)
    stream, chunk_s = bench.device.activations_in, CHUNK_BYTES / up / 1e9

    def activate() -> float:
        start = time.perf_counter()
        stream.copy(room, activation)
        arrived = stream.record()
        bench.inbox.let_pass(None, arrived)
        arrived.synchronize()
        return time.perf_counter() - start

    alone = statistics.median(activate() for _ in range(20))
    late: list[float] = []
    for _ in range(bench.rounds):
        thread = threading.Thread(
            target=lambda: (bench.device.attach_thread(), bench.upload([(bench.there, weights)] * 2))
        )
        thread.start()
        while thread.is_alive():
            late.append(activate() - alone)
            time.sleep(0.002)
        thread.join()
        bench.device.synchronize()
    late = late[bench.rounds :]
    median, most = statistics.median(late) * 1e3, max(late) * 1e3
    bench.row("8 MB upload alone", f"{alone * 1e3:.2f} ms")
    bound = 2 * chunk_s * 1e3
    bench.row(
        f"its delay while 2 GB of weights go up (median of {len(late)})",
        f"{median:.2f} ms",
        f"two chunks take {bound:.2f} ms; most seen {most:.2f} ms",
        median <= bound,
    )


def resident() -> int:
    """Bytes of this process that the operating system holds in memory, counted page by page."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Rss"))


def resident_growth(backend: Backend, layouts: Sequence[Layout]) -> int:
    """How much the process grows by blocks; the second time, when all that is not theirs is there already."""
    growth = 0
    for _ in range(2):
        before = resident()
        blocks = list(backend.host_blocks(layouts))
        for block in blocks:
            block.zero_()
        growth = resident() - before
        del block, blocks
    return growth


def exactness(bench: Bench) -> None:
    """Pinned bytes as the operating system counts them, beside the bytes asked for."""
    large = [
        Layout.of([torch.empty(n, dtype=torch.uint8, device="meta")]) for n in range(16 << 20, 19 << 20, 33_333)
    ]
    generator = torch.Generator().manual_seed(0)
    sizes = torch.randint(200, 6000, (100, 100), generator=generator).tolist()
    small = [Layout.of([torch.empty(n, device="meta") for n in sizes_of_layer]) for sizes_of_layer in sizes]
    cases = [
        ("blocks of 16 MiB and more", sum(layout.nbytes for layout in large), large, 1.001),
        ("ten thousand small parameters", 4 * sum(map(sum, sizes)), small, 1.02),
    ]
    for what, asked, layouts, bound in cases:
        ratio = resident_growth(bench.backend, layouts) / asked
        what, note = f"resident bytes, {what}", f"{ratio:.4f} of asked, at most {bound}"
        bench.row(what, f"{asked / 1e6:.0f} MB", note, ratio <= bound)


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", default=None)
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=max(torch.get_num_threads() // 4, 1))
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    backend = open_backend(options.devices, strict=False)
    bench = Bench(backend, options.layers, options.rounds)
    size = f"{bench.nbytes / 1e9:.2f} GB in {len(bench.layouts)} blocks"
    print(f"torch {torch.__version__}, {bench.device.name}, {size}")
    exactness(bench)
    up, down, both = plain_copies(bench)
    alloc, pieces = blocks_alone(bench, up, down)
    both_ways(bench, pieces, both)
    del pieces
    torch.set_num_threads(options.threads)
    in_place(bench, alloc)
    additions(bench)
    delays(bench, up)
    return int(options.check and bench.failed)


if __name__ == "__main__":
    sys.exit(main())
