"""`roundpipe train` without a model: the small one that comes with it, from the command to the files it leaves."""

from __future__ import annotations

import contextlib
import io
import json
import math
from pathlib import Path
from typing import Any

import finetuning
import pytest
from rp_cli.main import main
from transformers import AutoModelForCausalLM, AutoTokenizer

pytestmark = pytest.mark.usefixtures("measured_once")

STEPS = 6
SIZES = ["--batch", "5", "--sequence", "12", "--lr", "1e-2", "--devices", "cpu:2", "--num-microbatch", "4"]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_bytes(b"".join(b"%d bottles hang on the wall; " % count for count in range(200)))
    return path


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, text: Path) -> tuple[Path, str]:
    """The folder that a short training wrote, and what it printed."""
    folder = tmp_path_factory.mktemp("made") / "by" / "the command"
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        given = ["--data", str(text), "--output", str(folder), "--steps", str(STEPS)]
        assert main(["train", *given, *SIZES]) == 0
    return folder, printed.getvalue()


def test_every_step_leaves_a_line_of_metrics(finished: tuple[Path, str]) -> None:
    first, *steps, last = finetuning.lines(finished[0])

    assert [line["step"] for line in steps] == list(range(1, STEPS + 1))
    assert first["step"] == 0
    assert last["step"] == STEPS
    assert abs(first["held_out_loss"] - math.log(257)) < 0.5
    for line in steps:
        assert line["host_bytes"] > 0
        assert len(line["device_bytes"]) == len(line["device_peak_bytes"]) == 2
        assert 0 < line["tokens_per_s"] <= 60 / line["seconds"] * 1.01


def test_that_weights_are_random_is_said_in_words_without_a_path(finished: tuple[Path, str]) -> None:
    assert "the small model that comes with this command starts from random weights\n" in finished[1]
    assert "tiny" not in finished[1]


def test_the_held_out_loss_is_printed_as_it_was_recorded(finished: tuple[Path, str]) -> None:
    first, *_, last = finetuning.lines(finished[0])

    told = f"held-out loss {first['held_out_loss']:.2f} -> {last['held_out_loss']:.2f}"
    assert finished[1].splitlines()[-1] == told


def test_the_options_used_are_written_down_with_what_the_machine_decided(
    finished: tuple[Path, str], text: Path
) -> None:
    written = json.loads(finished[0].joinpath("options.json").read_text())

    assert written["data"] == [str(text)]
    assert written["devices"] == "cpu:2"
    assert written["dtype"] == "float32"
    assert written["num_microbatch"] == 4
    assert "roundpipe_version" in written


def test_the_saved_model_and_its_tokenizer_load(finished: tuple[Path, str]) -> None:
    model = AutoModelForCausalLM.from_pretrained(finished[0] / "model")
    tokenizer = AutoTokenizer.from_pretrained(finished[0] / "model")

    tokens = tokenizer("Größe: 5 m²\n", return_tensors="pt")["input_ids"]

    assert tokens[0].tolist() == list("Größe: 5 m²\n".encode())
    assert tokenizer.decode(tokens[0]) == "Größe: 5 m²\n"
    assert model(input_ids=tokens).logits.shape == (1, len(tokens[0]), 257)


@pytest.mark.slow
def test_a_folder_of_an_earlier_run_is_written_again_only_if_that_is_asked_for(
    tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["train", "--data", str(text), "--output", str(tmp_path / "runs"), *SIZES, "--steps"]
    assert main([*command, "2"]) == 0
    before = finetuning.lines(tmp_path / "runs")

    assert main([*command, "1"]) == 2
    told = "has a run already; continue it by --resume, replace it by --overwrite, or name another folder"
    assert told in capsys.readouterr().err
    assert finetuning.lines(tmp_path / "runs") == before

    assert main([*command, "1", "--overwrite"]) == 0
    assert [line["step"] for line in finetuning.lines(tmp_path / "runs")] == [0, 1, 1]


@pytest.mark.slow
def test_it_takes_the_options_of_a_fine_tuning(text: Path, tmp_path: Path) -> None:
    given: list[Any] = ["--data", text, "--output", tmp_path / "run", "--lora", "2", "--optimizer", "lion"]

    assert main(["train", *map(str, given), *SIZES, "--steps", "2", "--no-packing"]) == 0

    assert (tmp_path / "run" / "model" / "adapter_config.json").is_file()


@pytest.mark.later
def test_a_loss_that_is_not_finite_ends_it_with_one_line_and_exit_code_1(
    text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = ["--batch", "4", "--sequence", "8", "--steps", "50", "--lr", "1e38"]

    assert main(["train", "--data", str(text), "--devices", "cpu:1", *small]) == 1
    assert "must stay finite" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.slow
def test_state_on_disk_gives_the_same_losses_and_its_wear_is_told(
    text: Path, tmp_path: Path, finished: tuple[Path, str], capsys: pytest.CaptureFixture[str]
) -> None:
    folder, working = tmp_path / "run", tmp_path / "working"
    working.mkdir()
    disk = ["--disk", f"{working},{tmp_path}", "--disk-tbw", "600"]

    given = ["train", "--data", str(text), "--output", str(folder), "--steps", str(STEPS), *SIZES]
    assert main([*given, *disk, "--master", "disk"]) == 0
    told = capsys.readouterr().out
    assert main(["train", *SIZES, "--master", "disk"]) == 2
    assert "--master disk keeps halves of masters on a disk: name it with --disk" in capsys.readouterr().err
    assert main(["train", *SIZES, "--disk", str(tmp_path / "missing")]) == 2

    assert "of optimizer state and masters, read at " in told
    assert "days of its rated 600 TB" in told
    assert "make it first" in capsys.readouterr().err
    assert list(working.iterdir()) == []
    here, in_memory = ([one.get("loss") for one in finetuning.lines(each)] for each in (folder, finished[0]))
    assert here == in_memory


@pytest.mark.slow
def test_frozen_weights_on_disk_give_the_same_losses(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["train", "--data", str(text), *SIZES, "--steps", "3", "--lora", "2"]
    ways: dict[str, list[str]] = {
        "memory": [],
        "named": ["--frozen", f"disk:{tmp_path}"],
        "packed": ["--pack", "nf4"],
        "with the state": ["--pack", "nf4", "--disk", str(tmp_path), "--frozen", "disk"],
    }

    losses = {}
    for name, how in ways.items():
        assert main([*given, "--output", str(tmp_path / name), *how]) == 0
        losses[name] = [one.get("loss") for one in finetuning.lines(tmp_path / name)]
    told = capsys.readouterr().out
    refused = main([*given, "--frozen", f"disk:{tmp_path / 'none'}"])

    assert losses["named"] == losses["memory"]
    assert losses["with the state"] == losses["packed"] != losses["memory"]
    assert told.count("on disk, read ") == 2
    assert refused == 2
    assert "--frozen: " in capsys.readouterr().err
    assert main([*given, "--frozen", "ssd"]) == 2
    assert "must be memory, disk, or disk:DIR" in capsys.readouterr().err


@pytest.mark.slow
def test_it_learns(text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--data", str(text), *SIZES, "--steps", "60"]) == 0

    before, after = map(float, capsys.readouterr().out.splitlines()[-1].split()[2::2])
    assert after < before - 1


def test_a_model_that_host_memory_is_too_small_for_is_refused_in_one_line(
    text: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # Less than the process has in use already.
    monkeypatch.setenv("ROUNDPIPE_HOST_MEMORY", "10MB")
    arguments = ["--data", str(text), "--output", str(tmp_path / "out"), "--devices", "cpu:1", "--steps", "1"]
    assert main(["train", *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()[-1:]
    assert line.startswith("roundpipe: ")
    assert "host memory" in line


def test_devices_of_the_environment_are_refused_by_the_variables_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ROUNDPIPE_DEVICES", "gpu")

    assert main(["train", "--steps", "1"]) == 2

    assert "roundpipe: ROUNDPIPE_DEVICES: devices must read 'cuda'" in capsys.readouterr().err
