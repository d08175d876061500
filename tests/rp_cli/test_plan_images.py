"""`roundpipe plan --images` counts what images add: tokens as the processor makes them, and the tower's work."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import finetuning
import pytest
import torch
import vision
from rp_cli.main import main
from rp_data.images.processor import Sight
from rp_estimate.images import ImageSizes
from rp_estimate.meta.observe import observe
from rp_estimate.meta.towers import Patches, Shown, patches_of, with_towers
from rp_estimate.workload import TrainingSetup, Workload
from rp_trainer.errors import Refused
from transformers import AutoModelForImageTextToText


@pytest.mark.parametrize("family", vision.FAMILIES)
def test_an_image_takes_the_tokens_that_the_processor_gives_it(family):
    pytest.importorskip("torchvision")
    counted = patches_of(vision.config(family), ImageSizes(1, 16, 8))

    expanded = Sight(vision.processor(family)).expanded(
        "a:1", f"one {vision.MARKS[family]}", [vision.picture(1, width=8, height=16)]
    )

    assert expanded.tokens.count(vision.placeholder(family)) == counted.tokens
    inputs = Sight(vision.processor(family)).processed(
        [vision.MARKS[family]], [[vision.picture(1, width=8, height=16)]]
    )
    if family == "qwen3-vl":
        assert counted == Patches(len(inputs["pixel_values"]), counted.tokens)


def test_a_tower_works_for_each_image_and_keeps_activations_only_if_it_is_trained():
    with torch.device("meta"):
        model: Any = AutoModelForImageTextToText.from_config(vision.config("qwen3-vl"))
    plain = observe(model, 32)
    single, several = (Shown.of_size(model.config, ImageSizes(count, 16, 16)) for count in (1, 3))
    patches = single.each

    one, three = (with_towers(plain, model, shown).facts[0] for shown in (single, several))
    model.model.visual.requires_grad_(False)
    frozen = with_towers(plain, model, single).facts[0]

    before = plain.facts[0]
    added = [facts.forward_flops.each - before.forward_flops.each for facts in (one, three, frozen)]
    tower = sum(one.numel() for name, one in model.named_parameters() if "visual" in name and one.ndim > 1)
    assert added[1] == 3 * added[0]
    assert added[2] == added[0]
    assert 1.5 * patches.patches * tower < added[0] < 4 * patches.patches * tower
    assert one.kept_bytes.each > before.kept_bytes.each == frozen.kept_bytes.each
    assert frozen.backward_flops == before.backward_flops


def test_images_of_data_are_no_reason_to_refuse_a_model_that_cannot_be_observed(monkeypatch):
    with torch.device("meta"):
        model: Any = AutoModelForImageTextToText.from_config(vision.config("qwen3-vl"))
    plain = observe(model, 32)
    monkeypatch.setattr("rp_estimate.workload.observe", lambda *_: replace(plain, is_counted=False))
    shown = Shown.of_data(model.config, images=1, tokens=4, sequences=1)
    how = TrainingSetup(sequence=32)

    workload = Workload.of(model, how, images=shown)

    assert (workload.shown, workload.tower_layers) == ("", 0)
    with pytest.raises(Refused, match="its tower is not known"):
        Workload.of(model, how, images=Shown.of_size(model.config, ImageSizes(1, 16, 16)))


@pytest.mark.parametrize("family", vision.FAMILIES)
def test_images_of_data_are_counted_by_their_tokens(family):
    config = vision.config(family)
    each = patches_of(config, ImageSizes(1, 16, 16))

    shown = Shown.of_data(config, images=6, tokens=6 * each.tokens, sequences=4)

    assert shown is not None
    assert (shown.count, shown.each) == (1.5, each)
    assert "1.5 images a sequence on average" in shown.line
    assert Shown.of_data(config, images=0, tokens=0, sequences=4) is None


@pytest.mark.later
def test_a_plan_says_what_images_add_or_that_it_does_not_know(tmp_path, capsys):
    vision.config("qwen3-vl").save_pretrained(tmp_path / "sees")
    finetuning.make_model(tmp_path / "reads", weights=False)
    machine = ["--gpu", "memory=24GB,link=25,tflops=165", "--sequence", "64", "--json"]

    def planned(folder: Path, *more: str) -> tuple[int, str, str]:
        code = main(["plan", "--model", str(folder), *machine, *more])
        shown = capsys.readouterr()
        return code, shown.out, " ".join(shown.err.split())

    without, given = (json.loads(planned(tmp_path / "sees", *more)[1]) for more in ([], ["--images", "2x16x16"]))
    assert (without["sequence"], given["sequence"]) == (64, 64 + 2 * 4)
    assert "32 patches, and 8 tokens beside --sequence" in given["images"]
    code, _, error = planned(tmp_path / "reads", "--images", "1x16x16")
    assert code == 2
    assert "--images is for models that read images" in error
    assert planned(tmp_path / "sees", "--images", "1x100000x100000")[2].endswith(
        "--sequence and the tokens of --images together must be at most 128000, the positions that the model has, "
        "but is 64 + 156250000"
    )
    assert planned(tmp_path / "sees", "--images", "16x16")[2].endswith("such as 1x1024x1024, but is '16x16'")
