"""A fine-tuning that stops and goes on: by a signal, killed, or from any of its checkpoints, to the last bit."""

from __future__ import annotations

import json
import os
import pickle
import random
import shutil
import signal
import time
from itertools import count
from pathlib import Path
from typing import Any

import finetuning
import pytest
import torch
from programs import COMMAND_LINE, Program
from roundpipe import RoundPipe
from rp_checkpoint import check, is_finished
from rp_cli.main import main
from rp_estimate.machine.hardware import Machine
from rp_trainer.finetuning.evaluation import Evaluation
from rp_trainer.finetuning.training import Training
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, GPT2Config

pytestmark = pytest.mark.usefixtures("measured_once")

STEPS = 7
# One device: how layers are cut then changes no sum. Layers drop out by the random states that a checkpoint has.
SETTINGS = ["--sequence", "24", "--batch", "3", "--steps", str(STEPS), "--lr", "1e-2", "--devices", "cpu:1"]
SETTINGS += ["--num-microbatch", "2", "--save-every", "2", "--keep", "9", "--held-out", "0.2", "--eval-every", "3"]
SETTINGS += ["--no-sync"]
KINDS = {"full": [], "lora": ["--lora", "2"], "sync": ["--sync", "--no-packing"]}
KINDS |= {"halves": ["--master", "split", "--dtype", "bfloat16"]}
NIGHTLY = ("sync", "halves", "halves in place")
KINDS |= {"halves in place": [*KINDS["halves"], "--sync"]}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("inputs")
    model = finetuning.make_model(folder / "model", "gpt2")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "resid_pdrop": 0.2}))
    data = finetuning.json_lines(folder / "data.jsonl", finetuning.texts(30))
    return ["train", "--model", str(model), "--data", str(data), *SETTINGS]


@pytest.fixture(scope="module")
def whole(inputs: list[str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Runs that were not stopped, by kind, made when they are first asked for."""

    class Runs(dict[str, Path]):
        def __missing__(self, kind: str) -> Path:
            self[kind] = folder = tmp_path_factory.mktemp("whole") / kind
            assert main([*inputs, *KINDS[kind], "--output", str(folder)]) == 0
            return folder

    return Runs()


def assert_same(run: Path, other: Path) -> None:
    assert [timeless(line) for line in finetuning.lines(run)] == [
        timeless(line) for line in finetuning.lines(other)
    ]
    names = [path.name for path in (run / "model").glob("*.safetensors")]
    assert len(names) == 1
    ours, theirs = (load_file(folder / "model" / names[0]) for folder in (run, other))
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name


def timeless(line: dict[str, Any]) -> dict[str, Any]:
    kept = ("step", "loss", "steps_late", "learning_rate", "held_out_loss")
    return {name: value for name, value in line.items() if name in kept}


def stop_at(step: int, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Send this process a signal in the midst of a step."""
    run = Training.step

    def stopped(job: Training, at: int) -> Any:
        if at == step:
            os.kill(os.getpid(), number)
        return run(job, at)

    monkeypatch.setattr(Training, "step", stopped)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", ["full", "lora", *(pytest.param(kind, marks=pytest.mark.nightly) for kind in NIGHTLY)]
)
def test_a_run_goes_on_from_any_checkpoint_to_the_same_end(
    kind: str, inputs: list[str], whole: dict[str, Path], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(whole[kind], run)
    shutil.rmtree(run / "model")
    for newer in ("step-00000004", "step-00000006"):
        shutil.rmtree(run / "checkpoints" / newer)

    assert main([*inputs, *KINDS[kind], "--output", str(run), "--resume"]) == 0

    assert_same(run, whole[kind])


@pytest.mark.few(1)
@pytest.mark.parametrize(("number", "status", "step"), [(signal.SIGINT, 130, 3), (signal.SIGTERM, 143, 4)])
def test_a_signal_saves_a_checkpoint_and_the_same_command_with_resume_goes_on(
    number: int,
    status: int,
    step: int,
    inputs: list[str],
    whole: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = tmp_path / "run"
    with monkeypatch.context() as patched:
        stop_at(step, number, patched)
        assert main([*inputs, "--output", str(run)]) == status
    last = capsys.readouterr().err.splitlines()[-1]
    assert last == (
        f"roundpipe: interrupted after step {step} of {STEPS}; a checkpoint is saved: the same command with "
        "--resume goes on"
    )
    assert (run / "checkpoints" / f"step-{step:08}").is_dir()
    assert not (run / "model").exists()

    assert main([*inputs, "--output", str(run), "--resume"]) == 0

    assert f"goes on after step {step}\n" in capsys.readouterr().out
    assert_same(run, whole["full"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("evaluation", "number", "step"), [(0, signal.SIGINT, 0), (1, signal.SIGTERM, 3), (3, signal.SIGINT, STEPS)]
)
def test_a_signal_ends_an_evaluation_which_is_made_up_for_by_the_run_that_goes_on(
    evaluation: int,
    number: int,
    step: int,
    inputs: list[str],
    whole: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run, at = tmp_path / "run", count()
    evaluate = Evaluation.loss

    def interrupted(*given: Any) -> float | None:
        if next(at) == evaluation:
            os.kill(os.getpid(), number)
        return evaluate(*given)

    with monkeypatch.context() as patched:
        patched.setattr(Evaluation, "loss", interrupted)
        assert main([*inputs, "--output", str(run)]) == 128 + number
    told = f"after step {step} of {STEPS}; a checkpoint is saved" if step else "before the first step"
    assert capsys.readouterr().err.splitlines()[-1].startswith(f"roundpipe: interrupted {told}")
    evaluated = [line["step"] for line in finetuning.lines(run) if "held_out_loss" in line]
    assert evaluated == [0, 3, 6][:evaluation]

    assert main([*inputs, "--output", str(run), "--resume"]) == 0

    assert_same(run, whole["full"])


@pytest.mark.later
def test_a_signal_ends_an_evaluation_after_the_call_under_way(
    inputs: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = count(1)
    run = RoundPipe.loss

    def interrupted(model: RoundPipe, **given: Any) -> Any:
        if next(calls) == 2:
            os.kill(os.getpid(), signal.SIGINT)
        return run(model, **given)

    monkeypatch.setattr(RoundPipe, "loss", interrupted)
    data = inputs[inputs.index("--data") + 1]
    command = [value for value in inputs if value not in ("--held-out", "0.2")]
    command += ["--eval-data", data, "--batch", "1", "--num-microbatch", "1"]

    assert main([*command, "--output", str(tmp_path / "run")]) == 130

    assert next(calls) == 3


KILLED = """
import os, signal, sys
from rp_cli.main import main
from rp_trainer.finetuning.kept import InFolder
from rp_trainer.finetuning.training import Training
run, begin, last = Training.step, InFolder.begin, int(sys.argv.pop(1))
kept = []
def began(folder, training):
    kept.append(folder)
    return begin(folder, training)
def step(job, at):
    if at == last:
        kept[0].manager.wait()
        os.kill(os.getpid(), signal.SIGKILL)
    return run(job, at)
Training.step, InFolder.begin = step, began
sys.exit(main())
"""


@pytest.mark.parametrize("step", [6, *(pytest.param(at, marks=pytest.mark.nightly) for at in (1, 2, 3, 4, 5, 7))])
def test_a_killed_run_goes_on_to_the_same_end(
    step: int, inputs: list[str], whole: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    with Program(KILLED, str(step), *inputs, "--output", str(run), imports=COMMAND_LINE) as program:
        assert program.end()[0] == -signal.SIGKILL
    capsys.readouterr()

    assert main([*inputs, "--output", str(run), "--resume"]) == 0

    # The first evaluation behind a step, the third, is the best so far.
    saved = max((step - 1) // 2 * 2, 3 if step > 3 else 0)
    told = f"goes on after step {saved}" if saved else "no checkpoint yet: begins with step 1"
    assert told in capsys.readouterr().out
    assert_same(run, whole["full"])


RESUMED = """
import pickle, sys
from rp_cli.main import main
from rp_cli.finetune import forecast
machine = pickle.loads(bytes.fromhex(sys.argv.pop(1)))
# Measured once: that takes longer than to train.
forecast.measured = lambda *_: machine
sys.exit(main())
"""


def kill(inputs: list[str], run: Path, chance: random.Random) -> bool:
    """Start the command or go on with it, and kill it at some moment. Returns whether it had not ended before."""
    with Program(RESUMED, *inputs, "--output", str(run), "--resume", imports=COMMAND_LINE) as program:
        until = time.monotonic() + 300
        wanted = chance.randrange(4)
        before = size_of(run / "metrics.jsonl")
        while program.is_running() and size_of(run / "metrics.jsonl") < before + 200 * wanted:
            assert time.monotonic() < until, "the run does not get on"
            time.sleep(0.001)
        time.sleep(chance.random() * (0.02 if wanted else 1))
        os.kill(program.pid, signal.SIGKILL)
        status, _, complaints = program.end()
    assert status in (0, -signal.SIGKILL), complaints
    for path in (run / "checkpoints").glob("step-*"):
        assert is_finished(path)
        check(path)
    return status != 0


def size_of(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


@pytest.mark.nightly
@pytest.mark.timeout(7200)
def test_300_kills_of_the_command_change_nothing(
    inputs: list[str], whole: dict[str, Path], machines: dict[str, Machine], tmp_path: Path
) -> None:
    assert whole["full"].is_dir()
    machine = pickle.dumps(machines["1 torch.float32"]).hex()
    chance = random.Random(2)
    done, kills = 0, int(os.environ.get("ROUNDPIPE_KILLS", "300"))
    for number in count():
        run = tmp_path / f"{number}"
        while done < kills and kill([machine, *inputs], run, chance):
            done += 1
        assert main([*inputs, "--output", str(run), "--resume"]) == 0
        assert_same(run, whole["full"])
        shutil.rmtree(run)
        if done >= kills:
            return


@pytest.mark.later
def test_the_checkpoint_with_the_best_held_out_loss_is_kept(
    inputs: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    command = [*inputs, "--save-every", "100", "--keep", "1", "--eval-every", "1", "--output", str(run)]
    for losses, given in (([1.0, 5.0, 3.0, 4.0, 3.0, 4.0, 4.0, 2.0], []), ([4.0] * 5, ["--resume"])):
        left = iter(losses)
        monkeypatch.setattr(Evaluation, "loss", lambda *_, left=left: next(left))
        assert main([*command, *given]) == 0
        assert list(left) == []

        # Saved beside the usual ones, and not again by the run that goes on.
        assert [path.name for path in (run / "checkpoints").iterdir()] == ["step-00000002"]
        shutil.rmtree(run / "model")


@pytest.mark.later
def test_a_held_out_loss_that_is_not_finite_ends_the_training(
    inputs: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    losses = iter([1.0, float("nan")])
    monkeypatch.setattr(Evaluation, "loss", lambda *_: next(losses))

    assert main([*inputs, "--eval-every", "100", "--output", str(tmp_path / "run")]) == 1

    assert f"the held-out loss must stay finite, but is nan after step {STEPS}" in capsys.readouterr().err
    assert not (tmp_path / "run" / "model").exists()


@pytest.mark.later
def test_a_damaged_checkpoint_is_told_and_the_one_before_it_is_taken(
    inputs: list[str], whole: dict[str, Path], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(whole["full"], run)
    shutil.rmtree(run / "model")
    weights = run / "checkpoints" / "step-00000006" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])

    with pytest.warns(match="step-00000006"):
        assert main([*inputs, "--output", str(run), "--resume"]) == 0

    assert_same(run, whole["full"])


def test_a_finished_run_is_left_as_it_is(
    inputs: list[str], whole: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    before = finetuning.lines(whole["full"])

    assert main([*inputs, "--output", str(whole["full"]), "--resume"]) == 0

    assert "is finished" in capsys.readouterr().out
    assert finetuning.lines(whole["full"]) == before


CHANGED = {
    "--lr": ["--lr", "2e-2"],
    "--batch": ["--batch", "2"],
    "--no-packing": ["--no-packing"],
    "--lora": ["--lora", "4"],
    "--seed": ["--seed", "1"],
    "the tokenizer make other tokens": ["--data", "{other}"],
}


@pytest.mark.few(1)
@pytest.mark.parametrize("told", CHANGED)
def test_other_options_than_before_are_refused_by_name(
    told: str, inputs: list[str], whole: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    shutil.copy(whole["full"] / "options.json", run)
    other = finetuning.json_lines(tmp_path / "other.jsonl", finetuning.texts(31))
    changed = [value.format(other=other) for value in CHANGED[told]]
    capsys.readouterr()

    assert main([*inputs, *changed, "--output", str(run), "--resume"]) == 2

    shown = capsys.readouterr().err
    assert told in shown
    assert shown.count("\n") == 1
    assert [path.name for path in run.iterdir()] == ["options.json"]


@pytest.mark.later
def test_another_run_in_the_folder_is_refused_or_replaced(
    inputs: list[str], whole: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    shutil.copytree(whole["full"], run)
    (run / "notes.txt").write_text("mine")
    before = sorted(path for path in run.rglob("*"))

    assert main([*inputs, "--seed", "1", "--output", str(run)]) == 2
    assert "has a run already; continue it by --resume, replace it by --overwrite" in capsys.readouterr().err
    assert sorted(path for path in run.rglob("*")) == before

    assert main([*inputs, "--seed", "1", "--output", str(run), "--overwrite"]) == 0
    first, other = (timeless(finetuning.lines(folder)[1]) for folder in (run, whole["full"]))
    assert first["loss"] != other["loss"]
    assert (run / "notes.txt").read_text() == "mine"


@pytest.mark.later
def test_a_finished_run_is_extended_as_if_it_had_been_longer(
    inputs: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # A rate that does not depend on the number of steps.
    given = [*inputs, "--schedule", "constant", "--warm-up", "1"]
    run, longer = tmp_path / "run", tmp_path / "longer"

    assert main([*given, "--output", str(run), "--steps", "4"]) == 0
    first = load_file(run / "model" / "model.safetensors")
    again = [*given, "--output", str(run), "--resume"]
    assert main([*again, "--steps", "3"]) == 2
    assert "--steps was 4 and is 3" in capsys.readouterr().err
    assert main([*again, "--steps", "7"]) == 0

    shown = capsys.readouterr().out
    assert "extended from 4 to 7 steps: from here on, the learning rate is that of a run of 7 steps" in shown
    assert main([*given, "--output", str(longer)]) == 0
    assert_same(run, longer)
    kept = load_file(run / "model-after-step-4" / "model.safetensors")
    assert all(torch.equal(tensor, kept[name]) for name, tensor in first.items())
    # Now it has seven.
    assert main([*again, "--steps", "7"]) == 0
    assert "is finished" in capsys.readouterr().out
    assert main([*given, "--output", str(run), "--overwrite", "--steps", "1"]) == 0
    assert not (run / "model-after-step-4").exists()


@pytest.mark.later
def test_a_run_that_cannot_be_extended_keeps_its_model_and_its_length(
    inputs: list[str], whole: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    shutil.copytree(whole["full"], run)
    # Weights of another shape: only the checkpoint itself can tell.
    config = json.loads((run / "model" / "config.json").read_text())
    other = tmp_path / "other"
    AutoModelForCausalLM.from_config(GPT2Config(**{**config, "n_layer": 3})).save_pretrained(other)
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    more = ["--tokenizer", inputs[2], "--output", str(run), "--resume", "--steps", str(STEPS + 2)]

    assert main([*inputs, *more, "--model", str(other)]) == 2

    assert "do not have the same tensors" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
    assert main([*inputs, "--output", str(run), "--resume"]) == 0
    assert "is finished" in capsys.readouterr().out


@pytest.mark.later
@pytest.mark.parametrize("given", [[], ["--lora-targets", "all-linear"]])
@pytest.mark.parametrize("kind", ["full", "lora"])
def test_a_run_from_before_adapters_had_options_goes_on(
    kind: str, given: list[str], whole: dict[str, Path], inputs: list[str], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(whole[kind], run)
    options = json.loads((run / "options.json").read_text())
    for name in ("lora_parts", "lora_dropout", "dora", "rslora", "lora_bias", "modules_to_save"):
        del options[name]
    (run / "options.json").write_text(json.dumps(options))
    # Without adapters there are no targets to name.
    more = given if kind == "lora" else []

    assert main([*inputs, *KINDS[kind], *more, "--output", str(run), "--resume"]) == 0
    assert main([*inputs, *KINDS[kind], *more, "--output", str(run), "--resume", "--dora", "--lora", "2"]) == 2
