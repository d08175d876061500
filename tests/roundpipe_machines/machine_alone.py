"""What one machine does alone, or leaves undone, while the others go on; each returns what was raised here."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path
from tempfile import gettempdir
from typing import Any

import torch
from machine_trainings import Apart, adamw, batch, row, square_error, weights, wrapped
from roundpipe import RoundPipePackedData, RoundPipeRunConfig, Runtime, save_checkpoint, wrap_model_to_roundpipe
from rp_batch import Replicate
from torch import nn

Found = list[str]
Loss = Callable[[Any, torch.Tensor], torch.Tensor]


def error_of(do: Callable[[], object]) -> str:
    """The class of the error and its words; none is a mistake of the test."""
    try:
        do()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def rank_of(runtime: Runtime) -> int:
    """This machine's number."""
    return 0 if runtime.group is None else runtime.group.rank


def stepped(model: Any, optimizer: torch.optim.Optimizer, *, is_async: bool = False) -> None:
    """A step that drops its gradients."""
    model.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async=is_async)


def total(module: nn.Module) -> str:
    """What tells weights from others."""
    return f"{sum(value.double().sum() for value in weights(module).values())}"


def _loop(runtime: Runtime, model: Any, module: nn.Module, loss_fn: Loss, fails_at: int) -> Found:
    """A training loop that drops the batches that fail; machine 0's loss raises in one of them."""
    optimizer = adamw(model.optim_parameters())
    found: Found = []
    for number in range(3):
        x, y = batch(number)

        def attempt(number: int = number, x: torch.Tensor = x, y: torch.Tensor = y) -> None:
            loss = loss_fn(model(x), y)
            if number == fails_at and rank_of(runtime) == 0:
                raise ValueError("in the loss")
            loss.backward()
            stepped(model, optimizer)

        found.append(error_of(attempt))
        if found[-1] != "no error":
            model.zero_grad()
    return [*found, total(module)]


def loss_fails(runtime: Runtime) -> Found:
    """Between a row's forward and backward, in the second of three batches."""
    layers = row()
    return _loop(runtime, wrapped(runtime, layers), layers, square_error, 1)


def loss_fails_apart(runtime: Runtime) -> Found:
    """The same with a model that was taken apart."""
    torch.manual_seed(0)
    net = Apart()
    config = RoundPipeRunConfig(num_microbatch=5)
    model = wrap_model_to_roundpipe(net, runtime=runtime, name="m", lower_threshold=0, model_run_config=config)
    return _loop(runtime, model, net, lambda outputs, labels: square_error(outputs["out"], labels), 1)


def loss_fails_before_another_error(runtime: Runtime) -> Found:
    """The call that machine 0 goes on with fails there, too, before it is launched."""
    found: Found = []
    layers = row()
    model = wrapped(runtime, layers)
    optimizer = adamw(model.optim_parameters())
    (x, y), (next_x, next_y) = batch(0), batch(1)
    found.append(error_of(lambda: _unless(runtime, 0, square_error(model(x), y).backward)))
    model.zero_grad()
    sizes_differ = () if rank_of(runtime) else (next_x[:2],)
    found.append(error_of(lambda: model(next_x, *sizes_differ)))
    model.zero_grad()
    square_error(model(next_x), next_y).backward()
    stepped(model, optimizer)
    return [*found, total(layers)]


def _unless(runtime: Runtime, rank: int, do: Callable[[], object]) -> None:
    if rank_of(runtime) == rank:
        raise ValueError("in the loss")
    do()


def backward_twice(runtime: Runtime) -> Found:
    """Two calls whose backwards come in another order on machine 1; then all go on."""
    layers = row()
    model = wrapped(runtime, layers)
    optimizer = adamw(model.optim_parameters())
    x, y = batch(0)
    losses = [square_error(model(x), y) for _ in range(2)]
    found = [error_of(losses[rank_of(runtime)].backward)]
    model.zero_grad()
    square_error(model(x), y).backward()
    stepped(model, optimizer)
    return [*found, total(layers)]


def step_instead(runtime: Runtime) -> Found:
    """Machine 0's loss fails after others have added gradients; it steps, where the others go back."""
    layers = row()
    model = wrapped(runtime, layers)
    optimizer = adamw(model.optim_parameters())
    x, y = batch(0)
    before = weights(layers)
    loss = square_error(model(x), y)
    attempt = loss.backward if rank_of(runtime) else lambda: None
    found = [error_of(attempt), error_of(lambda: stepped(model, optimizer))]
    assert all(torch.equal(before[name], value) for name, value in weights(layers).items())
    model.reset()
    square_error(model(x), y).backward()
    stepped(model, optimizer)
    return [*found, total(layers)]


def dropped_after_a_step(runtime: Runtime) -> Found:
    """Machine 1 alone drops what a step function has left, then what is left of a penalty."""
    layers = row()
    model = wrapped(runtime, layers)
    optimizer = adamw(model.optim_parameters())
    found: Found = []
    for is_penalty in (False, True):
        _call(model)
        model.step(optimizer.step, is_async=False)
        if is_penalty:
            model.zero_grad()
            layers[0].weight.square().sum().backward()
            model.step(optimizer.step, is_async=False)
        if rank_of(runtime) == 1:
            model.zero_grad()
        found.append(error_of(lambda: _call(model)))
        model.zero_grad()
    _call(model)
    stepped(model, optimizer)
    return [*found, total(layers)]


def dropped_in_a_step_function(runtime: Runtime) -> Found:
    """Machine 1's step function alone drops gradients, or sets them to zero: by ours or torch's, before, too."""
    found: Found = []
    layers = row()
    model = wrapped(runtime, layers)
    for make, is_first, to_none in product((adamw, _sgd), (False, True), (True, False)):
        optimizer = make(model.optim_parameters())
        before = weights(layers)

        def step(
            optimizer: torch.optim.Optimizer = optimizer, is_first: bool = is_first, to_none: bool = to_none
        ) -> None:
            if rank_of(runtime) == 1 and is_first:
                optimizer.zero_grad(to_none)
            optimizer.step()
            if rank_of(runtime) == 1 and not is_first:
                optimizer.zero_grad(to_none)

        _call(model)
        found.append(error_of(lambda step=step: model.step(step, is_async=False)))
        model.reset()
        assert all(torch.equal(before[name], value) for name, value in weights(layers).items())
    # The same on all, of some parameters only, which one machine or the other owns.
    every = list(model.optim_parameters())
    halves = [make(every[at::2]) for at, make in enumerate((adamw, _sgd))]
    for one, to_none in product(halves, (True, False)):
        _call(model)
        found.append(
            error_of(
                lambda one=one, to_none=to_none: model.step(
                    lambda: ([each.step() for each in halves], one.zero_grad(to_none)), is_async=False
                )
            )
        )
    model.zero_grad()
    return [*found, total(layers)]


def _sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01)


def read_by_one(runtime: Runtime) -> Found:
    """Machine 0 alone reads state dicts while a step's result is not published, as if all had synchronized."""
    found: Found = []
    truth, _ = _read_between(runtime, lambda model, _: model.synchronize(), double_buffer=True)
    _, last = _read_between(runtime, lambda _, __: None, double_buffer=True)
    for double_buffer in (True, False):

        def read(model: Any, layers: nn.Module) -> None:
            for one in (model, layers) if rank_of(runtime) == 0 else ():
                state: dict[str, torch.Tensor] = {}
                found.append(error_of(lambda one=one, state=state: state.update(one.state_dict())))
                assert not state or all(torch.equal(truth[name], state[name]) for name in truth)
            if rank_of(runtime) == 0:
                found.append(error_of(lambda: model.state_dict(keep_vars=True)))

        _, end = _read_between(runtime, read, double_buffer=double_buffer)
        assert all(torch.equal(last[name], value) for name, value in end.items())
    return [*found, f"{sum(value.double().sum() for value in last.values())}"]


def checkpoint_of_one(runtime: Runtime) -> Found:
    """Machine 0 alone saves a checkpoint, while the other trains on; the folder is not made."""
    layers = row()
    model = wrapped(runtime, layers)
    optimizer = adamw(model.optim_parameters())
    place = Path(gettempdir()) / "never made"
    found = [error_of(lambda: _call(model) if rank_of(runtime) else save_checkpoint(place, model, optimizer))]
    assert not place.exists()
    # Only the call has drawn a seed.
    torch.manual_seed(0)
    model.zero_grad()
    _call(model)
    stepped(model, optimizer)
    return [*found, total(layers)]


def _read_between(
    runtime: Runtime, read: Callable[[Any, nn.Module], object], *, double_buffer: bool
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Weights after two asynchronous steps and what is read then; and after a third one."""
    layers = row()
    model = wrapped(runtime, layers, double_buffer=double_buffer)
    optimizer = adamw(model.optim_parameters())
    between: dict[str, torch.Tensor] = {}
    for number in range(3):
        _call(model)
        stepped(model, optimizer, is_async=True)
        if number == 1:
            read(model, layers)
            between = {name: value.detach().clone() for name, value in layers.named_parameters()}
    model.synchronize()
    return between, weights(layers)


def saved_by_hand(runtime: Runtime, *, folder: str) -> Found:
    """Machine 0 alone calls `save_pretrained` of a model and of its adapters, also where a step is under way."""
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    found: Found = []
    tokens = torch.arange(24).reshape(4, 6)
    for is_adapted in (False, True):
        for is_async, double_buffer in ((False, False), (True, True), (True, False)):
            torch.manual_seed(0)
            net: Any = LlamaForCausalLM(
                LlamaConfig(
                    vocab_size=32,
                    hidden_size=16,
                    intermediate_size=24,
                    num_hidden_layers=2,
                    num_attention_heads=2,
                    num_key_value_heads=2,
                )
            )
            if is_adapted:
                net = get_peft_model(net, LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
            model: Any = wrap_model_to_roundpipe(
                net,
                runtime=runtime,
                name="m",
                double_buffer=double_buffer,
                model_run_config=RoundPipeRunConfig(num_microbatch=2),
            )
            optimizer = adamw(model.optim_parameters())
            for number in range(2):
                model.forward_backward(input_kwargs={"input_ids": tokens + number, "labels": tokens + number})
                stepped(model, optimizer, is_async=is_async)
            place = f"{folder}/{is_adapted} {is_async} {double_buffer}"
            if rank_of(runtime) == 0:
                found.append(error_of(lambda model=model, place=place: model.save_pretrained(place)))
                found.append(error_of(lambda net=net, place=place: net.save_pretrained(f"{place} by itself")))
            model.synchronize()
            if rank_of(runtime) == 0:
                found.append(error_of(lambda model=model, place=place: model.save_pretrained(f"{place} truth")))
    return found


def _call(model: Any) -> None:
    x, y = batch(0)
    model.forward_backward((x,), label=y, loss_fn=square_error)


def packed_whole_by_one(runtime: Runtime) -> Found:
    """Machine 0 alone gives a forward what cannot be split, before it is launched; then all draw alike."""
    layers = row()
    model = wrapped(runtime, layers)
    optimizer = adamw(model.optim_parameters())
    (x, _), (next_x, next_y) = batch(0), batch(1)
    packed = RoundPipePackedData([x[:2], x[2:]], [(None, None)] * 2)
    whole = RoundPipeRunConfig(split_input=((Replicate(),), {}))

    def attempt() -> None:
        if rank_of(runtime):
            model(x)
        else:
            model(packed, roundpipe_run_config=whole)

    found = [error_of(attempt)]
    model.zero_grad()
    seed = torch.default_generator.get_state().sum().item()
    found.append(error_of(lambda: square_error(model(next_x), next_y).backward()))
    stepped(model, optimizer)
    return [*found, f"{seed} {total(layers)}"]


def replaced_by_all(runtime: Runtime) -> Found:
    """The parameters are replaced by those of a state dict, with their owners, and train on."""
    layers = row()
    model = wrapped(runtime, layers)
    x, y = batch(0)
    state = {key: value.clone() for key, value in model.state_dict().items()}
    found = [error_of(lambda: model.load_state_dict(state, assign=True))]
    optimizer = adamw(model.optim_parameters())
    found.append(error_of(lambda: square_error(model(x), y).backward()))
    found.append(error_of(lambda: stepped(model, optimizer)))
    return [*found, total(layers)]


ALONE: dict[str, Callable[[Runtime], Found]] = {
    each.__name__: each
    for each in (
        loss_fails,
        loss_fails_apart,
        loss_fails_before_another_error,
        backward_twice,
        step_instead,
        dropped_after_a_step,
        dropped_in_a_step_function,
        read_by_one,
        checkpoint_of_one,
        packed_whole_by_one,
        replaced_by_all,
    )
}


def do_all(runtime: Runtime) -> dict[str, Found]:
    """What each returns, one after another in the same processes: every one leaves the group whole."""
    found: dict[str, Found] = {}
    for name, do in ALONE.items():
        torch.manual_seed(0)
        found[name] = do(runtime)
    return found
