"""The GPUs of a benchmark: what computes attention, how much memory is used, and that engines start alike."""

from __future__ import annotations

import gc

import torch


def attend_by_cudnn() -> None:
    """Let cuDNN compute attention, which is nearly twice as fast on Hopper as what torch takes by default."""
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)


def cap(gb: float | None) -> None:
    """Let this process use so many 10^9 bytes of each GPU; None: all."""
    for index in range(torch.cuda.device_count() if gb else 0):
        total = torch.cuda.get_device_properties(index).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, gb * 1e9 / total), index)


def forget() -> None:
    """Free what the engine before has left, and measure peaks anew."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
