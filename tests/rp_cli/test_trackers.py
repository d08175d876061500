"""What trackers have of a run, read back from their own files, beside the lines that the run keeps itself."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import finetuning
import pytest
from rp_cli.main import main
from rp_cli.telling.console import log_printed
from rp_reports import trackers
from rp_reports.trackers import Tracked
from rp_trainer.errors import Refused, Unwritable
from rp_trainer.finetuning.reports import Reports

Rows = dict[tuple[str, int], float]
GIVEN = ["--steps", "4", "--held-out", "0.03", "--eval-every", "2", "--batch", "4", "--sequence", "16"]


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, value in {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "TRACKIO_DIR": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)


def trained(run: Path, kind: str, *more: str) -> None:
    """A run of its own process: trackers keep threads and open runs."""
    data = run.parent / "data.txt"
    data.write_text("some words to learn, again and again\n" * 60)
    command = ["train", "--data", str(data), "--output", str(run), "--report", f"jsonl,{kind}", *GIVEN, *more]
    subprocess.run([sys.executable, "-m", "rp_cli", *command], check=True, timeout=100, stdin=subprocess.DEVNULL)


def kept_lines(run: Path) -> Rows:
    """All numbers of metrics.jsonl, as trackers name them."""
    rows: Rows = {}
    for line in finetuning.lines(run):
        step = line.pop("step")
        if "held_out_loss" in line:
            rows["held_out/loss", step] = line["held_out_loss"]
            continue
        for name, value in line.items():
            for at, one in enumerate(value if isinstance(value, list) else [value]):
                rows[f"training/{name}_{at}" if isinstance(value, list) else f"training/{name}", step] = one
    return rows


def of_tensorboard(run: Path) -> Iterator[tuple[str, int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    for name in events.Tags()["scalars"]:
        for event in events.Scalars(name):
            yield name, event.step, event.value


def of_mlflow(run: Path) -> Iterator[tuple[str, int, float]]:
    from mlflow.tracking import MlflowClient

    client: Any = MlflowClient(f"sqlite:///{run}/mlflow.db")
    (experiment,) = client.search_experiments(filter_string="name = 'roundpipe'")
    (found,) = client.search_runs([experiment.experiment_id])
    assert found.data.params["steps"] == "4"
    for name in found.data.metrics:
        for point in client.get_metric_history(found.info.run_id, name):
            yield name, point.step, point.value


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "read"), [("tensorboard", of_tensorboard), ("mlflow", of_mlflow)])
def test_a_tracker_has_each_number_of_each_row(kind: str, read: Any, tmp_path: Path) -> None:
    pytest.importorskip(kind)
    run = tmp_path / "run"

    trained(run, kind, "--save-every", "1")

    wanted = kept_lines(run)
    found = {(name, step): value for name, step, value in read(run)}
    assert {name for name, _ in found} >= {"training/grad_norm", "training/tokens", "training/epoch"}
    # TensorBoard's numbers have 32 bits.
    assert found == pytest.approx(wanted, rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "made"), [("wandb", "wandb"), ("trackio", "trackers.json")])
def test_a_tracker_works_without_a_network(kind: str, made: str, tmp_path: Path) -> None:
    pytest.importorskip(kind)

    trained(tmp_path / "run", kind)

    assert (tmp_path / "run" / made).exists()
    assert kept_lines(tmp_path / "run")
    if kind == "trackio":
        assert list(tmp_path.glob("roundpipe*.db"))


class FullForAWhile:
    """A tracker on a disk that is full at first."""

    begun = 0

    def __init__(self) -> None:
        FullForAWhile.begun += 1

    def log(self, values: dict[str, float], step: int) -> None:
        del values
        if step == 0:
            raise OSError("No space left on device")

    def finish(self) -> None:
        pass


def test_what_a_tracker_lost_is_told_at_once_and_again_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Tracked, "_opened", lambda _: FullForAWhile())

    def run() -> None:
        with log_printed(), Reports(Tracked("tensorboard", tmp_path, {})) as opened:
            for step in range(3):
                opened.held_out(step, 1.0)

    with pytest.raises(Unwritable, match="No space left"):
        run()
    assert capsys.readouterr().err.count("the training continues\n") == 1
    assert FullForAWhile.begun == 2


def test_a_tracker_that_cannot_begin_is_refused_with_a_hint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "sideways")

    with pytest.raises(Refused, match=r"--report wandb cannot begin: (.|\n)*WANDB_MODE=offline"):
        Tracked("wandb", tmp_path, {})


def test_accelerate_is_told_of_no_other_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with trackers._alone():  # pyright: ignore[reportPrivateUsage]
        assert "WORLD_SIZE" not in os.environ
    assert os.environ["WORLD_SIZE"] == "2"


@pytest.mark.parametrize("kind", ["wandb", "mlflow"])
def test_a_report_needs_a_folder(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--report", kind]) == 2
    assert capsys.readouterr().err == "roundpipe: --report needs --output, the folder to keep it in\n"
