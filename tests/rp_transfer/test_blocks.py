"""Layouts: several tensors in one piece of memory, each as if it were alone."""

from __future__ import annotations

import gc
import io
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rp_transfer import CpuBackend, Layout, Unordered
from rp_transfer.memory.blocks import ALIGNMENT

DTYPES = st.sampled_from([torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int8, torch.bool])
SHAPES = st.lists(st.integers(0, 5), max_size=4)


@st.composite
def tensors(draw: st.DrawFn) -> list[torch.Tensor]:
    """One to five tensors of one dtype: contiguous, transposed, strided, expanded or overlapping."""
    dtype = draw(DTYPES)
    return [draw(tensors_of(dtype)) for _ in range(draw(st.integers(1, 5)))]


@st.composite
def tensors_of(draw: st.DrawFn, dtype: torch.dtype) -> torch.Tensor:
    shape = draw(SHAPES)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    tensor = torch.randint(0, 2, shape, generator=generator).to(dtype)
    kind = draw(st.sampled_from(["plain", "permuted", "strided", "expanded", "overlapping"]))
    if kind == "permuted":
        return tensor.permute(draw(st.permutations(range(tensor.dim()))))
    if kind == "strided" and tensor.dim():
        return tensor[..., ::2]
    if kind == "expanded":
        return tensor.unsqueeze(0).expand(3, *tensor.shape)
    if kind == "overlapping":
        return torch.arange(8).to(dtype).as_strided((2, 2, 2), (1, 1, 5))
    return tensor


@settings(deadline=None)
@given(given_tensors=tensors())
def test_what_is_filled_in_comes_back(given_tensors: list[torch.Tensor]) -> None:
    layout = Layout.of(given_tensors)
    block = torch.empty(layout.numel, dtype=layout.dtype)
    layout.fill(block, given_tensors)
    for views in (layout.views(block), layout.storages(block)):
        assert all(torch.equal(view, tensor) for view, tensor in zip(views, given_tensors, strict=True))
        assert all(view.shape == tensor.shape for view, tensor in zip(views, given_tensors, strict=True))


@settings(deadline=None)
@given(given_tensors=tensors())
def test_places_are_aligned_inside_the_block_and_do_not_overlap(given_tensors: list[torch.Tensor]) -> None:
    layout = Layout.of(given_tensors)
    owner = torch.zeros(layout.numel, dtype=torch.int64)
    for number, (span, view) in enumerate(zip(layout.extents, layout.views(owner), strict=True), start=1):
        nbytes = span.numel * layout.dtype.itemsize
        assert span.offset * layout.dtype.itemsize % (ALIGNMENT if nbytes >= 4096 else 16) == 0
        assert (view == 0).all()
        view.fill_(number)
        assert int((owner == number).sum()) == span.numel == view.numel()
    assert layout.nbytes == layout.numel * layout.dtype.itemsize
    padding = (ALIGNMENT - 1) * (len(given_tensors) - 1)
    assert layout.nbytes <= sum(t.numel() * t.element_size() for t in given_tensors) + padding


@settings(deadline=None)
@given(given_tensors=tensors(), begin=st.integers(0, 3))
def test_all_views_at_once_are_those_of_the_spans(given_tensors: list[torch.Tensor], begin: int) -> None:
    layout = Layout.of(given_tensors)
    block = torch.zeros(begin + layout.numel, dtype=layout.dtype)[begin:]
    for span, view in zip(layout.extents, layout.views(block), strict=True):
        single = span.of(block)
        assert (view.shape, view.stride()) == (single.shape, single.stride())
        assert view.data_ptr() == single.data_ptr() or not view.numel()
        assert view.untyped_storage().data_ptr() == block.untyped_storage().data_ptr() or not view.numel()


@settings(deadline=None)
@given(given_tensors=tensors())
def test_dense_strides_stay_and_others_become_contiguous(given_tensors: list[torch.Tensor]) -> None:
    layout = Layout.of(given_tensors)
    for span, tensor in zip(layout.extents, given_tensors, strict=True):
        wanted = torch.empty_like(tensor, memory_format=torch.preserve_format)
        dense = tensor.numel() and torch.ops.aten.is_non_overlapping_and_dense(tensor)
        if dense:
            assert span.stride == tensor.stride() == wanted.stride()
        elif tensor.numel():
            assert span.stride == tensor.contiguous().stride()


def test_channels_last_stays_channels_last() -> None:
    weight = torch.rand(4, 3, 2, 2).to(memory_format=torch.channels_last)
    (view,) = Layout.of([weight]).storages(torch.empty(weight.numel()))
    assert view.is_contiguous(memory_format=torch.channels_last)


def test_a_layout_is_for_one_dtype() -> None:
    with pytest.raises(ValueError, match=r"exactly one dtype, but got \['torch.float32', 'torch.int64'\]"):
        Layout.of([torch.zeros(1), torch.zeros(1, dtype=torch.int64)])
    with pytest.raises(ValueError, match="exactly one dtype"):
        Layout.of([])


def test_filling_casts_and_stays_out_of_the_graph() -> None:
    layout = Layout.of([torch.zeros(2, dtype=torch.bfloat16)])
    block = torch.zeros(2, dtype=torch.bfloat16)
    layout.fill(block, [torch.nn.Parameter(torch.tensor([1.5, 2.5]))])
    assert block.tolist() == [1.5, 2.5]
    assert not block.requires_grad
    with pytest.raises(ValueError, match="longer"):
        layout.fill(block, [torch.zeros(2), torch.zeros(2)])


def test_storages_share_the_blocks_bytes_but_count_their_own_versions() -> None:
    layout = Layout.of([torch.zeros(3), torch.zeros(2, 2)])
    block = torch.zeros(layout.numel)
    one, two = layout.storages(block)
    one.fill_(5)
    assert block[:3].tolist() == [5, 5, 5]
    assert one._version == 1
    assert two._version == 0
    assert one.untyped_storage().nbytes() == 12
    assert two.untyped_storage().nbytes() == 16


def test_saving_one_storage_does_not_save_the_block() -> None:
    layout = Layout.of([torch.zeros(3), torch.zeros(100_000)])
    block = torch.ones(layout.numel)
    small, _ = layout.storages(block)
    file = io.BytesIO()
    torch.save(small, file)
    assert file.tell() < 10_000
    file.seek(0)
    assert torch.equal(torch.load(file), small)


def test_parameters_on_storages_train_and_load() -> None:
    model = torch.nn.Linear(3, 2)
    layout = Layout.of([*model.parameters()])
    block = torch.empty(layout.numel)
    layout.fill(block, model.parameters())
    for parameter, storage in zip(model.parameters(), layout.storages(block), strict=True):
        parameter.data = storage
    before = block.clone()
    model(torch.ones(3)).sum().backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.sub_(torch.ones(()) if parameter.grad is None else parameter.grad)
    assert not torch.equal(block, before)
    model.load_state_dict({"weight": torch.ones(2, 3), "bias": torch.zeros(2)})
    assert layout.views(block)[0].sum() == 6


def test_a_storage_keeps_its_block_alive_and_no_longer() -> None:
    backend = CpuBackend(1)
    layout = Layout.of([torch.zeros(3), torch.zeros(2)])
    block = backend.host_empty((layout.numel,), torch.float32).fill_(7)
    one, two = layout.storages(block)
    gone = weakref.ref(block)
    del block, two
    gc.collect()
    assert one.tolist() == [7, 7, 7]
    assert backend.host_memory().used_bytes == layout.nbytes
    del one
    gc.collect()
    assert gone() is None
    assert backend.host_memory().used_bytes == 0


def test_uses_of_a_storage_are_uses_of_its_block() -> None:
    backend = CpuBackend(1)
    device = backend.devices[0]
    layout = Layout.of([torch.zeros(3), torch.zeros(2)])
    block = backend.host_empty((layout.numel,), torch.float32).fill_(7)
    one, two = layout.storages(block)
    there = device.empty((3,), torch.float32, stream=device.weights_in)
    device.weights_in.copy(there, one)
    backend.host_touch(write=[two])
    with pytest.raises(Unordered):
        backend.host_touch(write=[block])
    device.synchronize()
    backend.host_touch(write=[block])
