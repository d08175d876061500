"""`roundpipe env` tells of the machine and the installation, as text for an issue and as JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import rp_optim
import torch
from rp_cli.commands import env as command
from rp_cli.environment import hardware, software
from rp_cli.environment.facts import Fact, Section, as_json, as_text
from rp_cli.main import main
from rp_sched import Switch
from rp_telemetry.measurements import Rates
from rp_transfer import HostLimit, MemoryUse

pytestmark = pytest.mark.usefixtures("no_model")
GIB = 1 << 30


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rates and memory of a machine that is always the same."""
    limits = (HostLimit("the machine", 64 * GIB, 60 * GIB), HostLimit("the container", 32 * GIB, 30 * GIB))
    monkeypatch.setattr(hardware, "probe", lambda _: Rates(memory_gb_s=12.34, up_gb_s=(25.0,), down_gb_s=(24.0,)))
    monkeypatch.setattr(hardware, "host_limits", lambda: limits)
    monkeypatch.setattr(command, "_DRIVER", Path("nowhere"))
    for name in software._VARIABLES:
        monkeypatch.delenv(name, raising=False)


def told(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["env", "--devices", "cpu:2", *arguments]) == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    return shown.out


def test_it_tells_what_a_report_needs(capsys: pytest.CaptureFixture[str]) -> None:
    lines = told(capsys).splitlines()
    titles = [line for line in lines if not line.startswith(" ")]
    assert titles == ["versions", "host", "devices", "kernels", "missing"]
    found = {line[2:].split("  ")[0]: line.split("  ")[-1].strip() for line in lines if line.startswith("  ")}
    assert found["torch"] == torch.__version__
    assert found["machine memory"] == "64.0 GiB, 60.0 GiB free"
    assert found["container memory"] == "32.0 GiB, 30.0 GiB free"
    assert found["memory rate"] == "12.3 GB/s, updated in place"
    assert found["locked memory"].endswith("(ulimit -l)")
    assert found["cpu:1"] == "virtual, in host memory"
    assert found["available"] == ", ".join(rp_optim.available_kernels())
    assert {"python", "cupy", "transformers", *software.MEMBERS} <= found.keys()


def test_the_same_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(told(capsys, "--json"))
    assert found["host"]["container_memory"] == {"total_bytes": 32 * GIB, "free_bytes": 30 * GIB}
    assert found["host"]["memory_rate"] == {"gb_s": 12.34}
    assert found["kernels"]["in_use"] == rp_optim.kernel_in_use()
    assert found["devices"] == {"cpu:0": {"name": "virtual"}, "cpu:1": {"name": "virtual"}}
    assert found["variables"] == {}
    assert isinstance(found["missing"], list)


def test_variables_that_are_set_are_told(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROUNDPIPE_HOST_MEMORY", "48GB")
    assert "variables\n  ROUNDPIPE_HOST_MEMORY  48GB\n" in told(capsys)


def test_a_gpu_is_told_with_its_link(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (20 * GIB, 24 * GIB))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "RTX")
    (fact,) = hardware._devices((MemoryUse("cuda:0", 0, 0, 12 * GIB),), Rates(up_gb_s=(25.0,), down_gb_s=(24.0,)))
    assert fact.text == "RTX, 24.0 GiB, 20.0 GiB free; 25.0 GB/s to it, 24.0 GB/s back"
    assert fact.value == {
        "name": "RTX",
        "total_bytes": 24 * GIB,
        "free_bytes": 20 * GIB,
        "usable_bytes": 12 * GIB,
        "upload_gb_s": 25.0,
        "download_gb_s": 24.0,
    }


def test_a_slow_kernel_is_told_with_what_mends_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rp_optim, "available_kernels", lambda: ("torch",))
    monkeypatch.setattr(rp_optim, "kernel_in_use", lambda: "torch")
    shown = told(capsys)
    assert "in use          torch's operations, which are slower" in shown
    assert "missing\n  a C compiler, for fast optimizer steps: apt install gcc" in shown


def test_a_kernel_that_does_not_run_is_told(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> str:
        raise rp_optim.KernelUnavailable("it must be another")

    monkeypatch.setattr(rp_optim, "kernel_in_use", refuse)
    assert "in use          none: it must be another" in told(capsys)


def test_what_expands_packed_weights_is_told_of_each_gpu_with_what_mends_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # given two GPUs, on one of which Triton's kernel does not run
    assert "packed weights  by torch's operations: there are no CUDA devices\n" in told(capsys)
    gpus = Section("devices", (Fact("cuda:0", "RTX"), Fact("cuda:1", "GTX"), Fact("links_of_0_1", {})))
    monkeypatch.setattr(command, "hardware", lambda _: ([gpus], []))
    monkeypatch.setattr(command, "refusal", lambda card: "there is no ptxas" if card.index else None)
    # then
    shown = told(capsys)
    assert "packed weights  cuda:0 by Triton's kernel; cuda:1 by torch's operations, which are slower\n" in shown
    assert "missing\n  what Triton needs to expand packed weights on cuda:1: " in shown
    assert "; there is no ptxas\n" in shown
    found = json.loads(told(capsys, "--json"))
    assert found["kernels"]["packed_weights"] == {"cuda:0": "triton", "cuda:1": "torch"}


@pytest.mark.parametrize(
    ("cuda", "available", "cupy", "words"),
    [
        (None, False, True, "a torch built for CUDA"),
        ("12.8", False, True, "GPUs that torch can use"),
        ("12.8", True, False, "pip install 'rp-core[cuda12]'"),
        ("13.0", True, False, "pip install 'rp-core[cuda13]'"),
    ],
)
def test_what_gpus_lack_is_told_with_the_command(
    monkeypatch: pytest.MonkeyPatch, cuda: str | None, available: bool, cupy: bool, words: str
) -> None:
    monkeypatch.setattr(command, "_DRIVER", Path(__file__))
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
    monkeypatch.setattr(command, "installed", lambda _: "1.0" if cupy else None)
    assert any(words in line for line in command._missing())


def test_devices_that_cannot_be_opened_are_missing_and_the_rest_is_told(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["env", "--devices", "cuda:512"]) == 0
    shown = capsys.readouterr().out
    assert "missing\n" in shown
    assert "devices cannot be opened" in shown
    assert "memory rate" not in shown
    assert "machine memory" in shown


@pytest.mark.parametrize("arguments", [["--devices", "tpu:8"], ["--stpes", "3"], ["--data", "x"], ["--devices"]])
def test_wrong_arguments_get_one_line_and_exit_code_2(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["env", *arguments]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("roundpipe: ")
    assert shown.err.count("\n") == 1


def test_the_users_home_is_not_told() -> None:
    sections = [Section("a", (Fact("b", f"{Path.home()}/secret/x"),))]
    for show in (as_text, as_json):
        assert "~/secret/x" in show(sections, [f"{Path.home()}/y"])
        assert str(Path.home()) not in show(sections, [f"{Path.home()}/y"])


def test_links_that_share_a_switch_are_told() -> None:
    shared = Switch(devices=(0, 1), upload_gb_s=40.0, download_gb_s=30.0)
    rates = Rates(up_gb_s=(25.0,) * 2, down_gb_s=(25.0,) * 2, switches=(shared,))
    (fact,) = hardware._shared(rates)
    assert fact.name == "links_of_0_1"
    assert fact.words == "40.0 GB/s to them together, 30.0 GB/s back"
    virtual = tuple(MemoryUse(f"cpu:{index}", 0, 0, 0) for index in range(2))
    assert [fact.name for fact in hardware._devices(virtual, rates)] == ["cpu:0", "cpu:1"]


@pytest.mark.cuda
def test_links_are_measured() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    problems: list[str] = []
    uses, rates = hardware._measured("cuda:0", problems)
    assert not problems
    assert [use.name for use in uses] == ["cuda:0"]
    assert 0.1 < rates.up_gb_s[0] < 1000
    assert 0.1 < rates.down_gb_s[0] < 1000


def test_a_limit_of_memory_that_cannot_be_read_is_refused_in_a_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ROUNDPIPE_HOST_MEMORY", "much")
    assert main(["env", "--devices", "cpu:2"]) == 2
    assert "ROUNDPIPE_HOST_MEMORY: a size must read like" in capsys.readouterr().err
