"""What this machine can do: the ceilings that `train.py`'s figures are held against, as one JSON line.

    python benchmarks/ceilings.py

matmul and attention (TFLOP/s, bf16), pinned copies up, down and both ways at once (GB/s), a copy within host
memory (GB/s, read and written), and AdamW on the host (10^9 parameters a second, of 28 bytes of traffic each).
Medians of several runs. Without a GPU only the host's figures are there.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable

import torch
from gpus import attend_by_cudnn
from optim import link, make_arrays
from rp_optim import AdamW, unlink
from torch.nn import functional

ROUNDS = 7
COPY_BYTES = 1 << 30


def main() -> None:
    found = {"torch": torch.__version__, "threads": torch.get_num_threads(), **_host()}
    if torch.cuda.is_available():
        found |= {"gpu": torch.cuda.get_device_name(), **_arithmetic(), **_copies()}
    sys.stdout.write(json.dumps({name: round(x, 1) if isinstance(x, float) else x for name, x in found.items()}))
    sys.stdout.write("\n")


def _median_s(run: Callable[[], object], wait: Callable[[], object] = lambda: None) -> float:
    seconds = []
    for _ in range(2 + ROUNDS):
        wait()
        start = time.perf_counter()
        run()
        wait()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[2:])


def _host() -> dict[str, float]:
    source, target = (torch.ones(COPY_BYTES // 4) for _ in range(2))
    copied = 2 * COPY_BYTES / _median_s(lambda: target.copy_(source)) / 1e9
    count = 100_000_000
    arrays = make_arrays(count, 10)
    optimizer = AdamW([each.master for each in arrays], lr=1e-3)

    def step() -> None:
        link(arrays)
        optimizer.step()
        for each in arrays:
            unlink(each.master)

    return {"host_copy_gb_s": copied, "adamw_gparameters_s": count / _median_s(step) / 1e9}


def _arithmetic() -> dict[str, float]:
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    q, k, v = (torch.randn(8, heads, 2048, 128, device="cuda", dtype=torch.bfloat16) for heads in (16, 8, 8))
    attend_by_cudnn()

    def attend() -> torch.Tensor:
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    flops = 2 * 8 * 16 * 2048 * 2048 * 128
    return {
        "matmul_tflops": 2 * 8192**3 / _median_s(lambda: a @ a, torch.cuda.synchronize) / 1e12,
        "attention_tflops": flops / _median_s(attend, torch.cuda.synchronize) / 1e12,
    }


def _copies() -> dict[str, float]:
    here, home = (torch.empty(COPY_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2))
    there, away = (torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda") for _ in range(2))
    streams = torch.cuda.Stream(), torch.cuda.Stream()

    def both() -> None:
        with torch.cuda.stream(streams[0]):
            there.copy_(here, non_blocking=True)
        with torch.cuda.stream(streams[1]):
            home.copy_(away, non_blocking=True)

    wait = torch.cuda.synchronize
    return {
        "up_gb_s": COPY_BYTES / _median_s(lambda: there.copy_(here, non_blocking=True), wait) / 1e9,
        "down_gb_s": COPY_BYTES / _median_s(lambda: home.copy_(there, non_blocking=True), wait) / 1e9,
        "both_gb_s": 2 * COPY_BYTES / _median_s(both, wait) / 1e9,
    }


if __name__ == "__main__":
    main()
