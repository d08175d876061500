"""Transforms, modes, tensors and modules that devices cannot have are refused in words that say what to do."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from plain import assert_near, gradients, mlp, plans, square_error, twin
from roundpipe import RoundPipe, RoundPipeError, RoundPipeRunConfig, Runtime, TrainingWarning
from roundpipe import wrap_model_to_roundpipe as wrap
from torch import nn
from torch._C._profiler import _ExperimentalConfig
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.nn.utils import prune
from torch.overrides import TorchFunctionMode
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, LlamaForCausalLM

TWO = RoundPipeRunConfig(num_microbatch=2)
X = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))


# Transforms


def in_dual_level(call: Callable[[torch.Tensor], Any]) -> None:
    with forward_ad.dual_level():
        call(forward_ad.make_dual(X, X.clone()))


TRANSFORMS: dict[str, Callable[[Callable[[torch.Tensor], Any]], object]] = {
    "jvp": lambda call: torch.func.jvp(call, (X,), (X,)),
    "vmap": lambda call: torch.vmap(call)(torch.stack([X, X])),
    "grad": lambda call: torch.func.grad(lambda x: call(x).sum())(X),
    "vjp": lambda call: torch.func.vjp(call, X),
    "jacrev": lambda call: torch.func.jacrev(call)(X),
    "forward-mode": in_dual_level,
    "jacfwd": lambda call: torch.func.jacfwd(call)(X),
    "linearize": lambda call: torch.func.linearize(call, X),
}


@pytest.mark.pairwise
@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("grad_mode", [torch.enable_grad, torch.no_grad])
@pytest.mark.parametrize("is_apart", [False, True])
def test_a_call_inside_a_transform_is_refused_whatever_the_devices(
    runtime: Runtime, name: str, grad_mode: Callable[[], Any], is_apart: bool
) -> None:
    model: Any = (
        wrap(nn.ModuleDict({"inner": mlp()})["inner"][0], runtime=runtime, lower_threshold=1)
        if is_apart
        else RoundPipe(mlp(), runtime=runtime, model_run_config=TWO)
    )

    with grad_mode(), pytest.raises(RoundPipeError, match=r"was called inside (torch\.func|forward-mode)"):
        TRANSFORMS[name](model)

    assert model(X).shape[0] == len(X)


def test_training_calls_inside_forward_mode_are_refused(two: Runtime) -> None:
    model = RoundPipe(mlp(), runtime=two, model_run_config=TWO)

    with forward_ad.dual_level(), pytest.raises(RoundPipeError, match="forward-mode"):
        model.forward_backward(input_args=(X,), loss_fn=lambda outputs, _: outputs.sum())


class Tangents(nn.Module):
    """A layer that uses forward mode inside, slowly enough for two devices to meet in it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(5):
            _, along = torch.func.jvp(lambda v: torch.tanh(self.linear(v)), (x,), (torch.ones_like(x),))
            with forward_ad.dual_level():
                dual = forward_ad.make_dual(x, along)
                more = forward_ad.unpack_dual(self.linear(dual).sin()).tangent
            x = x + along + more
        return x


@pytest.mark.slow
def test_layers_may_use_forward_mode_on_several_devices(runtime: Runtime) -> None:
    torch.manual_seed(0)
    truth = nn.Sequential(*(Tangents() for _ in range(4)))
    layers = twin(truth)
    config = RoundPipeRunConfig(num_microbatch=8, execute_plan=plans(4, 8)["microbatches divided"])
    model = RoundPipe(layers, runtime=runtime, model_run_config=config)
    x = torch.randn(16, 4, generator=torch.Generator().manual_seed(1))

    for _ in range(3):
        square_error(truth(x), x).backward()
        model.forward_backward(input_args=(x,), label=x, loss_fn=square_error)
    model.synchronize()

    assert_near(gradients(layers), gradients(truth), 1e-4)


# Modes


@pytest.mark.parametrize("is_training", [False, True])
def test_a_mode_that_sees_no_layer_is_told_once(two: Runtime, is_training: bool) -> None:
    model = RoundPipe(mlp(), runtime=two, model_run_config=TWO)

    def call() -> None:
        with FlopCounterMode(display=False):
            if is_training:
                model.forward_backward(input_args=(X,), loss_fn=lambda outputs, _: outputs.sum())
            else:
                model(X)

    with pytest.warns(TrainingWarning, match="under FlopCounterMode, which sees only this thread"):
        call()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        call()


class Doubles(TorchFunctionMode):
    """A function mode that would change what layers compute."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * 2 if func is nn.functional.linear else result


def of_this_thread() -> Any:
    return profile(activities=[ProfilerActivity.CPU])


SEEN_FROM_HERE: dict[str, tuple[Callable[[], Any], str]] = {
    "function mode": (Doubles, "under Doubles, .* sees, counts and changes none"),
    "profiler": (of_this_thread, "under torch's profiler, .*profile_all_threads=True"),
    "old profiler": (torch.autograd.profiler.profile, r"under torch's profiler, .* roundpipe\.profile\(\)"),
    "default device": (lambda: torch.device("meta"), "under the default device meta, .* device=x.device"),
}


@pytest.mark.parametrize("name", SEEN_FROM_HERE)
@pytest.mark.parametrize("is_apart", [False, True])
def test_what_sees_this_thread_only_is_told_once_and_changes_no_result(
    two: Runtime, name: str, is_apart: bool
) -> None:
    surroundings, words = SEEN_FROM_HERE[name]
    model: Any = (
        wrap(nn.ModuleDict({"inner": mlp()})["inner"][0], runtime=two, lower_threshold=1)
        if is_apart
        else RoundPipe(mlp(), runtime=two, model_run_config=TWO)
    )
    wanted = model(X)

    with pytest.warns(TrainingWarning, match=words), surroundings():
        found = model(X)

    assert torch.equal(found, wanted)
    with warnings.catch_warnings():
        warnings.simplefilter("error", TrainingWarning)
        with surroundings():
            model(X)


def test_a_profiler_of_all_threads_sees_layers_and_is_not_told_of(two: Runtime) -> None:
    model = RoundPipe(mlp(), runtime=two, model_run_config=TWO)
    model(X)

    with warnings.catch_warnings():
        warnings.simplefilter("error", TrainingWarning)
        with profile(
            activities=[ProfilerActivity.CPU], experimental_config=_ExperimentalConfig(profile_all_threads=True)
        ) as taken:
            model(X)

    assert any(event.key == "aten::linear" for event in taken.key_averages())


def test_the_host_as_default_device_is_not_told_of(two: Runtime) -> None:
    model = RoundPipe(mlp(), runtime=two, model_run_config=TWO)

    with warnings.catch_warnings():
        warnings.simplefilter("error", TrainingWarning)
        with torch.device("cpu"):
            model(X)


def test_a_call_under_a_mode_without_values_is_refused(two: Runtime) -> None:
    model = RoundPipe(mlp(), runtime=two, model_run_config=TWO)

    with FakeTensorMode(), pytest.raises(RoundPipeError, match="FakeTensorMode"):
        model(X)


# Tensors


def nested() -> torch.Tensor:
    return torch.nested.nested_tensor([torch.ones(2, 4), torch.ones(3, 4)], layout=torch.jagged)


ODD: dict[str, tuple[Callable[[], torch.Tensor], str]] = {
    "nested": (nested, "nested tensor"),
    "sparse": (lambda: X.to_sparse(), "sparse tensor"),
    "compressed": (lambda: X.to_sparse_csr(), "sparse tensor"),
    "quantized": (lambda: torch.quantize_per_tensor(X, 0.1, 0, torch.qint8), "quantized tensor"),
    "meta": (lambda: X.to("meta"), "tensor without values"),
}


@pytest.mark.filterwarnings("ignore:.*beta state")
@pytest.mark.parametrize("name", ODD)
@pytest.mark.parametrize("count", [1, 2])
def test_tensors_that_cannot_go_to_devices_are_refused_by_path(two: Runtime, name: str, count: int) -> None:
    make, words = ODD[name]
    config = RoundPipeRunConfig(num_microbatch=count)
    model = RoundPipe(mlp(), runtime=two, model_run_config=config)

    with pytest.raises(TypeError, match=rf"was given a {words}.* as args\[0\], .*; \w+ it"):
        model(make())
    with pytest.raises(TypeError, match=rf"was given a {words}.* as label\['a'\]"):
        model.forward_backward(input_args=(X,), label={"a": make()}, loss_fn=square_error)


# Modules


class Holds(nn.Module):
    """Has a tensor as a buffer or parameter, by the name `odd`."""

    def __init__(self, tensor: torch.Tensor, *, is_parameter: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        if is_parameter:
            self.odd = nn.Parameter(tensor)
        else:
            self.register_buffer("odd", tensor)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


def pruned() -> nn.Module:
    layer = nn.Linear(4, 4)
    prune.l1_unstructured(layer, "weight", 2)
    return layer


def with_old_weight_norm() -> nn.Module:
    return nn.utils.weight_norm(nn.Linear(4, 4))


MODULES: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "scripted": (lambda: torch.jit.script(nn.Linear(4, 4)), r"torch\.jit.*wrap the module that it was made from"),
    "traced": (lambda: torch.jit.trace(nn.Linear(4, 4), X), r"torch\.jit.*wrap the module that it was made from"),
    "lazy": (lambda: nn.LazyLinear(4), "a parameter 'weight' without a shape.*run one batch"),
    "lazy buffers": (lambda: nn.LazyBatchNorm1d(affine=False), "a buffer 'running_mean' without a shape"),
    "old weight norm": (with_old_weight_norm, r"use torch\.nn\.utils\.parametrizations\.weight_norm"),
    "pruned": (pruned, r"torch\.nn\.utils\.prune\.remove"),
    "sparse parameter": (lambda: Holds(X.to_sparse(), is_parameter=True), "parameter 'odd' that is a sparse"),
    "nested parameter": (lambda: Holds(nested(), is_parameter=True), "parameter 'odd' that is a nested"),
    "nested buffer": (lambda: Holds(nested(), is_parameter=False), "buffer 'odd' that is a nested"),
    "quantized buffer": (
        lambda: Holds(torch.quantize_per_tensor(X, 0.1, 0, torch.qint8), is_parameter=False),
        "buffer 'odd' that is a quantized",
    ),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("how", ["row", "inside a layer", "wrap"])
def test_modules_that_cannot_be_copied_to_devices_are_refused_at_wrapping(
    two: Runtime, name: str, how: str
) -> None:
    make, words = MODULES[name]
    layers = nn.Sequential(nn.Linear(4, 4), nn.Sequential(make()) if how == "inside a layer" else make())

    def wrapped() -> object:
        if how == "wrap":
            return wrap(nn.ModuleDict({"inner": layers}), runtime=two, lower_threshold=1)
        return RoundPipe(layers, runtime=two)

    with pytest.raises((TypeError, ValueError), match=words):
        wrapped()


# Key-value caches


def llama() -> nn.Module:
    sizes = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=1))


@pytest.mark.few(1)
@pytest.mark.parametrize("how", ["by name", "by place", "in training"])
def test_a_cache_that_a_call_asks_for_is_told_to_be_left_out(two: Runtime, how: str) -> None:
    model = wrap(llama(), runtime=two, model_run_config=TWO)
    ids = torch.ones(4, 3, dtype=torch.long)

    def call() -> None:
        if how == "by name":
            assert model(input_ids=ids, use_cache=True).past_key_values is None
        elif how == "by place":
            names = list(inspect.signature(LlamaForCausalLM.forward).parameters)[1:]
            model(ids, *[None] * (names.index("use_cache") - 1), True)
        else:
            model.forward_backward(input_kwargs={"input_ids": ids, "labels": ids, "use_cache": True})

    with pytest.warns(TrainingWarning, match="use_cache=True, which changes nothing.*past_key_values"):
        call()
    with warnings.catch_warnings():
        warnings.simplefilter("error", TrainingWarning)
        call()


def test_a_cache_that_only_the_configuration_asks_for_is_not_told(two: Runtime) -> None:
    model = wrap(llama(), runtime=two, model_run_config=TWO)
    assert model.config.use_cache

    with warnings.catch_warnings():
        warnings.simplefilter("error", TrainingWarning)
        model(input_ids=torch.ones(4, 3, dtype=torch.long), use_cache=None)
        model(input_ids=torch.ones(4, 3, dtype=torch.long), use_cache=False)
