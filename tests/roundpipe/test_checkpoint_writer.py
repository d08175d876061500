"""A checkpoint's writer holds a limited number of buffers, waits when they are full, and tells for how long."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import threading
from collections import Counter, OrderedDict, deque
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpointing import job
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from roundpipe import CheckpointError, Runtime, save_checkpoint
from rp_checkpoint.files import tensor_file, writer
from rp_checkpoint.files.tensor_file import catalogue, header, source_of
from rp_checkpoint.files.values import decode, encode
from safetensors.torch import load_file, save_file

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.bool, torch.float8_e5m2]


@settings(max_examples=examples(60), deadline=None)
@given(
    shapes=st.lists(st.lists(st.integers(0, 9), max_size=3), max_size=5),
    dtypes=st.lists(st.sampled_from(DTYPES), min_size=5, max_size=5),
    stride=st.sampled_from([8, 24, 64, 1 << 20]),
)
def test_the_library_reads_what_is_written_in_pieces_and_the_other_way_round(
    tmp_path_factory: pytest.TempPathFactory,
    shapes: list[list[int]],
    dtypes: list[torch.dtype],
    stride: int,
) -> None:
    folder = tmp_path_factory.mktemp("files")
    tensors = {
        str(at): torch.randint(0, 2, shape).to(dtype)
        for at, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=False))
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer, "STRIDE_BYTES", stride)
        patch.setattr(tensor_file, "STRIDE_BYTES", stride)
        own = writer.FileWriter(folder, buffer_bytes=1)
        own.write("a.safetensors", [source_of(*item) for item in tensors.items()], {"format": "pt"})
        sums = own.finish()["a.safetensors"]
        same(load_file(folder / "a.safetensors"), tensors)
        same({name: found.read() for name, found in catalogue(folder / "a.safetensors").items()}, tensors)
        content = (folder / "a.safetensors").read_bytes()
        pieces = [content[at : at + stride] for at in range(0, len(content), stride)]
        assert sums.strides == tuple(hashlib.sha256(piece).hexdigest() for piece in pieces)
        save_file(tensors, folder / "b.safetensors")
        same({name: found.read() for name, found in catalogue(folder / "b.safetensors").items()}, tensors)


def same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert found[name].dtype == value.dtype
        assert found[name].shape == value.shape
        assert torch.equal(found[name].float(), value.float())


def test_a_cast_and_strides_are_written_as_torch_has_them(tmp_path: Path) -> None:
    values = torch.randn(5, 7).t()
    own = writer.FileWriter(tmp_path, buffer_bytes=1)
    own.write("a.safetensors", [source_of("x", values, torch.bfloat16)], {})
    own.finish()
    assert torch.equal(load_file(tmp_path / "a.safetensors")["x"], values.bfloat16())
    target = torch.zeros(5, 7, dtype=torch.float64).t()
    catalogue(tmp_path / "a.safetensors")["x"].read_into(target)
    assert torch.equal(target, values.bfloat16().double())


def test_a_dtype_that_safetensors_lacks_is_refused_by_name() -> None:
    with pytest.raises(CheckpointError, match=r"x has dtype torch.complex128"):
        header([source_of("x", torch.zeros(1, dtype=torch.complex128))], {})


class Slow:
    """A disk that takes nothing until it is let go. `entered`: a write has begun."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.entered, self.released = threading.Semaphore(0), threading.Event()
        write = os.pwrite

        def slow(*args: Any) -> int:
            self.entered.release()
            assert self.released.wait(30)
            return write(*args)

        patch.setattr(os, "pwrite", slow)


def test_a_full_buffer_waits_for_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "STRIDE_BYTES", 256)
    monkeypatch.setattr(writer, "_LONG_S", 0.01)
    told = threading.Event()
    monkeypatch.setattr(writer._LOG, "warning", lambda *_: told.set())
    slow = Slow(monkeypatch)
    own = writer.FileWriter(tmp_path, buffer_bytes=512)
    values = torch.arange(1000)
    taking = threading.Thread(target=own.write, args=("a.safetensors", [source_of("x", values)], {}))
    taking.start()
    for _ in range(2):
        assert slow.entered.acquire(timeout=30)
    # Two buffers are all that there may be, and both are with the disk.
    assert told.wait(30)
    assert taking.is_alive()
    assert own.nbytes == 512
    slow.released.set()
    taking.join(30)
    values.zero_()
    own.finish()
    assert own.waited_s > 0
    assert torch.equal(load_file(tmp_path / "a.safetensors")["x"], torch.arange(1000))


def test_calls_go_on_while_the_disk_is_slow_and_the_next_step_waits(
    tmp_path: Path, two: Runtime, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    truth = job(two, double_buffer=True)
    wanted = truth.train(0, 4)
    after = job(two)
    after.train(0, 1)
    monkeypatch.setattr(writer, "STRIDE_BYTES", 256)
    slow = Slow(monkeypatch)
    own = job(two, double_buffer=True)
    found = own.train(0, 1)
    with caplog.at_level(logging.INFO, "rp_checkpoint.saving.saving"):
        saving = save_checkpoint(tmp_path / "c", own.model, own.optimizer, wait=False, buffer_bytes=512)
        stepped = threading.Event()
        update = own.update

        def noted() -> None:
            stepped.set()
            update()

        own.update = noted  # type: ignore[method-assign]
        # A whole call, and the launch of its step, while the disk takes nothing.
        found += own.train(1, 2)
        assert slow.entered.acquire(timeout=30)
        assert not stepped.is_set()
        assert not saving.done()
        slow.released.set()
        found += own.train(2, 4)
        saving.wait()
    assert saving.waited_s > 0
    assert "held up the next step" in caplog.text
    assert found == wanted
    weights = after.weights()
    for name, value in load_file(tmp_path / "c/model.safetensors").items():
        assert torch.equal(value, weights[name])


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.text() | st.integers(), inner)
        | st.lists(inner).map(deque)
        | st.dictionaries(st.text(), inner).map(OrderedDict)
        | st.lists(st.integers()).map(Counter)
        | st.frozensets(st.integers())
    ),
    max_leaves=12,
)


@pytest.mark.later
@settings(max_examples=examples(100), deadline=None)
@given(value=VALUES)
def test_plain_values_come_back_as_they_were(value: Any) -> None:
    tensors: dict[str, torch.Tensor] = {}
    found = decode(json.loads(json.dumps(encode(value, "x", tensors.__setitem__))), tensors.__getitem__)
    assert found == value
    assert type(found) is type(value)
