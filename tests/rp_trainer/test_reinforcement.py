"""TRL's trainers that generate give with the mixin what the unchanged ones do, on the same completions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import trl
from datasets import Dataset
from packaging.version import Version
from peft import LoraConfig
from roundpipe import RoundPipe, wrap_model_to_roundpipe
from rp_trainer import OnDevices, RoundPipeMixin
from sometimes import one_in
from tiny import ARGUMENTS, LOGGED, WORDS, assert_same, causal_lm, logs, rewarding, sentences, tokenizer, weights
from transformers import Qwen3ForCausalLM
from trl.experimental.gmpo import GMPOConfig, GMPOTrainer
from trl.experimental.online_dpo import OnlineDPOConfig, OnlineDPOTrainer

pytestmark = pytest.mark.skipif(
    Version(trl.__version__) < Version("1.16") and not torch.cuda.is_available(),
    reason="the fused head of older TRLs is a Triton kernel",
)

PROMPTS = Dataset.from_dict({"prompt": sentences(8)})
NAMES = (
    *(*LOGGED, "reward", "reward_std", "kl", "entropy", "completions/mean_length", "num_tokens", "eval_reward"),
    *("clip_ratio/region_mean", "rewards/margins", "objective/kl", "objective/scores", "logps/chosen", "eval_kl"),
)
SETTINGS: dict[str, Any] = {
    "per_device_train_batch_size": 6,
    "per_device_eval_batch_size": 6,
    "num_generations": 3,
    "max_completion_length": 7,
    "beta": 0.0,
    "max_steps": 4,
    "bf16": False,
    "eval_strategy": "steps",
    "eval_steps": 3,
    # Else Adam makes whole steps of gradients that are zero but for rounding.
    "adam_epsilon": 1e-4,
}
KINDS: dict[str, tuple[type[Any], type[Any]]] = {
    "grpo": (trl.GRPOTrainer, trl.GRPOConfig),
    "rloo": (trl.RLOOTrainer, trl.RLOOConfig),
    "gmpo": (GMPOTrainer, GMPOConfig),
    "online": (OnlineDPOTrainer, OnlineDPOConfig),
}
ONLINE = {
    "beta": 0.1,
    "num_generations": None,
    "max_completion_length": None,
    "max_new_tokens": 7,
    "eval_strategy": "no",
}


class Seeded:
    """Completions that are sampled with a seed of their own each time."""

    state: Any

    def _generate(self, *args: Any, **kwargs: Any) -> Any:
        torch.manual_seed(100 + self.state.global_step)
        return super()._generate(*args, **kwargs)  # type: ignore[misc]


def digits(completions: list[str], **_: object) -> list[float]:
    """How often a completion has the wanted digit."""
    return [float(text.count("1")) for text in completions]


def trained(
    name: str,
    path: Path,
    settings: dict[str, Any],
    mixin: tuple[type, ...] = (),
    reward: Callable[[], Any] = lambda: digits,
    seeded: bool = True,
    resume: str | None = None,
    **given: Any,
) -> Any:
    """A trainer that has trained a model in `path`, whose reference is that model, too."""
    kind, config = KINDS[name]
    wanted = {**ARGUMENTS, **SETTINGS, **(ONLINE if name == "online" else {}), **settings}
    args = config(str(path / "run"), **{key: value for key, value in wanted.items() if value is not None})
    causal_lm().save_pretrained(path / "model")
    made = type("Made", (*([Seeded] if seeded else []), *mixin, kind), {})
    rewards = reward()
    if isinstance(rewards, list):
        given["reward_processing_classes"] = [tokenizer(), None]
    trainer = made(
        model=Qwen3ForCausalLM.from_pretrained(path / "model"),
        args=args,
        train_dataset=PROMPTS,
        eval_dataset=PROMPTS.select(range(2)),
        processing_class=tokenizer(),
        reward_funcs=rewards,
        **given,
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def assert_as_unchanged(name: str, path: Path, options: Any, settings: dict[str, Any], **given: Any) -> Any:
    wanted = trained(name, path, settings, **given)
    found = trained(name, path, settings, (RoundPipeMixin,), roundpipe=options, **given)
    assert_same(found, wanted, NAMES)
    assert sum(line["grad_norm"] > 1e-2 for line in logs(found) if "loss" in line) > 2
    return found


def adapters() -> LoraConfig:
    return LoraConfig(target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", r=4, init_lora_weights=False)


REUSED = {"num_iterations": 2, "steps_per_generation": 2, "max_steps": 6}


@pytest.mark.parametrize(
    "case",
    one_in(
        7,
        [
            ("grpo", {**REUSED, "beta": 0.1}),
            ("grpo", {}),
            ("grpo", {"gradient_accumulation_steps": 2}),
            ("rloo", {**REUSED, "beta": 0.1}),
            ("gmpo", REUSED),
            ("online", {}),
            ("online", {"gradient_accumulation_steps": 2, "loss_type": "ipo"}),
        ],
    ),
    ids=str,
)
def test_trainers_that_generate_are_the_same(case, tmp_path, options):
    assert_as_unchanged(case[0], tmp_path, options, case[1])


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_so_they_are_with_adapters_whose_reference_is_the_model_without_them(name, tmp_path, options):
    settings = {"beta": 0.1, **({} if name == "online" else {"num_iterations": 2})}
    found = assert_as_unchanged(name, tmp_path, options, settings, peft_config=adapters())

    # They are not merged, not even for a while.
    assert found.ref_model is None
    start = causal_lm().state_dict()
    for key, value in weights(found).items():
        if "lora_" not in key:
            assert torch.equal(value, start[key.removeprefix("base_model.model.").replace(".base_layer", "")]), key


@pytest.mark.slow
def test_what_is_asked_of_the_policy_under_its_own_name_runs_on_the_devices_too(tmp_path, options, monkeypatch):
    calls: list[bool] = []
    plain = OnDevices.forward

    def noted(self: OnDevices, *args: Any, **kwargs: Any) -> Any:
        calls.append(torch.is_grad_enabled())
        return plain(self, *args, **kwargs)

    monkeypatch.setattr(OnDevices, "forward", noted)
    settings = {"beta": 0.1, "num_iterations": 2, "max_steps": 2, "eval_strategy": "no"}
    trained("grpo", tmp_path, settings, (RoundPipeMixin,), roundpipe=options, peft_config=adapters())

    # Its log-probabilities at generation, and those of the reference; then two steps.
    assert calls == [False, False, True, True]


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["grpo", "dr_grpo", "bnpo", "cispo", "sapo"])
def test_so_they_are_with_other_losses(loss, tmp_path, options):
    assert_as_unchanged("grpo", tmp_path, options, {**REUSED, "loss_type": loss})


def fixed(prompts: list[str], trainer: Any) -> dict[str, Any]:
    """A rollout of a user's own."""
    ids = trainer.processing_class(prompts)["input_ids"]
    generator = torch.Generator().manual_seed(trainer.state.global_step)
    lengths = torch.randint(2, 7, (len(ids),), generator=generator).tolist()
    said = [torch.randint(2, len(WORDS), (length,), generator=generator).tolist() for length in lengths]
    # Else the trainer shuffles rows as the calls before have left torch's generator.
    torch.manual_seed(trainer.state.global_step)
    return {"prompt_ids": ids, "completion_ids": said, "logprobs": [[0.0] * len(one) for one in said]}


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {**REUSED, "beta": 0.1}], ids=str)
def test_so_they_are_with_a_rollout_of_the_users_own(settings, tmp_path, options):
    assert_as_unchanged("grpo", tmp_path, options, settings, seeded=False, rollout_func=fixed)


@pytest.mark.later
@pytest.mark.parametrize("name", one_in(2, ["grpo", "online"]))
def test_reward_models_run_on_the_devices(name, tmp_path, options):
    given: list[Any] = [rewarding(), digits]
    found = assert_as_unchanged(name, tmp_path, options, {}, reward=lambda: [rewarding(), digits])
    model = found.reward_funcs[0]

    assert isinstance(model, OnDevices)
    assert len(model.engine.model) == 4
    assert model.engine.runtime is found.model_wrapped.engine.runtime
    assert not any(one.requires_grad for one in model.parameters())
    # The user's list is as it was, and one that is wrapped already is as good.
    given[0] = wrap_model_to_roundpipe(rewarding().requires_grad_(False), runtime=options.runtime)
    trainer = trained(name, tmp_path, {"max_steps": 1}, (RoundPipeMixin,), roundpipe=options, reward=lambda: given)
    assert [isinstance(one, OnDevices) for one in trainer.reward_funcs] == [True, False]
    assert isinstance(given[0], RoundPipe)


@pytest.mark.slow
@pytest.mark.parametrize("given", [{}, {"rollout_func": fixed}], ids=["generate", "rollout"])
def test_asynchronous_steps_are_the_same_where_each_has_text_of_its_own(given, tmp_path, options):
    late = replace(options, asynchronous=True)
    wanted = trained("grpo", tmp_path, {"beta": 0.1}, (RoundPipeMixin,), roundpipe=options, **given)
    found = trained("grpo", tmp_path, {"beta": 0.1}, (RoundPipeMixin,), roundpipe=late, **given)

    assert_same(found, wanted, ("loss", "kl", "reward"))
    assert {line["staleness"] for line in logs(found, ("loss", "staleness")) if "loss" in line} == {0.0}


@pytest.mark.slow
def test_they_say_how_old_the_text_is_and_compare_with_the_weights_that_have_generated(tmp_path, options):
    settings = {
        "num_iterations": 3,
        "max_steps": 3,
        "learning_rate": 0.1,
        "warmup_steps": 0,
        "eval_strategy": "no",
    }
    names = ("loss", "staleness", "clip_ratio/region_mean")
    now = logs(trained("grpo", tmp_path, settings, (RoundPipeMixin,), roundpipe=options), names)
    late = replace(options, asynchronous=True)
    later = logs(trained("grpo", tmp_path, settings, (RoundPipeMixin,), roundpipe=late), names)

    assert [line["staleness"] for line in now] == [0.0, 1.0, 2.0]
    assert [line["staleness"] for line in later] == [0.0, 0.0, 1.0]
    # The same rows in another order: their ratios are one until newer weights are read.
    assert now[1]["clip_ratio/region_mean"] > 0
    assert later[1]["clip_ratio/region_mean"] == 0
    assert later[1]["loss"] == pytest.approx(later[0]["loss"], abs=1e-5)
    assert later[2]["loss"] == pytest.approx(now[1]["loss"], abs=1e-5)


@pytest.mark.slow
def test_texts_of_an_evaluation_are_not_those_that_are_learned(tmp_path, options):
    settings = {"num_iterations": 3, "max_steps": 3, "eval_strategy": "steps", "eval_steps": 1}

    found = logs(trained("grpo", tmp_path, settings, (RoundPipeMixin,), roundpipe=options), ("loss", "staleness"))

    assert [line["staleness"] for line in found if "staleness" in line] == [0.0, 1.0, 2.0]


@pytest.mark.later
def test_each_line_of_the_log_says_how_long_phases_took(tmp_path, options, caplog):
    caplog.set_level("INFO", "rp_trainer")
    found = trained("grpo", tmp_path, {"max_steps": 2, "num_iterations": 2}, (RoundPipeMixin,), roundpipe=options)

    first, second = [line for line in found.state.log_history if "loss" in line]
    assert {f"seconds/{phase}" for phase in ("generate", "score", "train", "step")} <= first.keys()
    assert "seconds/generate" not in second
    assert all(value > 0 for line in (first, second) for key, value in line.items() if key.startswith("seconds/"))
    table = next(message for message in caplog.messages if message.startswith("seconds by phase:"))
    assert len(table.splitlines()) == 5


@pytest.mark.slow
def test_a_run_that_was_resumed_is_the_same_with_what_the_trainer_keeps_beside(tmp_path, options):
    # The coefficient of the entropy follows a target that is never reached.
    entropy = {"use_adaptive_entropy": True, "entropy_target": 9.0, "save_strategy": "steps", "save_steps": 2}
    whole = trained("grpo", tmp_path, entropy, (RoundPipeMixin,), roundpipe=options)
    checkpoint = str(tmp_path / "run" / "checkpoint-2")

    found = trained("grpo", tmp_path, entropy, (RoundPipeMixin,), roundpipe=options, resume=checkpoint)

    assert_same(found, whole, ("loss", "reward"), atol=0)
    assert found.entropy_coef == whole.entropy_coef > 0


@pytest.mark.slow
@pytest.mark.parametrize("gradients", [False, True])
def test_log_probabilities_leave_the_devices_without_logits(tmp_path, options, gradients):
    trainer = trained("grpo", tmp_path, {"max_steps": 1}, (RoundPipeMixin,), roundpipe=options)
    ids = torch.randint(2, len(WORDS), (4, 9))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}

    with torch.set_grad_enabled(gradients):
        output = trainer.model_wrapped(**batch, fused_lm_head=True)

    assert {name: tuple(value.shape) for name, value in output.items() if value.ndim} == {
        "log_probs": (4, 8),
        "entropy": (4, 8),
        "label_mask": (4, 8),
    }
    assert output.log_probs.requires_grad == gradients


@pytest.mark.nightly
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_digit_is_learned_as_it_is_without_roundpipe(seed, tmp_path, options):
    settings = {"max_steps": 30, "learning_rate": 2e-2, "max_grad_norm": 1.0, "seed": seed, "num_generations": 8}
    settings |= {"per_device_train_batch_size": 32, "eval_strategy": "no", "lr_scheduler_type": "constant"}
    plain = trained("grpo", tmp_path, settings, seeded=False)
    found = trained("grpo", tmp_path, settings, (RoundPipeMixin,), seeded=False, roundpipe=options)

    (start, end), (other_start, other_end) = ends(plain), ends(found)
    # Of 14: seven words with two digits.
    assert max(start, other_start) < 4
    assert min(end, other_end) > 12


def ends(trainer: Any) -> tuple[float, float]:
    """The mean reward of the first steps and of the last ones."""
    rewards = [line["reward"] for line in trainer.state.log_history if "reward" in line]
    return sum(rewards[:3]) / 3, sum(rewards[-3:]) / 3
