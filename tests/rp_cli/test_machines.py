"""`roundpipe train` under torchrun: the numbers of one process, one voice, and an end in order."""

from __future__ import annotations

import json
import pickle
import shutil
import signal
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import finetuning
import pytest
import torch
import vision
from processes import free_port
from programs import COMMAND_LINE, Program
from rp_cli.main import main
from rp_estimate.machine.hardware import Machine
from safetensors.torch import load_file

pytestmark = [pytest.mark.usefixtures("measured_once"), pytest.mark.timeout(300)]

STEPS = 5
SETTINGS = ["--sequence", "24", "--batch", "3", "--steps", str(STEPS), "--lr", "1e-2", "--devices", "cpu:1"]
SETTINGS += [
    "--num-microbatch",
    "3",
    "--save-every",
    "2",
    "--keep",
    "9",
    "--held-out",
    "0.15",
    "--eval-every",
    "3",
]
# The last call of an evaluation has one sequence, for two machines or three.
KINDS = {
    "full": [],
    "lora": ["--lora", "2", "--no-sync"],
    "padded": ["--no-packing", "--accumulation", "2", "--no-sync"],
}
# Rank 1 may send itself a signal in the midst of a step. Machines and links are not measured anew.
PROGRAM = """
import functools, os, pickle, sys, torch
from rp_cli.main import main
from rp_cli.finetune import forecast
from rp_trainer.finetuning.training import Training
from rp_dist import Machines
torch.set_num_threads(1)
# Processes that are not forked from one begin with seeds of their own.
torch.manual_seed(1000 + int(os.environ["RANK"]))
machine, at, number = pickle.loads(bytes.fromhex(sys.argv.pop(1)))
forecast.measured = lambda *_: machine
Machines.open = functools.partial(Machines.open, connections=1, timeout_s=30)
run = Training.step
def step(job, now):
    if now == at and os.environ["RANK"] == "1":
        os.kill(os.getpid(), number)
    return run(job, now)
Training.step = step
sys.exit(main())
"""
Ended = list[tuple[int, str, str]]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("inputs")
    model = finetuning.make_model(folder / "model")
    data = finetuning.json_lines(folder / "data.jsonl", finetuning.texts(50))
    return ["train", "--model", str(model), "--data", str(data), *SETTINGS]


@pytest.fixture(scope="module")
def alone(inputs: list[str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Runs of one process, by kind, made when they are first asked for."""

    class Runs(dict[str, Path]):
        def __missing__(self, kind: str) -> Path:
            self[kind] = folder = tmp_path_factory.mktemp("alone") / kind
            assert main([*inputs, *KINDS[kind], "--output", str(folder)]) == 0
            return folder

    return Runs()


def run(
    commands: Sequence[Sequence[str]],
    machines: dict[str, Machine],
    *,
    at: int = 0,
    number: int = 0,
    before: str = "",
    **more: str,
) -> Ended:
    """Run a command of each rank; a signal may reach rank 1 in step `at`. `before`: code that runs first."""
    port = str(free_port())
    state = pickle.dumps((machines.get("1 torch.float32"), at, number)).hex()
    places = [
        {"RANK": str(rank), "WORLD_SIZE": str(len(commands)), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        for rank in range(len(commands))
    ]
    with ExitStack() as stack:
        programs = [
            stack.enter_context(Program(before + PROGRAM, state, *command, imports=COMMAND_LINE, **place, **more))
            for command, place in zip(commands, places, strict=True)
        ]
        return [program.end() for program in programs]


def assert_close(folder: Path, truth: Path) -> None:
    """The same steps, losses and evaluations, and the same weights."""
    ours, theirs = finetuning.lines(folder), finetuning.lines(truth)
    kept = ("step", "steps_late", "learning_rate")
    assert [[line.get(name) for name in kept] for line in ours] == [
        [line.get(name) for name in kept] for line in theirs
    ]
    for name in ("loss", "held_out_loss"):
        found = [[line[name] for line in lines if name in line] for lines in (ours, theirs)]
        assert found[0] == pytest.approx(found[1], rel=2e-5), name
    (path,) = (truth / "model").glob("*.safetensors")
    first, second = load_file(folder / "model" / path.name), load_file(path)
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        torch.testing.assert_close(tensor, second[name], rtol=1e-3, atol=1e-4, msg=name)


@pytest.mark.parametrize(
    ("kind", "size"),
    [
        pytest.param("full", 2, marks=pytest.mark.slow),
        pytest.param("lora", 2, marks=pytest.mark.nightly),
        pytest.param("padded", 2, marks=pytest.mark.nightly),
        pytest.param("full", 3, marks=pytest.mark.nightly),
    ],
)
def test_several_processes_train_as_one(
    kind: str,
    size: int,
    inputs: list[str],
    alone: dict[str, Path],
    machines: dict[str, Machine],
    tmp_path: Path,
) -> None:
    truth, folder = alone[kind], tmp_path / "run"
    command = [*inputs, *KINDS[kind], "--output", str(folder)]

    (status, printed, shown), *others = run([command] * size, machines)

    assert status == 0, shown
    assert f"the model is in {folder / 'model'}" in printed
    assert f"{size} machines like this; network " in printed
    # One voice.
    assert others == [(0, "", "")] * (size - 1)
    assert_close(folder, truth)
    assert {path.name for path in folder.iterdir()} == {path.name for path in truth.iterdir()}
    own = {path.name for path in (folder / "checkpoints" / "step-00000002" / "roundpipe").iterdir()}
    assert {f"optimizers-of-machine-{rank}.safetensors" for rank in range(size)} <= own


@pytest.mark.slow
def test_several_processes_train_on_images_as_one(machines: dict[str, Machine], tmp_path: Path) -> None:
    pytest.importorskip("torchvision")
    shown = [[0], [], [1, 2], [3], [0, 3], []]
    for number in range(4):
        vision.picture(number, width=7 + 3 * number).save(tmp_path / f"{number}.png")
    records = [
        {
            "messages": [
                {"role": "user", "content": "what is it?"},
                {"role": "assistant", "content": finetuning.words(number, 2)},
            ],
            "images": [f"{one}.png" for one in images],
        }
        for number, images in enumerate(shown * 2)
    ]
    data = finetuning.json_lines(tmp_path / "data.jsonl", records)
    model = vision.make_model(tmp_path / "model", "qwen3-vl")
    command = ["train", "--model", str(model), "--data", str(data), "--sequence", "256", "--batch", "6", "--steps"]
    command += ["3", "--held-out", "0.3", "--eval-every", "2", "--num-microbatch", "2", "--devices", "cpu:1"]
    assert main([*command, "--output", str(tmp_path / "alone")]) == 0

    (status, _, told), other = run([[*command, "--output", str(tmp_path / "run")]] * 2, machines)

    assert (status, other) == (0, (0, "", "")), told
    assert_close(tmp_path / "run", tmp_path / "alone")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "number", "size"),
    [
        ("lora", signal.SIGTERM, 1),
        pytest.param("full", signal.SIGINT, 3, marks=pytest.mark.nightly),
        pytest.param("full", signal.SIGTERM, 1, marks=pytest.mark.nightly),
    ],
)
def test_a_signal_to_one_process_ends_all_with_a_checkpoint_from_which_any_number_goes_on(
    kind: str,
    number: int,
    size: int,
    inputs: list[str],
    alone: dict[str, Path],
    machines: dict[str, Machine],
    tmp_path: Path,
) -> None:
    folder = tmp_path / "run"
    command = [*inputs, *KINDS[kind], "--output", str(folder)]
    truth = alone[kind]

    (status, _, shown), (other, said, _) = run([command] * 2, machines, at=3, number=number)

    assert (status, other, said) == (128 + number, 128 + number, "")
    assert shown.splitlines()[-1] == (
        f"roundpipe: interrupted after step 3 of {STEPS}; a checkpoint is saved: the same command with --resume "
        "goes on"
    )
    assert (folder / "checkpoints" / "step-00000003").is_dir()
    if size == 1:
        assert main([*command, "--resume"]) == 0
    else:
        (status, printed, shown), *others = run([[*command, "--resume"]] * size, machines)
        assert status == 0, shown
        assert others == [(0, "", "")] * (size - 1)
        assert "goes on after step 3\n" in printed
    assert_close(folder, truth)


@pytest.mark.nightly
@pytest.mark.parametrize("steps", ["--sync", "--no-sync"])
def test_masters_in_halves_are_divided_and_go_on_alone(
    steps: str, inputs: list[str], machines: dict[str, Machine], tmp_path: Path
) -> None:
    command = [*inputs, "--dtype", "bfloat16", steps]
    # It measures the machine, too.
    assert main([*command, "--output", str(tmp_path / "alone")]) == 0
    for master in ("whole", "split"):
        (status, _, shown), _ = run(
            [[*command, "--master", master, "--output", str(tmp_path / master)]] * 2, machines
        )
        assert status == 0, shown
    alone, wanted, found = (_losses(tmp_path / name) for name in ("alone", "whole", "split"))
    # Weights differ on ties only.
    assert found == pytest.approx(wanted, rel=1e-3)
    for number in ("00000004", "00000005"):
        shutil.rmtree(tmp_path / "split" / "checkpoints" / f"step-{number}", ignore_errors=True)
    assert main([*command, "--master", "split", "--output", str(tmp_path / "split"), "--resume"]) == 0
    assert _losses(tmp_path / "split") == pytest.approx(alone, rel=2e-2)


def _losses(folder: Path) -> list[float]:
    return [line["loss"] for line in finetuning.lines(folder) if "loss" in line]


@pytest.mark.nightly
def test_a_process_that_is_killed_ends_the_others_with_one_line_and_one_goes_on(
    inputs: list[str], alone: dict[str, Path], machines: dict[str, Machine], tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    command = [*inputs, "--output", str(folder)]
    truth = alone["full"]

    (status, _, shown), (killed, _, _) = run([command] * 2, machines, at=4, number=signal.SIGKILL)

    assert (status, killed) == (1, -signal.SIGKILL)
    assert shown.splitlines()[-1].startswith("roundpipe: machine 0: rank 1 is lost: its process ended")
    assert "Traceback" not in shown
    assert main([*command, "--resume"]) == 0
    assert_close(folder, truth)


MISTAKES: dict[str, Any] = {
    "--lr must be the same on all machines, but is 0.01 on machine 0, 0.02 on machine 1": ["--lr", "2e-2"],
    "machine 1: --optimizer must be one of": ["--optimizer", "nobody"],
    "must be a folder that all machines share, but machine 1 does not see": ["--output", "{elsewhere}"],
    "the tokens of --data and --eval-data must be the same on all machines": ["--data", "{more}"],
    "--num-microbatch must be at least 2, the number of machines, but is 1": ["--num-microbatch", "1"],
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "told",
    [told if at == 0 else pytest.param(told, marks=pytest.mark.nightly) for at, told in enumerate(MISTAKES)],
)
def test_what_differs_between_processes_is_told_once_and_nothing_is_written(
    told: str, inputs: list[str], machines: dict[str, Machine], tmp_path: Path
) -> None:
    folder, more = tmp_path / "run", tmp_path / "more.jsonl"
    finetuning.json_lines(more, finetuning.texts(51))
    changed = [value.format(elsewhere=tmp_path / "elsewhere", more=more) for value in MISTAKES[told]]
    command = [*inputs, "--output", str(folder)]

    (status, _, shown), (other, _, silent) = run([command, [*command, *changed]], machines)

    assert (status, other, silent) == (2, 2, "")
    assert told in shown
    assert shown.count("\n") == 1
    assert not folder.exists()


@pytest.mark.nightly
def test_env_tells_of_the_network_between_the_machines(machines: dict[str, Machine]) -> None:
    (status, printed, shown), other = run([["env", "--devices", "cpu:1", "--json"]] * 2, machines)
    assert (status, shown, other) == (0, "", (0, "", ""))
    found = json.loads(printed)["machines"]
    assert found["number"] == 2
    assert found["network"]["gb_s"] > 0
    assert found["network"]["connections"] == 1


@pytest.mark.nightly
def test_the_built_in_job_trains_on_several_machines_as_on_one(
    machines: dict[str, Machine], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text.txt"
    text.write_bytes(b"".join(b"%d bottles hang on the wall; " % count for count in range(200)))
    command = ["train", "--data", str(text), "--steps", "4", "--batch", "4", "--sequence", "12"]
    command += ["--devices", "cpu:1", "--lr", "1e-2", "--output"]
    assert main([*command, str(tmp_path / "one")]) == 0
    capsys.readouterr()

    (status, printed, shown), other = run([[*command, str(tmp_path / "two")]] * 2, machines)

    assert status == 0, shown
    assert "held-out loss" in printed
    assert other == (0, "", "")
    ours, theirs = (finetuning.lines(tmp_path / name) for name in ("two", "one"))
    for name in ("loss", "held_out_loss"):
        found = [[line[name] for line in lines if name in line] for lines in (ours, theirs)]
        assert found[0] == pytest.approx(found[1], rel=1e-4)


@pytest.mark.slow
def test_the_built_in_job_draws_by_its_seed_on_every_machine(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("green bottles hang on the wall; " * 40)
    torch.manual_seed(5)
    sizes = ["--steps", "1", "--batch", "4", "--sequence", "8", "--devices", "cpu:1"]
    assert main(["train", "--data", str(text), *sizes, "--seed", "3"]) == 0
    assert torch.initial_seed() == 3


def test_torchrun_without_an_address_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    assert main(["train"]) == 2
    assert "start roundpipe with torchrun" in capsys.readouterr().err


def test_more_processes_than_gpus_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.delenv("ROUNDPIPE_DEVICES", raising=False)
    assert main(["train"]) == 2
    assert (
        "torchrun started 2 processes on this machine, but CUDA devices visible here are 1"
        in capsys.readouterr().err
    )


FAILING = """
import os
from rp_trainer.finetuning.training import Training
begun, listed = [], []
def noted(job, now, own=Training.step):
    begun.append(now)
    return own(job, now)
def listdir(path=".", real=os.listdir):
    if begun and os.environ["RANK"] == os.environ["FAILING_RANK"] and "checkpoints" in str(path):
        listed.append(path)
        if len(listed) in (1, 3):
            raise OSError(116, "Stale file handle")
    return real(path)
os.listdir, Training.step = listdir, noted
"""


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_listing_that_fails_on_one_machine_keeps_no_other_waiting(
    rank: int, inputs: list[str], alone: dict[str, Path], machines: dict[str, Machine], tmp_path: Path
) -> None:
    truth, folder = alone["full"], tmp_path / "run"
    command = [*inputs, "--output", str(folder)]

    ended = run([command] * 2, machines, before=FAILING, FAILING_RANK=str(rank))

    assert [status for status, _, _ in ended] == [0, 0], ended
    assert not any("Traceback" in complaints for _, _, complaints in ended)
    assert_close(folder, truth)
    assert len(list((folder / "checkpoints").iterdir())) >= 2
