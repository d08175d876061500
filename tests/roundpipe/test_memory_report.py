"""Memory reports: each kind is what is really held, and the whole is what the runtime gave."""

from __future__ import annotations

import copy
import dataclasses
import gc
from typing import Any

import pytest
import roundpipe
import torch
from plain import assert_near, gradients, square_error
from roundpipe import MemoryReport, RoundPipe, RoundPipeRunConfig, Runtime
from rp_engine.errors import Busy
from rp_engine.runtime.runtime import MemoryUse
from rp_transfer import Closed
from torch import nn

NUMEL = 16 * 16 + 16


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16, affine=False), nn.Linear(16, 16))


def wrapped(runtime: Runtime, model: nn.Module | None = None, **given: Any) -> RoundPipe:
    model = layers() if model is None else model
    return RoundPipe(model, runtime=runtime, model_run_config=RoundPipeRunConfig(num_microbatch=2), **given)


def call(model: RoundPipe, dtype: torch.dtype = torch.float32) -> None:
    x = torch.ones(8, 16, dtype=dtype)
    model.forward_backward(input_args=(x,), label=x, loss_fn=square_error)


def test_kinds_of_a_model_in_16_bits_with_masters_in_32(runtime: Runtime) -> None:
    model = wrapped(
        runtime, nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)).bfloat16(), optim_dtype=torch.float32
    )
    report = model.memory_report()
    assert (report.weights_bytes, report.gradients_bytes, report.masters_bytes) == (2 * 2 * NUMEL, 0, 0)
    optimizer = roundpipe.optim.AdamW(model.optim_parameters(), lr=1e-3)
    call(model, torch.bfloat16)
    model.synchronize()
    report = model.memory_report(optimizer)
    assert report.weights_bytes == 2 * 2 * NUMEL
    assert report.gradients_bytes in (2 * 2 * NUMEL, 2 * 4 * NUMEL)
    assert report.masters_bytes == 2 * 4 * NUMEL
    assert report.optimizer_bytes == 0
    model.step(optimizer.step, is_async=False)
    # Two moments of each parameter, and perhaps a count of steps.
    moments = 2 * 2 * 4 * NUMEL
    assert moments <= model.memory_report(optimizer).optimizer_bytes <= moments + 8 * 4
    assert model.memory_report().optimizer_bytes is None


def test_buffers_and_frozen_weights_count(runtime: Runtime) -> None:
    model = layers()
    model[0].requires_grad_(False)
    wrapper = wrapped(runtime, model)
    list(wrapper.optim_parameters())
    report = wrapper.memory_report()
    assert report.weights_bytes == 2 * 4 * NUMEL
    assert report.masters_bytes == 4 * NUMEL
    # The running mean and variance, and a count of batches.
    assert report.buffers_bytes == 16 * 4 * 2 + 8


@pytest.mark.parametrize("pin", ["alloc", "register", "off"])
def test_weights_count_wherever_they_lie(runtime: Runtime, pin: Any) -> None:
    report = wrapped(runtime, nn.Sequential(nn.Linear(16, 16)), pin_model=pin).memory_report()
    assert report.weights_bytes == 4 * NUMEL
    assert report.activations_bytes == 0


def test_all_that_a_runtime_gave_is_found_under_some_kind(two: Runtime) -> None:
    one, other = wrapped(two), wrapped(two)
    for model in (one, other):
        call(model)
        model.synchronize()
    reports = [one.memory_report(), other.memory_report()]
    blocks = sum(r.weights_bytes + r.buffers_bytes + r.gradients_bytes for r in reports)
    used = two.host_memory().used_bytes
    assert [report.activations_bytes for report in reports] == [used - blocks] * 2
    before = reports[0].activations_bytes
    with torch.no_grad():
        held = one(torch.ones(1024, 16))
    # The caller's result, two halves put together, is their own; what the pool keeps may be more than before.
    assert one.memory_report().activations_bytes >= before
    assert held.shape == (1024, 16)


def test_a_model_that_is_gone_counts_no_more(two: Runtime) -> None:
    kept, gone = wrapped(two), wrapped(two)
    assert len(two.states) == 2
    del gone

    gc.collect()
    assert kept.memory_report().activations_bytes == 0
    assert len(two.states) == 1


def test_pinned_bytes_and_devices_are_the_runtimes(runtime: Runtime) -> None:
    model = wrapped(runtime)
    call(model)
    model.synchronize()
    report = model.memory_report()
    assert report.devices == runtime.memory()
    assert max(use.peak_bytes for use in report.devices) >= 4 * NUMEL
    assert report.pinned_bytes == runtime.host_memory().pinned_bytes > 0
    assert report.host_total_bytes == runtime.host_memory().total_bytes


def test_it_prints_as_a_table() -> None:
    use = MemoryUse("cpu:0", 1024, 2048, 1 << 30)
    report = MemoryReport(2048, 0, 1024, 4096, None, 512, 8192, 1 << 40, (use,))
    assert str(report).splitlines() == [
        "host                  |      bytes",
        "weights               |    2.0 KiB",
        "second blocks         |      0.0 B",
        "buffers               |      0.0 B",
        "gradients             |    1.0 KiB",
        "masters               |    4.0 KiB",
        "optimizer state       |  not given",
        "activations and pool  |    512.0 B",
        "total                 |    7.5 KiB",
        "pinned                |    8.0 KiB",
        "machine total         | 1024.0 GiB",
        "",
        "device  |    used |    peak |   total",
        "cpu:0   | 1.0 KiB | 2.0 KiB | 1.0 GiB",
    ]


def test_it_cannot_be_changed(two: Runtime) -> None:
    report = wrapped(two).memory_report()
    with pytest.raises(dataclasses.FrozenInstanceError):
        report.weights_bytes = 0


def test_what_is_no_optimizer_is_refused(two: Runtime) -> None:
    with pytest.raises(TypeError, match=r"takes optimizers, but got a Linear instead; give it the torch\.optim"):
        wrapped(two).memory_report(nn.Linear(1, 1))


def test_device_memory_that_calls_have_left_goes_back_between_them(runtime: Runtime) -> None:
    plain = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))
    models = [wrapped(runtime, copy.deepcopy(plain)) for _ in range(2)]

    def released() -> list[int]:
        gc.collect()
        return [use.used_bytes for use in runtime.release_memory()]

    def outputs_of_calls() -> list[torch.Tensor]:
        for model in models:
            call(model)
        return [model(torch.ones(8, 16, requires_grad=True)) for model in models]

    # On GPUs, tests before have left something, and cuBLAS keeps memory for each stream from its first product on.
    is_alone = all(lane.device.torch_device.type == "cpu" for lane in runtime.lanes)
    outputs_of_calls()
    before = [0 for _ in runtime.lanes] if is_alone else released()

    outputs = outputs_of_calls()

    assert released() == before
    # What calls before need is there, and calls after have the numbers of one that follows no release.
    outputs[0].sum().backward()
    call(models[0])
    runtime.release_memory()
    outputs[1].sum().backward()
    runtime.release_memory()
    call(models[1])
    found, expected = (gradients(model) for model in models)
    assert_near(found, expected)


def test_it_is_refused_where_a_call_would_wait_for_itself(runtime: Runtime) -> None:
    def loss_fn(outputs: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        runtime.release_memory()
        return square_error(outputs, label)

    x = torch.ones(8, 16)
    with pytest.raises(Busy, match="inside a layer or loss function"):
        wrapped(runtime).forward_backward(input_args=(x,), label=x, loss_fn=loss_fn)
    runtime.close()
    with pytest.raises(Closed):
        runtime.release_memory()
