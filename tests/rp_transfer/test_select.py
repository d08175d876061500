"""Device strings, and the backends that they open."""

from __future__ import annotations

import sys
import types

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rp_transfer import (
    BackendUnavailable,
    CpuBackend,
    DeviceStringError,
    default_devices,
    local_processes,
    open_backend,
    parse_devices,
)


@given(indices=st.lists(st.integers(0, 99), min_size=1, unique=True))
def test_cuda_devices_are_read_in_the_order_given(indices: list[int]) -> None:
    assert parse_devices("cuda:" + ",".join(map(str, indices))).indices == tuple(indices)


@given(count=st.integers(1, 1000))
def test_cpu_devices_are_counted(count: int) -> None:
    assert parse_devices(f" cpu:{count} ").count == count


def test_without_numbers_all_cuda_devices_or_one_cpu_device_are_meant() -> None:
    assert parse_devices("cuda").indices is None
    assert (parse_devices("cpu").kind, parse_devices("cpu").count) == ("cpu", 1)


@pytest.mark.parametrize("text", ["", "gpu", "cpu:", "cpu:x", "cuda:", "cuda:-1", "cuda:0,", "cpu;2", "CPU"])
def test_what_nobody_can_read_is_refused_with_the_four_forms(text: str) -> None:
    with pytest.raises(DeviceStringError, match="must read 'cuda', 'cuda:0,2', 'cpu' or 'cpu:4', but are"):
        parse_devices(text)


@pytest.mark.parametrize("text", ["cpu:0", "cpu:1,2"])
def test_a_count_of_cpu_devices_is_one_positive_number(text: str) -> None:
    with pytest.raises(DeviceStringError, match="one number of virtual devices, at least 1"):
        parse_devices(text)


def test_a_cuda_device_is_named_once() -> None:
    with pytest.raises(DeviceStringError, match="may be named once, but devices are 'cuda:1,0,1'"):
        parse_devices("cuda:1,0,1")


def test_a_device_string_error_is_a_value_error() -> None:
    assert issubclass(DeviceStringError, ValueError)


@given(text=st.text(max_size=12))
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        kind, said = parse_devices(text).kind, repr(text)
    except DeviceStringError as error:
        kind, said = "", str(error)
    assert kind in ("", "cpu", "cuda")
    assert repr(text) in said


def test_cpu_devices_open() -> None:
    backend = open_backend("cpu:3", strict=False)
    assert [device.name for device in backend.devices] == ["cpu:0", "cpu:1", "cpu:2"]
    assert isinstance(backend, CpuBackend)
    assert not backend.streams.strict


def test_the_environment_chooses_when_nobody_else_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROUNDPIPE_DEVICES", "cpu:2")
    assert len(open_backend().devices) == 2
    assert len(open_backend("cpu").devices) == 1


def test_a_wrong_environment_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROUNDPIPE_DEVICES", "tpu")
    with pytest.raises(DeviceStringError, match="'tpu'"):
        open_backend()


@pytest.mark.parametrize("value", [None, ""])
def test_without_cuda_and_environment_one_cpu_device_opens(
    monkeypatch: pytest.MonkeyPatch, value: str | None
) -> None:
    monkeypatch.delenv("ROUNDPIPE_DEVICES", raising=False)
    if value is not None:
        monkeypatch.setenv("ROUNDPIPE_DEVICES", value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert [device.name for device in open_backend().devices] == ["cpu:0"]


def test_processes_on_one_machine_share_its_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.delenv("ROUNDPIPE_DEVICES", raising=False)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    found = []
    for rank in range(3):
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        found.append(default_devices())
    assert found == ["cuda:0,1", "cuda:2,3,4", "cuda:5,6,7"]
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    assert default_devices() == "cuda"


@pytest.mark.parametrize(
    ("rank", "size", "found"),
    [
        (None, None, (0, 1)),
        ("", "", (0, 1)),
        ("1", "2", (1, 2)),
        (None, "2", (0, 2)),
        ("2", "2", (0, 1)),
        ("-1", "2", (0, 1)),
        ("0", "0", (0, 1)),
        ("0", "many", (0, 1)),
    ],
)
def test_variables_that_make_no_sense_mean_a_process_alone(
    monkeypatch: pytest.MonkeyPatch, rank: str | None, size: str | None, found: tuple[int, int]
) -> None:
    for name, value in (("LOCAL_RANK", rank), ("LOCAL_WORLD_SIZE", size)):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    assert local_processes() == found


def test_more_processes_than_gpus_are_refused_unless_their_devices_are_named(
    two_gpus: pytest.MonkeyPatch,
) -> None:
    two_gpus.setenv("LOCAL_WORLD_SIZE", "3")
    two_gpus.delenv("ROUNDPIPE_DEVICES", raising=False)
    with pytest.raises(
        BackendUnavailable, match=r"3 processes .* visible here are 2;.* set ROUNDPIPE_DEVICES=cuda"
    ):
        open_backend()
    two_gpus.setenv("ROUNDPIPE_DEVICES", "cuda")
    assert default_devices() == "cuda"


def test_cuda_without_a_driver_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(BackendUnavailable, match=r"torch sees none here .*choose 'cpu' devices"):
        open_backend("cuda")


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A torch that claims to see two CUDA devices, for CUDA 13."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.delitem(sys.modules, "rp_transfer.cuda.backend", raising=False)
    return monkeypatch


@pytest.mark.usefixtures("two_gpus")
def test_a_cuda_device_that_is_not_there_is_named() -> None:
    with pytest.raises(BackendUnavailable, match="cuda:2 was requested, but 2 CUDA devices are visible"):
        open_backend("cuda:0,2")


def test_without_cupy_the_command_that_installs_it_is_given(two_gpus: pytest.MonkeyPatch) -> None:
    two_gpus.setitem(sys.modules, "cupy", None)
    with pytest.raises(BackendUnavailable, match=r"pip install 'rp-transfer\[cuda13\]'"):
        open_backend("cuda")


def cupy_whose_version_is(call: object) -> types.ModuleType:
    cupy = types.ModuleType("cupy")
    runtime = types.SimpleNamespace(runtimeGetVersion=call)
    cupy.cuda = types.SimpleNamespace(runtime=runtime)  # type: ignore[attr-defined]
    return cupy


def forget_the_cuda_module(monkeypatch: pytest.MonkeyPatch) -> None:
    # The one imported beside a CuPy made up here must not outlive this test, nor hide in the package.
    import rp_transfer.cuda.backend

    monkeypatch.setitem(sys.modules, "rp_transfer.cuda.backend", types.ModuleType("placeholder"))
    monkeypatch.delitem(sys.modules, "rp_transfer.cuda.backend")
    monkeypatch.setattr(rp_transfer.cuda, "backend", None, raising=False)


def test_cupy_for_another_cuda_is_refused_with_the_right_one(two_gpus: pytest.MonkeyPatch) -> None:
    two_gpus.setitem(sys.modules, "cupy", cupy_whose_version_is(lambda: 12080))
    forget_the_cuda_module(two_gpus)
    with pytest.raises(BackendUnavailable, match=r"CUDA 13 but CuPy for CUDA 12.*rp-transfer\[cuda13\]"):
        open_backend("cuda")


def test_a_driver_that_cupy_cannot_use_is_an_error_with_its_cause(two_gpus: pytest.MonkeyPatch) -> None:
    def fail() -> int:
        raise OSError("no libcudart")

    two_gpus.setitem(sys.modules, "cupy", cupy_whose_version_is(fail))
    forget_the_cuda_module(two_gpus)
    with pytest.raises(BackendUnavailable, match="cannot use the CUDA driver: no libcudart") as caught:
        open_backend("cuda")
    assert isinstance(caught.value.__cause__, OSError)


@pytest.mark.parametrize(
    "text", ["cpu:99999999999999999999", "cpu:1025", "cpu:" + "9" * 5000, "cuda:0," + "9" * 5000]
)
def test_more_devices_than_can_be_are_refused_before_any_is_made(text: str) -> None:
    with pytest.raises(DeviceStringError, match=r"must .* at most .* devices are "):
        open_backend(text)


@pytest.mark.parametrize("named", ["gpu", "cpu:0", "cuda:0,0"])
def test_devices_of_the_environment_are_refused_by_the_variables_name(
    named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROUNDPIPE_DEVICES", named)

    with pytest.raises(DeviceStringError, match=f"^ROUNDPIPE_DEVICES: .*{named}"):
        default_devices()
