"""CPU devices with little memory: what torch operations allocate counts, and the limit raises torch's error."""

from __future__ import annotations

import pytest
import torch
from rp_transfer import CpuBackend, is_out_of_memory, open_backend
from torch import nn

LIMIT = 10_000


def test_storages_of_operations_count_while_they_live() -> None:
    device = CpuBackend(1, memory_bytes=LIMIT).devices[0]
    layer = nn.Linear(10, 10)
    with device.computing():
        x = torch.ones(20, 10)
        assert device.memory().used_bytes == 800
        y = layer(x).tanh()
        # What the linear layer returned is freed: tanh keeps its own result.
        assert device.memory().used_bytes == 1600
        part = y.view(-1)[:3]
        del y
        assert device.memory().used_bytes == 1600
        part.sum().backward()
        del part, x
        assert device.memory().used_bytes == 440
        layer.zero_grad()
        assert device.memory().used_bytes == 0
    torch.ones(LIMIT)
    assert device.memory().used_bytes == 0
    assert device.memory().total_bytes == LIMIT


def test_what_is_allocated_for_streams_and_the_host_counts_once_or_not_at_all() -> None:
    backend = CpuBackend(1, memory_bytes=LIMIT)
    device = backend.devices[0]
    with device.computing():
        there = device.empty((100,), torch.float32, stream=device.compute)
        host = backend.host_empty((5000,), torch.float32)
        assert device.memory().used_bytes == 400
        del there, host
        assert device.memory().used_bytes == 0


def test_the_limit_raises_torchs_error_and_takes_nothing() -> None:
    device = CpuBackend(2, memory_bytes=LIMIT).devices[1]
    with device.computing():
        kept = torch.ones(1500)
        with pytest.raises(torch.OutOfMemoryError, match="cpu:1 is out of memory: 8000 bytes"):
            torch.ones(2000)
        with pytest.raises(torch.OutOfMemoryError):
            device.empty((2000,), torch.float32, stream=device.compute)
        assert device.memory().used_bytes == kept.nbytes
        device.empty((1000,), torch.float32, stream=device.compute)


class _OfCupy(Exception):
    """Stands for CuPy's, which is known by its name."""


_OfCupy.__module__, _OfCupy.__name__ = "cupy.cuda.memory", "OutOfMemoryError"


@pytest.mark.parametrize(
    ("error", "is_one"),
    [
        (torch.OutOfMemoryError("as arranged"), True),
        (_OfCupy("as arranged"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
        (ValueError("out of memory"), False),
        (MemoryError(), False),
        (KeyboardInterrupt(), False),
    ],
)
def test_errors_that_say_that_a_device_has_too_little_memory(error: BaseException, is_one: bool) -> None:
    assert is_out_of_memory(error) == is_one


def test_only_cpu_devices_are_given_a_limit() -> None:
    assert open_backend("cpu:2", memory_bytes=LIMIT).devices[1].memory().total_bytes == LIMIT
    with pytest.raises(ValueError, match="set_per_process_memory_fraction"):
        open_backend("cuda", memory_bytes=LIMIT)
