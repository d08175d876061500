"""TRL's trainers that learn from preferences give with the mixin what the unchanged ones do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import trl
from datasets import Dataset
from packaging.version import Version
from peft import LoraConfig
from rp_data import read_preferences
from rp_trainer import OnDevices, RoundPipeMixin
from sometimes import one_in
from tiny import ARGUMENTS, LOGGED, assert_same, causal_lm, logs, rewarding, sentences, tokenizer
from trl.experimental.cpo import CPOConfig, CPOTrainer
from trl.experimental.orpo import ORPOConfig, ORPOTrainer
from trl.experimental.tpo import TPOConfig, TPOTrainer

pytestmark = pytest.mark.skipif(
    Version(trl.__version__) < Version("1.16") and not torch.cuda.is_available(),
    reason="the fused head of older TRLs is a Triton kernel",
)

PAIRS = Dataset.from_dict({"prompt": sentences(9, 1), "chosen": sentences(9, 2), "rejected": sentences(9, 3)})
TRIPLES = PAIRS.add_column("reference", sentences(9, 4))
JUDGED = Dataset.from_dict(
    {"prompt": sentences(9, 1), "completion": sentences(9, 2), "label": [place % 3 > 0 for place in range(9)]}
)
NAMES = (
    *(*LOGGED, "nll_loss", "log_odds_ratio", "kl", "accuracy", "margin", "logps/chosen", "logps/rejected"),
    *("rewards/chosen", "rewards/rejected", "rewards/margins", "eval_rewards/margins", "eval_accuracy"),
)
SETTINGS = {"eval_strategy": "steps", "eval_steps": 2, "num_train_epochs": 1, "bf16": False}
# By kind of trainer: its class, its configuration's, and its data.
KINDS: dict[str, tuple[type[Any], type[Any], Dataset]] = {
    "dpo": (trl.DPOTrainer, trl.DPOConfig, PAIRS),
    "kto": (trl.KTOTrainer, trl.KTOConfig, JUDGED),
    "reward": (trl.RewardTrainer, trl.RewardConfig, PAIRS),
    "cpo": (CPOTrainer, CPOConfig, PAIRS),
    "orpo": (ORPOTrainer, ORPOConfig, PAIRS),
    "tpo": (TPOTrainer, TPOConfig, TRIPLES),
}


def trained(name: str, path: Path, settings: dict[str, Any], mixin: tuple[type, ...] = (), **given: Any) -> Any:
    """A trainer that has trained; `mixin`: what comes before its class."""
    kind, config, data = KINDS[name]
    args = config(str(path), **{**ARGUMENTS, **SETTINGS, **settings})
    torch.manual_seed(3)
    given = {"model": rewarding() if name == "reward" else causal_lm(), **given}
    if name in ("dpo", "kto") and "peft_config" not in given:
        given["ref_model"] = causal_lm(5)
    data = {"train_dataset": data, "eval_dataset": data.select(range(4))}
    made = type("Made", (*mixin, kind), {}) if mixin else kind
    trainer = made(args=args, processing_class=tokenizer(), **data, **given)
    trainer.train()
    return trainer


def adapters() -> LoraConfig:
    return LoraConfig(target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", r=4, init_lora_weights=False)


def assert_as_unchanged(name: str, path: Path, options: Any, settings: dict[str, Any], **given: Any) -> Any:
    wanted = trained(name, path, settings, **{key: value() for key, value in given.items()})
    given = {key: value() for key, value in given.items()}
    found = trained(name, path, settings, (RoundPipeMixin,), roundpipe=options, **given)
    assert_same(found, wanted, NAMES)
    assert {line["loss"] for line in logs(found, NAMES) if "loss" in line} != {0.0}
    return found


@pytest.mark.parametrize("name", one_in(5, [one for one in KINDS if one != "dpo"]))
def test_trainers_are_the_same(name, tmp_path, options):
    found = assert_as_unchanged(name, tmp_path, options, {})

    assert len(found.model_wrapped.engine.model) == 4
    assert isinstance(getattr(found, "ref_model", None), OnDevices) == (name == "kto")


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["kto", "cpo", "orpo", "tpo"])
def test_so_they_are_with_adapters_and_accumulation(name, tmp_path, options):
    assert_as_unchanged(name, tmp_path, options, {"gradient_accumulation_steps": 2}, peft_config=adapters)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        *(
            ("dpo", {"loss_type": loss})
            for loss in (
                *("sigmoid", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "aot"),
                *("aot_unpaired", "apo_zero", "apo_down", "discopop", "sft", "sigmoid_norm", ["sigmoid", "sft"]),
            )
        ),
        ("kto", {"loss_type": "apo_zero_unpaired"}),
        ("cpo", {"loss_type": "hinge"}),
        ("cpo", {"loss_type": "ipo"}),
        ("cpo", {"loss_type": "simpo", "cpo_alpha": 0.5}),
    ],
    ids=str,
)
def test_so_they_are_with_all_losses(name, settings, tmp_path, options):
    if settings.get("loss_type") in ("robust", "exo_pair"):
        settings = {**settings, "label_smoothing": 0.1}
    assert_as_unchanged(name, tmp_path, options, settings)


@pytest.mark.parametrize("name", one_in(4, ["kto", "dpo", "reward", "orpo"]))
def test_pairs_that_were_read_from_a_file_train_as_those_of_trl(name, tmp_path, options, monkeypatch):
    asked, one, other = sentences(9, 1), sentences(9, 2), sentences(9, 3)
    # The prompt is only in the answers: TRL finds it by itself.
    rows = [{"chosen": f"{a} {b}", "rejected": f"{a} {c}"} for a, b, c in zip(asked, one, other, strict=True)]
    rows = [row for row in rows if row["chosen"] != row["rejected"]]
    tmp_path.joinpath("data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    kind, config, _ = KINDS[name]
    monkeypatch.setitem(KINDS, name, (kind, config, Dataset.from_list(rows)))
    wanted = trained(name, tmp_path, {})
    monkeypatch.setitem(KINDS, name, (kind, config, read_preferences(tmp_path / "data.jsonl")))

    found = trained(name, tmp_path, {}, (RoundPipeMixin,), roundpipe=options)

    assert_same(found, wanted, NAMES)
