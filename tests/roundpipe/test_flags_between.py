"""What changes in layers between a forward and its backward: flags, adapters and attributes of forward count."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from plain import assert_near, batch, gradients, mlp, plans, square_error, twin, weights
from roundpipe import RoundPipe, RoundPipeRunConfig, Runtime, Stale
from roundpipe import wrap_model_to_roundpipe as wrap
from torch import nn
from transformers import Qwen3Config, Qwen3ForCausalLM

SMALL = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
}
# Not zero at first, so that all gradients say something.
LORA = {"r": 4, "lora_alpha": 8, "init_lora_weights": False}


def adapted(*others: str) -> PeftModel:
    torch.manual_seed(0)
    base = Qwen3ForCausalLM(Qwen3Config(**SMALL))
    model = get_peft_model(base, LoraConfig(target_modules=["q_proj", "down_proj"], **LORA))
    for name in others:
        model.add_adapter(name, LoraConfig(target_modules=["q_proj"], **LORA))
    return model


def ids(seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 40, (6, 5), generator=torch.Generator().manual_seed(seed))


def adapters(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters() if "lora_" in name}


def wrapped(peft: PeftModel, runtime: Runtime, *, as_row: bool) -> Any:
    config = RoundPipeRunConfig(num_microbatch=3)
    preset = None if as_row else False
    return wrap(peft, runtime=runtime, use_sequential_preset=preset, lower_threshold=1000, model_run_config=config)


def optimizer_of(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.3)


@pytest.mark.slow
@pytest.mark.pairwise
@pytest.mark.parametrize("as_row", [True, False])
@pytest.mark.parametrize("grad_mode", [torch.no_grad, nullcontext])
@pytest.mark.parametrize("is_async", [False, True])
def test_a_reference_pass_without_adapters_leaves_the_policys_backward_as_it_is(
    runtime: Runtime, as_row: bool, grad_mode: Callable[[], AbstractContextManager[Any]], is_async: bool
) -> None:
    def loss_of(policy: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
        return (policy - reference.detach().roll(1, 0)).square().mean()

    results: list[dict[str, torch.Tensor]] = []
    for is_inside in (True, False):
        peft = adapted()
        base = copy.deepcopy(peft)
        model = wrapped(peft, runtime, as_row=as_row)
        optimizer = optimizer_of(model.optim_parameters())

        for seed in range(4):
            policy = model(input_ids=ids(seed)).logits
            with grad_mode(), peft.disable_adapter():
                # Without adapters it does not depend on the training: so a plain model tells what it is.
                reference = (model if is_inside else base.base_model.model)(input_ids=ids(seed)).logits
                if not is_inside:
                    with base.disable_adapter():
                        reference = base(input_ids=ids(seed)).logits
            loss_of(policy, reference).backward()
            model.step(lambda o=optimizer: (o.step(), o.zero_grad()), is_async=is_async)
        model.synchronize()
        results.append(adapters(peft))

    assert_near(results[0], results[1], 1e-5)


@pytest.mark.few(1)
@pytest.mark.parametrize("as_row", [True, False])
def test_gradients_beside_a_reference_pass_are_those_of_plain_peft(runtime: Runtime, as_row: bool) -> None:
    plain = adapted()
    peft = copy.deepcopy(plain)
    model = wrapped(peft, runtime, as_row=as_row)

    found: list[dict[str, torch.Tensor | None]] = []
    for adapter, call in ((plain, plain), (peft, model)):
        policy = call(input_ids=ids()).logits
        with torch.no_grad(), adapter.disable_adapter():
            reference = call(input_ids=ids()).logits
        (policy - reference.roll(1, 0)).square().mean().backward()
        if call is model:
            model.synchronize()
        found.append({name: p.grad for name, p in adapter.named_parameters() if "lora_" in name})

    assert all(one is not None for one in found[0].values())
    assert_near(found[1], found[0], 1e-5)


@pytest.mark.slow
@pytest.mark.pairwise
@pytest.mark.parametrize("as_row", [True, False])
@pytest.mark.parametrize("is_async", [False, True])
def test_two_adapters_train_in_one_step_whichever_is_active_at_the_backward(
    runtime: Runtime, as_row: bool, is_async: bool
) -> None:
    plain = adapted("other")
    peft = copy.deepcopy(plain)
    model = wrapped(peft, runtime, as_row=as_row)
    peft.set_adapter("other")
    both = [*model.optim_parameters()]
    peft.set_adapter("default")
    both += [one for one in model.optim_parameters() if not any(one is other for other in both)]
    optimizers = [optimizer_of([p for n, p in plain.named_parameters() if "lora_" in n]), optimizer_of(both)]

    for adapter, call, optimizer in zip((plain, peft), (plain, model), optimizers, strict=True):
        for seed in range(3):
            losses: list[torch.Tensor] = []
            for name in ("default", "other"):
                adapter.set_adapter(name)
                losses.append(call(input_ids=ids(seed)).logits.square().mean())
            (losses[0] + 2 * losses[1]).backward()
            if call is plain:
                optimizer.step()
                optimizer.zero_grad()
            else:
                model.step(lambda o=optimizer: (o.step(), o.zero_grad()), is_async=is_async)
    model.synchronize()

    assert_near(adapters(peft), adapters(plain), 1e-4)


@pytest.mark.later
def test_gradients_stay_when_another_adapter_is_trained_before_the_step(runtime: Runtime) -> None:
    plain = adapted("other")
    peft = copy.deepcopy(plain)
    model = wrapped(peft, runtime, as_row=True)

    found: list[dict[str, torch.Tensor | None]] = []
    for adapter, call in ((plain, plain), (peft, model)):
        for name in ("default", "other"):
            adapter.set_adapter(name)
            call(input_ids=ids()).logits.square().mean().backward()
        if call is model:
            model.synchronize()
        found.append({name: p.grad for name, p in adapter.named_parameters() if "lora_" in name})

    assert all(one is not None for one in found[0].values())
    assert_near(found[1], found[0], 1e-5)


@pytest.mark.pairwise
@pytest.mark.parametrize("plan", ["planned", "one layer a stage", "forward whole, backward in layers"])
@pytest.mark.parametrize("change", ["freeze", "thaw", "freeze and thaw again", "freeze all but one"])
@pytest.mark.parametrize("is_earlier", [False, True], ids=["first call", "added to earlier gradients"])
def test_a_backward_goes_by_the_flags_of_its_forward(
    runtime: Runtime, plan: str, change: str, is_earlier: bool
) -> None:
    truth = mlp()
    truth[0].requires_grad_(change != "thaw")
    layers = twin(truth)
    config = RoundPipeRunConfig(num_microbatch=2, execute_plan=plans(len(layers), 2)[plan])
    model = RoundPipe(layers, runtime=runtime, model_run_config=config)
    x, y = batch(6)

    for row, call in ((truth, truth), (layers, model)):
        if is_earlier:
            square_error(call(x), 3 * y).backward()
        loss = square_error(call(x), y)
        if change == "thaw":
            row[0].requires_grad_(True)
        elif change == "freeze all but one":
            row[2:].requires_grad_(False)
        else:
            row[0].weight.requires_grad_(False)
            row[2].requires_grad_(False)
            if change != "freeze":
                row.requires_grad_(True)
        loss.backward()
    model.synchronize()

    assert_near(gradients(layers), gradients(truth), 1e-5)


@pytest.mark.parametrize("is_async", [False, True])
def test_layers_may_be_frozen_for_one_of_two_forwards_of_a_step(runtime: Runtime, is_async: bool) -> None:
    truth, x = mlp(), batch(6)
    layers = twin(truth)
    model = RoundPipe(layers, runtime=runtime, model_run_config=RoundPipeRunConfig(num_microbatch=2))
    optimizer = optimizer_of(model.optim_parameters())
    masters = {name: p.detach().clone() for name, p in truth.named_parameters()}
    before = masters

    for _ in range(4):
        read = before if is_async else masters
        with torch.no_grad():
            for name, parameter in truth.named_parameters():
                parameter.copy_(read[name])
        for row, call in ((truth, truth), (layers, model)):
            first = square_error(call(x[0]), x[1])
            row[0].requires_grad_(False)
            second = square_error(call(2 * x[0]), x[1])
            row[0].requires_grad_(True)
            (0.01 * (first + second)).backward()
        before = masters
        masters = {n: before[n] - 0.3 * p.grad for n, p in truth.named_parameters() if p.grad is not None}
        truth.zero_grad()
        model.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async=is_async)
    model.synchronize()

    assert_near(weights(layers), masters, 1e-4)


def test_layers_may_be_thawed_for_one_of_two_forwards_of_asynchronous_steps(runtime: Runtime) -> None:
    truth, (x, y) = mlp(), batch(6)
    layers = twin(truth)
    model = RoundPipe(layers, runtime=runtime, model_run_config=RoundPipeRunConfig(num_microbatch=2))
    optimizers = [optimizer_of(truth.parameters()), optimizer_of(model.optim_parameters())]

    for row, call, optimizer in zip((truth, layers), (truth, model), optimizers, strict=True):
        for _ in range(3):
            row[0].requires_grad_(False)
            first = square_error(call(x), y)
            row[0].requires_grad_(True)
            second = square_error(call(2 * x), y)
            (0.01 * (first + second)).backward()
            row[0].requires_grad_(False)
            if call is truth:
                optimizer.step()
                optimizer.zero_grad()
            else:
                model.step(lambda o=optimizer: (o.step(), o.zero_grad()))
                model.synchronize()

    assert_near(weights(layers), weights(truth), 1e-4)


class Scaled(nn.Linear):
    """A layer that reads a plain attribute."""

    scale = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale * super().forward(x)


@pytest.mark.parametrize("plan", ["one layer a stage", "cut differently", "forward whole, backward in layers"])
def test_a_backward_goes_by_the_attributes_of_its_forward(runtime: Runtime, plan: str) -> None:
    torch.manual_seed(0)
    truth = nn.Sequential(*(Scaled(4, 4) for _ in range(3)), nn.Linear(4, 3))
    layers = twin(truth)
    config = RoundPipeRunConfig(num_microbatch=2, execute_plan=plans(4, 2)[plan])
    model = RoundPipe(layers, runtime=runtime, model_run_config=config)
    x, y = batch(6)

    for row, call in ((truth, truth), (layers, model)):
        loss = square_error(call(x), y)
        for layer in row[:3]:
            layer.scale = 100.0
        loss.backward()
    model.synchronize()

    assert_near(gradients(layers), gradients(truth), 1e-5)


@pytest.mark.later
def test_adapters_that_are_merged_between_calls_act_once(two: Runtime) -> None:
    peft = adapted()
    plain = copy.deepcopy(peft)
    model = wrapped(peft, two, as_row=True)
    layer = peft.get_submodule("base_model.model.model.layers.0.mlp.down_proj")
    changes = (model.merge_adapter, model.unmerge_adapter, lambda: layer.scaling.update(default=0.0))

    found = [model(input_ids=ids()).logits.detach()]
    for change in changes:
        change()
        # Each device has twins of its own, which earlier calls have built or not.
        found += [model(input_ids=ids(seed)).logits.detach() for seed in (0, 0)]

    for logits in found[:-2]:
        torch.testing.assert_close(logits, plain(input_ids=ids()).logits, rtol=1e-4, atol=1e-5)
    plain.get_submodule("base_model.model.model.layers.0.mlp.down_proj").scaling["default"] = 0.0
    for logits in found[-2:]:
        torch.testing.assert_close(logits, plain(input_ids=ids()).logits, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("samples_first")
def test_a_pass_without_gradients_moves_no_weights(two: Runtime) -> None:
    layers = mlp()
    model = RoundPipe(layers, runtime=two)
    places = [parameter.data_ptr() for parameter in layers.parameters()]

    layers.requires_grad_(False)
    with torch.no_grad():
        model(batch(6)[0])
    model(batch(6)[0])

    assert [parameter.data_ptr() for parameter in layers.parameters()] == places


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("step", "newer weights were published since this forward"),
        ("write", "weights were written or loaded by code outside"),
        ("load", "weights were written or loaded by code outside"),
        ("replace", "modules, parameters or buffers were added, replaced"),
    ],
)
def test_a_stale_backward_says_what_has_changed_since_its_forward(two: Runtime, change: str, words: str) -> None:
    layers = mlp()
    model = RoundPipe(layers, runtime=two)
    x, y = batch(6)
    loss = square_error(model(x), y)

    if change == "step":
        model.step(lambda: None, is_async=False)
    elif change == "write":
        with torch.no_grad():
            layers[2].weight.mul_(2.0)
    elif change == "load":
        model.load_state_dict(model.state_dict())
    else:
        layers[2].weight = nn.Parameter(torch.ones_like(layers[2].weight))

    with pytest.raises(Stale, match=words):
        loss.backward()
