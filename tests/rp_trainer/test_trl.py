"""TRL's trainers with the mixin give what the unchanged ones do."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import trl
from datasets import Dataset
from packaging.version import Version
from peft import LoraConfig
from roundpipe import RoundPipe
from rp_trainer import OnDevices, RoundPipeMixin
from safetensors.torch import load_file
from tiny import ARGUMENTS, LOGGED, assert_same, causal_lm, logs, sentences, tokenizer, weights

pytestmark = pytest.mark.skipif(
    Version(trl.__version__) < Version("1.16") and not torch.cuda.is_available(),
    reason="the fused head of older TRLs is a Triton kernel",
)

TEXT = Dataset.from_dict({"text": sentences(14)})
ASKED = Dataset.from_dict({"prompt": sentences(14), "completion": sentences(14, 2)})
SAID = Dataset.from_list(
    [
        {"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]}
        for asked, said in zip(sentences(14), sentences(14, 2), strict=True)
    ]
)
TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'assistant' %}"
    "{% generation %}{{ message.content + ' </s> ' }}{% endgeneration %}"
    "{% else %}{{ message.content + ' w0 ' }}{% endif %}{% endfor %}"
)
PAIRS = Dataset.from_dict({"prompt": sentences(9, 1), "chosen": sentences(9, 2), "rejected": sentences(9, 3)})
NAMES = (
    *(*LOGGED, "entropy", "mean_token_accuracy", "num_tokens", "eval_entropy"),
    *("rewards/chosen", "rewards/rejected", "rewards/margins", "logps/chosen", "eval_rewards/margins"),
)
SETTINGS = {"eval_strategy": "steps", "eval_steps": 2, "num_train_epochs": 1, "bf16": False}


class SFT(RoundPipeMixin, trl.SFTTrainer):
    pass


class DPO(RoundPipeMixin, trl.DPOTrainer):
    pass


def lora() -> LoraConfig:
    return LoraConfig(target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", r=4, init_lora_weights=False)


def sft(kind: type[Any], path: Path, settings: dict[str, Any], **given: Any) -> Any:
    args = trl.SFTConfig(str(path), **{**ARGUMENTS, **SETTINGS, **settings})
    torch.manual_seed(3)
    rows = given.pop("rows", TEXT)
    given = {"model": causal_lm(), **given}
    data = {"train_dataset": rows, "eval_dataset": rows.select(range(4))}
    words = tokenizer()
    words.chat_template = TEMPLATE
    trainer = kind(args=args, processing_class=words, **data, **given)
    trainer.train()
    return trainer


def dpo(kind: type[Any], path: Path, settings: dict[str, Any], **given: Any) -> Any:
    args = trl.DPOConfig(str(path), **{**ARGUMENTS, **SETTINGS, **settings})
    torch.manual_seed(3)
    given = {"model": causal_lm(), **given}
    if "peft_config" not in given:
        given["ref_model"] = causal_lm(5)
    data = {"train_dataset": PAIRS, "eval_dataset": PAIRS.select(range(4))}
    trainer = kind(args=args, processing_class=tokenizer(), **data, **given)
    trainer.train()
    return trainer


@pytest.mark.parametrize(
    "settings", [pytest.param({}, marks=pytest.mark.nightly), {"gradient_accumulation_steps": 4}], ids=["1", "4"]
)
def test_sft_is_the_same(tmp_path, options, settings):
    wanted, found = sft(trl.SFTTrainer, tmp_path, settings), sft(SFT, tmp_path, settings, roundpipe=options)
    assert_same(found, wanted, NAMES)
    assert "entropy" in logs(found, NAMES)[0]


@pytest.mark.nightly
@pytest.mark.parametrize(
    "settings",
    [
        {"loss_type": "dft"},
        *(
            {"packing": True, "packing_strategy": how, "max_length": 12, "per_device_train_batch_size": 1}
            for how in ("bfd", "bfd_split", "wrapped")
        ),
        {"padding_free": True, "max_length": None},
        pytest.param({"label_smoothing_factor": 0.1}, marks=pytest.mark.filterwarnings("ignore:`label_smoothing")),
    ],
    ids=["dft", "bfd", "bfd_split", "wrapped", "padding_free", "smoothing"],
)
def test_so_it_is_with_other_settings(tmp_path, options, settings):
    wanted, found = sft(trl.SFTTrainer, tmp_path, settings), sft(SFT, tmp_path, settings, roundpipe=options)
    assert_same(found, wanted, NAMES)


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["nll", "dft"])
@pytest.mark.parametrize("rows", [ASKED, SAID], ids=["completions", "assistant"])
def test_so_it_is_where_only_answers_are_learned(tmp_path, options, rows, loss):
    settings = {"assistant_only_loss": rows is SAID, "loss_type": loss}
    wanted = sft(trl.SFTTrainer, tmp_path, settings, rows=rows)
    found = sft(SFT, tmp_path, settings, rows=rows, roundpipe=options)
    assert_same(found, wanted, NAMES)
    batch = next(iter(found.get_train_dataloader()))
    assert 0 < (batch["labels"] != -100).sum() < (batch["input_ids"] != 0).sum()


@pytest.mark.nightly
def test_adapters_train_the_same_and_are_not_empty(tmp_path, options):
    given = {"peft_config": lora()}
    wanted = sft(trl.SFTTrainer, tmp_path, {}, **given)
    found = sft(SFT, tmp_path, {}, peft_config=lora(), roundpipe=options)
    assert_same(found, wanted, NAMES)
    trained = [value for name, value in weights(found).items() if "lora_" in name]
    assert len(trained) == 8
    assert all(value.abs().sum() > 0 for value in trained)
    torch.manual_seed(3)
    start = sft(trl.SFTTrainer, tmp_path, {"max_steps": 1, "learning_rate": 0.0}, peft_config=lora())
    moved = [
        not torch.equal(value, weights(start)[name]) for name, value in weights(found).items() if "lora_" in name
    ]
    assert all(moved)


@pytest.mark.nightly
def test_adapters_in_bf16_train_nearly_the_same_and_are_saved_in_fp32(tmp_path, options):
    wanted = sft(SFT, tmp_path, {}, peft_config=lora(), roundpipe=options)
    narrow = replace(options, adapter_dtype=torch.bfloat16)
    found = sft(SFT, tmp_path / "narrow", {}, peft_config=lora(), roundpipe=narrow)
    found.save_model(str(tmp_path / "saved"))
    losses = [[line["loss"] for line in one.state.log_history if "loss" in line] for one in (found, wanted)]
    assert losses[0] != losses[1]
    assert losses[0] == pytest.approx(losses[1], rel=1e-2)
    saved = load_file(tmp_path / "saved" / "adapter_model.safetensors")
    assert {one.dtype for one in saved.values()} == {torch.float32}
    assert any(not torch.equal(one, one.bfloat16().float()) for one in saved.values())


@pytest.mark.nightly
@pytest.mark.parametrize("settings", [{}, {"gradient_accumulation_steps": 3}], ids=["1", "3"])
def test_dpo_with_a_reference_model_is_the_same(tmp_path, options, settings):
    wanted, found = dpo(trl.DPOTrainer, tmp_path, settings), dpo(DPO, tmp_path, settings, roundpipe=options)
    assert_same(found, wanted, NAMES)
    assert "rewards/margins" in logs(found, NAMES)[0]
    reference = found.ref_model
    assert isinstance(reference, OnDevices)
    assert isinstance(reference.engine, RoundPipe)
    assert reference.engine.runtime is found.model_wrapped.engine.runtime
    for name, value in causal_lm(5).state_dict().items():
        assert torch.equal(reference.state_dict()[name], value), name


@pytest.mark.nightly
def test_dpo_under_autocast_has_its_reference_on_the_devices_too(tmp_path, options):
    settings = {"bf16": True}
    wanted, found = dpo(trl.DPOTrainer, tmp_path, settings), dpo(DPO, tmp_path, settings, roundpipe=options)
    assert len(found.ref_model.engine.model) == 4
    for here, there in zip(logs(found, ("loss", "eval_loss")), logs(wanted, ("loss", "eval_loss")), strict=True):
        torch.testing.assert_close(here, there, rtol=0.05, atol=0.05)


@pytest.mark.later
def test_dpo_with_adapters_switched_off_is_the_same(tmp_path, options, monkeypatch):
    calls: list[bool] = []
    plain = OnDevices.forward

    def noted(self: OnDevices, *args: Any, **kwargs: Any) -> Any:
        calls.append(torch.is_grad_enabled())
        return plain(self, *args, **kwargs)

    wanted = dpo(trl.DPOTrainer, tmp_path, {}, peft_config=lora())
    monkeypatch.setattr(OnDevices, "forward", noted)
    found = dpo(DPO, tmp_path, {}, peft_config=lora(), roundpipe=options)
    assert_same(found, wanted, NAMES)
    # Adapters that begin with random numbers differ from none at once.
    assert logs(found, NAMES)[0]["rewards/chosen"] != 0
    # The reference ran on the devices, too: three steps, and two evaluations of one batch.
    assert calls.count(True) == 3
    assert calls.count(False) == 3 + 2 * 2


@pytest.mark.nightly
def test_dpo_against_an_adapter_that_was_trained_before(tmp_path, options):
    from peft import get_peft_model

    def adapted() -> Any:
        model = causal_lm()
        torch.manual_seed(7)
        return get_peft_model(model, lora())

    def trained(kind: type[Any], **given: Any) -> Any:
        args = trl.DPOConfig(str(tmp_path), **{**ARGUMENTS, **SETTINGS})
        trainer = kind(
            model=adapted(),
            args=args,
            train_dataset=PAIRS,
            eval_dataset=PAIRS.select(range(4)),
            processing_class=tokenizer(),
            **given,
        )
        trainer.train()
        return trainer

    assert_same(trained(DPO, roundpipe=options), trained(trl.DPOTrainer), NAMES)
