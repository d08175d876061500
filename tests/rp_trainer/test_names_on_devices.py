"""What a trainer holds in place of a model has that model's names, and is never converted or copied in silence."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from roundpipe import Runtime, wrap_model_to_roundpipe
from rp_trainer import OnDevices, RoundPipeMixin
from test_trl import PAIRS, SETTINGS
from tiny import ARGUMENTS, causal_lm, tokenizer

trl = pytest.importorskip("trl")

WEIGHT = "model.layers.0.self_attn.q_proj.weight"


class DPO(RoundPipeMixin, trl.DPOTrainer):
    pass


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    args = trl.DPOConfig(str(tmp_path_factory.mktemp("dpo")), **{**ARGUMENTS, **SETTINGS, "max_steps": 1})
    given = {"train_dataset": PAIRS, "eval_dataset": PAIRS.select(range(4)), "processing_class": tokenizer()}
    found = DPO(model=causal_lm(), ref_model=causal_lm(5), args=args, **given)
    found.train()
    return found


LOOKS: dict[str, Callable[[Any], object]] = {
    "parameter": lambda model: model.get_parameter(WEIGHT).shape,
    "submodule": lambda model: type(model.get_submodule("model.layers.0")),
    "buffer": lambda model: model.get_buffer("model.rotary_emb.inv_freq").shape,
    "parameters": lambda model: [name for name, _ in model.named_parameters()],
    "buffers": lambda model: [name for name, _ in model.named_buffers()],
    "modules": lambda model: [name for name, _ in model.named_modules()],
    "children": lambda model: [name for name, _ in model.named_children()],
    "state dict": lambda model: list(model.state_dict()),
    "embeddings": lambda model: type(model.get_input_embeddings()),
    "config": lambda model: type(model.config),
    "training": lambda model: model.training,
}


@pytest.mark.parametrize("look", LOOKS)
def test_the_model_and_the_reference_in_a_trainer_have_the_names_of_what_was_given(
    trainer: Any, look: str
) -> None:
    for held, plain in ((trainer.ref_model, causal_lm(5).eval()), (trainer.model_wrapped, trainer.model)):
        assert isinstance(held, OnDevices)
        assert LOOKS[look](held) == LOOKS[look](plain)


def test_a_parameter_found_by_name_is_the_one_that_was_given(trainer: Any) -> None:
    found = trainer.model_wrapped.get_parameter(WEIGHT)
    reference = trainer.ref_model.get_parameter(WEIGHT)

    assert found is dict(trainer.model.named_parameters())[WEIGHT]
    assert torch.equal(reference, causal_lm(5).get_parameter(WEIGHT))
    with pytest.raises(AttributeError, match="nowhere"):
        trainer.ref_model.get_parameter("nowhere.weight")


CONVERSIONS: dict[str, Callable[[Any], object]] = {
    "half": lambda model: model.half(),
    "bfloat16": lambda model: model.bfloat16(),
    "double": lambda model: model.double(),
    "to": lambda model: model.to(torch.bfloat16),
    "to by name": lambda model: model.to(device="cpu", dtype=torch.float16),
    "to like": lambda model: model.to(torch.ones(1, dtype=torch.float64)),
    "type": lambda model: model.type(torch.float16),
    "to_empty": lambda model: model.to_empty(device="cpu"),
}


@pytest.mark.parametrize("name", CONVERSIONS)
def test_another_dtype_is_refused_and_changes_nothing(trainer: Any, name: str) -> None:
    before = trainer.ref_model.get_parameter(WEIGHT).clone()

    with pytest.raises(RuntimeError, match="stays on the host in the dtype it was wrapped in"):
        CONVERSIONS[name](trainer.ref_model)

    assert torch.equal(trainer.ref_model.get_parameter(WEIGHT), before)


def test_moves_and_its_own_dtype_change_nothing(trainer: Any) -> None:
    held = trainer.ref_model
    same = [held.to("cpu"), held.to("cuda"), held.cuda(), held.cpu(), held.float(), held.to(torch.float32)]

    assert all(one is held for one in same)
    assert held.get_parameter(WEIGHT).device.type == "cpu"


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_copy_is_refused_with_what_to_copy_instead(trainer: Any, copied: Callable[[Any], object]) -> None:
    with pytest.raises(TypeError, match=r"cannot be (pickled or )?copied.*engine\.named_model"):
        copied(trainer.ref_model)


def test_the_model_that_is_to_be_copied_instead_can_be(trainer: Any) -> None:
    held = trainer.ref_model
    held.engine.synchronize()

    made = copy.deepcopy(held.engine.named_model)

    assert torch.equal(made.get_parameter(WEIGHT), held.get_parameter(WEIGHT))
    assert made.get_parameter(WEIGHT) is not held.get_parameter(WEIGHT)


@pytest.mark.slow
def test_calls_without_gradients_leave_the_callers_generator_and_drop_differently_each_time():
    with Runtime("cpu:1") as runtime:
        model = OnDevices(
            wrap_model_to_roundpipe(causal_lm(attention_dropout=0.5).train(), runtime=runtime)
        ).train()
        ids = torch.randint(0, 20, (2, 5), generator=torch.Generator().manual_seed(0))
        rounds = []
        for _ in range(2):
            torch.manual_seed(7)
            before = torch.get_rng_state()
            with torch.no_grad():
                rounds.append([model(input_ids=ids).logits.clone() for _ in range(3)])
            assert torch.equal(torch.get_rng_state(), before)
            torch.manual_seed(8)
            with torch.no_grad():
                model(input_ids=ids)

    first, second, third = rounds[0]
    assert not torch.equal(first, second)
    assert not torch.equal(second, third)
    assert all(map(torch.equal, *rounds))
