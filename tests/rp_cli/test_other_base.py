"""An adapter knows the weights that it was trained with: put on others of the same shapes, it is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from finetuning import json_lines, make_model, texts
from rp_cli.main import main
from rp_sources.trained_on import FILE, identity_of
from safetensors.torch import load_file, save_file

SETTINGS = ["--sequence", "16", "--batch", "4", "--steps", "2", "--lora", "4", "--save-every", "1"]
REFUSED = "was trained with another model"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, data, and a run of adapters."""
    place = tmp_path_factory.mktemp("trained")
    make_model(place / "base")
    json_lines(place / "data.jsonl", texts())
    assert train(place) == 0
    return place


@pytest.fixture(autouse=True)
def on_two_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROUNDPIPE_DEVICES", "cpu:2")


@pytest.fixture
def copied(trained: Path, tmp_path: Path) -> Path:
    """A copy of it, in which the adapter names the copied model."""
    place = tmp_path / "copied"
    shutil.copytree(trained, place)
    for config in place.glob("run/**/adapter_config.json"):
        settings = {**json.loads(config.read_text()), "base_model_name_or_path": str(place / "base")}
        config.write_text(json.dumps(settings))
    return place


def train(place: Path, *more: str) -> int:
    given = ["--model", str(place / "base"), "--data", str(place / "data.jsonl"), "--output", str(place / "run")]
    return main(["train", *given, *SETTINGS, *more])


def replace(base: Path) -> None:
    """Other weights of equal names, dtypes and shapes."""
    file = base / "model.safetensors"
    save_file({name: one + 0.25 for name, one in load_file(file).items()}, file, {"format": "pt"})


def commands(run: Path, place: Path, *more: str) -> dict[str, list[str]]:
    prompts = json_lines(place / "prompts.jsonl", [{"prompt": "one"}])
    said = ["--prompts", str(prompts), "--output", str(place / "said.jsonl"), "--max-tokens", "2"]
    return {
        "merge": ["merge", str(run), "--output", str(place / "merged"), *more],
        "export": ["export", str(run), "--output", str(place / "made"), *more],
        "eval": ["eval", str(run), "--data", str(place / "data.jsonl"), *more],
        "generate": ["generate", str(run), *said, *more],
        "chat": ["chat", str(run), *more],
    }


@pytest.mark.later
@pytest.mark.parametrize("what", ["run", "run/checkpoints/step-00000001", "run/model"])
def test_an_adapter_is_put_on_no_other_model_of_equal_shapes(
    copied: Path, what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    replace(copied / "base")

    statuses = {name: main(given) for name, given in commands(copied / what, copied).items()}

    assert set(statuses.values()) == {2}
    assert capsys.readouterr().err.count(REFUSED) == len(statuses)
    if what == "run":
        assert main(commands(copied / what, copied, "--other-base")["merge"]) == 0


def test_an_adapter_is_put_on_its_own_model_and_without_a_note_on_any(copied: Path) -> None:
    alone = shutil.copytree(copied / "run" / "model", copied / "alone")
    assert main(commands(alone, copied)["merge"]) == 0
    replace(copied / "base")
    assert main(commands(alone, copied)["export"]) == 2

    (alone / FILE).unlink()

    assert main(commands(alone, copied)["export"]) == 0


@pytest.mark.later
@pytest.mark.usefixtures("measured_once")
def test_a_run_of_adapters_is_not_resumed_on_another_model_and_an_adapter_begins_there_with_a_word(
    copied: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    replace(copied / "base")
    shutil.rmtree(copied / "run" / "model")

    assert train(copied, "--resume") == 2

    assert "--resume needs the same model" in capsys.readouterr().err
    shutil.move(copied / "run", copied / "earlier")
    at = SETTINGS.index("--lora")
    given = [
        *SETTINGS[:at],
        *SETTINGS[at + 2 :],
        "--init-adapter",
        str(copied / "earlier/checkpoints/step-00000001"),
    ]
    data = ["--data", str(copied / "data.jsonl"), "--output", str(copied / "run")]
    assert main(["train", "--model", str(copied / "base"), *data, *given]) == 0
    assert f"the adapter {REFUSED}" in capsys.readouterr().out


def test_how_weights_are_divided_into_files_does_not_count(trained: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    divided, changed = tmp_path / "divided", tmp_path / "changed"
    AutoModelForCausalLM.from_pretrained(trained / "base").save_pretrained(divided, max_shard_size="20KB")
    shutil.copytree(divided, changed)
    file = sorted(changed.glob("*.safetensors"))[1]
    state = load_file(file)
    name = max(state, key=lambda name: state[name].numel())
    state[name].view(-1)[-1] += 1
    save_file(state, file, {"format": "pt"})

    assert len(list(divided.glob("*.safetensors"))) > 2
    assert identity_of(divided) == identity_of(trained / "base")
    assert identity_of(changed) != identity_of(divided)
