"""Compiled layers: one compilation for each kind of layer and mode, and the numbers of those that are not."""

from __future__ import annotations

import importlib
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar

import pytest
import torch
from plain import assert_near, batch, gradients, square_error, twin
from roundpipe import AutoRoundPipe, RoundPipe, RoundPipeRunConfig, Runtime
from rp_transfer.cuda import inductor
from torch import nn
from torch._dynamo.exc import FailOnRecompileLimitHit
from torch._inductor.loop_body import InterpreterShim
from torch.fx import Tracer
from torch.fx.experimental.proxy_tensor import make_fx


class Layer(nn.Module):
    """A kind of layer that there are many of."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(x))


class Other(Layer):
    """Another kind."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x - torch.tanh(self.linear(x))


class Counting:
    """A compiler that counts the graphs it was given, and compiles none."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: Any) -> Any:
        del inputs
        self.graphs += 1
        return graph.forward


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    # In the end, the limits that were raised are what they were, too.
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        yield


def row(layers: int = 6) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Layer() for _ in range(layers)), Other())


def train(model: RoundPipe, calls: int = 3) -> list[torch.Tensor]:
    optimizer = torch.optim.SGD(model.optim_parameters(), lr=0.01)
    x, y = torch.ones(6, 6), torch.zeros(6, 6)
    losses = []
    for _ in range(calls):
        losses.append(model.forward_backward((x,), None, y, square_error))
        model.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async=False)
    return losses


@pytest.mark.parametrize("devices", [1, 2])
def test_layers_of_a_kind_share_a_compilation(devices: int) -> None:
    counting = Counting()
    # Devices that meet a kind at the same time may each compile it.
    kinds = 3 * devices
    with Runtime(f"cpu:{devices}") as runtime:
        config = RoundPipeRunConfig(num_microbatch=2)
        options = {"backend": counting}
        model = RoundPipe(row(), runtime=runtime, model_run_config=config, compile_layers=options)
        train(model)
        # The first layer's input needs no gradient, the others' do.
        first = counting.graphs
        assert 2 <= first <= kinds
        train(model)
        assert first <= counting.graphs <= kinds
        with torch.no_grad():
            model(torch.ones(6, 6))
        assert first < counting.graphs <= 2 * kinds


@pytest.mark.slow
def test_many_layers_on_many_devices_stay_within_the_compilers_limits() -> None:
    counting = Counting()
    with Runtime("cpu:4") as runtime:
        model = RoundPipe(row(24), runtime=runtime, compile_layers={"backend": counting})
        train(model, 2)
    assert counting.graphs <= 12


@pytest.mark.few(1)
def test_the_numbers_are_those_of_layers_that_are_not_compiled(runtime: Runtime, devices: str) -> None:
    # On the CPU the real compiler would need minutes; its graphs are what counts here, and a slow test has it.
    options: Any = True if devices == "cuda" else {"backend": "aot_eager"}
    layers = row(3)
    truth = twin(layers)
    x, y = torch.ones(6, 6), torch.zeros(6, 6)
    model = RoundPipe(layers, runtime=runtime, compile_layers=options)
    loss = model.forward_backward((x,), None, y, square_error)
    wanted = square_error(truth(x), y)
    wanted.backward()
    model.synchronize()
    assert_near(loss, wanted, 1e-4)
    assert_near(gradients(layers), gradients(truth), 1e-4)


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """For each graph that inductor is given, whether it is to make C++ code that launches the kernels."""
    asked: list[bool] = []
    compile_fx = importlib.import_module("torch._inductor.compile_fx")
    inner = compile_fx.compile_fx_inner

    def watched(*args: Any, **kwargs: Any) -> Any:
        asked.append(kwargs.get("cpp_wrapper", False))
        return inner(*args, **kwargs)

    monkeypatch.setattr(compile_fx, "compile_fx_inner", watched)
    # Otherwise what an earlier process compiled would not be compiled again.
    functorch: Any = importlib.import_module("torch._functorch.config")
    with compile_fx.config.patch(fx_graph_cache=False), functorch.patch(enable_autograd_cache=False):
        yield asked


@pytest.mark.cuda
def test_on_a_gpu_kernels_are_launched_from_cpp(graphs: list[bool], caplog: pytest.LogCaptureFixture) -> None:
    with Runtime("cuda") as runtime:
        layers = row(2)
        truth = twin(layers)
        model = RoundPipe(layers, runtime=runtime, compile_layers=True)
        loss = model.forward_backward((torch.ones(6, 6),), None, torch.zeros(6, 6), square_error)
        model.synchronize()
    wanted = square_error(truth(torch.ones(6, 6)), torch.zeros(6, 6))
    wanted.backward()
    assert_near(loss, wanted, 1e-4)
    assert_near(gradients(layers), gradients(truth), 1e-4)
    assert graphs
    assert all(graphs)
    assert not _warnings(caplog)


def test_what_launches_a_gpus_kernels_asks_for_no_vector_instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    codecache = importlib.import_module("torch._inductor.codecache")
    isa = importlib.import_module("torch._inductor.cpu_vec_isa")
    monkeypatch.setattr(isa, "pick_vec_isa", lambda: "usual")
    monkeypatch.setattr(codecache, "pick_vec_isa", isa.pick_vec_isa)
    inductor._ask_of_vectors_by_thread.cache_clear()
    try:
        with inductor._any_processor(), ThreadPoolExecutor(1) as other:
            for module in (codecache, isa):
                assert module.pick_vec_isa() is isa.invalid_vec_isa
                # What the user compiles for the CPU meanwhile.
                assert other.submit(module.pick_vec_isa).result() == "usual"
        assert codecache.pick_vec_isa() == "usual"
    finally:
        inductor._ask_of_vectors_by_thread.cache_clear()


def _warnings(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [record for record in caplog.records if record.name == inductor.__name__]


@pytest.mark.slow
def test_without_cpp_code_layers_are_compiled_as_usual_with_one_warning(
    graphs: list[bool], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_fx = importlib.import_module("torch._inductor.compile_fx")
    inner = compile_fx.compile_fx_inner

    def has_none(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("cpp_wrapper"):
            raise NotImplementedError("no such code")
        return inner(*args, **kwargs)

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        return compile_fx.compile_fx(graph, inputs, inner_compile=inductor._with_cpp)

    monkeypatch.setattr(compile_fx, "compile_fx_inner", has_none)
    inductor._warn_of_python.cache_clear()
    layer = Layer()
    truth = twin(layer)
    layer.compile(backend=backend)
    layer(torch.ones(2, 6)).sum().backward()
    truth(torch.ones(2, 6)).sum().backward()
    assert_near(gradients(layer), gradients(truth), 1e-5)
    # Forward and backward, one warning.
    assert graphs == [False, False]
    assert [record.args for record in _warnings(caplog)] == [("NotImplementedError: no such code",)]


@pytest.mark.slow
def test_on_the_cpu_layers_are_compiled_as_usual(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(inductor, "_with_cpp")
    layer = Layer()
    truth = twin(layer)

    with Runtime("cpu:1") as runtime:
        model = RoundPipe(layer, runtime=runtime, compile_layers=True)
        loss = model.forward_backward((torch.ones(2, 6),), None, torch.zeros(2, 6), square_error)
        model.synchronize()

    wanted = square_error(truth(torch.ones(2, 6)), torch.zeros(2, 6))
    wanted.backward()
    assert_near(loss, wanted, 1e-5)
    assert_near(gradients(layer), gradients(truth), 1e-5)


@pytest.mark.slow
@pytest.mark.skipif(not torch.__version__.startswith("2.11."), reason="only torch 2.11 crashes without care")
def test_layers_are_compiled_after_the_threads_of_another_runtime_have_ended() -> None:
    script = """
import torch
from roundpipe import RoundPipe, Runtime
from torch import nn

class Layer(nn.Linear):
    def forward(self, x):
        return super().forward(x).tanh()

for _ in range(3):
    torch._dynamo.reset()
    with Runtime("cpu:2") as runtime:
        row = nn.Sequential(Layer(3, 3), Layer(3, 3))
        model = RoundPipe(row, runtime=runtime, compile_layers={"backend": "aot_eager"})
        model.forward_backward((torch.ones(4, 3),), None, None, lambda output, _: output.sum())
"""
    # In a process of its own, where no thread that lives on has compiled anything, and freed memory is filled.
    subprocess.run(
        [sys.executable, "-c", script], check=True, timeout=100, env=os.environ | {"MALLOC_PERTURB_": "165"}
    )


@pytest.mark.slow
def test_layers_are_called_while_another_thread_traces(two: Runtime) -> None:
    traces, is_called = threading.Event(), threading.Event()

    def traced(x: torch.Tensor) -> torch.Tensor:
        traces.set()
        assert is_called.wait(100)
        return x + 1

    model = RoundPipe(row(), runtime=two, compile_layers={"backend": "aot_eager"})
    with ThreadPoolExecutor(1) as executor:
        graph = executor.submit(make_fx(traced), torch.ones(2))
        try:
            assert traces.wait(100)
            model(torch.randn(4, 6)).sum().backward()
        finally:
            is_called.set()
        graph.result(100)


@pytest.mark.slow
def test_no_layer_is_called_while_fx_takes_modules_for_parts_of_what_it_traces(
    two: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[str] = []
    plain = Tracer.trace

    def trace(self: Tracer, *args: Any, **kwargs: Any) -> torch.fx.Graph:
        # Others, of the compiler's own, call modules of other threads as they are.
        if type(self) is Tracer:
            threads.append(threading.current_thread().name)
        return plain(self, *args, **kwargs)

    monkeypatch.setattr(Tracer, "trace", trace)
    InterpreterShim._dummy_gm.cache_clear()
    with torch._inductor.config.patch(force_disable_caches=True):
        model = RoundPipe(nn.Sequential(Layer()), runtime=two, compile_layers=True)
        model.forward_backward((torch.ones(2, 6),), label=torch.ones(2, 6), loss_fn=square_error)
    assert threads == [threading.current_thread().name]


@pytest.mark.later
def test_gradients_are_summed_in_fp32_beside_compiled_layers(two: Runtime) -> None:
    found = []
    for options in (False, {"backend": "aot_eager"}):
        layers = row(2).bfloat16()
        model = RoundPipe(layers, torch.float32, runtime=two, compile_layers=options)
        x = torch.ones(6, 6, dtype=torch.bfloat16)
        model.forward_backward((x,), None, torch.zeros_like(x), square_error)
        model.synchronize()
        found.append(gradients(layers))
    assert_near(found[1], found[0], 1e-2)


def test_what_it_is_not_is_refused(two: Runtime) -> None:
    with pytest.raises(TypeError, match="compile_layers must be a bool or a dict"):
        RoundPipe(row(), runtime=two, compile_layers="yes")  # type: ignore[arg-type]


def test_models_that_were_taken_apart_pass_it_to_their_parts(two: Runtime) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = row(2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x)

    net = Net()
    net.inner = RoundPipe(net.inner, runtime=two, compile_layers={"backend": "aot_eager"})
    model = AutoRoundPipe(net, compile_layers=True)
    assert model(batch(6)[0].repeat(1, 2)[:, :6]).shape == (6, 6)


WORD = ["a"]


class Worded(Layer):
    """A variant for each word that there is."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(x)) * len(WORD[0])


class Looking(nn.Module):
    """Notes how many variants the compiler may keep where it runs."""

    seen: ClassVar[list[int]] = []

    @torch.compiler.disable
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        Looking.seen.append(torch._dynamo.config.recompile_limit)
        return x * 1.0


def test_as_many_variants_may_be_kept_as_devices_need_whichever_thread_calls(
    runtime: Runtime, devices: str
) -> None:
    options: Any = True if devices == "cuda" else {"backend": "eager"}
    model = RoundPipe(nn.Sequential(Layer(), Looking()), runtime=runtime, compile_layers=options)
    x = torch.ones(4, 6)
    Looking.seen.clear()
    with ThreadPoolExecutor(1) as another:
        another.submit(model.forward_backward, (x,), None, x, square_error).result()
    assert min(Looking.seen) >= 8 * len(runtime.lanes)


@pytest.mark.later
def test_a_variant_too_many_is_the_error_that_the_caller_asked_for() -> None:
    x = torch.ones(4, 6)
    with Runtime("cpu:1") as runtime, torch._dynamo.config.patch(recompile_limit=8):
        layers = nn.Sequential(Layer(), Worded())
        model = RoundPipe(layers, runtime=runtime, compile_layers={"backend": "eager"})

        def call(word: str) -> None:
            WORD[:] = [word]
            model.forward_backward((x,), None, x, square_error)

        for number in range(8):
            call("a" * number)
        with pytest.raises(FailOnRecompileLimitHit):
            call("a" * 8)
        model.reset()
