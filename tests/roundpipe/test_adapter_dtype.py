"""Adapters in 16 bits on the devices: masters, and the adapters that are saved, have what was rounded away."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import IA3Config, LoraConfig, PeftModel, get_peft_model, set_peft_model_state_dict
from roundpipe import (
    AutoRoundPipe,
    CheckpointWarning,
    RoundPipe,
    RoundPipeRunConfig,
    Runtime,
    load_checkpoint,
    optim,
    save_checkpoint,
)
from roundpipe import wrap_model_to_roundpipe as wrap
from safetensors.torch import load_file
from tiny_models import SMALL, untied, with_experts
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

BF16 = torch.bfloat16
ATTENTION: dict[str, Any] = {"r": 4, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False}
KINDS: dict[str, Any] = {
    "LoRA": LoraConfig(**ATTENTION),
    "DoRA": LoraConfig(**ATTENTION, use_dora=True),
    "rsLoRA and whole modules": LoraConfig(**ATTENTION, use_rslora=True, modules_to_save=["lm_head"]),
    "experts": LoraConfig(**ATTENTION, target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]),
    "IA3": IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
}


def adapted(kind: str = "LoRA", dtype: torch.dtype = BF16) -> PeftModel:
    torch.manual_seed(0)
    if kind == "experts":
        return get_peft_model(with_experts().to(dtype), KINDS[kind])
    return get_peft_model(untied().to(dtype), KINDS[kind])


def trained(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: one.detach().clone() for name, one in model.named_parameters() if one.requires_grad}


def batch(seed: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, 40, (4, 6), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids}


def train(model: RoundPipe | AutoRoundPipe, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    losses: list[float] = []
    for seed in steps:
        loss = model(**batch(seed)).loss
        loss.backward()
        model.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async=False)
        losses.append(loss.item())
    return losses


def plainly(model: nn.Module, steps: range) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Plain PyTorch with fp32 masters of rounded copies."""
    rounded = {name: one for name, one in model.named_parameters() if one.requires_grad}
    masters = {name: one.detach().float().clone().requires_grad_() for name, one in rounded.items()}
    optimizer = torch.optim.SGD(masters.values(), lr=0.3)
    losses: list[float] = []
    for name, one in rounded.items():
        one.data = masters[name].detach().to(BF16)
    for seed in steps:
        loss = model(**batch(seed), use_cache=False).loss
        loss.backward()
        for name, one in rounded.items():
            assert one.grad is not None
            masters[name].grad, one.grad = one.grad.float(), None
        optimizer.step()
        for name, one in rounded.items():
            one.data.copy_(masters[name].detach())
        losses.append(loss.item())
    return losses, {name: one.detach() for name, one in masters.items()}


@pytest.fixture
def two() -> Iterator[Runtime]:
    with Runtime("cpu:2") as runtime:
        yield runtime


def narrow(model: nn.Module, runtime: Runtime, **kwargs: Any) -> RoundPipe | AutoRoundPipe:
    config = RoundPipeRunConfig(num_microbatch=1)
    return wrap(model, runtime=runtime, adapter_dtype=BF16, model_run_config=config, **kwargs).train()


@pytest.mark.few(1)
@pytest.mark.parametrize("preset", [None, False], ids=["a row", "taken apart"])
@pytest.mark.parametrize("kind", KINDS)
def test_training_is_that_of_rounded_copies_of_fp32_masters(two: Runtime, kind: str, preset: bool | None) -> None:
    losses, masters = plainly(adapted(kind).train(), range(3))

    model = narrow(adapted(kind), two, use_sequential_preset=preset, lower_threshold=1000)
    found = train(model, torch.optim.SGD(model.optim_parameters(), lr=0.3), range(3))

    # A row computes the loss in another order, and gradients are rounded to bf16.
    assert found == (losses if preset is False else pytest.approx(losses, rel=1e-4))
    assert {one.dtype for one in trained(model.named_model).values()} == {BF16}
    state, first = model.state_dict(), trained(adapted(kind))
    for name, wanted in masters.items():
        assert state[name].dtype == first[name].dtype
        missing = (state[name].float() - wanted.to(state[name].dtype).float()).norm()
        assert missing <= (2e-2 if preset is None else 1e-6) * (wanted - first[name].float()).norm() + 1e-6, name


@pytest.mark.parametrize("master", ["whole", "split"])
def test_masters_begin_with_the_values_that_peft_made(two: Runtime, master: Any) -> None:
    first = trained(adapted(dtype=torch.float32))

    model = narrow(adapted(dtype=torch.float32), two, master=master)

    assert {one.dtype for one in model.optim_parameters()} == {torch.float32}
    state = model.state_dict()
    assert all(torch.equal(state[name], one) for name, one in first.items())
    # Not what the devices have.
    held = trained(model.named_model)
    assert any(not torch.equal(held[name].float(), one) for name, one in first.items())


@pytest.mark.slow
@pytest.mark.parametrize("master", ["whole", "split"])
@pytest.mark.parametrize("is_async", [True, False])
def test_saved_adapters_are_the_masters_and_training_goes_on_from_them(
    tmp_path: Path, two: Runtime, master: Any, is_async: bool
) -> None:
    model = narrow(adapted(), two, master=master)
    optimizer = optim.AdamW(model.optim_parameters(), lr=0.01)
    for seed in range(2):
        model(**batch(seed)).loss.backward()
        model.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async=is_async)

    path = save_checkpoint(tmp_path / "c", model, optimizer).path
    in_checkpoint = load_file(path / "adapter_model.safetensors")
    wanted = train(model, optimizer, range(2, 4))
    other = narrow(adapted(), two, master=master)
    another = optim.AdamW(other.optim_parameters(), lr=0.01)
    load_checkpoint(path, other, another)
    other.save_pretrained(tmp_path / "saved")
    again = train(other, another, range(2, 4))

    saved = load_file(tmp_path / "saved" / "adapter_model.safetensors")
    assert saved.keys() == in_checkpoint.keys()
    assert {one.dtype for one in saved.values()} == {torch.float32}
    assert all(torch.equal(saved[name], one) for name, one in in_checkpoint.items())
    assert any(not torch.equal(one, one.to(BF16).float()) for one in saved.values())
    # An asynchronous step's result is published when the model is saved: what was not saved reads it a call later.
    assert is_async or again == wanted


@pytest.mark.few(1)
@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("by", ["the wrapped model", "the user's own", "PEFT", "a model around it"])
def test_a_state_dict_loads_without_rounding_the_masters(two: Runtime, by: str, assign: bool) -> None:
    model = narrow(adapted(), two)
    wanted = {name: one + 1 / 3 for name, one in trained(adapted()).items()}

    if by == "a model around it":
        outer = nn.Module()
        outer.inner = model
        state = {f"inner.{name}": one for name, one in {**model.state_dict(), **wanted}.items()}
        outer.load_state_dict(state, assign=assign)
    elif by == "PEFT":
        names = {name: name.replace(".default", "") for name in wanted}
        set_peft_model_state_dict(model.named_model, {names[name]: one for name, one in wanted.items()})
    else:
        loads = model if by == "the wrapped model" else model.named_model
        loads.load_state_dict({**model.state_dict(), **wanted}, assign=assign)

    assert {one.dtype for one in trained(model.named_model).values()} == {BF16}
    state = model.state_dict()
    assert all(torch.equal(state[name], one) for name, one in wanted.items())
    # A call finds nothing that it would take over from the rounded weights.
    train(model, torch.optim.SGD(model.optim_parameters(), lr=0.0), range(1))
    state = model.state_dict()
    assert all(torch.equal(state[name], one) for name, one in wanted.items())


def test_an_adapter_that_peft_loads_again_stays_narrow_and_trains_on(tmp_path: Path, two: Runtime) -> None:
    model = narrow(adapted(), two)
    optimizer = torch.optim.SGD(model.optim_parameters(), lr=0.3)
    train(model, optimizer, range(1))
    model.save_pretrained(tmp_path)
    saved = {name: one.clone() for name, one in model.state_dict().items() if "lora_" in name}
    train(model, optimizer, range(1, 2))

    model.named_model.load_adapter(tmp_path, "default", is_trainable=True)

    state = model.state_dict()
    assert {one.dtype for one in trained(model.named_model).values()} == {BF16}
    assert all(torch.equal(state[name], one) for name, one in saved.items())
    train(model, optimizer, range(2, 3))
    state = model.state_dict()
    assert not any(torch.equal(state[name], one) for name, one in saved.items())


@pytest.mark.slow
@pytest.mark.parametrize("preset", [None, False], ids=["a row", "taken apart"])
def test_adapters_that_are_switched_to_after_wrapping_are_narrow_and_keep_their_values(
    two: Runtime, preset: bool | None
) -> None:
    own = adapted()
    own.add_adapter("frozen", KINDS["LoRA"])
    model = narrow(own, two, use_sequential_preset=preset, lower_threshold=1000)
    own.add_adapter("later", KINDS["LoRA"])
    first = {name: one.clone() for name, one in model.state_dict().items() if "lora_" in name}

    for adapter in ("default", "frozen", "later", "default"):
        own.set_adapter(adapter)
        rate = 0.0 if adapter == "default" else 0.3
        train(model, torch.optim.SGD(model.optim_parameters(), lr=rate), range(2))

    assert {one.dtype for name, one in own.named_parameters() if "lora_" in name} == {BF16}
    state = model.state_dict()
    assert {state[name].dtype for name in first} == {torch.float32}
    kept = {name for name, one in first.items() if torch.equal(state[name], one)}
    assert kept == {name for name in first if ".default." in name}
    moved = [state[name] for name in first if name not in kept]
    assert not any(torch.equal(one, one.to(BF16).float()) for one in moved)


def test_adapters_are_not_switched_while_there_are_gradients(two: Runtime) -> None:
    own = adapted()
    own.add_adapter("other", KINDS["LoRA"])
    model = narrow(own, two)
    model(**batch(0)).loss.backward()
    own.set_adapter("other")

    with pytest.raises(RuntimeError, match=r"lora_A\.other.*call model.zero_grad"):
        model(**batch(0))

    model.zero_grad()
    model(**batch(0)).loss.backward()


def test_a_state_dict_of_another_shape_changes_no_master(two: Runtime) -> None:
    model = narrow(adapted(), two)
    before = {name: one.clone() for name, one in model.state_dict().items()}
    name = next(name for name in before if "lora_A" in name)

    with pytest.raises(RuntimeError, match="size mismatch"):
        model.named_model.load_state_dict({name: torch.full((1, 16), 7.0)}, strict=False)

    train(model, torch.optim.SGD(model.optim_parameters(), lr=0.0), range(1))
    state = model.state_dict()
    assert all(torch.equal(state[name], one) for name, one in before.items())


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "how", [{"modules_to_save": ["lm_head"]}, {"bias": "all"}], ids=["whole modules", "biases"]
)
def test_what_is_no_adapter_keeps_the_dtype_of_the_base(two: Runtime, how: dict[str, Any]) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(**SMALL, attention_bias=True)
    model = narrow(get_peft_model(LlamaForCausalLM(config), LoraConfig(**ATTENTION, **how)), two)

    train(model, torch.optim.SGD(model.optim_parameters(), lr=0.1), range(1))

    dtypes = {name: one.dtype for name, one in trained(model.named_model).items()}
    assert {dtype for name, dtype in dtypes.items() if "lora_" in name} == {BF16}
    assert {dtype for name, dtype in dtypes.items() if "lora_" not in name} == {torch.float32}


def test_without_the_wrapped_model_a_state_dict_says_that_it_is_rounded(two: Runtime) -> None:
    own = adapted()
    narrow(own, two)
    gc.collect()

    with pytest.warns(CheckpointWarning, match="the wrapped model is gone"):
        own.state_dict()


def test_weights_that_other_code_writes_count_and_not_what_was_before(two: Runtime) -> None:
    model = narrow(adapted(), two)
    name, parameter = next((n, p) for n, p in model.named_model.named_parameters() if "lora_B" in n)

    with torch.no_grad():
        parameter.fill_(0.5)

    assert model.state_dict()[name].unique().tolist() == [0.5]


def test_a_model_that_cannot_be_wrapped_is_unchanged(two: Runtime) -> None:
    model = adapted()
    before = trained(model)

    with pytest.raises(ValueError, match="override_config"):
        narrow(model, two, override_config={nn.Linear(1, 1): RoundPipeRunConfig()})

    after = trained(model)
    assert all(after[name].dtype == one.dtype and torch.equal(after[name], one) for name, one in before.items())


def test_wrong_dtypes_and_models_are_refused(two: Runtime) -> None:
    with pytest.raises(ValueError, match="has none; add them before wrapping"):
        wrap(nn.Linear(2, 2), runtime=two, adapter_dtype=BF16)
    with pytest.raises(TypeError, match=r"must be torch\.bfloat16"):
        wrap(adapted(), runtime=two, adapter_dtype=torch.int8)


def test_copies_of_the_model_have_no_hook_of_it(two: Runtime) -> None:
    import copy

    model = narrow(adapted(), two)

    copied = copy.deepcopy(model.named_model)

    assert {one.dtype for name, one in copied.state_dict().items() if "lora_" in name} == {BF16}
