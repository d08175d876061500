"""Models that are almost a row of layers: each is refused by name, or carried rightly."""

import copy
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from comparison import apart, as_layers, differences, outcome, plainly
from rp_presets import NotARow, UnsupportedModel, to_sequential
from torch import Tensor, nn
from torch.nn import functional

SIZE = 6


class Layer(nn.Module):
    """A layer that any of these models could have."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(SIZE, SIZE)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x).tanh()


class Model(nn.Module):
    """Embedding, layers, head: a row. The others change one thing."""

    layer: Callable[[], nn.Module] = Layer
    main_input_name = "tokens"

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, SIZE)
        self.layers = nn.ModuleList(type(self).layer() for _ in range(3))
        self.head = nn.Linear(SIZE, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


TOKENS = torch.arange(10).reshape(2, 5)


def made(kind: type[Model]) -> Model:
    torch.manual_seed(5)
    return kind().eval()


def convert(model: nn.Module) -> nn.Sequential:
    return to_sequential(model, example_inputs={"tokens": TOKENS})


# What is carried


class EmbeddingReadBehind(Model):
    def forward(self, tokens: Tensor) -> Tensor:
        x = first = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x + first * 0.5)


class EmbeddingScaledInPlace(Model):
    def forward(self, tokens: Tensor) -> Tensor:
        first = self.embed(tokens)
        first *= 3.0
        x = first
        for layer in self.layers:
            x = layer(x)
        return self.head(x + first * 0.5)


class DropoutReadBehind(Model):
    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        x = first = self.dropout(self.embed(tokens))
        for layer in self.layers:
            x = layer(x)
        return self.head(x + first)


class EveryResultReadBehind(Model):
    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        seen = [x]
        for layer in self.layers:
            x = layer(x)
            seen.append(x)
        return self.head(torch.stack(seen).mean(0))


class FirstResultInTheSecondAndThird(Model):
    class Mixing(Layer):
        def forward(self, x: Tensor, first: Tensor | None = None) -> Tensor:
            return super().forward(x) if first is None else super().forward(x) * first.sigmoid()

    layer = Mixing

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        first = None
        for layer in self.layers:
            x = layer(x, first)
            first = x if first is None else first
        return self.head(x)


class SharedContainer(Model):
    class Sharing(Layer):
        def forward(self, x: Tensor, shared: dict[str, Tensor]) -> Tensor:
            x = super().forward(x)
            if "keys" in shared:
                return x * shared["keys"].sigmoid()
            shared["keys"] = x * 2
            return x

    layer = Sharing

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        shared: dict[str, Tensor] = {}
        for layer in self.layers:
            x = layer(x, shared)
        return self.head(x + shared["keys"])


class Applying(Layer):
    def forward(self, x: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
        return change(super().forward(x))


class HandsOnAFunction(Model):
    layer = Applying

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        scale = 0.5
        for change, layer in zip((torch.tanh, lambda y: y * scale, functional.relu), self.layers, strict=True):
            x = layer(x, change)
        return self.head(x)


class TuplesWithNone(Model):
    class Pair(Layer):
        def forward(self, x: Tensor) -> tuple[Tensor, None]:
            return super().forward(x), None

    layer = Pair

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x, _ = layer(x)
        return self.head(x)


class ScratchAttribute(Model):
    class Noting(Layer):
        def forward(self, x: Tensor) -> Tensor:
            self.last = super().forward(x)
            return self.last

    layer = Noting


class WholeSlice(Model):
    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)[:, slice(0, None)]
        return self.head(x)


class OneLayerThrice(Model):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([self.layers[0]] * 3)


class OnePartTwice(DropoutReadBehind):
    def __init__(self) -> None:
        super().__init__()
        self.again = self.dropout

    def forward(self, tokens: Tensor) -> Tensor:
        x = first = self.again(self.embed(tokens))
        for layer in self.layers:
            x = layer(x)
        return self.head(x + first)


class ScaledBetween(Model):
    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x) * 0.5
        return self.head(x)


class FirstIsScaled(Model):
    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for number, layer in enumerate(self.layers):
            x = layer(x)
            if number == 0:
                x = x / 2
        return self.head(x)


class Branches(Model):
    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
            if x.sum() > 1e9:
                break
        return self.head(x)


class CatchesErrors(Model):
    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
            with suppress(Exception):
                x = x * 0.5
        return self.head(x)


CARRIED = [
    Model,
    EmbeddingReadBehind,
    EmbeddingScaledInPlace,
    DropoutReadBehind,
    EveryResultReadBehind,
    ScaledBetween,
    FirstIsScaled,
    CatchesErrors,
    Branches,
    FirstResultInTheSecondAndThird,
    SharedContainer,
    TuplesWithNone,
    HandsOnAFunction,
    ScratchAttribute,
    WholeSlice,
    OneLayerThrice,
    OnePartTwice,
]


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", CARRIED)
@pytest.mark.parametrize("run", [as_layers, apart])
def test_a_row_has_the_outputs_and_gradients_of_the_model(kind, run):
    model = made(kind)
    row = convert(model)
    inputs = {"tokens": TOKENS.flip(1)}
    expected = outcome(model, plainly(model, inputs))
    assert differences(outcome(model, run(row, inputs)), expected) == []
    last = list(model.layers)[-1].linear.weight
    name = next(name for name, parameter in model.named_parameters() if parameter is last)
    assert expected[f"gradient of {name}"].any()


@pytest.mark.parametrize("kind", [DropoutReadBehind, OnePartTwice])
def test_dropout_that_is_read_behind_the_layers_is_not_drawn_anew(kind):
    model = made(kind).train()
    row = convert(model)
    inputs = {"tokens": TOKENS}
    expected = outcome(model, plainly(model, inputs))
    for run in (as_layers, apart):
        assert differences(outcome(model, run(row, inputs)), expected) == []


# What is refused


class CalledTwice(Model):
    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(layer(x))
        return self.head(x)


class LoopedTwice(Model):
    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for _ in range(2):
            for layer in self.layers:
                x = layer(x)
        return self.head(x)


class OutOfOrder(Model):
    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in reversed(self.layers):
            x = layer(x)
        return self.head(x)


class SkippedAtRandom(Model):
    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            if torch.rand(()) < 1.0:
                continue
            x = layer(x)
        return self.head(x)


class ReadsAnother(Model):
    class Reading(Layer):
        last: Tensor | float = 0.0

        def forward(self, x: Tensor) -> Tensor:
            others = getattr(self, "others", [])
            self.last = super().forward(x)
            return self.last + sum(other.last for other in others)

    layer = Reading

    def __init__(self) -> None:
        super().__init__()
        self.layers[2].others = [self.layers[0]]


class WritesAnother(Model):
    class Writing(Layer):
        def forward(self, x: Tensor) -> Tensor:
            for other in getattr(self, "others", []):
                other.gain = 2.0
            return super().forward(x) * getattr(self, "gain", 1.0)

    layer = Writing

    def __init__(self) -> None:
        super().__init__()
        self.layers[0].others = [self.layers[1]]


class Remembers(Model):
    class Remembering(Layer):
        def forward(self, x: Tensor) -> Tensor:
            self.memory = super().forward(x) + getattr(self, "memory", 0.0)
            return self.memory

    layer = Remembering


class Counts(Model):
    class Counting(Layer):
        def __init__(self) -> None:
            super().__init__()
            self.losses: list[Tensor] = []

        def forward(self, x: Tensor) -> Tensor:
            self.losses.append(x.sum())
            return super().forward(x)

    layer = Counting

    def forward(self, tokens: Tensor) -> Tensor:
        x = super().forward(tokens)
        return x + sum(layer.losses[-1] for layer in self.layers)


class PenaltyReadBehind(Model):
    class Penalized(Layer):
        def forward(self, x: Tensor) -> Tensor:
            self.penalty = x.square().mean()
            return super().forward(x)

    layer = Penalized

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) + sum(layer.penalty for layer in self.layers)


class PenaltyWithDefault(PenaltyReadBehind):
    def forward(self, tokens: Tensor) -> Tensor:
        return Model.forward(self, tokens) + sum(getattr(layer, "penalty", 0.0) for layer in self.layers)


class WeightReadBehind(Model):
    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) + self.layers[0].linear.weight.square().sum()


class ContainerWrittenBetween(Model):
    class Listening(Layer):
        def forward(self, x: Tensor, shared: dict[str, Tensor]) -> Tensor:
            return super().forward(x) * shared["gain"]

    layer = Listening

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        shared: dict[str, Tensor] = {}
        for number, layer in enumerate(self.layers):
            shared["gain"] = torch.tensor(float(number))
            x = layer(x, shared)
        return self.head(x)


class ResultWrittenToContainer(ContainerWrittenBetween):
    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        shared = {"gain": torch.ones(())}
        for layer in self.layers:
            x = layer(x, shared)
            shared["gain"] = x
        return self.head(x)


class WritesWhatItIsHanded(Model):
    class InPlace(Layer):
        def forward(self, x: Tensor, bias: Tensor) -> Tensor:
            bias.add_(1.0)
            return super().forward(x) + bias

    layer = InPlace

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        bias = torch.zeros(SIZE)
        for layer in self.layers:
            x = layer(x, bias)
        return self.head(x)


class FunctionalDropoutReadBehind(Model):
    def forward(self, tokens: Tensor) -> Tensor:
        x = first = functional.dropout(self.embed(tokens), 0.5, self.training)
        for layer in self.layers:
            x = layer(x)
        return self.head(x + first)


class WithoutGradients(Model):
    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        with torch.no_grad():
            for layer in self.layers:
                x = layer(x)
        return self.head(x)


class InAFunction(Model):
    class Reversible(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, layers):  # noqa: ARG004
            for layer in layers:
                x = layer(x)
            return x

        @staticmethod
        def backward(ctx, grad):  # noqa: ARG004
            return grad * 2, None

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.Reversible.apply(self.embed(tokens), self.layers))


class ReturnsItsLength(Model):
    class Measuring(Layer):
        def forward(self, x: Tensor, length: int = 1) -> tuple[Tensor, int]:
            return super().forward(x) / length, x.shape[1]

    layer = Measuring

    def forward(self, tokens: Tensor) -> Tensor:
        handed = (self.embed(tokens),)
        for layer in self.layers:
            handed = layer(*handed)
        return self.head(handed[0])


@dataclass
class Holder:
    hidden: Tensor


class ReturnsAnObject(Model):
    class Holding(Layer):
        def forward(self, x: Tensor) -> Holder:
            return Holder(super().forward(x))

    layer = Holding

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x).hidden
        return self.head(x)


class HandsOnAFunctionOfTensors(Model):
    layer = Applying

    def change(self, x: Tensor) -> Callable[[Tensor], Tensor]:
        gain = x.mean(-1, keepdim=True)
        return lambda y: y * gain

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        change = self.change(x)
        for layer in self.layers:
            x = layer(x, change)
        return self.head(x)


class HandsOnAPartial(HandsOnAFunctionOfTensors):
    def change(self, x: Tensor) -> Callable[[Tensor], Tensor]:
        return partial(torch.mul, x.mean(-1, keepdim=True))


class HandsOnAMethod(HandsOnAFunctionOfTensors):
    def change(self, x: Tensor) -> Callable[[Tensor], Tensor]:
        return x.mean(-1, keepdim=True).mul


class HandsOnItsOwnMethod(HandsOnAFunctionOfTensors):
    def own(self, x: Tensor) -> Tensor:
        return x * self.embed.weight.mean()

    def change(self, x: Tensor) -> Callable[[Tensor], Tensor]:
        del x
        return self.own


class ContainerInAContainer(Model):
    class Collecting(Layer):
        def forward(self, x: Tensor, shared: dict[str, list[Tensor]]) -> Tensor:
            shared["seen"].append(x)
            return super().forward(x)

    layer = Collecting

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        shared: dict[str, list[Tensor]] = {"seen": []}
        for layer in self.layers:
            x = layer(x, shared)
        return self.head(x + sum(shared["seen"]))


class CastsItsLayers(Model):
    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        with torch.autocast("cpu", torch.bfloat16):
            for layer in self.layers:
                x = layer(x)
        return self.head(x.float())


class SharesAnObject(Model):
    class Talking(Layer):
        board = SimpleNamespace(last=None)

        def forward(self, x: Tensor) -> Tensor:
            found = super().forward(x)
            found = found if self.board.last is None else found + self.board.last
            self.board.last = x
            return found

    layer = Talking

    def forward(self, tokens: Tensor) -> Tensor:
        self.Talking.board.last = None
        return super().forward(tokens)


class TellsItsLayersByAnObject(Model):
    class Listening(Layer):
        board = SimpleNamespace(gain=None)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.board.gain

    layer = Listening

    def forward(self, tokens: Tensor) -> Tensor:
        self.Listening.board.gain = self.embed(tokens).mean(-1, keepdim=True)
        return super().forward(tokens)


class CountsItsRuns(Model):
    """Warms up: its own code counts."""

    runs = 0

    def forward(self, tokens: Tensor) -> Tensor:
        self.runs += 1
        return super().forward(tokens) * min(self.runs / 100, 1.0)


class CountsBeforeItsLayers(Model):
    def forward(self, tokens: Tensor) -> Tensor:
        self.steps = getattr(self, "steps", 0) + 1
        x = self.embed(tokens) * self.steps
        for layer in self.layers:
            x = layer(x)
        return x


REFUSED = {
    CountsItsRuns: "the code behind its layers depends on how often it ran",
    CountsBeforeItsLayers: "the code before its layers depends on how often it ran",
    SharesAnObject: "layer 1 reads a tensor that it neither holds nor is handed",
    TellsItsLayersByAnObject: "layer 0 reads a tensor that it neither holds nor is handed",
    CastsItsLayers: "layer 0 is called inside an autocast",
    ReturnsItsLength: "layer 0 returns a int",
    ReturnsAnObject: "layer 0 returns a Holder",
    HandsOnAFunctionOfTensors: "layer 0 is handed a function, which cannot be handed on",
    HandsOnAPartial: "layer 0 is handed a partial, which cannot be handed on",
    HandsOnAMethod: "layer 0 is handed a (builtin_function_or_)?method, which cannot be handed on",
    HandsOnItsOwnMethod: "layer 0 is handed a method, which cannot be handed on",
    ContainerInAContainer: "a container inside a container",
    CalledTwice: "layer 0 is called out of turn",
    LoopedTwice: "layer 0 is called out of turn",
    OutOfOrder: "layer 2 is called out of turn",
    SkippedAtRandom: "called none of its lists of layers",
    ReadsAnother: "sets its attribute 'last'.* layer 2 has other modules",
    WritesAnother: "sets the attribute 'gain' of a Writing outside of it",
    Remembers: "sets its attribute 'memory', and reads it the next time",
    Counts: "sets its attribute 'losses', and reads it|the code around its layers reads Counting.losses",
    PenaltyReadBehind: "the code around its layers reads Penalized.penalty",
    PenaltyWithDefault: "the code around its layers reads Penalized.penalty",
    WeightReadBehind: "the code around its layers reads Linear.weight",
    ContainerWrittenBetween: "writes a container between its layers",
    ResultWrittenToContainer: "writes what a layer returned into a container|writes a container between",
    WritesWhatItIsHanded: "layer 0 writes a tensor that it is handed",
    FunctionalDropoutReadBehind: "random numbers that are drawn before",
    WithoutGradients: "layer 0 is called without gradients",
    InAFunction: "layer 0 is called without gradients",
}


@pytest.mark.parametrize(("kind", "reason"), REFUSED.items())
def test_what_is_no_row_is_refused_with_its_reason(kind, reason):
    with pytest.raises(UnsupportedModel, match=reason) as raised:
        convert(made(kind))
    if isinstance(raised.value, NotARow):
        assert raised.value.path == "layers"
        assert raised.value.reason in str(raised.value)


class ScaledBetweenMany(ScaledBetween):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(6))


def test_a_model_that_computes_between_many_layers_is_refused(monkeypatch):
    monkeypatch.setattr("rp_presets.convert._MOST_CUTS", 3)

    with pytest.raises(UnsupportedModel, match="computes between its layers: before layer 4, mul reads"):
        convert(made(ScaledBetweenMany))


def test_code_between_layers_that_takes_another_path_is_refused():
    row = convert(made(Branches))
    with torch.no_grad():
        row[0].model.embed.inner.weight.fill_(1e10)
    with pytest.raises(UnsupportedModel, match="the model calls 'head' where it did not"):
        as_layers(row, {"tokens": TOKENS})()


def test_layers_that_are_dropped_at_random_are_refused_however_rarely():
    model = made(Model)
    model.layerdrop = 1e-9
    with pytest.raises(ValueError, match=r"Model\.layerdrop must be 0, but is 1e-09"):
        convert(model)


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", [*CARRIED, *REFUSED])
def test_conversion_leaves_the_model_as_it_was(kind):
    model = made(kind)
    twin = copy.deepcopy(model)
    with suppress(UnsupportedModel):
        convert(model)
    for (name, module), (_, other) in zip(model.named_modules(), twin.named_modules(), strict=True):
        plain = {key: value for key, value in vars(module).items() if not key.startswith("_")}
        assert plain.keys() == {key for key in vars(other) if not key.startswith("_")}, name
        assert module.training == other.training
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), twin.parameters(), strict=True))


def test_conversion_leaves_the_callers_random_numbers(monkeypatch):
    model = made(DropoutReadBehind)
    before = torch.get_rng_state()
    # CUDA is not in use here: its generators would be seeded later, whatever the caller's seed was.
    monkeypatch.setattr(torch.cuda, "manual_seed_all", pytest.fail)
    convert(model)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.cuda
def test_conversion_on_a_gpu_leaves_its_random_numbers():
    model = made(DropoutReadBehind).cuda()
    torch.cuda.manual_seed_all(7)
    before = torch.cuda.get_rng_state()
    to_sequential(model, example_inputs={"tokens": TOKENS.cuda()})
    assert torch.equal(torch.cuda.get_rng_state(), before)
