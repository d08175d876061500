"""`--step-in-backward` of `roundpipe train` and `plan`: the same numbers, fewer bytes, and what it cannot do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import finetuning
import pytest
import torch
from rp_cli.main import main
from safetensors.torch import load_file

FLAG = "--step-in-backward"
CONFIG = {
    "model_type": "qwen3",
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("inputs")
    finetuning.make_model(folder / "model")
    data = finetuning.json_lines(folder / "data.jsonl", finetuning.texts())
    settings = ["--sequence", "24", "--batch", "2", "--devices", "cpu:1", "--num-microbatch", "1"]
    return [
        "--model",
        str(folder / "model"),
        "--data",
        str(data),
        *settings,
        "--steps",
        "3",
        "--dtype",
        "bfloat16",
    ]


@pytest.mark.slow
@pytest.mark.parametrize("how", [["--master", "split"], ["--lora", "4"]], ids=["split", "lora"])
def test_a_fine_tuning_ends_with_the_same_bits(inputs: list[str], how: list[str], tmp_path: Path) -> None:
    runs = {name: tmp_path / name for name in ("during", "after")}
    for name, flags in (("during", [FLAG]), ("after", [])):
        assert main(["train", *inputs, *how, "--clip", "0", *flags, "--output", str(runs[name])]) == 0
    losses = [[line["loss"] for line in finetuning.lines(run) if "loss" in line] for run in runs.values()]
    assert losses[0] == losses[1]
    files = [sorted((run / "model").glob("*.safetensors")) for run in runs.values()]
    assert [one.name for one in files[0]] == [one.name for one in files[1]] != []
    for one, other in zip(*files, strict=True):
        found, wanted = load_file(one), load_file(other)
        assert all(torch.equal(found[name], value) for name, value in wanted.items())


@pytest.mark.slow
def test_evaluations_between_its_steps_have_the_same_bits(inputs: list[str], tmp_path: Path) -> None:
    runs = {name: tmp_path / name for name in ("during", "after")}

    for name, flags in (("during", [FLAG]), ("after", [])):
        given = [*flags, "--clip", "0", "--held-out", "0.3", "--eval-every", "1"]
        assert main(["train", *inputs, *given, "--output", str(runs[name])]) == 0

    losses = [
        [line["held_out_loss"] for line in finetuning.lines(run) if "held_out_loss" in line]
        for run in runs.values()
    ]
    assert len(losses[0]) == 4
    assert losses[0] == losses[1]


WRONG = {
    "late steps": (["--no-sync"], "cannot be used with --no-sync"),
    "clipping": ([], "use --clip 0 with it"),
    "accumulation": (["--clip", "0", "--accumulation", "2"], "use --accumulation 1 with it"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_needs_gradients_is_refused_in_one_line(
    case: str, inputs: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags, told = WRONG[case]
    assert main(["train", *inputs, FLAG, *flags, "--output", str(tmp_path / "run")]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("roundpipe: --step-in-backward")
    assert told in shown
    assert shown.count("\n") == 1


def test_without_a_model_the_same_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", FLAG, "--no-sync"]) == 2
    assert main(["train", FLAG]) == 2
    assert capsys.readouterr().err.count("roundpipe: --step-in-backward") == 2


@pytest.mark.slow
@pytest.mark.usefixtures("no_model")
def test_a_plan_counts_and_suggests_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(CONFIG))
    machine = ["plan", "--model", str(file), "--gpu", "memory=2GB,link=10,tflops=1", "--batch", "4"]
    machine += ["--sequence", "64", "--devices", "2", "--master", "split"]

    def found(*flags: str) -> dict[str, Any]:
        assert main([*machine, *flags, "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    kept, consumed = found("--ram", "4GB"), found("--ram", "4GB", FLAG)
    assert [answer["model"]["step_in_backward"] for answer in (kept, consumed)] == [False, True]
    numel = kept["model"]["parameters"]
    # Of 16 layers two at once, and the embedding and the head in turn.
    layer = (numel - 2 * 512 * 256 - 256) // 16
    assert consumed["host_bytes"]["gradients"] == pytest.approx(2 * (2 * layer + 512 * 256), rel=0.01)
    assert kept["host_bytes"]["gradients"] >= 2 * numel
    most, least = (found("--ram", "1MB", *flags)["short"]["bytes"] for flags in ((), (FLAG,)))
    short = found("--ram", f"{round((most + least) / 2e6)}MB")
    assert any(change["option"] == FLAG for change in short["changes"]), short
    assert main([*machine, "--ram", "4GB", FLAG]) == 0
    assert "fp32 masters in halves, stepped in backward" in capsys.readouterr().out
    assert main([*machine, FLAG, "--machines", "2", "--network", "100Gb"]) == 2
