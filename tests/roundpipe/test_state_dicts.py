"""State dicts, `save_pretrained` and `generate` have one step's result, always, and wait for what is under way."""

from __future__ import annotations

import copy
import io
import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import roundpipe
import torch
import torch.distributed.checkpoint as dcp
from checkpointing import Job, equal, job
from roundpipe import RoundPipeRunConfig, Runtime, wrap_model_to_roundpipe
from safetensors.torch import load_file
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

OPTIMIZERS = [roundpipe.optim.AdamW, torch.optim.AdamW]


def late(own: Job) -> threading.Event:
    """Let the next step end only after this event, or after a while."""
    go, update = threading.Event(), own.update

    def slowly() -> None:
        own.optimizer.step()
        go.wait(0.2)
        own.optimizer.zero_grad()
        own.update = update  # type: ignore[method-assign]

    own.update = slowly  # type: ignore[method-assign]
    return go


def values(state: dict[str, Any]) -> list[torch.Tensor]:
    return [value.clone() for one in state["state"].values() for value in one.values()]


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda made: made.__module__.partition(".")[0])
def test_an_optimizers_state_dict_waits_for_the_step_under_way(two: Runtime, optimizer: Any) -> None:
    own = job(two, optimizer=optimizer, double_buffer=False)
    own.scheduler = None
    own.train(0, 1)
    late(own)
    own.train(1, 2)
    found = values(own.optimizer.state_dict())
    own.model.synchronize()
    assert all(map(torch.equal, found, values(own.optimizer.state_dict())))
    assert found[0] == 2


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda made: made.__module__.partition(".")[0])
def test_loading_an_optimizers_state_waits_for_the_step_under_way(two: Runtime, optimizer: Any) -> None:
    own = job(two, optimizer=optimizer)
    own.scheduler = None
    own.train(0, 1)
    state = own.optimizer.state_dict()
    kept = {"state": {at: {k: v.clone() for k, v in one.items()} for at, one in state["state"].items()}}
    wanted = values(kept)
    late(own)
    own.train(1, 2)
    own.optimizer.load_state_dict({**state, **kept})
    own.model.synchronize()
    assert all(map(torch.equal, wanted, values(own.optimizer.state_dict())))


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda made: made.__module__.partition(".")[0])
def test_a_state_dict_is_read_inside_a_step_function_too(two: Runtime, optimizer: Any) -> None:
    own = job(two, optimizer=optimizer)
    own.train(0, 1)
    found: list[int] = []
    own.model.step(lambda: found.append(len(own.optimizer.state_dict()["state"])), is_async=False)
    assert found == [6]


@pytest.mark.parametrize("second", [True, False], ids=["second block", "one block"])
def test_a_models_state_dict_has_the_last_steps_result_and_its_buffers(two: Runtime, second: bool) -> None:
    row = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 5), nn.Linear(5, 3))
    own = job(two, layers=row, double_buffer=second)
    own.train(0, 2)
    late(own)
    own.train(2, 3)
    found = {name: value.clone() for name, value in own.model.state_dict().items()}
    own.model.synchronize()
    assert equal(found, own.model.state_dict())
    assert found["1.num_batches_tracked"] == 6


def test_another_threads_state_dict_is_neither_refused_nor_in_the_way(two: Runtime) -> None:
    own = job(two)
    own.train(0, 1)
    errors: list[BaseException] = []
    over = threading.Event()

    def read_all_along() -> None:
        try:
            while not over.is_set():
                own.model.state_dict()
                own.optimizer.state_dict()
        except BaseException as error:
            errors.append(error)

    reader = threading.Thread(target=read_all_along)
    reader.start()
    own.train(1, 20)
    over.set()
    reader.join()
    assert errors == []


def test_distributed_checkpoints_hold_one_step_and_load_in_mid_run(tmp_path: Path, two: Runtime) -> None:
    own = job(two, is_async=False)
    own.scheduler = None
    own.train(0, 2)
    dcp.save({"model": own.model.state_dict(), "optimizer": own.optimizer.state_dict()}, checkpoint_id=tmp_path)
    torch.manual_seed(4)
    wanted, weights = own.train(2, 4), own.weights()
    state = {"model": own.model.state_dict(), "optimizer": own.optimizer.state_dict()}
    dcp.load(state, checkpoint_id=tmp_path)
    own.model.load_state_dict(state["model"])
    own.optimizer.load_state_dict(state["optimizer"])
    torch.manual_seed(4)
    assert own.train(2, 4) == wanted
    assert equal(own.weights(), weights)


def saved(module: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES: dict[str, Callable[[nn.Module], dict[str, torch.Tensor]]] = {
    "deepcopy": lambda module: copy.deepcopy(module).state_dict(),
    "pickle": lambda module: pickle.loads(pickle.dumps(module)).state_dict(),
    "torch.save": lambda module: saved(module).state_dict(),
    "deepcopy of parameters": lambda module: {
        name: copy.deepcopy(one).detach() for name, one in module.named_parameters()
    },
    "copy of parameters": lambda module: {
        name: copy.copy(one).detach().clone() for name, one in module.named_parameters()
    },
}


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("second", [True, False], ids=["second block", "one block"])
def test_a_copy_of_the_module_has_the_last_steps_result(two: Runtime, how: str, second: bool) -> None:
    own = job(two, double_buffer=second)
    row = own.model.model
    own.train(0, 2)
    late(own)
    own.train(2, 3)

    found = COPIES[how](row)

    own.model.synchronize()
    assert equal(found, {name: own.model.state_dict()[name] for name in found})


def test_a_copy_made_after_the_runtime_was_closed_says_what_it_lacks() -> None:
    with Runtime("cpu:1") as runtime:
        own = job(runtime)
        own.train(0, 2)

    with pytest.warns(UserWarning, match="this copy lags behind the optimizer's parameters; call synchronize"):
        copy.deepcopy(own.model.model)


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=40,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            eos_token_id=None,
        )
    )


@pytest.mark.few(1)
@pytest.mark.parametrize("preset", [None, False], ids=["a row", "taken apart"])
def test_save_pretrained_and_generate_wait_by_themselves(
    tmp_path: Path, two: Runtime, preset: bool | None
) -> None:
    model = wrap_model_to_roundpipe(
        llama(),
        preset,
        lower_threshold=0,
        runtime=two,
        model_run_config=RoundPipeRunConfig(num_microbatch=1),
    )
    optimizer = torch.optim.AdamW(model.optim_parameters(), lr=0.5)
    ids = torch.randint(0, 40, (2, 6), generator=torch.Generator().manual_seed(1))

    def step() -> None:
        model(input_ids=ids, labels=ids).loss.backward()
        model.step(lambda: (optimizer.step(), optimizer.zero_grad()))

    step()
    step()
    model.save_pretrained(tmp_path)
    step()
    drawn = model.generate(ids, max_new_tokens=5, do_sample=False, use_cache=preset is None)
    model.synchronize()
    plain = llama()
    plain.load_state_dict(model.state_dict())
    assert torch.equal(drawn, plain.generate(ids, max_new_tokens=5, do_sample=False))
    again = load_file(tmp_path / "model.safetensors")
    before = LlamaForCausalLM.from_pretrained(tmp_path).state_dict()
    assert equal(again, {name: before[name] for name in again})
    assert not equal(again, {name: model.state_dict()[name] for name in again})
