"""What a checkpoint costs a training that goes on: steps with and without one, in one process; one JSON line.

    python benchmarks/checkpoints.py --model qwen3-1.7b --batch 32 --compile --folder /scratch
    python benchmarks/checkpoints.py --devices cpu:1 --model tiny --batch 8 --sequence 16 --every 5

`--every` steps without a checkpoint, then as many of which the first is followed by one that is written while the
rest go on. `added_s` is the difference; `allowed_s` the larger of 3 % of these steps and of the time in which the
disk takes so many bytes, at the rate of a file written before in the same way, less one step. `buffer_gb` is by
how much the process grew at most while the checkpoint was written.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import threading
import time
from itertools import pairwise
from pathlib import Path

import psutil
import roundpipe
import torch
from decoder import SIZES, batches, decoder
from gpus import attend_by_cudnn
from loops import Workload, loss_of
from roundpipe import RoundPipe, RoundPipeRunConfig, Runtime
from torch import Tensor

_RATE_BYTES, _PIECE_BYTES = 8 << 30, 64 << 20


def main() -> None:
    args = _arguments()
    attend_by_cudnn()
    with Runtime(args.devices, strict=False) as runtime, tempfile.TemporaryDirectory(dir=args.folder) as folder:
        options = {"compile_layers": True} if args.compile else {}
        config = RoundPipeRunConfig(num_microbatch=args.microbatches)
        model = RoundPipe(decoder(SIZES[args.model]), torch.float32, "bench", config, runtime=runtime, **options)
        optimizer = roundpipe.optim.AdamW(model.optim_parameters(), lr=1e-5)
        batch, loss_fn = batches(SIZES[args.model], args.batch, args.sequence), loss_of(_workload(args))

        def step() -> float:
            tokens: Tensor = batch()
            loss = model.forward_backward(input_args=(tokens,), label=tokens, loss_fn=loss_fn)
            model.step(lambda: (optimizer.step(), optimizer.zero_grad()))
            loss.item()
            return time.perf_counter()

        def steps(count: int) -> list[float]:
            times = [time.perf_counter(), *(step() for _ in range(count))]
            return [after - before for before, after in pairwise(times)]

        steps(args.warmup)
        rate = _disk_bytes_per_s(Path(folder), args.rate_bytes)
        without = steps(args.every)
        growth = Growth()
        begin = time.perf_counter()
        saving = roundpipe.save_checkpoint(Path(folder) / "step", model, optimizer, wait=False)
        saved = steps(args.every)
        in_steps = time.perf_counter() - begin
        saving.wait()
        whole = time.perf_counter() - begin
        buffer = growth.end()
        nbytes = sum(file.stat().st_size for file in (Path(folder) / "step").rglob("*") if file.is_file())
        allowed = max(0.03 * sum(without), nbytes / rate - statistics.median(without))
        print(
            json.dumps(
                {
                    "model": args.model,
                    "batch": args.batch,
                    "steps": args.every,
                    "step_s": round(statistics.median(without), 4),
                    "without_s": round(sum(without), 2),
                    "with_s": round(in_steps, 2),
                    "added_s": round(in_steps - sum(without), 2),
                    "added_percent": round(100 * (in_steps / sum(without) - 1), 2),
                    "allowed_s": round(allowed, 2),
                    "written_after_s": round(whole, 2),
                    "longest_step_s": round(max(saved), 2),
                    "checkpoint_gb": round(nbytes / 1e9, 2),
                    "disk_gb_s": round(rate / 1e9, 2),
                    "buffer_gb": round(buffer / 1e9, 2),
                }
            ),
            flush=True,
        )


class Growth:
    """By how much the process grows, read every tenth of a second; file pages that it wrote do not count."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._before = self._most = self._process.memory_info().rss
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()

    def end(self) -> int:
        """The most bytes above those at the start."""
        self._over.set()
        self._thread.join()
        return self._most - self._before

    def _watch(self) -> None:
        while not self._over.wait(0.1):
            self._most = max(self._most, self._process.memory_info().rss)


def _disk_bytes_per_s(folder: Path, nbytes: int) -> float:
    """The rate of one file written in pieces and synchronised."""
    piece = memoryview(os.urandom(1 << 20) * (_PIECE_BYTES >> 20))
    begin = time.perf_counter()
    with (folder / "rate").open("wb", buffering=0) as file:
        for _ in range(max(nbytes // _PIECE_BYTES, 1)):
            file.write(piece)
        os.fsync(file.fileno())
    taken = time.perf_counter() - begin
    written = (folder / "rate").stat().st_size
    (folder / "rate").unlink()
    return written / taken


def _workload(args: argparse.Namespace) -> Workload:
    return Workload(
        model=args.model,
        batch=args.batch,
        sequence=args.sequence,
        microbatches=args.microbatches,
        compile=args.compile,
        devices=args.devices,
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", default=None, help="as ROUNDPIPE_DEVICES takes them")
    parser.add_argument("--model", choices=sorted(SIZES), default="qwen3-1.7b")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--sequence", type=int, default=2048)
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--compile", action="store_true", help="compile each block")
    parser.add_argument("--every", type=int, default=50, help="steps of each part")
    parser.add_argument("--warmup", type=int, default=8, help="steps before")
    parser.add_argument(
        "--folder", default=None, help="on the disk to write to; default: the folder for temporary files"
    )
    parser.add_argument("--rate-bytes", type=int, default=_RATE_BYTES, help="written to find the disk's rate")
    return parser.parse_args()


if __name__ == "__main__":
    main()
