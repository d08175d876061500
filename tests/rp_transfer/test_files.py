"""Mapped files: what is copied out of them is what they hold, and the pages that were read are not kept."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from rp_transfer import GivingBack, Layout, MappedFiles
from rp_transfer.memory.files import PIECE_BYTES
from torch import nn

pytestmark = pytest.mark.skipif(not Path("/proc/self/pagemap").exists(), reason="mappings are found on Linux only")

COUNT = 5 * PIECE_BYTES // 8 + 3
# What the system may map around a page that was read.
AROUND_BYTES = 1 << 22


@pytest.fixture
def file(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "weights"
    # Not whole pages, as in safetensors, whose header is before the first tensor.
    path.write_bytes(b"\0" * 12 + torch.arange(COUNT, dtype=torch.int32).numpy().tobytes())
    yield path
    path.unlink()


def mapped(path: Path, count: int = COUNT) -> torch.Tensor:
    """The file's first numbers, (count,) int32, mapped as safetensors maps them."""
    storage = torch.UntypedStorage.from_file(str(path), False, path.stat().st_size)[12 : 12 + 4 * count]
    return torch.tensor([], dtype=torch.uint8).set_(storage).view(torch.int32)


def resident_bytes(path: Path) -> int:
    """How much of the file is resident in this process."""
    lines = Path("/proc/self/smaps").read_text().splitlines()
    starts = [index for index, line in enumerate(lines) if line.endswith(f" {path}")]
    sizes = [next(line for line in lines[start:] if line.startswith("Rss:")) for start in starts]
    return sum(int(size.split()[1]) * 1024 for size in sizes)


def test_what_is_mapped_is_found(file: Path) -> None:
    tensor = mapped(file)
    files = MappedFiles.now()
    assert files.holds(tensor)
    assert files.holds(tensor[7:9])
    assert not files.holds(torch.zeros(COUNT))
    assert not files.holds(torch.empty(0))
    shared = mmap.mmap(-1, 1 << 20)
    assert not MappedFiles.now().holds(torch.frombuffer(shared, dtype=torch.uint8))


@pytest.mark.few(1)
@pytest.mark.parametrize("dtype", [torch.int32, torch.float32, torch.int8])
@pytest.mark.parametrize("view", [lambda t: t, lambda t: t[::2], lambda t: t[: COUNT // 3 * 3].view(-1, 3).T])
def test_a_copy_is_that_of_torch_and_leaves_no_pages(
    file: Path, view: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype
) -> None:
    source = view(mapped(file))
    wanted = torch.empty(source.shape, dtype=dtype).copy_(source)
    assert resident_bytes(file) > PIECE_BYTES
    found = torch.empty(source.shape, dtype=dtype)
    MappedFiles.now().copy(found, source)
    assert torch.equal(found, wanted)
    assert resident_bytes(file) < AROUND_BYTES


def test_no_more_than_a_piece_is_resident_while_a_tensor_is_copied(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[int] = []
    give_back = MappedFiles.give_back_range

    def watched(self: MappedFiles, address: int, nbytes: int) -> None:
        found.append(resident_bytes(file))
        give_back(self, address, nbytes)

    monkeypatch.setattr(MappedFiles, "give_back_range", watched)
    source = mapped(file)
    MappedFiles.now().copy(torch.empty_like(source), source)
    assert len(found) == 3
    assert PIECE_BYTES // 2 < max(found) < PIECE_BYTES + AROUND_BYTES


def test_pages_that_were_written_are_kept(file: Path) -> None:
    tensor = mapped(file)
    tensor[COUNT // 2] = -1
    assert tensor.double().sum() < COUNT * (COUNT - 1) / 2
    files = MappedFiles.now()
    files.give_back(tensor)
    assert tensor[COUNT // 2] == -1
    copy = torch.empty_like(tensor)
    files.copy(copy, tensor)
    assert copy[COUNT // 2] == tensor[COUNT // 2] == -1
    assert resident_bytes(file) < PIECE_BYTES + AROUND_BYTES


def test_memory_that_is_not_a_files_is_left_alone() -> None:
    tensor = torch.arange(COUNT)
    MappedFiles.now().give_back(tensor)
    assert torch.equal(tensor, torch.arange(COUNT))


def test_a_block_is_filled_from_a_file_that_is_mapped_no_more_afterwards(file: Path) -> None:
    parameter = nn.Parameter(mapped(file), requires_grad=False)
    layout = Layout.of([parameter])
    layout.move_in(torch.empty(layout.numel, dtype=layout.dtype), [parameter], MappedFiles.now())
    assert torch.equal(parameter, torch.arange(COUNT, dtype=torch.int32))
    assert str(file) not in Path("/proc/self/maps").read_text()


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "compute",
    [
        lambda t: t.to(dtype=torch.float32),
        lambda t: t.to(device="cpu", dtype=torch.float32),
        lambda t: t.to(torch.float32),
        lambda t: torch.stack([t[: COUNT // 2], t[COUNT // 2 : COUNT // 2 * 2]]),
        lambda t: torch.zeros(COUNT, dtype=torch.int32).copy_(t),
        lambda t: torch.cat(tensors=(t, t)),
        lambda t: t.sort(descending=True).values,
    ],
)
def test_what_functions_compute_from_files_leaves_no_pages(
    file: Path, compute: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    tensor = mapped(file)
    with GivingBack():
        found = compute(tensor)
        assert resident_bytes(file) < AROUND_BYTES
    assert torch.equal(found, compute(tensor))
    assert resident_bytes(file) > AROUND_BYTES


def test_small_reads_are_given_back_at_the_end(file: Path) -> None:
    tensor = mapped(file, PIECE_BYTES // 8)
    with GivingBack():
        copy = tensor.clone()
        assert resident_bytes(file) >= PIECE_BYTES // 2
    assert resident_bytes(file) < AROUND_BYTES
    assert torch.equal(copy, tensor)


def test_views_are_views_and_writing_stays(file: Path) -> None:
    tensor = mapped(file)
    with GivingBack():
        view = tensor.view(-1)[3:].to(dtype=torch.int32, device="cpu")
        view[0] = -5
        tensor.add(1)
    assert view.data_ptr() == tensor[3:].data_ptr()
    assert tensor[3] == -5
    assert tensor[4] == 4


def test_casts_keep_gradients(file: Path) -> None:
    del file
    leaf = torch.ones(PIECE_BYTES // 4, requires_grad=True)
    with GivingBack():
        leaf.to(dtype=torch.float64).sum().backward()
    assert leaf.grad is not None
    assert leaf.grad.sum() == PIECE_BYTES // 4
