"""Options of `roundpipe train --model`: in a file, of the optimizer, of reports, and of what is printed."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import finetuning
import pytest
import torch
from roundpipe import RoundPipe, Runtime, optim
from rp_cli.arguments import parse
from rp_cli.finetune.options import FineTuning
from rp_cli.finetune.resumed import check_same
from rp_cli.finetune.run import settings_of
from rp_cli.main import main
from rp_cli.options import shared as names
from rp_cli.options.config_file import with_config
from rp_cli.options.declared import declared, read
from rp_optim import OPTIMIZERS
from rp_trainer.errors import Refused
from rp_trainer.finetuning.settings import learning_rate
from rp_trainer.finetuning.updates import stepped
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM

pytestmark = pytest.mark.usefixtures("measured_once")
SETTINGS = ["--sequence", "24", "--batch", "2", "--devices", "cpu:1", "--num-microbatch", "1"]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("inputs")
    finetuning.make_model(folder / "model")
    data = finetuning.json_lines(folder / "data.jsonl", finetuning.texts())
    return ["--model", str(folder / "model"), "--data", str(data)]


def options(*given: str) -> FineTuning:
    usual = ["--model", "m", "--data", "d", "--output", "o"]
    return read(FineTuning, with_config(parse(["train", *usual, *given]), declared(FineTuning)))


def test_a_config_file_says_the_same_as_the_command_line(tmp_path: Path) -> None:
    path = tmp_path / "options.yaml"
    path.write_text(
        "lr: 1e-4\nlora: 8\nlora-targets: [q_proj, v_proj]\nnum-microbatch: auto\nsync: true\ncompile: false\n"
        "completions_only: yes\nwarm-up: 0.1\nsave-every: 20min\nbetas: 0.9,0.99\neval-data: x.jsonl\n"
    )
    same = [
        "--lr",
        "1e-4",
        "--lora",
        "8",
        "--lora-targets",
        "q_proj",
        "v_proj",
        "--num-microbatch",
        "auto",
        "--sync",
    ]
    same += ["--completions-only", "--warm-up", "0.1", "--save-every", "20min", "--betas", "0.9,0.99"]

    assert options("--config", str(path)) == options(*same, "--eval-data", "x.jsonl")
    both = options("--config", str(path), "--lr", "3", "--lora-targets", "k_proj")
    assert both == replace(options("--config", str(path)), lr=3.0, lora_targets=("k_proj",))


def test_of_two_options_that_do_not_go_together_the_command_lines_counts(tmp_path: Path) -> None:
    path = tmp_path / "options.yaml"
    path.write_text("epochs: 3\nresume: true\nheld-out: 0.1\n")
    given = ["--steps", "7", "--overwrite", "--eval-data", "x.jsonl"]
    assert options("--config", str(path), *given) == options(*given)
    path.write_text("epochs: 3\nsteps: 7\n")
    with pytest.raises(Refused, match="--epochs and --steps exclude each other"):
        options("--config", str(path))


def test_a_run_from_before_there_were_kinds_of_state_goes_on_as_fp32(tmp_path: Path) -> None:
    flags = ("--model", "m", "--data", "d.txt", "--output", str(tmp_path))
    earlier = {**options(*flags).jsonable(), "data_digest": "d"}
    del earlier["optimizer_state"], earlier["compute"]
    (tmp_path / "options.json").write_text(json.dumps(earlier))
    check_same(options(*flags), tmp_path, "d")
    with pytest.raises(Refused, match="--optimizer-state was fp32 and is 8bit"):
        check_same(options(*flags, "--optimizer-state", "8bit"), tmp_path, "d")


@pytest.mark.later
def test_linear_layers_multiply_in_fp8(
    inputs: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    run = ["train", *inputs, *SETTINGS, "--dtype", "bfloat16", "--steps", "2", "--lora", "4", "--quiet"]
    kinds = ("bf16", "fp8", "fp8-cast")
    for kind in kinds:
        with caplog.at_level("INFO", "rp_engine.planning.fp8_layers"):
            assert main([*run, "--output", str(tmp_path / kind), "--compute", kind]) == 0
    told = [record.getMessage() for record in caplog.records if "multiply in FP8" in record.getMessage()]
    first, second, third = ([line["loss"] for line in finetuning.lines(tmp_path / kind)] for kind in kinds)

    # Adapters, and the head.
    assert "skipped by name" in told[0]
    assert first != second == third
    assert second == pytest.approx(first, rel=0.02)
    # What is decided is told, and goes on so.
    auto = [*run[:-1], "--output", str(tmp_path / "auto"), "--compute", "auto"]
    assert main(auto) == 0
    words = "compute='auto': bf16, since cpu:0 emulates products in FP8, which takes longer"
    assert words in " ".join(capsys.readouterr().err.split())
    assert words.replace("'", "&#x27;") in (tmp_path / "auto" / "report.html").read_text()
    assert [line["loss"] for line in finetuning.lines(tmp_path / "auto")] == first
    with pytest.raises(Refused, match="--compute fp8-cast is for models in bfloat16, but --dtype is float32"):
        options("--compute", "fp8-cast", "--dtype", "float32")


@pytest.mark.slow
def test_a_config_file_may_have_everything(inputs: list[str], tmp_path: Path) -> None:
    path = tmp_path / "all.yaml"
    path.write_text(
        f"model: {inputs[1]}\ndata: {inputs[3]}\noutput: {tmp_path / 'run'}\nsequence: 24\nbatch: 2\nsteps: 1\n"
        "devices: cpu:1\n"
    )

    assert main(["train", "--config", str(path)]) == 0

    assert json.loads((tmp_path / "run" / "options.json").read_text())["sequence"] == 24


def test_the_command_knows_all_named_optimizers_and_which_take_betas() -> None:
    made = {name: make([torch.nn.Parameter(torch.ones(2, 2))]) for name, make in OPTIMIZERS.items()}
    assert sorted(names.OPTIMIZERS) == sorted(made)
    # Muon's are of what it leaves to AdamW.
    with_betas = {name for name, one in made.items() if "betas" in one.defaults} | {"muon"}
    assert set(names.WITH_BETAS) == with_betas


@pytest.mark.parametrize("name", ["adamw", "adam", "adafactor", "lion", "sgd", "sgd-momentum"])
def test_each_optimizer_decays_weights_but_no_norms_and_biases(name: str) -> None:
    chosen = options(
        "--optimizer", name, "--lr", "0.1", "--weight-decay", "0.5", "--clip", "1e-9", "--warm-up", "0"
    )
    with Runtime("cpu:1") as runtime:
        row = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Embedding(4, 4))
        model = RoundPipe(row, runtime=runtime)
        updates = stepped(model, settings_of(chosen, 1))

    first, second = updates.param_groups
    assert (first["weight_decay"], second["weight_decay"]) == (0.5, 0.0)
    assert [tuple(one.shape) for one in first["params"]] == [(4, 4), (4, 4)]
    assert {one.ndim for one in second["params"]} == {1}


def test_muon_takes_hidden_matrices_and_leaves_the_rest_to_adamw() -> None:
    chosen = options("--optimizer", "muon", "--lr", "0.1", "--weight-decay", "0.5", "--betas", "0.8,0.9")
    with Runtime("cpu:1") as runtime:
        row = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 5))
        updates = stepped(RoundPipe(row, runtime=runtime), settings_of(chosen, 1))

    found = updates.param_groups
    assert [(group["use_muon"], group["weight_decay"]) for group in found] == [
        (True, 0.5),
        (False, 0.5),
        (False, 0.0),
    ]
    assert [[tuple(one.shape) for one in group["params"]] for group in found] == [
        [(4, 4)],
        [(5, 4), (5, 4)],
        [(4,), (4,), (4,), (5,)],
    ]
    assert {group["betas"] for group in found if not group["use_muon"]} == {(0.8, 0.9)}
    assert {group["adjust_lr_fn"] for group in found} == {"match_rms_adamw"}


def test_rates_rise_then_fall_or_stay() -> None:
    def rates(**given: Any) -> list[float]:
        return [round(learning_rate(step, steps=10, highest=1.0, **given), 3) for step in range(1, 11)]

    assert rates(warm_up=4, schedule="constant") == [0.25, 0.5, 0.75, *[1.0] * 7]
    assert rates(warm_up=0.2)[:2] == [0.5, 1.0]
    assert rates(warm_up=0.2)[2:] == sorted(rates(warm_up=0.2)[2:], reverse=True)
    assert rates(warm_up=0.2)[-1] == 0.1
    # A warm-up longer than the training.
    assert rates(warm_up=20)[-1] == 0.5


@pytest.mark.later
def test_what_makes_results_others_than_they_seem_is_told(
    inputs: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = inputs[inputs.index("--data") + 1]
    given = [*inputs[:2], "--data", data, data, "--sequence", "8"]
    shown = ["--eval-data", data, "--steps", "1", "--warm-up", "9", "--dtype", "bfloat16"]

    assert main(["train", *given, *shown, "--output", str(tmp_path / "a")]) == 0
    told = capsys.readouterr().out
    assert main(["prepare", *given, "--output", str(tmp_path / "b")]) == 0

    assert "--warm-up 9 takes longer than the training, which never reaches --lr" in told
    assert "has weights in float32, which are rounded; --dtype float32 keeps them" in told
    assert "documents repeat another one" in told
    assert "are in --data, too, so the held-out loss is that of what is learned" in told
    for out in (told, capsys.readouterr().out):
        assert "samples are longer than --sequence 8" in out


@pytest.mark.later
def test_random_weights_are_said_aloud_and_depend_on_the_seed(
    tmp_path: Path, inputs: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = finetuning.make_model(tmp_path / "bare", weights=False)
    weights: list[torch.Tensor] = []
    for run, model, seed in (("a", folder, "1"), ("b", folder / "config.json", "1"), ("c", folder, "2")):
        given = [
            "--model",
            str(model),
            *inputs[2:],
            "--output",
            str(tmp_path / run),
            "--seed",
            seed,
            "--steps",
            "1",
        ]
        assert main(["train", *given, *SETTINGS, "--lr", "1e-12"]) == 0
        assert f"random weights: {model} has none\n" in capsys.readouterr().out
        weights.append(AutoModelForCausalLM.from_pretrained(tmp_path / run / "model").lm_head.weight)

    torch.testing.assert_close(weights[0], weights[1])
    assert not torch.allclose(weights[0], weights[2])


@pytest.mark.slow
def test_the_plan_is_told_before_the_first_step(
    inputs: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        main(
            ["train", *inputs, "--output", str(tmp_path / "run"), *SETTINGS[:-2], "--held-out", "0.1", "--no-sync"]
        )
        == 0
    )

    printed, shown = capsys.readouterr()
    told = ["data: 24 samples", "host memory", "device memory", "num_microbatch", "tokens/s", "bound by"]
    told += ["held-out loss after step 0", "held-out loss after step", "the model is in"]
    places = [printed.index(words) for words in told]
    assert places == sorted(places)
    assert "random weights" not in printed
    assert shown.count("a loss is of weights 1 step older") == shown.count("memory in use") == 1
    assert "tokens/s" in shown


@pytest.mark.slow
def test_a_quiet_training_prints_nothing(
    inputs: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    given = ["--output", str(tmp_path / "run"), *SETTINGS, "--held-out", "0.1", "--quiet"]

    assert main(["train", *inputs, *given]) == 0

    assert capfd.readouterr() == ("", "")
    assert (tmp_path / "run" / "model").is_dir()


@pytest.mark.slow
def test_lines_of_a_report_tell_tokens_and_epochs_so_far(inputs: list[str], tmp_path: Path) -> None:
    command = ["train", *inputs, "--output", str(tmp_path / "run"), *SETTINGS, "--save-every", "1"]
    assert main([*command, "--steps", "2"]) == 0
    assert main([*command, "--steps", "4", "--resume"]) == 0

    lines = finetuning.lines(tmp_path / "run")

    seen = 0
    for line in lines:
        seen += round(line["tokens_per_s"] * line["seconds"])
        assert line["tokens"] == seen
        assert line["epoch"] == pytest.approx(line["step"] * lines[0]["epoch"], rel=0.4)
    assert [line["step"] for line in lines] == [1, 2, 3, 4]


@pytest.mark.later
def test_lines_of_a_report_tell_how_late_the_weights_of_a_loss_are(inputs: list[str], tmp_path: Path) -> None:
    late: dict[str, list[int]] = {}
    for run, given in (("async", ["--no-sync"]), ("sync", [])):
        assert main(["train", *inputs, "--output", str(tmp_path / run), *SETTINGS, "--steps", "4", *given]) == 0
        late[run] = [line["steps_late"] for line in finetuning.lines(tmp_path / run)]

    # Nothing is late before the first step.
    assert late == {"async": [0, 1, 1, 1], "sync": [0, 0, 0, 0]}


@pytest.mark.later
def test_what_does_not_fit_is_refused_before_a_file_is_written(
    inputs: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ROUNDPIPE_HOST_MEMORY", "800MB")
    config = json.loads((Path(inputs[1]) / "config.json").read_text())
    folder = tmp_path / "large"
    shutil.copytree(inputs[1], folder, ignore=shutil.ignore_patterns("*.safetensors"))
    (folder / "config.json").write_text(json.dumps({**config, "hidden_size": 4096, "intermediate_size": 16384}))
    monkeypatch.setattr("rp_cli.finetune.forecast.measured", real_machine)

    given = ["--model", str(folder), *inputs[2:], "--output", str(tmp_path / "run"), *SETTINGS]
    assert main(["train", *given]) == 2

    shown = capsys.readouterr().err
    assert "this does not fit: host memory is short by" in shown
    assert not (tmp_path / "run").exists()


def real_machine(runtime: Runtime, *more: Any) -> Any:
    """The machine with its limit as it is now."""
    from rp_estimate.machine.hardware import measured

    return measured(runtime, *more)


@pytest.mark.later
def test_a_loss_that_is_not_finite_ends_the_training_and_saves_nothing_of_it(
    tmp_path: Path, inputs: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = iter([torch.tensor(1.0), torch.tensor(float("nan"))])
    backpropagate = RoundPipe.forward_backward

    def spoilt(model: RoundPipe, **given: Any) -> torch.Tensor:
        backpropagate(model, **given)
        return next(found)

    monkeypatch.setattr(RoundPipe, "forward_backward", spoilt)
    assert main(["train", *inputs, "--output", str(tmp_path / "run"), *SETTINGS]) == 1

    assert "the loss must stay finite, but is nan at step 2; try a lower --lr" in capsys.readouterr().err
    assert not (tmp_path / "run" / "model").exists()


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("name", "rows", "given"),
    [
        ("model.layers.0.input_layernorm.weight", slice(1), []),
        ("lm_head.weight", slice(-1, None), []),
        ("lm_head.weight", slice(-1, None), ["--no-packing"]),
        # Only what training or evaluation reads shows it.
        ("model.embed_tokens.weight", "cat", ["--no-packing", "--batch", "24"]),
        ("model.embed_tokens.weight", "cat", ["--no-packing", "--held-out", "0.5"]),
    ],
)
def test_weights_that_are_not_finite_are_named(
    name: str,
    rows: slice | str,
    given: list[str],
    inputs: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = tmp_path / "spoilt"
    shutil.copytree(inputs[1], folder)
    weights = load_file(folder / "model.safetensors")
    weights[name][finetuning.tokenizer().encode(rows) if isinstance(rows, str) else rows] = float("nan")
    save_file(weights, folder / "model.safetensors", {"format": "pt"})

    command = ["train", "--model", str(folder), *inputs[2:], *SETTINGS, "--steps", "2", *given]
    assert main([*command, "--output", str(tmp_path / "run")]) == 2

    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("roundpipe: --model")
    assert last.endswith(f"its weight {name} has numbers that are NaN or infinite; fetch it or save it again")


@pytest.mark.slow
@pytest.mark.parametrize("given", [["--sync"], ["--no-sync"], ["--sync", "--clip", "0"]])
def test_gradients_that_are_not_finite_end_the_training_before_they_reach_a_weight(
    given: list[str],
    inputs: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    steps, clip = count(1), optim.clip_grad_norm_

    def spoilt(parameters: Any, *given: Any, **more: Any) -> torch.Tensor:
        if next(steps) == 3:
            parameters[0].grad.fill_(float("inf"))
        return clip(parameters, *given, **more)

    monkeypatch.setattr(optim, "clip_grad_norm_", spoilt)
    run = tmp_path / "run"

    # The last step: no loss would show it.
    assert main(["train", *inputs, "--output", str(run), *SETTINGS, "--steps", "3", *given]) == 1

    last = capsys.readouterr().err.splitlines()[-1]
    assert last == "roundpipe: the gradients must stay finite, but are not at step 3; try a lower --lr"
    assert not (run / "model").exists()


@pytest.mark.later
def test_a_trace_that_cannot_be_written_costs_no_model(
    inputs: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("needs a file that is always full")
    run = tmp_path / "run"

    given = ["--output", str(run), *SETTINGS, "--steps", "1", "--profile", str(full)]
    assert main(["train", *inputs, *given]) == 1

    assert "roundpipe: --profile /dev/full cannot be written" in capsys.readouterr().err
    assert (run / "model" / "model.safetensors").is_file()


@pytest.mark.later
def test_tensorboard_gets_what_the_lines_have(inputs: list[str], tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = tmp_path / "run"
    given = [
        "--output",
        str(run),
        *SETTINGS,
        "--steps",
        "3",
        "--held-out",
        "0.1",
        "--report",
        "jsonl",
        "tensorboard",
    ]
    assert main(["train", *inputs, *given]) == 0

    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    losses = [(event.step, event.value) for event in events.Scalars("training/loss")]
    lines = [line for line in finetuning.lines(run) if "loss" in line]
    assert losses == [(line["step"], pytest.approx(line["loss"])) for line in lines]
    assert [event.step for event in events.Scalars("held_out/loss")] == [0, 3]


@pytest.mark.nightly
def test_compiled_layers_train_the_same(inputs: list[str], tmp_path: Path) -> None:
    losses: list[list[float]] = []
    for run, given in (("plain", []), ("compiled", ["--compile"])):
        command = [*inputs, "--output", str(tmp_path / run), *SETTINGS, "--steps", "3", *given]
        subprocess.run([sys.executable, "-m", "rp_cli", "train", *command], check=True, timeout=100)
        losses.append([line["loss"] for line in finetuning.lines(tmp_path / run)])
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


@pytest.mark.later
def test_evaluations_leave_the_random_numbers_of_the_training_alone(inputs: list[str], tmp_path: Path) -> None:
    folder = finetuning.make_model(tmp_path / "gpt2", "gpt2")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "resid_pdrop": 0.3}))
    losses: list[list[float]] = []
    for run, given in (("without", []), ("with", ["--eval-data", inputs[3], "--eval-every", "1"])):
        command = ["--model", str(folder), *inputs[2:], "--output", str(tmp_path / run), *SETTINGS, "--steps", "3"]
        assert main(["train", *command, *given]) == 0
        losses.append([line["loss"] for line in finetuning.lines(tmp_path / run) if "loss" in line])

    assert losses[0] == losses[1]
