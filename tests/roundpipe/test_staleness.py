"""The plain loop of `benchmarks/staleness.py` takes the steps that the engine takes: on time, or one late."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from roundpipe import Runtime
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import staleness
from decoder import SIZES
from late import workloads
from late.loops import Plain, Steps, engine_run
from late.report import curves, table
from late.variants import VARIANTS, Run
from late.workloads import Workload, workload

CPU = torch.device("cpu")
STEPS = 8


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """As the engine's CPU devices have, so that sums have one order."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decoders of two narrow layers, and what is tuned was not trained before."""
    size = replace(SIZES["tiny"], layers=2, hidden=32, inner=48, vocabulary=256)
    monkeypatch.setitem(workloads._DECODERS, "decoder-1m", workloads._Decoder(size, 4, 16, STEPS, 4e-3))
    base = workload("decoder-1m", CPU).make(0)
    monkeypatch.setattr(workloads, "_trained", lambda *_: base)


def run_of(chosen: Workload, variant: str, seed: int = 0) -> Run:
    return Run(VARIANTS[variant], seed, STEPS, chosen.rate, 0.95)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["decoder-1m", "finetune", "lora", "convnet"])
@pytest.mark.parametrize("variant", ["synchronous", "late", "late after 30 %", "late, beta1 from 0.5"])
def test_the_loop_ends_with_the_weights_of_the_engine(two: Runtime, name: str, variant: str) -> None:
    chosen = workload(name, CPU)
    run = run_of(chosen, variant)
    plain = Plain(chosen)
    wanted = plain.run(run, evaluations=2)
    found, masters = engine_run(chosen, run, two)
    assert found.losses == pytest.approx(wanted.losses, rel=1e-5)
    assert found.delays == [0, *(int(run.is_late_at(step)) for step in range(1, STEPS))]
    assert len(masters) == len(plain.masters)
    for mine, theirs in zip(plain.masters, masters, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)


@pytest.mark.later
def test_a_late_loop_differs_from_the_engine_on_time(two: Runtime) -> None:
    chosen = workload("convnet", CPU)
    late = Plain(chosen).run(run_of(chosen, "late"), evaluations=1)
    found, _ = engine_run(chosen, run_of(chosen, "synchronous"), two)
    assert late.losses[:2] != pytest.approx(found.losses[:2], rel=1e-3)


def test_extrapolated_weights_are_one_more_of_the_last_update() -> None:
    weight = nn.Parameter(torch.tensor([0.0]))
    steps = Steps([weight], is_extrapolated=True)
    read: list[float] = []
    for value, growth in ((1.0, 1.0), (3.0, 1.0), (4.0, 0.5), (4.0, 1.0)):
        steps.step(lambda value=value: steps.masters[0].data.fill_(value), is_late=True, growth=growth)
        read.append(weight.item())
    # Masters were 0, 0 | 0, 1 | 1, 3 | 3, 4 when they were published.
    assert read == [0.0, 2.0, 4.0, 5.0]
    with steps.newest():
        assert weight.item() == 4.0
    assert weight.item() == 5.0


def test_a_report_has_a_row_for_each_variant_and_compares_it_with_the_same_seeds() -> None:
    lines = [
        {
            "workload": "one",
            "variant": variant,
            "late_share": float(variant == "late"),
            "beta2": 0.95,
            "rate": 1e-3,
            "seed": seed,
            "steps": 20,
            "held_out": [(10, 2.0 + seed), (20, 1.0 + seed + shift)],
            "losses": [2.0] * 20,
        }
        for variant, shift in (("synchronous", 0.0), ("late", 0.25))
        for seed in range(2)
    ]
    rows = table(lines).splitlines()
    assert len(rows) == 4
    assert "+0.2500 ± 0.0000" in rows[-1]
    drawn = curves(lines, {"one": {False: 2.0, True: 1.0}})
    assert drawn.count("<polyline") == 4
    assert drawn.endswith("</svg>\n")


def test_a_benchmark_that_was_cut_off_goes_on_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = [
        "convnet",
        "--steps",
        "4",
        "--seeds",
        "1",
        "--beta2",
        "0.95",
        "--device",
        "cpu",
        "--step-times",
        "1.25",
        "1",
        "--output",
    ]
    for variants in (["late"], ["late", "synchronous, same seconds"]):
        monkeypatch.setattr(sys, "argv", ["staleness.py", *asked, str(tmp_path), "--variants", *variants])
        staleness.main()
    lines = [json.loads(line) for line in (tmp_path / "runs.jsonl").read_text().splitlines()]
    assert [(line["variant"], line["steps"]) for line in lines] == [("late", 4), ("synchronous, same seconds", 3)]
    assert capsys.readouterr().out.count("convnet late") == 1
    assert (tmp_path / "curves.svg").read_text().count("<polyline") == 4
