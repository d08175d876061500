"""torch's allocator on a GPU: what is free in pieces is used for a tensor that is larger than each."""

from __future__ import annotations

import pytest
import torch
from programs import TORCH, ended
from rp_transfer.cuda.segments import leave_no_holes, settings_without_holes

EXPANDABLE = "expandable_segments:True"


@pytest.mark.parametrize("empty", [{}, {"PYTORCH_CUDA_ALLOC_CONF": ""}])
def test_without_settings_segments_become_expandable(empty: dict[str, str]) -> None:
    assert settings_without_holes(empty) == EXPANDABLE


@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_other_settings_of_the_user_stay(name: str) -> None:
    given = "garbage_collection_threshold:0.8"
    assert settings_without_holes({name: given}) == f"{given},{EXPANDABLE}"


@pytest.mark.parametrize("given", [EXPANDABLE, "expandable_segments:False", "backend:cudaMallocAsync"])
def test_what_the_user_has_decided_stays(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", given)
    monkeypatch.setattr("torch._C._accelerator_setAllocatorSettings", pytest.fail)
    leave_no_holes()


def test_torch_takes_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    # Raises AttributeError if this torch has no such function.
    monkeypatch.setattr("torch._C._accelerator_setAllocatorSettings", told.append)
    leave_no_holes()
    assert told == [EXPANDABLE]


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
    assert ended(TORCH + FITS, what, imports=TORCH) == (0, fits + "\n", "")
