"""What a wrapped model is not made for works as in plain PyTorch, or is refused in words that say what to do."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from plain import assert_near
from roundpipe import AutoRoundPipe, RoundPipe, RoundPipeError, RoundPipeRunConfig, Runtime
from roundpipe import wrap_model_to_roundpipe as wrap
from torch import distributed, fx, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.func import functional_call

TWO = RoundPipeRunConfig(num_microbatch=2)
X = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
KINDS = ("row", "apart")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Dropout(0.5), nn.Linear(4, 4))
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.scale * self.inner(x)


def made(kind: str, runtime: Runtime) -> Any:
    if kind == "row":
        return RoundPipe(Net().inner, name="mine", runtime=runtime, model_run_config=TWO)
    return wrap(Net(), name="mine", runtime=runtime, lower_threshold=1, model_run_config=TWO)


def grads(model: Any) -> list[torch.Tensor]:
    model.synchronize()
    return [parameter.grad.clone() for parameter in model.named_model.parameters()]


# Refused


def wrapped_again(model: Any) -> object:
    return wrap(model, runtime=model.runtime, lower_threshold=1)


def twice_backward(model: Any) -> None:
    loss = model(X).sum()
    loss.backward(retain_graph=True)
    loss.backward()


WRONG: dict[str, tuple[Callable[[Any], object], str]] = {
    "wrapped again": (lambda model: RoundPipe(model, runtime=model.runtime), "wrapped already, as 'mine'; use it"),
    "wrapped again, apart": (lambda model: AutoRoundPipe(model), "wrapped already, as 'mine'; use it"),
    "wrapped again by wrap": (wrapped_again, "wrapped already, as 'mine'.*wrap it once"),
    "inner wrapped again": (
        lambda model: RoundPipe(model.model, runtime=model.runtime),
        "(already belongs to the RoundPipe model 'mine'|'inner' in the model is wrapped already)",
    ),
    "deepcopy": (copy.deepcopy, r"copy\.deepcopy\(model\.model\), and wrap the copy"),
    "copy": (copy.copy, "cannot be pickled or copied"),
    "pickle": (pickle.dumps, "cannot be pickled or copied.*state_dict"),
    "torch.save": (lambda model: torch.save(model, io.BytesIO()), "cannot be pickled or copied.*state_dict"),
    "to bf16": (lambda model: model.to(torch.bfloat16), "asked to move to torch.bfloat16; .* before wrapping"),
    "half": (lambda model: model.half(), "asked to move to torch.float16; .* before wrapping"),
    "double": (lambda model: model.double(), "asked to move to torch.float64; .* before wrapping"),
    "to cuda": (lambda model: model.to("cuda"), "asked to move to cuda; .* before wrapping"),
    "cuda": (lambda model: model.cuda(), "stays on the host .* before wrapping"),
    "compile": (lambda model: model.compile(), "compile_layers=True"),
    "jit.script": (torch.jit.script, r"torch\.jit\.script cannot compile; wrap it with compile_layers=True"),
    "jit.trace": (lambda model: torch.jit.trace(model, X), r"inside torch\.jit\.trace.*before wrapping"),
    "backward twice": (twice_backward, "a second time through the same forward.*Call the model once"),
    "loss in nothing": (
        lambda model: model.forward_backward((X,)),
        r"(of shape \(2, 4\), but a loss has one element, and there is no loss_fn; give|has no forward_backward)",
    ),
    "label in vain": (
        lambda model: model.forward_backward((X,), label=X),
        "(no loss_fn that reads it|has no forward_backward)",
    ),
}


def pushed_forward(net: nn.Module) -> object:
    with torch.autograd.forward_ad.dual_level():
        return net(torch.autograd.forward_ad.make_dual(X, X))


TRANSFORMS: dict[str, tuple[Callable[[nn.Module], object], str]] = {
    "vmap": (lambda net: torch.vmap(lambda row: net(row[None]))(X), r"inside torch\.func\.vmap"),
    "jacrev": (lambda net: torch.func.jacrev(net)(X), r"inside torch\.func\.grad, vjp or jacrev"),
    # It gave no tangent, and said nothing.
    "forward mode": (pushed_forward, "inside forward-mode differentiation"),
    "trace": (lambda net: torch.jit.trace(net, X), r"inside torch\.jit\.trace"),
    "export": (lambda net: torch.export.export(net, (X,)), "under FakeTensorMode"),
}
COMPILED: dict[str, tuple[Callable[[nn.Module], object], str]] = {
    "jit.script": (
        torch.jit.script,
        r"runs on its devices cannot be compiled by torch\.jit\.script; script",
    ),
    "fx": (fx.symbolic_trace, r"model 'mine', or one around it, is traced by torch\.fx"),
}


@pytest.mark.few(1)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", TRANSFORMS)
def test_the_module_that_was_taken_apart_refuses_what_the_model_refuses(two: Runtime, name: str) -> None:
    use, words = TRANSFORMS[name]
    net = Net()
    model = wrap(net, name="mine", runtime=two, lower_threshold=1, model_run_config=TWO)

    with pytest.raises(RoundPipeError, match=rf"'mine' was called {words}"):
        use(net)

    net(X).sum().backward()
    assert all(grad is not None for grad in grads(model))


class Deep(nn.Module):
    """Its own parameter, and a part that is no single module of torch's."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.inner = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * self.scale


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", COMPILED)
def test_what_compiles_the_module_that_was_taken_apart_is_refused_in_own_words(two: Runtime, name: str) -> None:
    use, words = COMPILED[name]
    net = Deep()
    model = wrap(net, name="mine", runtime=two, lower_threshold=1, model_run_config=TWO)

    with pytest.raises(RoundPipeError, match=words):
        use(net)

    net(X).sum().backward()
    assert all(grad is not None for grad in grads(model))


@pytest.mark.filterwarnings("ignore")
def test_a_functional_call_with_other_values_is_right_for_the_module_and_refused_for_the_model(
    two: Runtime,
) -> None:
    net = Deep()
    truth = copy.deepcopy(net)
    model = wrap(net, name="mine", runtime=two, lower_threshold=1, model_run_config=TWO)
    doubled = {name: 2 * each.detach() for name, each in net.named_parameters()}

    torch.testing.assert_close(functional_call(net, doubled, (X,)), functional_call(truth, doubled, (X,)))
    with pytest.raises(TypeError, match=r"scale is a parameter of model 'mine'.*functional_call the module that"):
        functional_call(model, doubled, (X,))

    torch.testing.assert_close(model(X), truth(X))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_use_is_refused_in_own_words_and_the_model_goes_on(two: Runtime, kind: str, name: str) -> None:
    use, words = WRONG[name]
    model = made(kind, two)

    with pytest.raises((TypeError, ValueError, RuntimeError, RoundPipeError), match=words):
        use(model)

    model.zero_grad()
    model(X).sum().backward()
    assert all(grad is not None for grad in grads(model))


@pytest.mark.parametrize("count", [-1, 0, "2", True, False, 2.0, [2]])
def test_a_number_of_microbatches_that_is_none_is_refused(count: Any) -> None:
    with pytest.raises((TypeError, ValueError), match=r"num_microbatch must be .* is .* instead"):
        RoundPipeRunConfig(num_microbatch=count)


def test_settings_of_a_call_are_refused_by_a_model_in_parts(two: Runtime) -> None:
    model = made("apart", two)

    with pytest.raises(TypeError, match=r"model 'mine' runs in parts.*takes no roundpipe_run_config; give"):
        model(X, roundpipe_run_config=TWO)


@pytest.mark.parametrize("how", ["the same module", "a module around it", "another with a weight of it"])
def test_a_parameter_belongs_to_one_model(two: Runtime, how: str) -> None:
    net, other = Net(), Net()
    other.inner[0].weight = net.inner[0].weight
    first = RoundPipe(net.inner, name="first", runtime=two)
    second = {"the same module": net.inner, "a module around it": net, "another with a weight of it": other}[how]

    with pytest.raises(ValueError, match="already belongs to the RoundPipe model 'first'; put both"):
        wrap(second, runtime=two, lower_threshold=1)

    assert first(X).shape == X.shape


class Viewed(nn.Module):
    """A trained weight of which a buffer is a view."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 4))
        self.register_buffer("row", self.weight.detach()[1])


def same_memory() -> nn.Module:
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    net[2].weight.data = net[0].weight.data
    return net


def some_columns(second: slice) -> nn.Module:
    memory = torch.ones(4, 8)
    return nn.ParameterList([memory[:, :4], memory[:, second]])


@pytest.mark.parametrize("made", [same_memory, Viewed, lambda: some_columns(slice(3, 7))])
def test_weights_in_memory_that_another_tensor_has_are_refused(
    two: Runtime, made: Callable[[], nn.Module]
) -> None:
    with pytest.raises(ValueError, match=r"two tensors in the same memory.*b.weight = a.weight"):
        wrap(made(), runtime=two)


@pytest.mark.parametrize("made", [same_memory, Viewed, lambda: some_columns(slice(4, 8))])
def test_memory_that_nothing_trains_or_that_is_beside_may_be_one(
    two: Runtime, made: Callable[[], nn.Module]
) -> None:
    model = made()
    if not isinstance(model, nn.ParameterList):
        model.requires_grad_(False)

    assert wrap(model, runtime=two)


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """One process, as torch's FSDP wants to know it."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1,))
    finally:
        distributed.destroy_process_group()


def sharded(module: nn.Module) -> nn.Module:
    return FullyShardedDataParallel(module, device_id=torch.device("cpu"))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("mesh")
@pytest.mark.parametrize("around", [nn.DataParallel, nn.parallel.DistributedDataParallel, sharded])
def test_what_replicates_a_module_is_not_wrapped(two: Runtime, around: Callable[[nn.Module], nn.Module]) -> None:
    for net in (around(Net()), nn.Sequential(around(Net()), nn.Tanh())):
        with pytest.raises(TypeError, match=r"(Data)?Parallel\) is torch's.*wrap the module in it: one process"):
            wrap(net, runtime=two, lower_threshold=1)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("mesh")
def test_training_inside_of_ddp_around_the_module_that_was_taken_apart_is_refused(two: Runtime) -> None:
    net = Net()
    model = wrap(net, name="mine", runtime=two, lower_threshold=1, model_run_config=TWO)

    with pytest.raises(RoundPipeError, match=r"'mine' was called by DistributedDataParallel"):
        nn.parallel.DistributedDataParallel(net)(X)

    assert model(X).shape == X.shape


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", KINDS)
def test_training_inside_of_ddp_is_refused_and_evaluation_works(kind: str) -> None:
    with Runtime("cpu:2") as two:
        model = made(kind, two)
        model.eval()
        wanted = model(X)
        distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
        try:
            around = nn.parallel.DistributedDataParallel(nn.Sequential(model))
            with pytest.raises(RoundPipeError, match=r"DistributedDataParallel.*leave it out"):
                around(X)
            with torch.no_grad():
                found = around(X)
        finally:
            distributed.destroy_process_group()

    assert torch.equal(found, wanted)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", KINDS)
def test_fsdp_around_a_model_is_refused_and_leaves_it_whole(kind: str, mesh: DeviceMesh) -> None:
    with Runtime("cpu:2") as two:
        model, words = made(kind, two), r"'mine' is given to torch's FSDP.*leave it out"
        for put_around in (lambda model: model, lambda model: nn.Sequential(model, nn.Linear(4, 4))):
            with pytest.raises(RoundPipeError, match=words):
                fully_shard(put_around(made(kind, two)), mesh=mesh)
            with pytest.raises(RoundPipeError, match=words):
                sharded(put_around(model))
        assert get_model_state_dict(model).keys() == model.state_dict().keys()
        model(X).sum().backward()
        assert all(grad is not None for grad in grads(model))


@pytest.mark.filterwarnings("ignore")
def test_sharded_weights_are_refused_before_and_after_wrapping(mesh: DeviceMesh) -> None:
    with Runtime("cpu:2") as two:
        with pytest.raises(ValueError, match=r"'scale' that is a DTensor.*fully_shard has no place"):
            wrap(fully_shard(Net(), mesh=mesh), runtime=two)
        net = Net()
        model = wrap(net, name="mine", runtime=two, lower_threshold=1, model_run_config=TWO)
        fully_shard(net.inner, mesh=mesh)
        model(X).sum().backward()
        with pytest.raises(TypeError, match="a weight is a DTensor"):
            model.synchronize()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", KINDS)
def test_what_fx_has_traced_can_be_wrapped_and_what_is_wrapped_says_that_it_cannot_be_traced(kind: str) -> None:
    torch.manual_seed(0)
    x, traced = torch.randn(4, 4), fx.symbolic_trace(Net().eval())
    wanted = traced(x)

    with Runtime("cpu:2") as two:
        model = made(kind, two)
        for around in (model, nn.Sequential(model, nn.Tanh())):
            with pytest.raises(RoundPipeError, match=r"'mine', or one around it, is traced by torch\.fx"):
                fx.symbolic_trace(around)
        whole = wrap(traced, False, runtime=two, model_run_config=TWO, upper_threshold=1 << 20)
        assert torch.equal(whole(x), wanted)


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_whose_runtime_was_closed_says_so_and_keeps_its_weights(kind: str) -> None:
    with Runtime("cpu:1") as one:
        model = made(kind, one)
        output = model(X)
        state = {name: value.clone() for name, value in model.state_dict().items()}

    for use in (lambda: model(X), output.sum().backward, lambda: model.step(lambda: None), model.synchronize):
        with pytest.raises(
            RuntimeError, match="the runtime was closed; open another one and wrap the model again"
        ):
            use()
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in state.items())


# As in plain PyTorch


@pytest.mark.parametrize("kind", KINDS)
def test_evaluation_mode_between_forward_and_backward_changes_no_gradient(two: Runtime, kind: str) -> None:
    model = made(kind, two)
    torch.manual_seed(3)
    model(X).sum().backward()
    wanted = grads(model)
    model.zero_grad()

    torch.manual_seed(3)
    output = model(X)
    model.eval()
    output.sum().backward()

    assert_near(grads(model), wanted, 1e-6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("what", ["output", "input"])
def test_a_tensor_written_in_place_before_backward_changes_no_gradient(two: Runtime, kind: str, what: str) -> None:
    model, x = made(kind, two).eval(), X.clone()
    (2 * model(X)).sum().backward()
    wanted = grads(model)
    model.zero_grad()

    output = model(x)
    if what == "input":
        x.mul_(5)
        output = output * 2
    else:
        output.mul_(2)
    output.sum().backward()

    assert_near(grads(model), wanted, 1e-6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("which", ["parameter", "buffer"])
def test_weights_made_in_inference_mode_are_refused_in_own_words(two: Runtime, kind: str, which: str) -> None:
    net = Deep() if kind == "apart" else nn.Sequential(nn.Linear(4, 4))
    inner = net.inner if isinstance(net, Deep) else net
    with torch.inference_mode():
        made = nn.Linear(4, 4) if which == "parameter" else torch.zeros(4)
    if isinstance(made, nn.Module):
        inner.append(made)
    else:
        inner[0].register_buffer("made", made)

    with pytest.raises(ValueError, match=rf"has a {which} that was made under torch\.inference_mode\(\).*clone"):
        wrap(net, kind != "apart" and None, runtime=two, lower_threshold=1, model_run_config=TWO)


@pytest.mark.parametrize("kind", KINDS)
def test_inputs_made_in_inference_mode_train(two: Runtime, kind: str) -> None:
    model = made(kind, two).eval()
    model(X).sum().backward()
    wanted = grads(model)
    model.zero_grad()

    with torch.inference_mode():
        x = X.clone()
    model(x).sum().backward()

    assert_near(grads(model), wanted, 1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_data_parallel_without_gpus_and_a_dtype_of_its_own_change_nothing(two: Runtime, kind: str) -> None:
    model = made(kind, two).eval()

    assert model.to("cpu") is model.float() is model.to(torch.float32) is model
    if not torch.cuda.is_available():
        assert torch.equal(nn.DataParallel(model)(X), model(X))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("call", ["forward", "forward_backward"])
def test_torchs_compiler_passes_a_call_over(two: Runtime, kind: str, call: str) -> None:
    model, graphs = made(kind, two).eval(), list[Any]()

    def backend(graph: torch.fx.GraphModule, _: object) -> Callable[..., Any]:
        graphs.extend(node.target for node in graph.graph.nodes if node.op.startswith("call"))
        return graph.forward

    def train(x: torch.Tensor) -> torch.Tensor:
        if call == "forward" or kind == "apart":
            return model(x * 2).sum() * 3
        return model.forward_backward((x * 2,), loss_fn=lambda outputs, _: outputs.sum()) * 3

    wanted = train(X)
    torch.compiler.reset()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Dynamo")
        found = torch.compile(train, backend=backend)(X)

    assert torch.equal(found, wanted)
    # What stands before and after the call is compiled, and nothing of the engine.
    assert 2 <= len(graphs) <= 3


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_graph_that_must_be_whole_is_refused_at_the_call(two: Runtime, kind: str) -> None:
    model = made(kind, two).eval()
    torch.compiler.reset()

    with pytest.raises(RuntimeError, match=r"(?s)forward.*disable"):
        torch.compile(lambda x: model(x).sum(), backend="eager", fullgraph=True)(X)
