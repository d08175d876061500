"""The training job, from the command to the files it leaves."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from roundpipe import Runtime
from roundpipe.cli import main
from roundpipe.cli.errors import Refused
from roundpipe.cli.options import Given, Options, read_options
from roundpipe.cli.train import train
from roundpipe.cli.training.data import Corpus, read_corpus
from roundpipe.cli.training.job import Job
from roundpipe.cli.training.model import ModelSize
from roundpipe.cli.training.rates import learning_rate
from transformers import AutoModelForCausalLM

TINY = ModelSize(layers=2, hidden=16, intermediate=32, heads=2, key_value_heads=1, head_numbers=8)
STEPS = 6


def _options(**given: Any) -> Options:
    values = {"steps": str(STEPS), "batch_size": "5", "seq_len": "12", "lr": "1e-2", "devices": "cpu:2"}
    return read_options(Given(**{**values, **given}))


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_bytes(b"".join(b"%d bottles hang on the wall; " % count for count in range(200)))
    return path


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, text: Path) -> tuple[Path, str]:
    """The folder that a short job wrote, and what it printed."""
    folder = tmp_path_factory.mktemp("made") / "by" / "the job"
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        train(_options(data=[str(text)], output=str(folder)), TINY)
    return folder, printed.getvalue()


def _lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in folder.joinpath("metrics.jsonl").read_text().splitlines()]


def test_every_step_leaves_a_line_of_metrics(finished: tuple[Path, str]) -> None:
    first, *steps, last = _lines(finished[0])

    assert [line["step"] for line in steps] == list(range(1, STEPS + 1))
    assert first["step"] == 0
    assert last["step"] == STEPS
    assert abs(first["held_out_loss"] - math.log(256)) < 0.5
    for line in steps:
        assert line["host_bytes"] > 0
        assert len(line["device_bytes"]) == len(line["device_peak_bytes"]) == 2
        assert line["tokens_per_s"] == pytest.approx(60 / line["seconds"])


def test_the_held_out_loss_is_printed_as_it_was_recorded(finished: tuple[Path, str]) -> None:
    first, *_, last = _lines(finished[0])

    assert f"held-out loss {first['held_out_loss']:.2f} -> {last['held_out_loss']:.2f}\n" in finished[1]


def test_the_options_used_are_written_down_with_what_the_machine_decided(
    finished: tuple[Path, str], text: Path
) -> None:
    written = json.loads(finished[0].joinpath("options.json").read_text())

    assert written["data"] == [str(text)]
    assert written["devices"] == "cpu:2"
    assert written["dtype"] == "float32"
    assert written["num_microbatch"] == 4
    assert "roundpipe_version" in written


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_saved_model_loads_and_gives_the_same_logits(tmp_path: Path, text: Path, dtype: str) -> None:
    options = _options(data=[str(text)], dtype=dtype)
    with Runtime("cpu:2") as runtime:
        job = Job(options, read_corpus(options.data), TINY, runtime)
        for step in range(1, STEPS + 1):
            job.step(step)
        job.save(tmp_path / "model")
        inputs, _ = job.held_out.at([0, 5, 9, 20])
        with torch.no_grad():
            streamed = job.model(input_ids=inputs).logits

    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model")

    assert loaded.dtype == getattr(torch, dtype)
    with torch.no_grad():
        logits = loaded(input_ids=inputs).logits
    torch.testing.assert_close(logits, streamed, rtol=1e-4 if dtype == "float32" else 2e-2, atol=1e-4)
    assert not torch.equal(logits[0], logits[1])


def test_a_folder_of_an_earlier_run_is_written_again_only_if_that_is_asked_for(tmp_path: Path, text: Path) -> None:
    run = tmp_path / "runs"
    train(_options(data=[str(text)], output=str(run), steps="2"), TINY)
    before = _lines(run)

    with pytest.raises(Refused, match="has a run already; continue it by --resume, replace it by --overwrite"):
        train(_options(data=[str(text)], output=str(run), steps="1"), TINY)
    assert _lines(run) == before

    train(_options(data=[str(text)], output=str(run), steps="1", overwrite=True), TINY)
    assert [line["step"] for line in _lines(run)] == [0, 1, 1]


def test_losses_do_not_depend_on_the_number_of_devices(text: Path) -> None:
    corpus = read_corpus([text])

    one, two, four = (_losses(_options(), corpus, devices) for devices in ("cpu:1", "cpu:2", "cpu:4"))

    assert two == pytest.approx(one, rel=1e-4)
    assert four == pytest.approx(one, rel=1e-4)


def test_an_asynchronous_step_reads_weights_one_step_older(text: Path) -> None:
    corpus = read_corpus([text])

    delayed, current = _losses(_options(sync=False), corpus, "cpu:2"), _losses(_options(), corpus, "cpu:2")

    assert delayed[0] == pytest.approx(current[0], rel=1e-5)
    # Step 2 repeats the first weights, unless steps are synchronous.
    assert delayed[1] != pytest.approx(current[1], rel=1e-4)


def test_the_loss_is_that_of_the_whole_batch_whatever_the_microbatches(text: Path) -> None:
    corpus = read_corpus([text])

    whole, parts = (_losses(_options(num_microbatch=count, steps="3"), corpus, "cpu:2") for count in ("1", "5"))

    assert parts == pytest.approx(whole, rel=1e-4)


@pytest.mark.parametrize("sync", [True, False])
def test_masters_in_halves_give_the_same_losses(text: Path, sync: bool) -> None:
    corpus = read_corpus([text])

    whole, split = (
        _losses(_options(dtype="bfloat16", master=master, sync=sync), corpus, "cpu:1")
        for master in ("whole", "split")
    )

    # Planned calls add in another order.
    assert split == pytest.approx(whole, rel=1e-2)


def test_sixteen_bits_with_a_narrow_exponent_train_too(text: Path) -> None:
    corpus = read_corpus([text])

    full, half = (_losses(_options(dtype=dtype), corpus, "cpu:2") for dtype in ("float32", "float16"))

    assert half == pytest.approx(full, rel=1e-2)


def test_a_loss_that_is_not_finite_ends_the_job_with_one_line_and_exit_code_1(
    text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = ["--batch-size", "4", "--seq-len", "8", "--steps", "50", "--lr", "1e38"]

    assert main(["train", "--data", str(text), "--devices", "cpu:1", *small]) == 1
    assert "the loss must stay finite" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.slow
def test_the_job_learns(text: Path) -> None:
    losses = _losses(_options(steps="60"), read_corpus([text]), "cpu:2")

    assert losses[-1] < losses[0] - 1


def test_the_rate_rises_to_its_height_and_falls_to_a_tenth() -> None:
    rates = [learning_rate(step, steps=100, highest=2.0) for step in range(1, 101)]

    assert max(rates) == rates[9] == 2.0
    assert rates[-1] == pytest.approx(0.2)
    assert all(earlier < later for earlier, later in itertools.pairwise(rates[:10]))
    assert all(earlier > later for earlier, later in itertools.pairwise(rates[9:]))


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_a_short_job_has_rates_above_zero(steps: int) -> None:
    assert all(0 < learning_rate(step, steps=steps, highest=1.0) <= 1 for step in range(1, steps + 1))


def _losses(options: Options, corpus: Corpus, devices: str) -> list[float]:
    with Runtime(devices) as runtime:
        job = Job(replace(options, devices=devices, dtype=options.dtype or "float32"), corpus, TINY, runtime)
        return [job.step(step).loss for step in range(1, options.steps + 1)]


def test_a_model_that_host_memory_is_too_small_for_is_refused_in_one_line(
    text: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # Less than the process has in use already.
    monkeypatch.setenv("ROUNDPIPE_HOST_MEMORY", "10MB")
    arguments = ["--data", str(text), "--output", str(tmp_path / "out"), "--devices", "cpu:1", "--steps", "1"]
    assert main(["train", *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()[-1:]
    assert line.startswith("roundpipe: model")
    assert "of host memory to train" in line
