"""Adapters of PEFT train on devices as in plain PEFT, and are saved, loaded and merged by PEFT's own functions."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import (
    AdaLoraConfig,
    IA3Config,
    LoraConfig,
    PeftModel,
    PromptTuningConfig,
    VeraConfig,
    get_peft_model,
)
from plain import assert_near
from roundpipe import AutoRoundPipe, RoundPipe, RoundPipeError, RoundPipeRunConfig, Runtime
from roundpipe import wrap_model_to_roundpipe as wrap
from rp_state.modules.parametrizing import cache_by_thread
from tiny_models import tied, untied, with_experts
from torch import nn
from torch.nn.utils import parametrize

FAMILIES: dict[str, Callable[[], nn.Module]] = {"qwen": tied, "llama": untied, "moe": with_experts}
# Not zero at first, so that all gradients say something.
LORA = {"r": 4, "lora_alpha": 8, "init_lora_weights": False}


def adapted(family: str, **kwargs: Any) -> PeftModel:
    torch.manual_seed(0)
    base = FAMILIES[family]()
    how = {"target_modules": ["q_proj", "v_proj"], **LORA, **kwargs}
    if family == "moe":
        how["target_parameters"] = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    return get_peft_model(base, LoraConfig(**how))


def adapters(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters() if "lora_" in name}


def ids(seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 40, (6, 5), generator=torch.Generator().manual_seed(seed))


def loss_of(model: nn.Module, seed: int) -> torch.Tensor:
    logits = model(input_ids=ids(seed)).logits
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids(seed)[:, 1:].flatten())


def wrapped(model: nn.Module, runtime: Runtime, **kwargs: Any) -> RoundPipe | AutoRoundPipe:
    how = {"model_run_config": RoundPipeRunConfig(num_microbatch=3), "lower_threshold": 1000, **kwargs}
    return wrap(model, runtime=runtime, **how)


def train(model: Any, steps: int = 2, *, is_async: bool = False) -> None:
    optimizer = torch.optim.SGD(model.optim_parameters(), lr=0.3)
    for seed in range(steps):
        loss_of(model, seed).backward()
        model.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async=is_async)


def train_plainly(model: nn.Module, steps: int = 2) -> None:
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.3)
    for seed in range(steps):
        optimizer.zero_grad()
        loss_of(model, seed).backward()
        optimizer.step()


@pytest.fixture(params=["cpu:1", "cpu:3", pytest.param("cuda", marks=pytest.mark.cuda)])
def devices(request: pytest.FixtureRequest) -> Iterator[Runtime]:
    """A runtime on one or three devices."""
    with Runtime(request.param) as opened:
        yield opened


@pytest.mark.pairwise
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("given", ["the PEFT model", "its base"])
@pytest.mark.parametrize("preset", [None, False])
def test_adapters_train_as_in_plain_peft(devices: Runtime, family: str, given: str, preset: bool | None) -> None:
    p = adapted(family)
    truth = copy.deepcopy(p)
    model = wrapped(p if given == "the PEFT model" else p.get_base_model(), devices, use_sequential_preset=preset)
    optimizer = torch.optim.SGD(model.optim_parameters(), lr=0.3)
    plain = torch.optim.SGD([p for p in truth.parameters() if p.requires_grad], lr=0.3)
    for seed in range(3):
        loss, wanted = loss_of(model, seed), loss_of(truth, seed)
        assert_near(loss, wanted, 1e-5)
        loss.backward()
        wanted.backward()
        model.synchronize()
        for (name, parameter), (_, other) in zip(p.named_parameters(), truth.named_parameters(), strict=True):
            assert (parameter.grad is None) == (other.grad is None), name
            if other.grad is not None:
                assert_near(parameter.grad, other.grad, 1e-5)
        model.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async=False)
        plain.step()
        plain.zero_grad()
    assert_near(adapters(p), adapters(truth), 1e-5)


@pytest.mark.parametrize("preset", [None, False])
def test_names_are_those_of_the_peft_model(two: Runtime, preset: bool | None) -> None:
    p = adapted("qwen")
    truth = copy.deepcopy(p)
    model = wrapped(p, two, use_sequential_preset=preset)
    trained = [name for name, parameter in truth.named_parameters() if parameter.requires_grad]
    assert [name for name, _ in model.optim_named_parameters()] == trained
    assert list(model.state_dict()) == list(truth.state_dict())
    assert [name for name, _ in p.named_modules()] == [name for name, _ in truth.named_modules()]


@pytest.mark.few(2)
@pytest.mark.pairwise
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("preset", [None, False])
@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("given", ["the PEFT model", "its base"])
def test_what_was_trained_is_saved_loads_in_plain_peft_and_goes_on(
    two: Runtime, tmp_path: Path, family: str, preset: bool | None, is_async: bool, given: str
) -> None:
    p = adapted(family)
    before = adapters(p)
    base = copy.deepcopy(p).unload()
    model = wrapped(p if given == "the PEFT model" else p.get_base_model(), two, use_sequential_preset=preset)
    train(model, is_async=is_async)
    # Without `synchronize`: saving publishes what the last step has left.
    p.save_pretrained(tmp_path)
    found = PeftModel.from_pretrained(copy.deepcopy(base), tmp_path, is_trainable=True)
    assert adapters(found).keys() == before.keys()
    masters = dict(model.optim_named_parameters())
    for name, value in adapters(found).items():
        key = name if given == "the PEFT model" else name.removeprefix("base_model.model.")
        assert_near(value, masters[key], 0)
        assert not torch.equal(value, before[name])
    assert_near(found(input_ids=ids()).logits, model(input_ids=ids()).logits, 1e-5)
    truth = copy.deepcopy(found)
    again = wrapped(found, two, use_sequential_preset=preset)
    train(again)
    train_plainly(truth)
    again.synchronize()
    assert_near(adapters(found), adapters(truth), 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("preset", [None, False])
def test_a_trained_model_merges(two: Runtime, tmp_path: Path, family: str, preset: bool | None) -> None:
    p = adapted(family)
    model = wrapped(p, two, use_sequential_preset=preset)
    train(model, is_async=True)
    p.save_pretrained(tmp_path)
    with torch.no_grad():
        wanted = model(input_ids=ids()).logits
    merged = copy.deepcopy(p).merge_and_unload()
    assert not any("lora" in name for name, _ in merged.named_parameters())
    with torch.no_grad():
        assert_near(merged(input_ids=ids()).logits, wanted, 1e-5)
    # In place, too: the user's own model.
    own = p.merge_and_unload()
    merged.save_pretrained(tmp_path / "merged")
    loaded = type(merged).from_pretrained(tmp_path / "merged")
    with torch.no_grad():
        assert_near(own(input_ids=ids(), use_cache=False).logits, wanted, 1e-5)
        assert_near(loaded(input_ids=ids()).logits, wanted, 1e-5)


@pytest.mark.few(1)
@pytest.mark.parametrize("preset", [None, False])
def test_adapters_may_be_added_after_wrapping(two: Runtime, preset: bool | None) -> None:
    torch.manual_seed(0)
    base = tied()
    truth = copy.deepcopy(base)
    model = wrapped(base, two, use_sequential_preset=preset)
    made: list[PeftModel] = []
    for layers in (base, truth):
        torch.manual_seed(1)
        made.append(get_peft_model(layers, LoraConfig(target_modules=["q_proj", "v_proj"], **LORA)))
    train(model)
    train_plainly(made[1])
    model.synchronize()
    assert_near(adapters(made[0]), adapters(made[1]), 1e-5)


def test_a_model_that_trains_nothing_says_so(two: Runtime) -> None:
    p = adapted("qwen")
    p.requires_grad_(False)
    model = wrapped(p, two, use_sequential_preset=True)
    with pytest.raises(RoundPipeError, match="no trainable parameter"):
        model.forward_backward(input_kwargs={"input_ids": ids()}, loss_fn=lambda outputs, _: outputs.logits.sum())
    apart = wrapped(adapted("llama").requires_grad_(False), two, use_sequential_preset=False)
    with pytest.raises(RuntimeError, match="does not require grad"):
        loss_of(apart, 0).backward()


def test_what_only_the_peft_model_can_do_is_refused_in_a_row(two: Runtime) -> None:
    model = wrapped(adapted("qwen"), two, use_sequential_preset=True)
    with pytest.raises(ValueError, match="adapter_names must not be given"):
        model(input_ids=ids(), adapter_names=["default"] * 6)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "config",
    [
        PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2),
        AdaLoraConfig(target_modules=["q_proj"], total_step=10),
    ],
    ids=["prompt", "AdaLoRA"],
)
def test_a_peft_model_that_does_more_than_call_its_base_runs_itself(two: Runtime, config: Any) -> None:
    torch.manual_seed(0)
    p = get_peft_model(tied(), config)
    truth = copy.deepcopy(p)
    model = wrapped(p, two, use_sequential_preset=False)
    loss = model(input_ids=ids(), labels=ids()).loss
    wanted = truth(input_ids=ids(), labels=ids(), use_cache=False).loss
    assert_near(loss, wanted, 1e-5)
    loss.backward()
    wanted.backward()
    model.synchronize()
    for (name, parameter), (_, other) in zip(p.named_parameters(), truth.named_parameters(), strict=True):
        if other.grad is not None:
            assert_near(parameter.grad, other.grad, 1e-5), name


KINDS: dict[str, Any] = {
    "DoRA": LoraConfig(target_modules=["q_proj", "v_proj"], use_dora=True),
    "tied embeddings": LoraConfig(target_modules=["embed_tokens", "lm_head", "q_proj"], r=4),
    "a head of its own": LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"]),
    "rows of an embedding": LoraConfig(
        target_modules=["q_proj"], trainable_token_indices={"embed_tokens": [1, 2]}
    ),
    "all linear layers": LoraConfig(target_modules="all-linear"),
    "IA3": IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
    "VeRA": VeraConfig(target_modules=["q_proj", "o_proj"], r=4),
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.* share the buffer:UserWarning")
@pytest.mark.pairwise
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", ["qwen", "llama"])
@pytest.mark.parametrize("preset", [None, False])
def test_adapters_of_any_kind_train_and_are_saved(
    two: Runtime, tmp_path: Path, kind: str, family: str, preset: bool | None
) -> None:
    torch.manual_seed(0)
    base = FAMILIES[family]()
    p = get_peft_model(copy.deepcopy(base), KINDS[kind])
    with torch.no_grad():
        for parameter in (parameter for parameter in p.parameters() if parameter.requires_grad):
            parameter.add_(torch.randn_like(parameter) * 0.05)
    truth = copy.deepcopy(p)
    train(wrapped(p, two, use_sequential_preset=preset))
    train_plainly(truth)
    p.save_pretrained(tmp_path)
    assert_near(p.state_dict(), truth.state_dict(), 1e-5)
    with torch.no_grad():
        loaded = PeftModel.from_pretrained(base, tmp_path)
        assert_near(loaded(input_ids=ids()).logits, truth(input_ids=ids()).logits, 1e-5)


def test_shared_matrices_of_a_model_that_is_taken_apart_are_warned_of(two: Runtime) -> None:
    p = get_peft_model(untied(), KINDS["VeRA"])
    with pytest.warns(UserWarning, match=r"self_attn and .* share the buffer"):
        wrapped(p, two, use_sequential_preset=False)


def test_the_example_of_the_documentation_runs(two: Runtime, tmp_path: Path) -> None:
    text = (Path(__file__).parents[2] / "docs" / "peft.md").read_text()
    code = text.split("```python\n")[1].split("```")[0]
    names: dict[str, Any] = {
        "base": tied(),
        "batches": [{"input_ids": ids(seed)} for seed in range(2)],
        "loss_of": lambda logits, batch: logits.square().mean() + 0 * batch["input_ids"].sum(),
        "folder": tmp_path,
    }
    exec(
        code.replace("wrap_model_to_roundpipe(p)", "wrap_model_to_roundpipe(p, runtime=runtime)"),
        names | {"runtime": two},
    )
    assert (tmp_path / "adapter_model.safetensors").exists()


def test_a_cache_of_parametrized_weights_is_the_threads_own() -> None:
    cache_by_thread()
    layer = nn.Linear(2, 2)

    class Shift(nn.Module):
        def __init__(self, by: float) -> None:
            super().__init__()
            self.by = by

        def forward(self, weight: torch.Tensor) -> torch.Tensor:
            return weight + self.by

    inside, done = threading.Event(), threading.Event()

    def another() -> None:
        with parametrize.cached():
            inside.set()
            assert done.wait(30)

    thread = threading.Thread(target=another)
    thread.start()
    assert inside.wait(30)
    before = layer.weight.detach().clone()
    try:
        for by in (1.0, 2.0):
            parametrize.register_parametrization(layer, "weight", Shift(by))
            with parametrize.cached():
                assert_near(layer.weight, before + by, 0)
            parametrize.remove_parametrizations(layer, "weight", leave_parametrized=False)
    finally:
        done.set()
        thread.join()


def test_the_penalty_that_adalora_adds_to_the_loss_is_trained(devices: Runtime) -> None:
    config = AdaLoraConfig(target_modules=["q_proj"], total_step=10, task_type="CAUSAL_LM")
    torch.manual_seed(0)
    truth = get_peft_model(tied(), config)
    with torch.no_grad():
        for name, parameter in truth.named_parameters():
            if "lora_" in name:
                parameter.add_(0.1 * torch.randn_like(parameter))
    p = copy.deepcopy(truth)
    model = wrapped(p, devices)

    wanted, found = (each(input_ids=ids(), labels=ids()).loss for each in (truth, model))
    wanted.backward()
    found.backward()
    model.synchronize()

    assert found.item() == pytest.approx(wanted.item(), rel=1e-5)
    assert_near(
        {n: q.grad for n, q in p.named_parameters()}, {n: q.grad for n, q in truth.named_parameters()}, 1e-4
    )
