"""A row or a layer that is given to `RoundPipe` directly is split along its first dimension if values allow it."""

from __future__ import annotations

import copy
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import rp_batch
import torch
from roundpipe import AutoRoundPipe, RoundPipe, RoundPipeRunConfig, Runtime, TrainingWarning, token_mean
from roundpipe.optim import SGD
from rp_sched import Plan
from torch import nn

WIDTH = 8
THREE = RoundPipeRunConfig(num_microbatch=3)


@contextmanager
def told() -> Iterator[list[str]]:
    """What is told of batches that run in one piece."""
    found: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield found
    messages = [str(one.message) for one in caught if issubclass(one.category, TrainingWarning)]
    found += [text for text in messages if " runs its batch in one piece" in text]


class Does(nn.Module):
    """Applies a linear layer, then a function."""

    def __init__(self, function: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.linear, self.function = nn.Linear(WIDTH, WIDTH), function

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(self.linear(x))


def time_first() -> nn.Module:
    return nn.Sequential(nn.TransformerEncoderLayer(WIDTH, 2, 16, 0.0), nn.Linear(WIDTH, WIDTH))


def folded() -> nn.Module:
    """Mixes the steps of each sample, which are folded with samples, steps first."""
    return nn.Sequential(Does(lambda x: x.unflatten(0, (4, -1)).softmax(0).flatten(0, 1)), nn.Tanh())


def statistics() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), Does(lambda x: x - x.mean(0)))


def neighbours() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), Does(lambda x: x + x.roll(1, 0)))


def first_sample() -> nn.Module:
    return Does(lambda x: x - x[:1])


def samples_first() -> nn.Module:
    return nn.Sequential(nn.TransformerEncoderLayer(WIDTH, 2, 16, 0.0, batch_first=True), nn.Linear(WIDTH, WIDTH))


MIXED = {each.__name__: each for each in (time_first, folded, statistics, neighbours, first_sample)}


def summed(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    return (output - label).square().sum()


def trained(model: nn.Module, x: torch.Tensor, label: torch.Tensor, steps: int = 3) -> list[float]:
    """The losses of plain PyTorch."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    losses: list[float] = []
    for _ in range(steps):
        loss = summed(model(x), label)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_a_plan_that_divides_microbatches_of_a_row_that_cannot_be_split_is_refused_in_words(two):
    plan = Plan(fused=range(0, 1), groups=[range(0, 2), range(2, 4)])
    config = RoundPipeRunConfig(num_microbatch=4, execute_plan=plan)
    row = nn.Sequential(statistics())
    model = RoundPipe(row, runtime=two, name="mixed", model_run_config=config)
    x = torch.randn(8, 5, WIDTH)

    with told(), pytest.raises(ValueError, match=r"mixed must run its batch in one piece.*leave the groups out"):
        model.forward_backward((x,), label=torch.zeros_like(x), loss_fn=summed)


@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize("kind", MIXED)
def test_a_row_that_mixes_its_first_dimension_trains_on_the_numbers_of_plain_pytorch(two, kind, count):
    torch.manual_seed(0)
    row = MIXED[kind]()
    plain, x, label = copy.deepcopy(row), torch.randn(8, 5, WIDTH), torch.randn(8, 5, WIDTH)
    model = RoundPipe(row, runtime=two, model_run_config=RoundPipeRunConfig(num_microbatch=count))
    optimizer = SGD(model.optim_parameters(), lr=1e-3)

    with told() as whole:
        losses: list[float] = []
        for _ in range(3):
            losses.append(float(model.forward_backward((x,), label=label, loss_fn=summed)))
            model.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async=False)
        output = model(x)

    assert losses == pytest.approx(trained(plain, x, label), rel=1e-4)
    torch.testing.assert_close(output, plain(x))
    assert len(whole) == 1
    assert "split_input" in whole[0]
    assert "override_config" not in whole[0]


@pytest.mark.few(1)
@pytest.mark.parametrize("rows", [8, 7, 4, 3, 2])
def test_a_row_that_takes_samples_first_is_split(two, rows):
    torch.manual_seed(0)
    row = samples_first()
    plain, x, label = copy.deepcopy(row), torch.randn(rows, 5, WIDTH), torch.randn(rows, 5, WIDTH)
    sizes: list[int] = []
    row[1].register_forward_pre_hook(lambda _, args: sizes.append(len(args[0])))
    model = RoundPipe(row, runtime=two, model_run_config=THREE)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", rp_batch.FewerParts)
        with told() as whole:
            model.forward_backward((x,), label=label, loss_fn=summed)
        sizes.clear()
        found = model.forward_backward((x,), label=label, loss_fn=summed)
    model.synchronize()

    assert float(found) == pytest.approx(float(summed(plain(x), label)), rel=1e-4)
    assert whole == []
    assert sum(sizes) >= rows
    assert max(sizes) == -(-rows // min(3, rows))


class Counts(nn.Module):
    """Counts the rows of its runs, outside."""

    def __init__(self, rows: list[int]) -> None:
        super().__init__()
        self.linear, self.note = nn.Linear(WIDTH, WIDTH), rows.append

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.note(len(x))
        return self.linear(x)


def runs_of(two: Runtime, config: RoundPipeRunConfig, x: Any) -> list[Counter[int]]:
    """How often the layer ran with how many rows, in each of two calls."""
    rows: list[int] = []
    found: list[Counter[int]] = []
    model = RoundPipe(Counts(rows), runtime=two, model_run_config=config)
    for _ in range(2):
        rows.clear()
        with torch.no_grad():
            model(x)
        found.append(Counter(rows))
    return found


def test_of_a_large_call_a_microbatch_of_the_largest_and_two_of_the_smallest_are_tried_once(two, monkeypatch):
    monkeypatch.setattr("rp_calls.dividing.trial._SMALL", 0)
    first, second = runs_of(two, RoundPipeRunConfig(num_microbatch=4), torch.randn(10, WIDTH))

    # Seven rows in one piece and in three, then the call.
    assert first == Counter({7: 1, 3: 1 + 2, 2: 2 + 2})
    assert second == Counter({3: 2, 2: 2})


@pytest.mark.parametrize(
    "config",
    [
        RoundPipeRunConfig(num_microbatch=1),
        RoundPipeRunConfig(num_microbatch=2, split_input=((rp_batch.Split(),), {})),
        RoundPipeRunConfig(
            num_microbatch=2, split_input=lambda args, kwargs, count: rp_batch.split((args, kwargs), count)
        ),
    ],
)
def test_where_it_is_said_how_to_split_nothing_is_tried(two, config):
    count = config.num_microbatch

    first, second = runs_of(two, config, torch.randn(8, WIDTH))

    assert first == second == Counter({8 // count: count})


def test_what_is_in_microbatches_already_is_not_tried(two):
    parts = rp_batch.Parts([torch.randn(2, WIDTH), torch.randn(2, WIDTH)])

    first, _ = runs_of(two, RoundPipeRunConfig(num_microbatch=2), parts)

    assert set(first) == {2}


def test_a_row_that_says_which_arguments_are_the_batch_is_not_tried(two):
    rows: list[int] = []

    class Row(nn.Sequential):
        main_arguments = ("x",)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x)

    model = RoundPipe(Row(Counts(rows)), runtime=two, model_run_config=THREE)
    with torch.no_grad():
        model(x=torch.randn(6, WIDTH))

    assert set(rows) == {2}


def test_a_layer_inside_of_a_model_on_the_host_is_tried_as_well(two):
    torch.manual_seed(0)
    inner = statistics()
    plain = copy.deepcopy(inner)
    model = AutoRoundPipe(nn.Sequential(RoundPipe(inner, runtime=two, model_run_config=THREE)))

    with told() as whole:
        found = model(x := torch.randn(6, WIDTH))

    torch.testing.assert_close(found, plain(x))
    assert len(whole) == 1


def test_an_error_of_some_samples_is_raised_as_itself_and_training_goes_on(two):
    def refuse(x: torch.Tensor) -> torch.Tensor:
        if x.isnan().any():
            raise ValueError("not a number")
        return x

    row = nn.Sequential(nn.Linear(WIDTH, WIDTH), Does(refuse))
    model = RoundPipe(row, runtime=two, model_run_config=THREE)
    good, label = torch.randn(6, WIDTH), torch.zeros(6, WIDTH)

    with told() as whole:
        for row_index in (0, 5):
            bad = good.clone()
            bad[row_index] = torch.nan
            with pytest.raises(ValueError, match="not a number"):
                model.forward_backward((bad,), label=label, loss_fn=summed)
            model.zero_grad()
        found = model.forward_backward((good,), label=label, loss_fn=summed)

    torch.testing.assert_close(found, summed(row(good), label))
    assert whole == []


def test_batch_norm_and_dropout_are_split_all_the_same(two):
    row = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.5))
    model = RoundPipe(row, runtime=two, model_run_config=THREE)

    with told() as whole:
        model.forward_backward((torch.randn(9, WIDTH),), label=torch.zeros(9, WIDTH), loss_fn=summed)
    model.synchronize()

    assert whole == []
    # One microbatch after the other has written them.
    assert row[1].num_batches_tracked == 3


def test_the_loss_of_labels_that_are_counted_is_that_of_the_whole_batch_in_one_piece(two):
    torch.manual_seed(0)
    row = statistics()
    plain, x, label = copy.deepcopy(row), torch.randn(6, WIDTH), torch.randint(WIDTH, (6,))
    loss_fn = token_mean(
        lambda output, label: nn.functional.cross_entropy(output, label, reduction="sum"), shift=False
    )

    with told():
        found = RoundPipe(row, runtime=two, model_run_config=THREE).forward_backward(
            (x,), label=label, loss_fn=loss_fn
        )

    torch.testing.assert_close(found, nn.functional.cross_entropy(plain(x), label))


@pytest.mark.parametrize("merge", [False, None])
def test_outputs_in_one_piece_are_one_microbatch(two, merge):
    config = RoundPipeRunConfig(num_microbatch=3, merge_output=merge)

    with told(), torch.no_grad():
        found = RoundPipe(statistics(), runtime=two, model_run_config=config)(torch.randn(6, WIDTH))

    assert len(found) == (6 if merge is None else 1)


class Stateful(nn.Module):
    """Returns the state of its LSTM, in which samples are second."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        output, (state, _) = self.lstm(x)
        return output, state


def balance(x: torch.Tensor) -> torch.Tensor:
    """As a router's: a product of two means over the batch."""
    return ((x > 0).float().mean((0, 1)) * x.sigmoid().mean((0, 1))).sum()


RETURNS: dict[str, Callable[[], nn.Module]] = {
    "a sum": lambda: Does(lambda x: {"x": x, "divergence": x.square().sum()}),
    "a product of means": lambda: Does(lambda x: (x, balance(x))),
    "what the batch has in common": lambda: Does(lambda x: (x, x[0, 0] * 0 + 2.0)),
    "an entry for each sample": lambda: Does(lambda x: [x.tanh(), list(x.unbind())]),
    "states": Stateful,
}


@pytest.mark.parametrize("returns", RETURNS)
@pytest.mark.parametrize("is_one_layer", [False, True])
def test_outputs_that_microbatches_do_not_make_are_those_of_the_batch_in_one_piece(two, returns, is_one_layer):
    torch.manual_seed(0)
    layer = RETURNS[returns]()
    row = layer if is_one_layer else nn.Sequential(nn.Linear(WIDTH, WIDTH), layer)
    plain, x = copy.deepcopy(row), torch.randn(6, 5, WIDTH)

    with told() as whole:
        model = RoundPipe(row, runtime=two, model_run_config=THREE)
        outputs, wanted = model(x), plain(x)
        sum(one.sin().sum() for one in rp_batch.flatten(outputs)[0]).backward()
        sum(one.sin().sum() for one in rp_batch.flatten(wanted)[0]).backward()
        model.synchronize()
        gradients = copy.deepcopy([parameter.grad for parameter in row.parameters()])
        _, kept = model.forward_backward((x,), loss_fn=lambda out, _: first(out).sum(), return_outputs=True)

    torch.testing.assert_close(outputs, wanted)
    torch.testing.assert_close(kept, wanted)
    torch.testing.assert_close(gradients, [parameter.grad for parameter in plain.parameters()])
    assert len(whole) == 1
    assert "merge_output" in whole[0]


def first(output: Any) -> torch.Tensor:
    return rp_batch.flatten(output)[0][0]


@pytest.mark.parametrize("returns", RETURNS)
def test_what_only_a_loss_function_reads_may_be_of_a_microbatch(two, returns):
    row = nn.Sequential(nn.Linear(WIDTH, WIDTH), RETURNS[returns]())
    model = RoundPipe(row, runtime=two, model_run_config=THREE)
    rows: list[int] = []

    def loss_fn(output: Any, _: None) -> torch.Tensor:
        rows.append(len(first(output)))
        return first(output).square().sum()

    with told() as whole:
        model.forward_backward((torch.randn(6, 5, WIDTH),), loss_fn=loss_fn)

    assert (sorted(rows), whole) == ([2, 2, 2], [])


def test_outputs_may_be_merged_as_the_settings_say(two):
    model = RoundPipe(
        RETURNS["a sum"](),
        runtime=two,
        model_run_config=RoundPipeRunConfig(
            num_microbatch=3, merge_output={"x": None, "divergence": rp_batch.Sum()}
        ),
    )
    with told() as whole:
        output = model(torch.randn(6, 5, WIDTH))

    torch.testing.assert_close(output["divergence"], output["x"].square().sum())
    assert whole == []


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_an_embedding_that_counts_indices_in_the_batch_gets_the_whole_batch(two, kind):
    row = nn.Sequential(kind(5, WIDTH, scale_grad_by_freq=True), nn.Linear(WIDTH, WIDTH))
    plain, x = copy.deepcopy(row), torch.tensor([[1, 2], [1, 1], [3, 2], [1, 0]])
    plain(x).square().sum().backward()

    with told() as whole:
        model = RoundPipe(row, runtime=two, model_run_config=RoundPipeRunConfig(num_microbatch=2))
        model.forward_backward((x,), loss_fn=lambda output, _: output.square().sum())
        model.synchronize()

    torch.testing.assert_close(row[0].weight.grad, plain[0].weight.grad)
    assert len(whole) == 1
    assert "scale_grad_by_freq" in whole[0]
