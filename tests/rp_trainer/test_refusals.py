"""What cannot work is refused where the trainer is made, by the argument's name; what is overridden is there."""

from __future__ import annotations

import importlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import roundpipe
import torch
import trl
from datasets import Dataset
from roundpipe import wrap_model_to_roundpipe
from rp_trainer import RoundPipeMixin, RoundPipeOptions, RoundPipeTrainer
from rp_trainer.huggingface.override_points import TRAINER, TRL, changed
from rp_trainer.refusals import refuse, refuse_optimizer
from tiny import ARGUMENTS, causal_lm, padded, rows, sentences, tokenizer
from transformers import Trainer, TrainingArguments


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("torch_compile", True),
        ("auto_find_batch_size", True),
        ("use_liger_kernel", True),
        ("neftune_noise_alpha", 5.0),
        ("bf16_full_eval", True),
        ("fp16_full_eval", True),
        ("debug", "underflow_overflow"),
        ("optim", "lion_8bit"),
        ("optim", "galore_adamw"),
    ],
)
def test_arguments_that_cannot_work_are_refused_by_name(tmp_path, options, name, value):
    args = TrainingArguments(str(tmp_path), **{**ARGUMENTS, name: value})
    with pytest.raises(ValueError, match=rf"^{name} must"):
        RoundPipeTrainer(causal_lm(), args, padded, roundpipe=options)


@pytest.mark.parametrize("name", ["deepspeed", "fsdp", "parallelism_config", "fp16"])
def test_so_are_those_that_need_a_cluster_or_a_gpu_to_be_made(tmp_path, name):
    args = TrainingArguments(str(tmp_path), **ARGUMENTS)
    setattr(args, name, {"anything": True})
    with pytest.raises(ValueError, match=rf"^{name} must not be set"):
        refuse(args, RoundPipeTrainer)


def in_backward(path: Path, options: Any, kind: type[Trainer] = RoundPipeTrainer, **given: Any) -> Trainer:
    """A trainer whose steps are during backward, with these arguments; those of `args` are in capitals."""
    settings = {name.lower(): value for name, value in given.items() if name.isupper()}
    given = {"model": causal_lm(), **{name: value for name, value in given.items() if name.islower()}}
    args = TrainingArguments(str(path), **{**ARGUMENTS, "max_grad_norm": 0, **settings})
    return kind(args=args, data_collator=padded, roundpipe=replace(options, step_in_backward=True), **given)


class OwnLoss(RoundPipeTrainer):
    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        return super().compute_loss(*args, **kwargs)


class OwnStep(RoundPipeTrainer):
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        return super().training_step(*args, **kwargs)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("words", "given"),
    [
        ("^max_grad_norm must be 0 .* but is 1.0", {"MAX_GRAD_NORM": 1.0}),
        ("^optim must be adamw_torch.*Adafactor", {"OPTIM": "adafactor"}),
        ("^optim must be .*, but it is torch.*RMSprop", {"optimizers": torch.optim.RMSprop}),
        ("with compute_loss of OwnLoss", {"kind": OwnLoss}),
        ("with compute_loss_func", {"compute_loss_func": lambda outputs, *_, **__: outputs.loss}),
        ("with label_smoothing_factor", {"LABEL_SMOOTHING_FACTOR": 0.1}),
        (
            "with gradient_accumulation_steps > 1 and training_step of OwnStep",
            {"kind": OwnStep, "GRADIENT_ACCUMULATION_STEPS": 2},
        ),
    ],
    ids=lambda value: value[:34] if isinstance(value, str) else "",
)
def test_what_steps_during_backward_cannot_do_is_refused_where_the_trainer_is_made(
    tmp_path, options, words, given
):
    if "optimizers" in given:
        model = causal_lm()
        given = {"model": model, "optimizers": (given["optimizers"](model.parameters(), lr=1e-3), None)}
    with pytest.raises(ValueError, match=words):
        in_backward(tmp_path, options, **given)


def test_what_they_can_do_is_not_refused(tmp_path, options):
    in_backward(tmp_path, options, GRADIENT_ACCUMULATION_STEPS=2)
    model = causal_lm()
    own = roundpipe.optim.Lion(model.parameters(), lr=1e-3)
    in_backward(tmp_path, options, kind=OwnStep, model=model, optimizers=(own, None))


def test_a_trainer_of_trl_computes_a_loss_of_its_own_and_so_cannot_step_during_backward(tmp_path, options):
    class SFT(RoundPipeMixin, trl.SFTTrainer):
        pass

    args = trl.SFTConfig(str(tmp_path), **{**ARGUMENTS, "max_grad_norm": 0}, bf16=False)
    data = Dataset.from_dict({"text": sentences(4)})
    given = {"train_dataset": data, "processing_class": tokenizer()}
    with pytest.raises(ValueError, match="step_in_backward=True does not go with compute_loss of SFTTrainer"):
        SFT(model=causal_lm(), args=args, roundpipe=replace(options, step_in_backward=True), **given)


def test_what_was_set_after_the_trainer_was_made_is_refused_where_training_begins(tmp_path, options):
    trainer = in_backward(tmp_path, options, train_dataset=rows())
    trainer.args.max_grad_norm = 1.0
    with pytest.raises(ValueError, match=r"^max_grad_norm must be 0"):
        trainer.train()
    # No call has stepped.
    assert all(
        torch.equal(*both) for both in zip(trainer.model.parameters(), causal_lm().parameters(), strict=True)
    )


def test_a_model_that_was_wrapped_otherwise_is_refused(tmp_path, options):
    engine = wrap_model_to_roundpipe(causal_lm(), runtime=options.runtime)
    with pytest.raises(ValueError, match="wrapped without it before"):
        in_backward(tmp_path, options, model=engine)
    engine = wrap_model_to_roundpipe(causal_lm(), runtime=options.runtime, step_in_backward=True)
    args = TrainingArguments(str(tmp_path), **{**ARGUMENTS, "max_grad_norm": 0})
    with pytest.raises(ValueError, match="asynchronous=True is among the options, but"):
        RoundPipeTrainer(engine, args, padded, roundpipe=replace(options, asynchronous=True))


def test_a_batch_of_a_step_of_several_that_comes_alone_is_refused(tmp_path, options):
    class Copying(RoundPipeTrainer):
        def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
            batches, count = super().get_batch_samples(*args, **kwargs)
            return [dict(batch) for batch in batches], count

    settings = {"GRADIENT_ACCUMULATION_STEPS": 2, "train_dataset": rows()}
    with pytest.raises(ValueError, match="does not go with a batch that get_batch_samples of Copying did not"):
        in_backward(tmp_path, options, kind=Copying, **settings).train()


def test_options_that_do_not_go_together_are_refused():
    with pytest.raises(ValueError, match="does not go with asynchronous=True"):
        RoundPipeOptions(asynchronous=True, step_in_backward=True)


def test_several_processes_are_refused(tmp_path, options, monkeypatch):
    args = TrainingArguments(str(tmp_path), **ARGUMENTS)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="one process"):
        RoundPipeTrainer(causal_lm(), args, padded, roundpipe=options)


def test_a_precision_of_the_environment_is_refused(tmp_path, options, monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    args = TrainingArguments(str(tmp_path), **ARGUMENTS)
    with pytest.raises(ValueError, match="ACCELERATE_MIXED_PRECISION must be"):
        RoundPipeTrainer(causal_lm(), args, padded, roundpipe=options)


def test_the_mixin_must_come_first():
    with pytest.raises(TypeError, match=r"write class Last\(RoundPipeMixin, \.\.\.\)"):
        type("Last", (Trainer, RoundPipeMixin), {})


def test_optimizers_that_change_weights_between_steps_are_refused(tmp_path, options):
    class Free(torch.optim.SGD):
        def train(self) -> None: ...

        def eval(self) -> None: ...

    model = causal_lm()
    args = TrainingArguments(str(tmp_path), **ARGUMENTS)
    with pytest.raises(ValueError, match="optimizers: Free"):
        RoundPipeTrainer(
            model, args, padded, optimizers=(Free(model.parameters(), lr=1e-3), None), roundpipe=options
        )
    refuse_optimizer(torch.optim.SGD(model.parameters(), lr=1e-3))


@pytest.mark.parametrize("name", ["sync_ref_model", "precompute_ref_log_probs", "activation_offloading"])
def test_arguments_of_trl_are_refused_by_name(tmp_path, name):
    args = trl.DPOConfig(str(tmp_path), **ARGUMENTS, bf16=False, **{name: True})
    with pytest.raises(ValueError, match=rf"^{name} must not be set"):
        refuse(args, trl.DPOTrainer)


@pytest.mark.parametrize(
    "name", ["use_vllm", "use_transformers_continuous_batching", "cast_lm_head_to_fp32", "sync_ref_model"]
)
def test_arguments_of_trainers_that_generate_are_refused_by_name(tmp_path, name):
    args = trl.GRPOConfig(str(tmp_path), **ARGUMENTS, bf16=False, num_generations=3)
    setattr(args, name, True)
    with pytest.raises(ValueError, match=rf"^{name} must not be set"):
        refuse(args, trl.GRPOTrainer)


@pytest.mark.parametrize("name", ["cpo", "orpo"])
def test_generating_in_evaluation_is_refused_by_name(tmp_path, name):
    trainer, config = experimental(name)
    args = config(str(tmp_path), **ARGUMENTS, bf16=False, generate_during_eval=True)
    with pytest.raises(ValueError, match=r"^generate_during_eval must not be set"):
        type("Made", (RoundPipeMixin, trainer), {})(model=causal_lm(), args=args, processing_class=tokenizer())


@pytest.mark.parametrize(
    ("name", "method"), [("a2po", "_estimate_optimal_values"), ("iw_opd", "_generate_with_model")]
)
def test_trainers_that_generate_with_the_model_on_the_host_are_refused(tmp_path, name, method):
    trainer, config = experimental(name)
    args = config(str(tmp_path), **ARGUMENTS, bf16=False)
    with pytest.raises(ValueError, match=rf"^{trainer.__name__}\.{method} generates text with trainer\.model"):
        type("Made", (RoundPipeMixin, trainer), {})(model=causal_lm(), args=args)


@pytest.mark.parametrize("name", ["async_grpo", "async_distillation"])
def test_trainers_that_always_need_a_server_are_refused(tmp_path, name):
    trainer, config = experimental(name)
    args = config(str(tmp_path), **{**ARGUMENTS, "bf16": False})
    with pytest.raises(ValueError, match="always has its completions from a vLLM server"):
        type("Made", (RoundPipeMixin, trainer), {})(model=causal_lm(), args=args)


@pytest.mark.parametrize("name", ["sdft", "sdpo"])
def test_trainers_with_a_teacher_are_refused(tmp_path, name):
    trainer, config = experimental(name)
    causal_lm().save_pretrained(tmp_path)
    args = config(str(tmp_path), **{**ARGUMENTS, "bf16": False, "per_device_train_batch_size": 8})
    row = {"prompt": "w1 w2", "privileged_context": "w3"}
    given = {"train_dataset": Dataset.from_list([row] * 8), "processing_class": tokenizer()}
    if name == "sdpo":
        given["reward_funcs"] = [lambda completions, **_: [0.0] * len(completions)]
    with pytest.raises(ValueError, match=r"^teacher_model of Made is a model that RoundPipe does not run"):
        type("Made", (RoundPipeMixin, trainer), {})(model=str(tmp_path), args=args, **given)


def test_a_trainer_of_ones_own_is_refused_for_what_it_does_too(tmp_path, options):
    from trl.models import unwrap_model_for_generation

    class Sampling(RoundPipeTrainer):
        def sample(self) -> None:
            with unwrap_model_for_generation(self.model, self.accelerator) as model:
                model.generate()

    class Distilling(RoundPipeTrainer):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self.critic = kwargs.pop("critic")
            super().__init__(*args, **kwargs)

    args = TrainingArguments(str(tmp_path), **ARGUMENTS)
    with pytest.raises(ValueError, match=r"^Sampling\.sample generates text"):
        Sampling(causal_lm(), args, padded, roundpipe=options)
    with pytest.raises(ValueError, match=r"^critic of Distilling is a model"):
        Distilling(causal_lm(), args, padded, roundpipe=options, critic=causal_lm(1))
    wrapped = wrap_model_to_roundpipe(causal_lm(1).requires_grad_(False), runtime=options.runtime)
    Distilling(causal_lm(), args, padded, roundpipe=options, critic=wrapped)


@pytest.mark.parametrize("argument", ["model", "ref_model"])
def test_a_model_that_was_wrapped_before_it_got_a_head_of_trls_is_refused(tmp_path, options, argument):
    wrapped = wrap_model_to_roundpipe(causal_lm().requires_grad_(argument == "model"), runtime=options.runtime)
    pairs = {"prompt": sentences(3, 1), "chosen": sentences(3, 2), "rejected": sentences(3, 3)}
    given = {"model": causal_lm(), "ref_model": causal_lm(1), argument: wrapped}
    given |= {"train_dataset": Dataset.from_dict(pairs), "processing_class": tokenizer(), "roundpipe": options}
    args = trl.DPOConfig(str(tmp_path), **ARGUMENTS, bf16=False)
    with pytest.raises(ValueError, match=rf"^{argument} was wrapped before this trainer gave it the head"):
        type("Made", (RoundPipeMixin, trl.DPOTrainer), {})(args=args, **given)


def experimental(name: str) -> tuple[type[Any], type[Any]]:
    """A trainer of `trl.experimental` and its configuration's class."""
    module = importlib.import_module(f"trl.experimental.{name}.{name}_trainer")
    kind = next(
        one
        for one in vars(module).values()
        if getattr(one, "__module__", "") == module.__name__ and isinstance(one, type) and issubclass(one, Trainer)
    )
    return kind, getattr(
        importlib.import_module(f"trl.experimental.{name}"), kind.__name__.replace("Trainer", "Config")
    )


def test_what_is_not_refused_stays_on_the_host(tmp_path, options):
    args = TrainingArguments(str(tmp_path), **ARGUMENTS, activation_checkpointing=True) if _is_new() else None
    args = args or TrainingArguments(str(tmp_path), **ARGUMENTS, gradient_checkpointing=True)
    trainer = RoundPipeTrainer(causal_lm(), args, padded, roundpipe=options)
    assert trainer.accelerator.device.type == args.device.type == "cpu"
    assert args.train_batch_size == args.per_device_train_batch_size
    assert not trainer.model_wrapped.engine.named_model.is_gradient_checkpointing


def _is_new() -> bool:
    return hasattr(TrainingArguments, "activation_checkpointing")


def test_the_device_that_arguments_have_found_becomes_the_host(tmp_path, options):
    args = TrainingArguments(str(tmp_path), **{**ARGUMENTS, "use_cpu": False})
    # As on a machine with two GPUs.
    vars(args)["_setup_devices"] = torch.device("cuda:0")
    args._n_gpu = 2
    assert args.train_batch_size == 2 * args.per_device_train_batch_size
    trainer = RoundPipeTrainer(causal_lm(), args, padded, roundpipe=options)
    assert args.use_cpu
    assert args.device.type == trainer.accelerator.device.type == "cpu"
    assert args.train_batch_size == args.per_device_train_batch_size


# Override points


def test_every_override_point_of_trainer_is_there() -> None:
    assert list(changed(Trainer)) == []


@pytest.mark.parametrize("name", TRL)
def test_every_override_point_of_trl_is_there(name):
    assert list(changed(getattr(trl, name), TRL[name])) == []
    assert (
        list(changed(getattr(trl, name), {key: TRAINER[key] for key in TRAINER.keys() - TRL[name].keys()})) == []
    )


def test_all_that_the_mixin_overrides_is_listed():
    names = {name for kind in RoundPipeMixin.__mro__ if kind is not object for name in vars(kind)}
    own = {name for name in names if hasattr(Trainer, name) and not name.startswith("__")}
    assert own == TRAINER.keys()


def test_one_that_is_gone_or_called_otherwise_would_be_noticed():
    class Without(Trainer):
        get_batch_samples: Any = None

        def training_step(self, model: Any, inputs: Any, other: Any = None) -> Any:
            del model, inputs, other

    assert len(list(changed(Without, {**TRAINER, "gone": "(self)"}))) == 3
