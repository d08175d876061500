"""`--image-cache`: runs on images with what the processor made of them before, to the last bit."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path
from typing import Any

import finetuning
import pytest
import torch
import vision
from rp_cli.main import main
from rp_data.images import pictures
from safetensors.torch import load_file

pytest.importorskip("torchvision")
pytestmark = pytest.mark.usefixtures("measured_once")

SETTINGS = ["--sequence", "256", "--batch", "3", "--num-microbatch", "3", "--devices", "cpu:2", "--steps", "4"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return vision.make_model(tmp_path_factory.mktemp("model"), "qwen3-vl")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    rows = list[Any]()
    for number in range(9):
        written = io.BytesIO()
        vision.picture(number, width=7 + 3 * number).save(written, "PNG")
        tmp_path.joinpath(f"{number}.png").write_bytes(written.getvalue())
        images = [f"{number}.png"] * (number % 3)
        said = {"role": "assistant", "content": finetuning.words(number, 1 + number % 3)}
        rows.append({"messages": [{"role": "user", "content": "what is it?"}, said], "images": images})
    return finetuning.json_lines(tmp_path / "data.jsonl", rows)


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    places, decode = list[str](), pictures.decoded

    def counted(place: str, content: bytes) -> Any:
        places.append(place)
        return decode(place, content)

    monkeypatch.setattr(pictures, "decoded", counted)
    return places


def numbers(run: Path) -> list[Any]:
    """The losses of a run, and its weights."""
    losses = [line.get("loss", line.get("held_out_loss")) for line in finetuning.lines(run)]
    return [losses, {name: one.tolist() for name, one in load_file(run / "model" / "model.safetensors").items()}]


@pytest.mark.later
def test_runs_with_a_cache_are_those_without_and_decode_nothing_twice(model, data, tmp_path, decoded, capsys):
    def trained(name: str, *more: str) -> list[Any]:
        given = ["--model", str(model), "--data", str(data), "--output", str(tmp_path / name), *SETTINGS]
        assert main(["train", *given, "--held-out", "0.2", "--eval-every", "2", "--save-every", "1", *more]) == 0
        return numbers(tmp_path / name)

    cache = ["--image-cache", str(tmp_path / "kept")]
    plain = trained("plain")
    decoded.clear()

    assert trained("first", *cache) == plain
    # What reading has made is kept, and compared once with what the processor makes of the first batch.
    assert 0 < len(decoded) <= 5
    told = " ".join(capsys.readouterr().out.split())
    assert f" images; what the processor makes of them is kept in {tmp_path / 'kept'}, up to 20 GB" in told
    for part in ("model", "checkpoints/step-00000003", "checkpoints/step-00000002"):
        shutil.rmtree(tmp_path / "first" / part, ignore_errors=True)
    # So little room that what was made is removed again and again.
    small = ["--image-cache", str(tmp_path / "small"), "--image-cache-gb", "1e-5"]
    assert trained("first", "--resume", *small) == plain
    assert 0 < sum(one.stat().st_size for one in (tmp_path / "small").glob("??/*")) <= 10_000


@pytest.mark.later
def test_prepare_keeps_what_train_and_eval_use(model, data, tmp_path, decoded, capsys):
    given = ["--model", str(model), "--image-cache", str(tmp_path / "kept"), "--image-cache-gb", "0.1"]
    made = ["prepare", *given, "--data", str(data), "--output", str(tmp_path / "made"), "--sequence", "256"]
    assert main(made) == 0
    kept = sorted(tmp_path.glob("kept/??/*"))
    assert len(kept) == 6
    decoded.clear()

    assert (
        main(["train", *given, "--data", str(tmp_path / "made"), "--output", str(tmp_path / "run"), *SETTINGS])
        == 0
    )

    assert sorted(tmp_path.glob("kept/??/*")) == kept
    assert len(decoded) <= 5
    losses = []
    for more in ([], given[2:4], given[2:4]):
        decoded.clear()
        capsys.readouterr()
        assert main(["eval", str(tmp_path / "run"), "--data", str(data), "--json", *more]) == 0
        losses.append(json.loads(capsys.readouterr().out)["loss"])
    assert losses[0] == losses[1] == losses[2]
    # What the processor makes of the first batch is compared once.
    assert len(decoded) <= 9
    assert sorted(tmp_path.glob("kept/??/*")) == kept
    assert all(torch.tensor(finetuning.lines(tmp_path / "run")[0]["loss"]).isfinite() for _ in kept)


def test_a_cache_for_data_without_images_or_in_a_used_folder_is_refused(model, data, tmp_path, capsys):
    text = finetuning.json_lines(tmp_path / "text.jsonl", [{"text": "one two three"}] * 9)
    given = ["--model", str(model), "--output", str(tmp_path / "run"), *SETTINGS, "--image-cache"]

    assert main(["train", *given, str(tmp_path / "kept"), "--data", str(text)]) == 2
    assert "--image-cache is for images, but the data has none; omit it" in capsys.readouterr().err
    assert main(["train", *given, str(model), "--data", str(data)]) == 2
    assert "has other files in it; name a new or empty folder" in " ".join(capsys.readouterr().err.split())
    assert main(["train", *given[:-1], "--image-cache-gb", "1", "--data", str(data)]) == 2
    assert "--image-cache-gb needs --image-cache" in capsys.readouterr().err
