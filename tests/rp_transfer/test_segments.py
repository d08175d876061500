"""torch's allocator on a GPU: what is free in pieces is used for a tensor that is larger than each."""

from __future__ import annotations

import os
from collections import defaultdict, deque
from contextlib import nullcontext
from itertools import count
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from programs import TORCH, ended
from rp_transfer.cuda.segments import leave_no_holes, settings_of

EXPANDABLE = "expandable_segments:True"
CUDA, HIP, ANY = VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What torch is told, by a process without settings."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    told: list[str] = []
    monkeypatch.setattr(
        "torch._C._accelerator_getAllocatorSettings", lambda: settings_of(os.environ), raising=False
    )
    # Raises AttributeError if this torch has no such function.
    monkeypatch.setattr("torch._C._accelerator_setAllocatorSettings", told.append)
    return told


@pytest.mark.parametrize(
    ("variables", "counts"),
    [
        ({}, ""),
        ({ANY: "a:1"}, "a:1"),
        ({ANY: "a:1", HIP: "b:1"}, "b:1"),
        ({ANY: "a:1", HIP: "b:1", CUDA: "c:1"}, "c:1"),
        ({ANY: "a:1", CUDA: ""}, ""),
    ],
)
def test_the_variable_that_counts_is_the_one_that_counts_for_torch(variables: dict[str, str], counts: str) -> None:
    assert settings_of(variables) == counts


def test_without_settings_segments_become_expandable_and_the_log_says_so(
    told: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        leave_no_holes()
    assert told == [EXPANDABLE]
    assert EXPANDABLE in caplog.text


@pytest.mark.parametrize("end", ["", ",", " , "])
def test_other_settings_of_the_user_stay(end: str, told: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ANY, f"garbage_collection_threshold:0.8{end}")
    leave_no_holes()
    assert told == [f"garbage_collection_threshold:0.8,{EXPANDABLE}"]


@pytest.mark.parametrize("given", [EXPANDABLE, "expandable_segments:False", "backend:cudaMallocAsync"])
def test_what_the_user_has_decided_stays(given: str, told: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ANY, given)
    leave_no_holes()
    assert told == []


def test_what_the_program_has_decided_stays_where_torch_tells(
    told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "torch._C._accelerator_getAllocatorSettings", lambda: "expandable_segments:False", raising=False
    )
    leave_no_holes()
    assert told == []


def test_a_gpu_that_gives_unused_memory_back_leaves_no_holes_from_then_on(
    told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cupy = pytest.importorskip("cupy")
    from rp_transfer.cuda.backend import CudaDevice

    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(cupy, "get_default_memory_pool", Mock)
    CudaDevice.release_unused(Mock())
    assert told == [EXPANDABLE]


def test_streams_are_used_again_for_the_same_purpose_and_by_one_device_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cupy = pytest.importorskip("cupy")
    from rp_transfer.cuda import backend

    made = count(1)
    monkeypatch.setattr(cupy.cuda, "Stream", lambda **_: SimpleNamespace(ptr=next(made)))
    monkeypatch.setattr(cupy.cuda, "Device", nullcontext)
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    monkeypatch.setattr(torch.cuda, "ExternalStream", Mock())
    monkeypatch.setattr(backend, "_IDLE_STREAMS", defaultdict(deque))

    def streams(device: backend.CudaDevice) -> list[int]:
        return [stream.native.ptr for stream in device._streams]

    first, second = backend.CudaDevice(0, Mock()), backend.CudaDevice(0, Mock())
    compute = first.compute
    assert [*streams(first), *streams(second)] == list(range(1, 11))
    del first
    assert streams(backend.CudaDevice(1, Mock())) == list(range(11, 16))
    # Compute's is still in use.
    third = backend.CudaDevice(0, Mock())
    assert streams(third) == [16, 2, 3, 4, 5]
    del compute, third
    assert sorted(streams(backend.CudaDevice(0, Mock()))) == [1, 2, 3, 4, 5]


FITS = """
import sys
from rp_transfer.cuda.backend import CudaBackend

def fits():
    mib = 1 << 18
    torch.empty(2048 * mib, device="cuda")  # One segment, which the next eight split.
    pieces = [torch.empty(256 * mib, device="cuda") for _ in range(8)]
    del pieces[::2]
    try:
        torch.empty(512 * mib, device="cuda")
    except torch.OutOfMemoryError:
        return False
    return True

device = CudaBackend([0]).devices[0]
total = torch.cuda.get_device_properties(0).total_memory
torch.cuda.set_per_process_memory_fraction((2200 << 20) / total, 0)
if sys.argv[1] == "release":
    device.release_unused()
print(fits())
"""


@pytest.mark.cuda
@pytest.mark.parametrize(("what", "fits"), [("keep", "False"), ("release", "True")])
def test_holes_are_used_once_unused_memory_was_released(what: str, fits: str) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    if settings_of(os.environ):
        pytest.skip("the allocator has settings")
    assert ended(TORCH + FITS, what, imports=TORCH) == (0, fits + "\n", "")


UNMAPPED = """
import gc
from rp_transfer.cuda.backend import CudaBackend
from rp_transfer.cuda.segments import leave_no_holes

leave_no_holes()

def streams():
    backend = CudaBackend([0])
    (device,) = backend.devices
    for stream in device._streams:
        device.empty((64 << 20,), torch.uint8, stream=stream)  # Free again, and kept by torch for this stream.
    backend.close()
    return [stream.native.ptr for stream in device._streams]

first = streams()
gc.collect()
torch.cuda.empty_cache()
print(torch.cuda.memory_reserved(), streams() == first)
"""


@pytest.mark.cuda
def test_memory_of_a_device_that_is_gone_is_given_back() -> None:
    if settings_of(os.environ):
        pytest.skip("the allocator has settings")
    assert ended(TORCH + UNMAPPED, imports=TORCH) == (0, "0 True\n", "")
