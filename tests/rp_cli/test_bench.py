"""`roundpipe bench` measures a machine in less than two minutes; its line calibrates `roundpipe plan`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from rp_cli.main import main
from rp_cli.recipes.catalogue import recipes
from rp_estimate import calibrating
from rp_estimate.machine.calibration import Calibration

LINE = Calibration(
    gpu="RTX 4090",
    devices=2,
    memory_bytes=25_757_220_864,
    link_gb_s=25.0,
    tflops=165.0,
    ram_bytes=64_000_000_000,
    ram_gb_s=60.0,
    utilisation=0.25,
    torch="2.15.0",
).line
MODEL = ["--model", str(recipes()["qwen3-1.7b-full"].configuration), "--batch", "4"]


def planned(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["plan", *MODEL, *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@settings(max_examples=examples(60), deadline=None)
@given(
    st.text(st.characters(codec="ascii", exclude_characters=";=", exclude_categories=["C"])).map(str.strip),
    st.integers(1, 256),
    st.integers(1, 2**59),
    st.floats(1e-3, 1e6),
    st.floats(1e-3, 1.0),
)
def test_a_line_is_read_as_it_was_written(gpu: str, devices: int, nbytes: int, rate: float, part: float) -> None:
    before = Calibration(
        gpu=gpu,
        devices=devices,
        memory_bytes=nbytes,
        link_gb_s=rate,
        tflops=rate,
        ram_bytes=nbytes,
        ram_gb_s=rate,
        utilisation=part,
        torch="2.15.0+cu130",
    )

    after = Calibration.read(f"What I got:\n\n  {before.line}\n")

    assert (after.gpu, after.devices, after.memory_bytes, after.torch) == (gpu, devices, nbytes, before.torch)
    assert after.link_gb_s == pytest.approx(rate, rel=1e-3)
    assert after.utilisation == pytest.approx(part, rel=1e-3)


@pytest.mark.later
def test_a_plan_is_that_of_the_machine_in_the_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "line.txt"
    file.write_text(f"{LINE}\n")
    by_hand = ("--gpu", "RTX 4090", "--devices", "2", "--ram", "64GB", "--ram-gb-s", "60", "--utilisation", "0.25")

    answers = [planned(capsys, *of) for of in (("--calibration", LINE), ("--calibration", str(file)), by_hand)]

    for answer in answers:
        # Of the card the line has what it measured.
        del answer["machine"]
    assert answers[0] == answers[1]
    assert answers[0]["plan"] == answers[2]["plan"]
    assert answers[0]["fits"] is answers[2]["fits"]


def test_options_count_before_the_line(capsys: pytest.CaptureFixture[str]) -> None:
    more = ("--devices", "1", "--ram", "32GB", "--utilisation", "0.5")

    answer = planned(capsys, "--calibration", LINE, *more)

    assert (answer["machine"]["devices"], answer["machine"]["ram_bytes"]) == (1, 32 * 10**9)
    assert answer["assumed"]["utilisation"] == 0.5


@pytest.mark.slow
def test_adapters_reach_less_than_the_line_says(capsys: pytest.CaptureFixture[str]) -> None:
    assumed = planned(capsys, "--calibration", LINE, "--lora", "8")["assumed"]

    assert assumed["utilisation"] == pytest.approx(0.25 * 0.38 / 0.5)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("nowhere.txt", "must have a line that begins with 'roundpipe bench 1'"),
        (LINE.replace("devices=2", "devices=two"), "must have a number above 0 as devices, but it is 'two'"),
        (LINE.replace("utilisation=0.25", "utilisation=25"), "as utilisation, but it is '25'"),
        (LINE.replace("; torch=2.15.0", ""), "must have each of gpu, devices"),
    ],
)
def test_what_is_no_such_line_is_refused(text: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *MODEL, "--calibration", text]) == 2

    shown = capsys.readouterr().err
    assert said in shown
    assert shown.count("\n") == 1


@pytest.mark.later
def test_a_machine_is_measured_and_foretold_by_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    small = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 16}
    monkeypatch.setattr(calibrating, "_ON_CPUS", calibrating._ON_CPUS | small)
    monkeypatch.setattr(calibrating, "_CPU_SEQUENCE", 8)

    _is_foretold(capsys)


@pytest.mark.nightly
def test_a_machine_is_measured_by_a_model_of_some_size(capsys: pytest.CaptureFixture[str]) -> None:
    _is_foretold(capsys)


def _is_foretold(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--devices", "cpu:1"]) == 0

    (line,) = capsys.readouterr().out.splitlines()
    answer = planned(capsys, "--calibration", line)
    assert answer["machine"]["gpu"] == "cpu:0"
    assert 0 < answer["assumed"]["utilisation"] <= 1
