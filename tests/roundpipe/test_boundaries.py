"""What layers hand on to each other is as in plain PyTorch wherever a plan cuts, or is refused."""

from __future__ import annotations

from collections import OrderedDict, UserDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from plain import assert_near, gradients, plans, twin
from roundpipe import (
    AutoRoundPipe,
    BoundaryError,
    RoundPipe,
    RoundPipeRunConfig,
    Runtime,
    wrap_model_to_roundpipe,
)
from torch import nn

Function = Callable[[Any], Any]
DEVICES = ["cpu:2", pytest.param("cuda", marks=pytest.mark.cuda)]
GRAINS = ["stage", "layer"]


@pytest.fixture(params=DEVICES)
def two(request: pytest.FixtureRequest) -> Iterator[Runtime]:
    """A runtime on two CPU devices, or on GPUs."""
    with Runtime(request.param) as opened:
        yield opened


class Does(nn.Module):
    """Calls a function."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Any) -> Any:
        return self.function(x)


def row(*functions: Function) -> nn.Sequential:
    """A linear layer, a layer for each function, and a linear layer."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), *map(Does, functions), nn.Linear(4, 4))


def total(out: torch.Tensor, _: Any = None) -> torch.Tensor:
    """A loss."""
    return out.square().sum()


def train(
    layers: nn.Sequential, runtime: Runtime, plan: str, grain: Any, x: torch.Tensor, microbatches: int = 1
) -> torch.Tensor:
    """The loss of one call; gradients are in the layers afterwards."""
    config = RoundPipeRunConfig(
        num_microbatch=microbatches, execute_plan=plans(len(layers), microbatches)[plan], recompute_grain=grain
    )
    model = RoundPipe(layers, runtime=runtime, model_run_config=config)
    loss = model.forward_backward((x,), loss_fn=total)
    model.synchronize()
    return loss


def some(rows: int = 5) -> torch.Tensor:
    """An input."""
    return torch.randn(rows, 4, generator=torch.Generator().manual_seed(1))


def assert_as_plain(layers: nn.Sequential, runtime: Runtime, plan: str, grain: Any, microbatches: int = 1) -> None:
    """The loss and gradients are those of plain PyTorch."""
    truth, x = twin(layers), some()

    loss = train(layers, runtime, plan, grain, x, microbatches)

    wanted = total(truth(x.clone()))
    wanted.backward()
    assert_near(loss, wanted.detach())
    assert_near(gradients(layers), gradients(truth))


CUTS = ["all fused", "one stage", "one layer a stage", "cut differently", "forward whole, backward in layers"]
every_cut = pytest.mark.parametrize("plan", CUTS)
every_grain = pytest.mark.parametrize("grain", GRAINS)


# Writes of what is shared


def twice(h: torch.Tensor) -> Any:
    """One tensor, twice."""
    return h, h


def with_view(h: torch.Tensor) -> Any:
    """A tensor and a view of all of it."""
    return {"h": h, "skip": h.view(-1, 2)}


def with_part(h: torch.Tensor) -> Any:
    """A tensor and a part of it."""
    return [h, h[1:, :2]]


def halves(h: torch.Tensor) -> Any:
    """Two parts of one tensor."""
    return h[:, :2], h[:, 2:]


def detached(h: torch.Tensor) -> Any:
    """A tensor, and the same without its graph."""
    return h, h.detach()


def leaves_of(pair: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Both of them."""
    first, other = pair.values() if isinstance(pair, dict) else pair
    return first, other


def rejoined(pair: Any) -> torch.Tensor:
    """A tensor of four columns that depends on both."""
    first, other = leaves_of(pair)
    return torch.cat((first, first), 1)[:, :4] + other.sum()


def written(pair: Any) -> Any:
    """The same, after a write of the first."""
    leaves_of(pair)[0].mul_(0.5)
    return rejoined(pair)


def written_through_a_view(pair: Any) -> Any:
    """The same, after a write of a view of the first."""
    leaves_of(pair)[0].t()[:1].add_(1.0)
    return rejoined(pair)


def other_written(pair: Any) -> Any:
    """The same, after a write of the second, which wants no gradient."""
    with torch.no_grad():
        leaves_of(pair)[1].zero_()
    return rejoined(pair)


def written_by_numpy(pair: Any) -> Any:
    """The same, after a write that raises no version counter."""
    leaves_of(pair)[0].detach().numpy().__imul__(0.5)
    return rejoined(pair)


def written_as_data(pair: Any) -> Any:
    """The same, as older code does it."""
    leaves_of(pair)[0].data.mul_(0.5)
    return rejoined(pair)


SHARED = [
    (twice, written),
    (twice, written_by_numpy),
    (with_view, written_as_data),
    (twice, written_through_a_view),
    (with_view, written),
    (with_part, written),
    (halves, written),
    (detached, other_written),
]


@pytest.mark.pairwise
@every_grain
@every_cut
@pytest.mark.parametrize(("make", "write"), SHARED, ids=[f"{a.__name__}-{b.__name__}" for a, b in SHARED])
def test_a_layer_that_writes_what_another_leaf_shares_is_refused_wherever_a_plan_cuts(
    two: Runtime, make: Function, write: Function, plan: str, grain: Any
) -> None:
    wanted = r"^layer 2 \(Does\) writes its input.*\[.*\] in place, which shares memory with input.*\[.*clone"
    if write is written_by_numpy and two.lanes[0].device.torch_device.type != "cpu":
        pytest.skip("NumPy cannot write memory of a GPU")

    with pytest.raises(BoundaryError, match=wanted):
        train(row(make, write), two, plan, grain, some())


@every_grain
@every_cut
def test_an_alias_that_passes_through_layers_is_still_one(two: Runtime, plan: str, grain: Any) -> None:
    def on(pair: Any) -> Any:
        first, other = pair
        return other, first.view_as(first)

    with pytest.raises(BoundaryError, match=r"^layer 4 \(Does\) writes its input\[0\] in place.* with input\[1\]"):
        train(row(twice, on, on, written), two, plan, grain, some())


@pytest.mark.pairwise
@every_grain
@every_cut
@pytest.mark.parametrize("make", [twice, with_view, with_part, halves, detached])
def test_aliases_may_pass(two: Runtime, make: Function, plan: str, grain: Any) -> None:
    assert_as_plain(row(make, lambda pair: pair, rejoined), two, plan, grain)


@every_grain
@every_cut
def test_a_write_of_an_argument_that_another_one_shares_is_refused(two: Runtime, plan: str, grain: Any) -> None:
    class Takes(nn.Module):
        def forward(self, x: torch.Tensor, *, also: torch.Tensor) -> torch.Tensor:
            return x.add_(1.0) + also

    torch.manual_seed(0)
    layers = nn.Sequential(Takes(), *row(torch.tanh))
    config = RoundPipeRunConfig(num_microbatch=1, execute_plan=plans(4, 1)[plan], recompute_grain=grain)
    model = RoundPipe(layers, runtime=two, model_run_config=config)
    x = some()

    with pytest.raises(BoundaryError, match=r"^layer 0 .* writes its args\[0\] in place.* with kwargs\['also'\]"):
        model.forward_backward((x,), {"also": x[:]}, loss_fn=total)


@every_cut
@pytest.mark.parametrize("kind", ["buffer", "frozen parameter"])
def test_a_write_of_another_layers_buffer_or_parameter_is_refused(two: Runtime, plan: str, kind: str) -> None:
    class Returns(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            table = torch.ones(4)
            if kind == "buffer":
                self.register_buffer("table", table)
            else:
                self.table = nn.Parameter(table, requires_grad=False)

        def forward(self, x: torch.Tensor) -> Any:
            return x, self.table[:]

    layers = row(torch.tanh, other_written)
    layers[1] = Returns()

    with pytest.raises(BoundaryError, match=r"^layer 2 .* its input\[1\] in place.* a parameter or buffer"):
        train(layers, two, plan, "stage", some())


def test_a_layer_that_writes_in_some_calls_only_is_refused_in_those(two: Runtime) -> None:
    class Sometimes(nn.Module):
        def forward(self, pair: Any) -> torch.Tensor:
            h, skip = pair
            return skip + (h.mul_(2.0) if self.training else h * 2.0)

    layers = nn.Sequential(*row(twice)[:2], Sometimes())
    model = RoundPipe(layers, runtime=two).eval()
    model.forward_backward((some(),), loss_fn=total)

    model.train()

    with pytest.raises(BoundaryError, match=r"layer 2 \(Sometimes\) writes its input\[0\]"):
        model.forward_backward((some(),), loss_fn=total)


# Writes of what is not shared


@pytest.mark.pairwise
@every_grain
@every_cut
@pytest.mark.parametrize("microbatches", [1, 2])
def test_an_input_of_its_own_may_be_written(two: Runtime, plan: str, grain: Any, microbatches: int) -> None:
    def inside(h: torch.Tensor) -> torch.Tensor:
        h[:, 1:].mul_(3.0)
        return h.add_(1.0)

    layers = row(torch.neg, torch.neg, torch.neg, inside)
    layers[2] = nn.ReLU(inplace=True)

    assert_as_plain(layers, two, plan, grain, microbatches)


class Noisy(nn.Module):
    """Draws random numbers for large inputs, and writes its input for these, or for all."""

    def __init__(self, *, writes_all: bool) -> None:
        super().__init__()
        self.writes_all = writes_all

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        is_large = bool(h.detach().abs().max() > 100)
        h = h.mul_(0.5) if is_large or self.writes_all else h * 0.5
        return nn.functional.dropout(h) if is_large else h


def noisy_pair(runtime: Runtime, *, writes_all: bool) -> tuple[RoundPipe, RoundPipe]:
    """A model that has seen a small input, and a fresh one."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(4, 4), Noisy(writes_all=writes_all), nn.Linear(4, 4))
    fresh = twin(layers)
    assert isinstance(fresh, nn.Sequential)
    seen, other = (
        RoundPipe(each, runtime=runtime, model_run_config=RoundPipeRunConfig(num_microbatch=1))
        for each in (layers, fresh)
    )
    for _ in range(2):
        seen.forward_backward((some(),), loss_fn=total)
    seen.zero_grad()
    return seen, other


def loss_of_large(model: RoundPipe) -> torch.Tensor:
    """The loss for a large input, after a seed."""
    torch.manual_seed(0)
    return model.forward_backward((some() * 1000,), loss_fn=total)


def test_a_layer_that_writes_its_input_and_begins_to_draw_is_right(two: Runtime) -> None:
    seen, fresh = noisy_pair(two, writes_all=True)

    assert_near(loss_of_large(seen), loss_of_large(fresh))


def test_a_layer_that_begins_to_write_and_to_draw_at_once_is_refused_once() -> None:
    # A GPU's numbers come from its own generator, so nothing is run again there.
    with Runtime("cpu:2") as two:
        seen, fresh = noisy_pair(two, writes_all=False)

        with pytest.raises(BoundaryError, match="drew random numbers, which it had not done before"):
            loss_of_large(seen)
        seen.zero_grad()

        assert_near(loss_of_large(seen), loss_of_large(fresh))


def test_a_models_input_stays_as_it_was(two: Runtime) -> None:
    model = RoundPipe(nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 4)), runtime=two)
    x = some()

    found = model(x)

    assert torch.equal(x, some())
    assert_near(found, model.model[1](x.relu()))


@pytest.mark.parametrize("wrap", ["taken apart", "one part"])
def test_a_part_that_writes_its_input_is_refused_for_the_models_forward_sees_it(two: Runtime, wrap: str) -> None:
    class UNet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(4, 4)
            self.down = nn.Sequential(nn.LeakyReLU(0.2, inplace=True), nn.Linear(4, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.first(x)
            return torch.cat((h, self.down(h)), 1)

    net = UNet()
    if wrap == "one part":
        net.down = RoundPipe(net.down, runtime=two)
        model: Any = AutoRoundPipe(net)
    else:
        model = wrap_model_to_roundpipe(net, runtime=two, lower_threshold=1)

    with pytest.raises(
        BoundaryError, match=r"writes its args\[0\] in place.* a tensor of the model's own forward"
    ):
        model(some())


# Strides


def strides_of(h: torch.Tensor) -> torch.Tensor:
    """The input times its strides, and whether all of it lies in a row."""
    weights = [stride + 1.0 for stride in h.stride()]
    return h.sum() * h.new_tensor([*weights, float(h.is_contiguous())]).prod() + h.new_zeros(5, 4)


LAYOUTS: dict[str, Function] = {
    "transposed": lambda h: h.t(),
    "expanded": lambda h: h.unsqueeze(1).expand(-1, 3, -1),
    "expanded and transposed": lambda h: h.unsqueeze(1).expand(-1, 3, -1).transpose(0, 2),
    "a part": lambda h: h[1:, :2],
    "a transposed part": lambda h: h[1:, :3].t(),
    "every second": lambda h: h[::2, ::2],
    "windows": lambda h: h.contiguous().as_strided((3, 4), (2, 1)),
    "a row": lambda h: h[:1],
    "an expanded part": lambda h: h[:, 1:2].expand(-1, 4),
    "channels last": lambda h: h[:4, :3].reshape(1, 3, 2, 2).contiguous(memory_format=torch.channels_last),
    "one channel last": lambda h: h[:4].reshape(2, 1, 2, 4).contiguous(memory_format=torch.channels_last),
    "a scalar": lambda h: h.sum(),
    "nothing": lambda h: h[:0].t(),
    "complex": lambda h: torch.view_as_complex(h.view(5, 2, 2)).t().conj(),
}


@pytest.mark.few(1)
@pytest.mark.pairwise
@every_grain
@every_cut
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layer_sees_the_strides_of_plain_pytorch(two: Runtime, layout: str, plan: str, grain: Any) -> None:
    def seen(h: torch.Tensor) -> torch.Tensor:
        return strides_of(h.abs() if h.is_complex() else h)

    assert_as_plain(row(LAYOUTS[layout], seen), two, plan, grain)


@every_cut
def test_a_view_that_plain_pytorch_refuses_is_refused_wherever_a_plan_cuts(two: Runtime, plan: str) -> None:
    layers = row(lambda h: h.t(), lambda h: h.view(5, 4))

    with pytest.raises(RuntimeError, match="view size is not compatible"):
        train(layers, two, plan, "stage", some())


@pytest.mark.parametrize("layout", ["transposed", "a part", "every second", "expanded"])
def test_an_input_in_one_piece_keeps_its_strides(two: Runtime, layout: str) -> None:
    class Shows(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tensor([*x.stride()], device=x.device)

    model = RoundPipe(Shows(), runtime=two, model_run_config=RoundPipeRunConfig(num_microbatch=1))
    x = LAYOUTS[layout](some())

    assert model(x).tolist() == [*x.stride()]


@pytest.mark.usefixtures("samples_first")
def test_a_microbatch_of_a_transposed_batch_lies_as_the_batch_does(two: Runtime) -> None:
    class Sees(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            # Time first again: a view in plain PyTorch.
            return x.transpose(0, 1).view(-1, 4).sum() + x.new_zeros(len(x))

    model = RoundPipe(Sees(), runtime=two, model_run_config=RoundPipeRunConfig(num_microbatch=3))
    x = torch.randn(2, 6, 4).transpose(0, 1)

    assert_near(model(x), torch.cat([part.sum().expand(2) for part in x.split(2)]))


# Objects


class AttrDict(dict[str, Any]):
    """A dict with its items as attributes."""

    __getattr__ = dict.__getitem__


class Ordered(OrderedDict[str, Any]):
    """An own ordered dict."""


@dataclass
class Record:
    """A dataclass."""

    x: Any


class State:
    """An own class."""

    def __init__(self, x: Any) -> None:
        self.x = x


class Slotted:
    """An own class with slots."""

    __slots__ = ("x",)

    def __init__(self, x: Any) -> None:
        self.x = x


class Listed(list[Any]):
    """An own list."""


CARRIED: dict[str, Function] = {
    "AttrDict": lambda x: AttrDict(x=x),
    "Ordered": lambda x: Ordered(x=x),
    "UserDict": lambda x: UserDict(x=x),
    "SimpleNamespace": lambda x: SimpleNamespace(x=x),
    "Record": lambda x: Record({"deep": x}),
}
HIDDEN: dict[str, Function] = {
    "State": State,
    "Slotted": Slotted,
    "Listed": lambda x: Listed([x]),
    "State in a dict": lambda x: {"state": [State({"deep": (x,)})]},
    "State in an AttrDict": lambda x: AttrDict(state=State(x)),
    "partial": lambda x: partial(torch.mul, x),
    "closure": lambda x: lambda: x,
    "generator": lambda x: (each for each in [x]),
    "iterator": lambda x: iter([x]),
    "set": lambda x: {x},
}


def nothing(held: Any) -> torch.Tensor:
    """A tensor that depends on nothing."""
    del held
    return torch.ones(5, 4)


def opened(held: Any) -> torch.Tensor:
    """The tensor in any of `CARRIED`."""
    x = held["x"] if hasattr(held, "keys") else held.x
    return x["deep"] if isinstance(x, dict) else x


@pytest.mark.pairwise
@every_grain
@every_cut
@pytest.mark.parametrize("kind", CARRIED)
def test_gradients_flow_through_mappings_and_records(two: Runtime, kind: str, plan: str, grain: Any) -> None:
    def again(held: Any) -> Any:
        assert type(held) is type(CARRIED[kind](None))
        return CARRIED[kind](opened(held).tanh())

    assert_as_plain(row(CARRIED[kind], again, again, opened), two, plan, grain)


@every_cut
@pytest.mark.parametrize("kind", HIDDEN)
def test_a_tensor_inside_of_an_object_is_refused_wherever_a_plan_cuts(two: Runtime, kind: str, plan: str) -> None:
    layers = row(HIDDEN[kind], nothing)

    with pytest.raises(
        BoundaryError, match=r"^layer 1 \(Does\) returns a tensor inside of an object: output.* is a "
    ):
        train(layers, two, plan, "stage", some())


def test_the_error_names_the_path_to_a_tensor_inside(two: Runtime) -> None:
    layers = row(HIDDEN["State in a dict"], nothing)

    with pytest.raises(BoundaryError, match=r"output\['state'\]\[0\]\.x\['deep'\]\[0\],.* or register State with"):
        train(layers, two, "all fused", "stage", some())


@every_cut
def test_objects_without_tensors_pass(two: Runtime, plan: str) -> None:
    def on(pair: Any) -> torch.Tensor:
        state, h = pair
        return h * state.x["factor"]

    assert_as_plain(row(lambda h: (State({"factor": 2.0}), h), lambda pair: pair, on), two, plan, "stage")


def test_an_output_that_only_the_loss_function_reads_may_be_an_object(two: Runtime) -> None:
    layers = row(torch.tanh, State)[:-1]
    truth = twin(layers)
    model = RoundPipe(layers, runtime=two)

    loss = model.forward_backward((some(),), loss_fn=lambda out, _: total(out.x))
    model.synchronize()

    wanted = total(truth(some()).x)
    wanted.backward()
    assert_near(loss, wanted.detach())
    assert_near(gradients(layers), gradients(truth))
    with pytest.raises(BoundaryError, match="returns a tensor inside of an object: output is a State"):
        model(some())


class Opening(nn.Linear):
    """Takes an object, whose tensor is on the host."""

    def forward(self, state: State) -> torch.Tensor:
        return super().forward(state.x.to(self.weight.device))


def test_an_object_with_an_input_that_wants_a_gradient_is_refused(two: Runtime) -> None:
    layers = nn.Sequential(Opening(4, 4), nn.Linear(4, 4))
    model = RoundPipe(layers, runtime=two, model_run_config=RoundPipeRunConfig(num_microbatch=1))

    model.forward_backward((State(some()),), loss_fn=total)
    with pytest.raises(BoundaryError, match=r"is given a tensor inside of an object: args\[0\] is a State"):
        model.forward_backward((State(some().requires_grad_()),), loss_fn=total)


def test_a_class_that_is_registered_passes_from_then_on(two: Runtime) -> None:
    class Own:
        def __init__(self, x: Any) -> None:
            self.x = x

    layers = row(Own, opened)
    with pytest.raises(BoundaryError, match=r"register Own with torch\.utils\._pytree\.register_pytree_node"):
        train(twin(layers), two, "one layer a stage", "stage", some())

    torch.utils._pytree.register_pytree_node(Own, lambda own: ([own.x], None), lambda values, _: Own(*values))

    assert_as_plain(layers, two, "one layer a stage", "stage")
