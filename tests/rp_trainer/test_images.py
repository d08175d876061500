"""TRL's SFTTrainer with images gives what the unchanged one does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import vision
from datasets import Dataset
from datasets import Image as ImageColumn
from datasets import List as ListColumn
from peft import LoraConfig
from roundpipe import RoundPipeRunConfig
from rp_trainer import RoundPipeOptions, RoundPipeTrainer
from test_trl import NAMES, SETTINGS, SFT
from tiny import ARGUMENTS, assert_same, weights
from transformers import Trainer, TrainingArguments
from trl.trainer.sft_trainer import DataCollatorForVisionLanguageModeling

trl = pytest.importorskip("trl", minversion="1.16", reason="the fused head of older TRLs is a Triton kernel")
pytest.importorskip("torchvision")

# The gradient of a key's bias is rounding alone, which Adam magnifies where its epsilon is as small.
GENTLE = {"learning_rate": 1e-3, "adam_epsilon": 1e-4}
# Several images a sample, one, and none: microbatches and whole batches without images.
COUNTS = (2, 0, 1, 1, 0, 0, 1, 3, 0, 0, 0, 0)


def chats(counts: tuple[int, ...] = COUNTS, *, prompts: bool = False) -> Dataset:
    """Conversations about images of several sizes."""
    rows: list[dict[str, Any]] = []
    for number, count in enumerate(counts):
        asked = {"role": "user", "content": "abc " * (1 + number % 3)}
        said = {"role": "assistant", "content": "yes " * (1 + number % 2)}
        images = [vision.picture(9 * number + one, 6 + 5 * one, 8) for one in range(count)]
        row = {"prompt": [asked], "completion": [said]} if prompts else {"messages": [asked, said]}
        rows.append({**row, "images": images})
    return Dataset.from_list(rows).cast_column("images", ListColumn(ImageColumn()))


def sft(kind: type[Any], path: Path, family: str, settings: dict[str, Any], **given: Any) -> Any:
    args = trl.SFTConfig(str(path), **{**ARGUMENTS, **SETTINGS, **GENTLE, **settings})
    data = chats(prompts=bool(settings.get("completion_only_loss")))
    torch.manual_seed(3)
    trainer = kind(
        model=given.pop("model", None) or vision.model(family),
        args=args,
        processing_class=vision.processor(family),
        train_dataset=data,
        eval_dataset=data.select(range(4)),
        **given,
    )
    trainer.train()
    return trainer


def assert_images_train_the_same(path: Path, family: str, options: Any, settings: dict[str, Any]) -> None:
    wanted = sft(trl.SFTTrainer, path, family, settings)
    found = sft(SFT, path, family, settings, roundpipe=options)
    assert_same(found, wanted, NAMES)
    # It is a row of layers, and its tower is trained.
    assert isinstance(found.model_wrapped.engine.model, torch.nn.Sequential)
    start = vision.model(family).state_dict()
    tower = {name: one for name, one in weights(found).items() if "vision" in name or "visual" in name}
    assert any(not torch.equal(one, start[name]) for name, one in tower.items())


@pytest.mark.parametrize(
    "family", ["qwen3-vl", *(pytest.param(one, marks=pytest.mark.slow) for one in ("gemma3", "llava"))]
)
def test_sft_with_images_is_the_same(tmp_path, options, family):
    settings = {"gradient_accumulation_steps": 2, "num_train_epochs": 2}
    assert_images_train_the_same(tmp_path, family, options, settings)


@pytest.mark.later
def test_batches_with_images_that_a_plain_trainer_accumulates_are_divided_by_samples(tmp_path, two):
    def trained(kind: type[Any], **given: Any) -> Any:
        more = {"gradient_accumulation_steps": 2, "remove_unused_columns": False}
        trainer = kind(
            model=vision.model("qwen3-vl"),
            args=TrainingArguments(str(tmp_path), **{**ARGUMENTS, **GENTLE, **more}),
            data_collator=DataCollatorForVisionLanguageModeling(vision.processor("qwen3-vl")),
            train_dataset=chats(),
            **given,
        )
        trainer.train()
        return trainer

    # Two batches a step, each of which is divided further.
    options = RoundPipeOptions(runtime=two, model_run_config=RoundPipeRunConfig(num_microbatch=4))
    assert_same(trained(RoundPipeTrainer, roundpipe=options), trained(Trainer))


@pytest.mark.nightly
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"completion_only_loss": True},
        {"assistant_only_loss": True, "gradient_accumulation_steps": 2, "num_train_epochs": 2},
        {"loss_type": "dft"},
        {"per_device_train_batch_size": 1, "max_length": None},
    ],
    ids=["plain", "completions", "assistant", "dft", "one"],
)
@pytest.mark.parametrize("family", vision.FAMILIES)
def test_so_it_is_with_other_settings(tmp_path, options, family, settings):
    assert_images_train_the_same(tmp_path, family, options, settings)


@pytest.mark.nightly
@pytest.mark.parametrize("family", vision.FAMILIES)
def test_adapters_of_towers_and_layers_train_the_same(tmp_path, options, family):
    def lora() -> LoraConfig:
        return LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM", r=2, init_lora_weights=False)

    wanted = sft(trl.SFTTrainer, tmp_path, family, {}, peft_config=lora())
    found = sft(SFT, tmp_path, family, {}, peft_config=lora(), roundpipe=options)
    assert_same(found, wanted, NAMES)
    assert any("vision" in name or "visual" in name for name in weights(found) if "lora_" in name)
