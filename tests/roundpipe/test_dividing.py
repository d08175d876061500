"""Parts of a model are split along the dimension that values show to be the batch, or not at all."""

from __future__ import annotations

import copy
import random
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import rp_batch
import torch
from roundpipe import AutoRoundPipe, RoundPipeRunConfig, Runtime, TrainingWarning
from roundpipe import wrap_model_to_roundpipe as wrap
from roundpipe.optim import AdamW
from rp_calls.dividing.rows import rows_of
from rp_calls.dividing.trial import SplitTrial
from rp_engine.errors import BoundaryError, Busy, HostMemoryShort, MachineFailed
from rp_sched import Plan
from torch import nn
from transformers.utils import ModelOutput

THREE = RoundPipeRunConfig(num_microbatch=3)
WIDTH = 8


@contextmanager
def told() -> Iterator[list[str]]:
    """The names of the parts that are told not to be split."""
    found: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield found
    messages = [str(one.message) for one in caught if issubclass(one.category, TrainingWarning)]
    found += [text.split(" runs its batch in one piece")[0].rpartition(".py:")[2] for text in messages]


def apart(model: nn.Module, runtime: Runtime, config: RoundPipeRunConfig = THREE, **options: Any) -> AutoRoundPipe:
    sizes = {"lower_threshold": 1, "upper_threshold": 1 << 30, **options}
    wrapped = wrap(model, False, runtime=runtime, model_run_config=config, **sizes)
    assert isinstance(wrapped, AutoRoundPipe)
    return wrapped


def leaves(output: Any) -> list[torch.Tensor]:
    return [leaf for leaf in rp_batch.flatten(output)[0] if isinstance(leaf, torch.Tensor)]


def assert_trains_as_plain(model: nn.Module, runtime: Runtime, *inputs: torch.Tensor, **options: Any) -> list[str]:
    """Outputs and gradients are plain PyTorch's; returns which parts are told not to be split."""
    plain = copy.deepcopy(model)
    wrapped = apart(model, runtime, **options)

    with told() as whole:
        found, wanted = leaves(wrapped(*inputs)), leaves(plain(*inputs))
        sum(leaf.square().mean() for leaf in found).backward()
        sum(leaf.square().mean() for leaf in wanted).backward()
        wrapped.synchronize()

    torch.testing.assert_close(found, wanted)
    for (name, one), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, msg=lambda text, name=name: f"{name}: {text}")
    return whole


class Holder(nn.Module):
    """Runs one module as a part."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.part(*args, **kwargs)


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, 0.0)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


class TimeFirst(nn.Module):
    """Takes samples first, and runs its encoder time first."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.encoder, self.head = nn.Embedding(20, WIDTH), encoder(), nn.Linear(WIDTH, 20)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(self.embed(ids).transpose(0, 1)).transpose(0, 1))


class Recurrent(nn.Module):
    """Hands a bidirectional encoder's states, and its last one, on."""

    def __init__(self, *, batch_first: bool) -> None:
        super().__init__()
        kinds = {"num_layers": 2, "batch_first": batch_first, "bidirectional": True}
        self.encoder, self.decoder = nn.LSTM(WIDTH, WIDTH, **kinds), nn.LSTM(WIDTH, WIDTH, **kinds)
        self.head = nn.Linear(2 * WIDTH, 3)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        _, states = self.encoder(x)
        output, (last, _) = self.decoder(x, states)
        return self.head(output), last[-1]


class MixesTime(nn.Module):
    """Mixes the time steps of each sample; samples and steps are folded into one dimension."""

    def __init__(self, *, is_inner: bool) -> None:
        super().__init__()
        self.is_inner = is_inner
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, steps: int) -> torch.Tensor:
        shape = (steps, -1) if self.is_inner else (-1, steps)
        unfolded = self.linear(x).unflatten(0, shape)
        return (unfolded + unfolded.mean(0 if self.is_inner else 1, keepdim=True)).flatten(0, 1)


class Folds(nn.Module):
    """Folds samples and time steps for its part."""

    def __init__(self, *, is_inner: bool) -> None:
        super().__init__()
        self.is_inner, self.part = is_inner, MixesTime(is_inner=is_inner)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.transpose(0, 1) if self.is_inner else x
        steps = x.shape[0 if self.is_inner else 1]
        found = self.part(x.flatten(0, 1), steps).unflatten(0, x.shape[:2])
        return found.transpose(0, 1) if self.is_inner else found


class BatchStatistics(nn.Module):
    """Subtracts the mean of the batch, in every mode."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        return y - y.mean(0, keepdim=True)


@pytest.mark.few(1)
@pytest.mark.parametrize(("rows", "steps"), [(7, 5), (5, 7), (6, 3), (6, 6)])
def test_a_part_that_gets_time_first_is_split_by_samples(two, rows, steps):
    torch.manual_seed(0)

    whole = assert_trains_as_plain(TimeFirst(), two, torch.randint(20, (rows, steps)))

    assert whole == []


@pytest.mark.parametrize(("rows", "steps"), [(7, 5), (5, 7), (6, 6)])
def test_a_model_that_gets_time_first_is_split_by_samples(two, rows, steps):
    torch.manual_seed(0)

    whole = assert_trains_as_plain(Holder(encoder()), two, torch.randn(steps, rows, WIDTH))

    assert whole == []


@pytest.mark.few(1)
@pytest.mark.parametrize(("rows", "steps"), [(7, 5), (4, 7), (6, 6), (4, 4)])
@pytest.mark.parametrize("batch_first", [False, True])
def test_states_of_a_bidirectional_lstm_are_split_and_merged_along_their_own_dimension(
    two, batch_first, rows, steps
):
    torch.manual_seed(0)
    x = torch.randn(rows, steps, WIDTH)

    assert_trains_as_plain(Recurrent(batch_first=batch_first), two, x if batch_first else x.transpose(0, 1))


@pytest.mark.parametrize(("rows", "steps"), [(7, 5), (5, 7), (6, 3), (6, 6)])
@pytest.mark.parametrize("is_inner", [False, True])
def test_samples_and_steps_in_one_dimension_are_split_by_samples(two, is_inner, rows, steps):
    torch.manual_seed(0)

    whole = assert_trains_as_plain(Folds(is_inner=is_inner), two, torch.randn(rows, steps, WIDTH))

    assert whole == []


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_a_part_with_statistics_of_the_batch_runs_in_one_piece_and_says_so_once(two, mode):
    torch.manual_seed(0)
    model = getattr(Holder(BatchStatistics()), mode)()
    plain = copy.deepcopy(model)
    wrapped, x = apart(model, two), torch.randn(6, WIDTH)

    with told() as whole:
        found = [wrapped(x), wrapped(x)]

    torch.testing.assert_close(found, [plain(x)] * 2)
    assert [name.partition(".")[2] for name in whole] == ["part"]


class SlightlyMixed(nn.Module):
    """Adds a little of the batch's mean, less than what 16 bits round."""

    def __init__(self, share: float, width: int = WIDTH) -> None:
        super().__init__()
        self.linear, self.share = nn.Linear(width, width), share

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        return y + self.share * y.mean(0, keepdim=True)


@pytest.mark.parametrize("kind", ["bf16", "fp16", "autocast"])
@pytest.mark.parametrize("way", ["part", "row"])
def test_what_16_bits_would_hide_is_found(two, kind, way):
    torch.manual_seed(0)
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "autocast": torch.float32}[kind]
    x = torch.randn(6, WIDTH).to(dtype)

    with told() as whole, torch.autocast("cpu", torch.bfloat16, enabled=kind == "autocast"):
        for share in (0.0, 1e-3):
            WRAPS[way](SlightlyMixed(share).to(dtype), two)(x)

    assert len(whole) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("way", ["part", "row"])
def test_what_a_norm_behind_it_would_hide_is_found(two, way, dtype):
    # A norm of two numbers is nearly the sign of their difference: 1e-5 of another sample is left in outputs, and
    # as much of a gradient as there is. What casts to fp32, as norms do, rounds as much.
    class Casts(nn.LayerNorm):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x.float()).to(x.dtype)

    def behind(share: float) -> nn.Module:
        mixed = SlightlyMixed(share, 2).to(dtype)
        with torch.no_grad():
            mixed.linear.weight.copy_(torch.eye(2))
        return nn.Sequential(mixed, Casts(2), nn.Linear(2, 2).to(dtype))

    x = torch.arange(1, 7, dtype=dtype).unsqueeze(1) * torch.tensor([1.0, -1.0], dtype=dtype)
    with told() as whole:
        for share in (0.0, 0.1):
            WRAPS[way](behind(share), two)(x)

    assert len(whole) == 1


def test_small_numbers_of_training_alone_hide_nothing_in_16_bits(two):
    class Jitters(SlightlyMixed):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = super().forward(x)
            return y * (1 + 0.01 * torch.rand_like(y)) if self.training else y

    with told() as whole:
        for share in (0.0, 1e-3):
            apart(Holder(Jitters(share)).bfloat16(), two)(torch.randn(6, WIDTH).bfloat16())

    assert len(whole) == 1


class RoundsInside(nn.Module):
    """Computes in bf16 whatever its weights are, or has a table: its own, or of the best dtype of all inputs."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.linear, self.how = nn.Linear(WIDTH, 64), how
        self.table: Any = torch.eye(WIDTH).bfloat16() if how == "own table" else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.how == "rounds":
            return self.linear(x).bfloat16().exp().sum(-1, keepdim=True).to(x.dtype) * x
        if self.table is None or (self.how == "cache" and x.dtype.itemsize > self.table.dtype.itemsize):
            self.table = torch.eye(WIDTH, dtype=x.dtype, device=x.device)
        return self.linear(x @ self.table)


@pytest.mark.parametrize("how", ["rounds", "own table", "cache"])
def test_a_part_that_cannot_compute_in_fp32_is_split_by_what_16_bits_show(two, how):
    torch.manual_seed(0)
    model = Holder(RoundsInside(how)).bfloat16()
    plain, x = copy.deepcopy(model), torch.randn(6, WIDTH).bfloat16()
    wrapped = apart(model, two)

    with told() as whole:
        found = [wrapped(x), wrapped(x)]

    assert whole == []
    torch.testing.assert_close(found, [plain(x)] * 2)


def test_batch_norm_and_dropout_are_split_all_the_same(two):
    model = Holder(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.5)))
    wrapped = apart(model, two)

    with told() as whole:
        wrapped(torch.randn(9, WIDTH)).sum().backward()
        wrapped.synchronize()

    assert whole == []
    # One microbatch after the other has written them.
    assert model.part[1].num_batches_tracked == 3


def test_dropout_that_is_no_module_does_not_hide_statistics_of_the_batch(two):
    class Drops(nn.Module):
        def __init__(self, *, mixes: bool) -> None:
            super().__init__()
            self.linear, self.mixes = nn.Linear(WIDTH, WIDTH), mixes

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = nn.functional.dropout(self.linear(x), 0.3, self.training)
            return y - y.mean(0) if self.mixes else y

    with told() as whole:
        for mixes in (False, True):
            apart(Holder(Drops(mixes=mixes)), two)(torch.randn(6, WIDTH))

    assert len(whole) == 1


def test_random_numbers_hide_no_statistics_that_are_taken_in_training_only(two):
    class Trains(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.linear(x)
            return y - y.mean(0) if self.training else y

    assert len(assert_trains_as_plain(Holder(Trains()), two, torch.randn(6, WIDTH))) == 1


class Counting(nn.Module):
    """Counts its calls, in a buffer and outside; draws from every generator."""

    def __init__(self, calls: Counter[str], *, draws: bool = False) -> None:
        super().__init__()
        self.linear, self.draws = nn.Linear(WIDTH, WIDTH), draws
        self.add = lambda: calls.update(["calls"])
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.add()
        self.count += 1
        if self.draws:
            return self.linear(x) * random.random() * float(np.random.rand()) * torch.rand(())
        return self.linear(x)


def test_a_trial_leaves_buffers_and_generators_as_they_were(two):
    def after(config: RoundPipeRunConfig) -> tuple[int, list[Any]]:
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        model = Holder(Counting(Counter(), draws=True))
        wrapped = apart(model, two, config)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", TrainingWarning)
            wrapped(torch.ones(3, WIDTH)).sum().backward()
        wrapped.synchronize()
        return int(model.part.count), [torch.get_rng_state(), torch.rand(1)]

    count, numbers = after(THREE)
    wanted_count, wanted = after(RoundPipeRunConfig(num_microbatch=1))

    assert count == wanted_count == 1
    assert all(map(torch.equal, numbers, wanted))


def test_no_other_thread_comes_between_the_runs_of_a_trial(two, monkeypatch):
    model = wrap(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)), runtime=two, model_run_config=THREE)
    outputs, found, threads = SplitTrial.outputs, [], []

    def begin(call):
        def run():
            try:
                found.append(call())
            except Busy as error:
                found.append(error)

        threads.append(threading.Thread(target=run))
        threads[-1].start()

    def between(trial, parts):
        if not threads:
            # Another call is refused; what reads the model waits until the trial is over.
            begin(lambda: model(torch.ones(6, 4)))
            threads[0].join()
            begin(model.state_dict)
        result = outputs(trial, parts)
        assert threads[1].is_alive()
        return result

    monkeypatch.setattr(SplitTrial, "outputs", between)
    model(torch.randn(6, 4))
    threads[1].join()
    assert isinstance(found[0], Busy)
    assert isinstance(found[1], dict)


def test_other_sizes_are_no_reason_for_another_trial_but_equal_sizes_are(two):
    calls: Counter[str] = Counter()
    wrapped = apart(Holder(Counting(calls)), two)

    def run(rows: int, steps: int) -> int:
        before = calls["calls"]
        with torch.no_grad():
            wrapped(torch.randn(rows, steps, WIDTH))
        return calls["calls"] - before

    sizes = [(6, 5), (6, 7), (6, 11), (5, 7), (6, 6), (9, 9), (7, 7), (9, 9), (6, 5)]
    # A trial runs the whole and as many microbatches as the call, and both in fp64. Pairs were not cut, then are.
    assert [run(*size) for size in sizes] == [11, 3, 3, 3, 11, 11, 3, 3, 3]


class Pairs(nn.Module):
    """Compares the samples of each pair, which are one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        signs = torch.ones(len(y), 1)
        signs[1::2] = -1
        return y * signs


@pytest.mark.parametrize("way", ["part", "row"])
def test_what_is_not_cut_at_first_is_tried_once_it_is(two, way):
    module = Pairs()
    wrapped = WRAPS[way](module, two)

    for rows, is_whole in ((6, False), (12, False), (5, False), (9, True), (6, True)):
        x = torch.randn(rows, WIDTH)
        with told() as whole:
            found = wrapped(x)

        torch.testing.assert_close(found, module(x))
        # It is told once.
        assert len(whole) == (is_whole and rows == 9)


@pytest.mark.parametrize("sizes", [(2, 1, 1, 1, 1), (4, 3, 3), (2, 2, 1)])
def test_a_row_is_tried_at_cuts_that_show_what_positions_do(two, sizes):
    module = Pairs()
    config = RoundPipeRunConfig(num_microbatch=len(sizes))
    wrapped, x = wrap(nn.Sequential(module), runtime=two, model_run_config=config), torch.randn(sum(sizes), WIDTH)

    with told() as whole:
        found = wrapped(x)

    torch.testing.assert_close(found, module(x))
    assert len(whole) == (sizes != (2, 2, 1))


def test_a_part_whose_samples_never_differ_is_not_tried_for_ever(two):
    calls: Counter[str] = Counter()
    wrapped = apart(Holder(Counting(calls)), two)

    def run() -> int:
        before = calls["calls"]
        with torch.no_grad():
            wrapped(torch.ones(6, 5, WIDTH))
        return calls["calls"] - before

    # A trial runs the whole and as many microbatches as the call, and both in fp64.
    assert [run() for _ in range(10)] == [11] * 8 + [3] * 2


class Gated(nn.Module):
    """Adds the batch's mean through a gate that is closed at first."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.gate = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        return y + self.gate * y.mean(0)


def test_what_weights_hide_at_first_is_found_at_a_later_trial(two):
    torch.manual_seed(0)
    model = Holder(Gated())
    wrapped = apart(model, two)
    optimizer = AdamW(wrapped.optim_parameters(), lr=0.1)

    with told() as whole:
        found = []
        for _ in range(5):
            wrapped(torch.randn(6, WIDTH)).square().mean().backward()
            wrapped.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async=False)
            found.append(len(whole))
    x = torch.randn(6, WIDTH)

    assert len(whole) == 1
    torch.testing.assert_close(wrapped(x), plain_of(model, Gated)(x))


class Neighbours(nn.Module):
    """Gives each sample what its neighbour has."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).roll(1, 0)


@pytest.mark.parametrize("warm_up", [torch.zeros(6, 4, WIDTH), torch.ones(6, 4, WIDTH)], ids=["zeros", "ones"])
@pytest.mark.parametrize("trains", [True, False])
def test_a_warm_up_with_equal_samples_decides_nothing(two, warm_up, trains):
    torch.manual_seed(0)
    model = Holder(Neighbours())
    plain, wrapped = copy.deepcopy(model), apart(model, two)
    x = torch.randn(6, 4, WIDTH)

    with torch.set_grad_enabled(trains), told():
        wrapped(warm_up)
        found = wrapped(x)

    torch.testing.assert_close(found, plain(x))


def plain_of(model: nn.Module, kind: Callable[[], nn.Module]) -> nn.Module:
    """A plain module with the same weights."""
    plain = Holder(kind())
    plain.load_state_dict(model.state_dict())
    return plain


def test_kinds_of_calls_are_tried_a_limited_number_of_times(two):
    calls: Counter[str] = Counter()

    class Chooses(Counting):
        def forward(self, x: torch.Tensor, how: str) -> torch.Tensor:
            assert how
            return super().forward(x)

    wrapped, x = apart(Holder(Chooses(calls)), two), torch.randn(6, WIDTH)

    with told() as whole, torch.no_grad():
        for number in range(40):
            wrapped(x, str(number))

    assert len(whole) == 1
    assert calls["calls"] == 16 * 11 + 24


def test_outputs_of_another_structure_than_at_the_trial_are_tried_anew(two):
    class Changes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.both = nn.Linear(WIDTH, WIDTH), True

        def forward(self, x: torch.Tensor) -> Any:
            y = self.linear(x)
            return (y, y.mean()) if self.both else y

    model = Holder(Changes())
    wrapped, x = apart(model, two), torch.randn(6, WIDTH)

    first, mean = wrapped(x)
    model.part.both = False
    second = wrapped(x)

    torch.testing.assert_close(second, first)
    torch.testing.assert_close(mean, first.mean())


@pytest.mark.parametrize("scale", [torch.mean, torch.sum])
def test_outputs_that_were_equal_in_all_microbatches_at_the_trial_may_differ_later(two, scale):
    class Gate(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.norm = nn.Parameter(torch.zeros(())), nn.BatchNorm1d(WIDTH)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return self.norm(x), scale(x * self.gate)

    model = Holder(Gate())
    wrapped, x = apart(model, two), torch.randn(6, WIDTH)
    wrapped(x)
    with torch.no_grad():
        model.part.gate.fill_(0.5)

    with told() as whole:
        _, found = wrapped(x)

    torch.testing.assert_close(found, scale(x * 0.5))
    assert whole == []
    # No microbatch has run twice.
    assert model.part.norm.num_batches_tracked == 6


def test_a_spec_of_the_user_is_followed_without_a_trial(two):
    calls: Counter[str] = Counter()
    model = Holder(Counting(calls))
    spec = RoundPipeRunConfig(
        num_microbatch=3, split_input=((rp_batch.Split(1),), {}), merge_output=rp_batch.Concat(1)
    )
    wrapped = apart(model, two, spec)

    found = wrapped(x := torch.randn(4, 6, WIDTH))

    # One run for each microbatch, and one in which the layer is examined.
    assert calls["calls"] == 3 + 1
    torch.testing.assert_close(found, nn.functional.linear(x, model.part.linear.weight, model.part.linear.bias))


@pytest.mark.parametrize("merge", [rp_batch.Concat(0), lambda parts: torch.cat(parts), False])
def test_outputs_that_are_merged_as_the_user_says_are_compared_so(two, merge):
    config = RoundPipeRunConfig(num_microbatch=3, merge_output=merge)
    x = torch.randn(6, WIDTH)

    with told() as whole:
        split = apart(Holder(nn.Linear(WIDTH, WIDTH)), two, config)(x)
        in_one = apart(Holder(BatchStatistics()), two, config)(x)

    assert len(whole) == 1
    if merge is False:
        assert (len(split), len(in_one)) == (3, 1)


def test_what_the_whole_raises_is_raised(two):
    class Refuses(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if len(x) > 4:
                raise ValueError("too many rows")
            return self.linear(x)

    with pytest.raises(ValueError, match="too many rows"):
        apart(Holder(Refuses()), two)(torch.randn(6, WIDTH))


def test_a_part_that_refuses_fewer_rows_runs_in_one_piece(two):
    class Needs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if len(x) != 6:
                raise ValueError("6 rows are needed")
            return self.linear(x)

    assert len(assert_trains_as_plain(Holder(Needs()), two, torch.randn(6, WIDTH))) == 1


def test_a_batch_of_one_sample_is_not_split_along_its_steps(two):
    torch.manual_seed(0)

    whole = assert_trains_as_plain(Holder(nn.LSTM(WIDTH, WIDTH, batch_first=True)), two, torch.randn(1, 6, WIDTH))

    assert whole == []


def test_torch_sizes_arrive_as_themselves(two):
    class Views(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor, size: torch.Size) -> tuple[torch.Tensor, torch.Size]:
            assert type(size) is torch.Size
            return self.linear(x) * size.numel(), size

    for count in (1, 3):
        config = RoundPipeRunConfig(num_microbatch=count)
        _, size = apart(Holder(Views()), two, config)(torch.randn(6, WIDTH), torch.Size([2, 5]))

        assert type(size) is torch.Size
        assert size == (2, 5)


class Large(nn.Module):
    """Takes a few rows at a time only, as where a device has no memory for more."""

    def __init__(self, *, mixes: bool, most: int) -> None:
        super().__init__()
        self.linear, self.mixes, self.most = nn.Linear(WIDTH, WIDTH), mixes, most

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(x) > self.most:
            raise torch.OutOfMemoryError(f"no memory for {len(x)} rows")
        y = self.linear(x)
        return y - y.mean(0) if self.mixes else y


@pytest.mark.few(1)
@pytest.mark.parametrize("most", [2, 3, 4, 5])
def test_a_batch_that_does_not_fit_in_one_piece_is_tried_with_fewer_rows(two, most):
    x = torch.randn(6, WIDTH)
    model = Holder(Large(mixes=False, most=most))

    found = apart(model, two)(x)

    torch.testing.assert_close(found, nn.functional.linear(x, model.part.linear.weight, model.part.linear.bias))
    with told() as whole, pytest.raises(torch.OutOfMemoryError):
        apart(Holder(Large(mixes=True, most=most)), two)(x)
    assert len(whole) == 1


@pytest.mark.slow
def test_a_trial_compiles_nothing(two):
    sizes: list[int] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        sizes.extend(len(one) for one in inputs if isinstance(one, torch.Tensor) and one.dim() == 3)
        return graph

    class Own(nn.Linear):
        # Torch 2.11 compiles none of torch's own modules.
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).tanh()

    torch._dynamo.reset()
    wrapped = apart(Holder(Own(WIDTH, WIDTH)), two, compile_layers={"backend": backend})

    with torch.no_grad():
        wrapped(torch.randn(6, 5, WIDTH))

    assert set(sizes) == {2}


# --- models that are one row -------------------------------------------------------------------------------------


class Loss(nn.Module):
    """A last layer that returns a sum of this shape, which has no rows."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.shape = shape

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.square().sum().view(self.shape)


def row_of(kind: str) -> nn.Module:
    """A model that is wrapped as a row, or as a single layer."""
    made: dict[str, Callable[[], nn.Module]] = {
        "time first": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), encoder()),
        "statistics": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), BatchStatistics()),
        "one layer": lambda: nn.LSTM(WIDTH, WIDTH),
        "samples": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()),
        "time first, to a loss": lambda: nn.Sequential(encoder(), Loss(())),
        "statistics, to a loss": lambda: nn.Sequential(BatchStatistics(), nn.Linear(WIDTH, WIDTH), Loss((1,))),
        "samples, to a loss": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), Loss(())),
    }
    return made[kind]()


@pytest.mark.parametrize("kind", ["time first", "statistics", "samples"])
def test_a_loss_that_the_last_layer_computes_hides_nothing(two, kind):
    torch.manual_seed(0)
    model = row_of(f"{kind}, to a loss")
    plain = copy.deepcopy(model)
    x = torch.randn(6, 4, WIDTH)

    with told() as whole:
        found = wrap(model, runtime=two, model_run_config=THREE).forward_backward((x,))

    torch.testing.assert_close(found.sum(), plain(x).sum())
    assert len(whole) == (kind != "samples")


class Similar(nn.Module):
    """Compares each sample with each."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = nn.functional.normalize(self.linear(x), dim=1)
        return y @ y.t()


class Crowded(nn.Module):
    """A layer of experts that have room for two thirds of the batch: who comes last finds none."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output, chosen = torch.zeros_like(x), (x[:, 0] > 0).long()
        for number, expert in enumerate(self.experts):
            places = (chosen == number).nonzero()[: len(x) * 2 // 3, 0]
            output = output.index_add(0, places, expert(x[places]))
        return output


@pytest.mark.parametrize("kind", [Similar, Crowded])
def test_a_row_whose_first_samples_look_right_runs_in_one_piece(two, kind):
    torch.manual_seed(0)
    x = torch.randn(12, WIDTH).abs() * torch.tensor([1, -1, 1, -1, 1, -1, 1, -1, -1, 1, 1, 1.0])[:, None]
    model = nn.Sequential(nn.Identity(), kind())

    with told() as whole:
        found = wrap(model, runtime=two, model_run_config=THREE)(x)

    torch.testing.assert_close(found, model(x))
    assert len(whole) == 1


def test_ragged_outputs_of_samples_are_split(two):
    class Ragged(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            rows = super().forward(input)
            return torch.nested.nested_tensor([row[: 1 + int(row.sum() > 0)] for row in rows])

    torch.manual_seed(0)
    model, x = nn.Sequential(Ragged(WIDTH, WIDTH)), torch.randn(6, WIDTH)

    def loss_fn(output: Any, _: object) -> torch.Tensor:
        return sum(one.square().sum() for one in output.unbind())

    with told() as whole, torch.no_grad():
        found = wrap(model, runtime=two, model_run_config=THREE).loss((x,), label=x, loss_fn=loss_fn)

    torch.testing.assert_close(torch.as_tensor(found), loss_fn(model(x), None))
    assert whole == []


class OwnLoss(nn.Module):
    """A model that is one layer and returns its loss."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.linear, self.kind = nn.Linear(WIDTH, WIDTH), kind

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        if self.kind == "statistics":
            y = y - y.mean(0, keepdim=True)
        if self.kind == "time first":
            y = y.cumsum(0)
        return y.square().sum() if self.kind == "sum" else y.square().mean()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["statistics", "time first", "sum", "mean"])
def test_a_model_of_one_layer_that_returns_a_loss_is_tried_by_that(two, kind, dtype):
    torch.manual_seed(0)
    model, x = OwnLoss(kind).to(dtype), torch.randn(6, 4, WIDTH).to(dtype)
    plain = copy.deepcopy(model)

    with told() as whole:
        found = wrap(model, False, runtime=two, model_run_config=THREE).forward_backward((x,))

    assert len(whole) == (kind in ("statistics", "time first"))
    # Means of microbatches are added up, as losses of any row are.
    torch.testing.assert_close(found, plain(x) * (3 if kind == "mean" else 1), rtol=2e-2, atol=1e-3)


def first(output: Any) -> torch.Tensor:
    return output if isinstance(output, torch.Tensor) else output[0]


@pytest.mark.parametrize("way", ["forward", "forward_backward", "evaluation"])
@pytest.mark.parametrize("kind", ["time first", "statistics", "one layer", "samples"])
def test_a_wrapped_row_that_does_not_take_samples_first_runs_in_one_piece(two, kind, way):
    torch.manual_seed(0)
    model = row_of(kind)
    plain = copy.deepcopy(model)
    wrapped = wrap(model, runtime=two, model_run_config=THREE)
    x = torch.randn(6, 4, WIDTH)
    wanted = first(plain(x)).square().sum()

    with told() as whole:
        if way == "forward_backward":
            found = wrapped.forward_backward((x,), label=x, loss_fn=lambda y, _: first(y).square().sum())
        else:
            with torch.set_grad_enabled(way == "forward"):
                found = first(wrapped(x)).square().sum()
    if way == "forward":
        found.backward()

    torch.testing.assert_close(found, wanted)
    assert len(whole) == (kind != "samples")
    if way != "evaluation":
        wanted.backward()
        wrapped.synchronize()
        for one, other in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad)


class Hides(nn.Module):
    """Returns what it computes in an object that is no tree, or in a tensor that cannot leave a device."""

    def __init__(self, how: str, *, mixes: bool) -> None:
        super().__init__()
        self.linear, self.how, self.mixes = nn.Linear(WIDTH, WIDTH), how, mixes

    def forward(self, x: torch.Tensor) -> Any:
        y = self.linear(x)
        return HIDDEN[self.how][0](y - y.mean(0) if self.mixes else y)


class Own:
    """A user's own class."""

    def __init__(self, value: torch.Tensor) -> None:
        self.value = value


@dataclass
class Output(ModelOutput):
    value: torch.Tensor | None = None
    state: Any = None


# How a layer hides its result, and how a loss function finds it.
HIDDEN: dict[str, tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]] = {
    "own class": (Own, lambda found: found.value),
    "namespace": (lambda y: SimpleNamespace(value=y), lambda found: found.value),
    "namespace in own class": (lambda y: Own(SimpleNamespace(value=y)), lambda found: found.value.value),
    "model output": (lambda y: Output(value=None, state=Own(y)), lambda found: found.state.value),
    "function": (lambda y: lambda: y, lambda found: found()),
    "iterator": (lambda y: iter([y]), next),
    "sparse": (lambda y: y.to_sparse(), lambda found: found.to_dense()),
}


@pytest.mark.few(1)
@pytest.mark.parametrize("mixes", [False, True])
@pytest.mark.parametrize("how", HIDDEN)
def test_what_only_the_loss_function_reads_is_tried_wherever_it_is(two, how, mixes):
    torch.manual_seed(0)
    row = nn.Sequential(nn.Linear(WIDTH, WIDTH), Hides(how, mixes=mixes))
    plain, x = copy.deepcopy(row), torch.randn(6, WIDTH)
    wanted = HIDDEN[how][1](plain(x)).square().sum()
    wrapped = wrap(row, runtime=two, model_run_config=THREE)

    with told() as whole:
        found = wrapped.forward_backward((x,), label=x, loss_fn=lambda y, _: HIDDEN[how][1](y).square().sum())

    torch.testing.assert_close(found, wanted)
    assert len(whole) == mixes


def test_what_leaves_a_part_inside_of_an_object_is_refused_as_without_a_trial(two):
    with pytest.raises(BoundaryError, match=r"output\.value"):
        apart(Holder(Hides("own class", mixes=False)), two)(torch.randn(6, WIDTH))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.complex64])
@pytest.mark.parametrize("shape", [(30, 50), (65,), (64 * 40,), (4100,)])
def test_wide_rows_leave_their_device_as_a_few_numbers_that_show_a_difference(dtype, shape):
    torch.manual_seed(0)
    whole = torch.randn(5, *shape).to(dtype)
    other = whole.clone()
    other[3] += torch.randn(shape).to(dtype) / 10

    one, another = ((found := rows_of({"logits": rows}))["output['logits']", shape] for rows in (whole, other))
    found = [rp_batch.distance(one[i : i + 1], another[i : i + 1], 0) for i in range(5)]

    assert one.dtype == dtype
    assert one.numel() <= 5 * 65
    assert found == [0, 0, 0, pytest.approx(0.1, rel=0.5), 0]


def test_trials_are_in_no_log_and_plans_learn_nothing_from_them(two):
    model = wrap(row_of("samples"), runtime=two, model_run_config=THREE)
    x = torch.randn(6, WIDTH)

    model.forward_backward((x,), label=x, loss_fn=lambda y, _: y.square().sum())
    model.synchronize()

    assert list(model.engine.plans()) == [("fused", 3)]
    assert [time.plan for time in model.call_times()] == list(model.engine.plans().values())
    assert {timer.estimator.samples for timer in model.engine.planner.records._timers.values()} <= {0, 1}
    assert model.engine.planner.records.timer("infer", 1).estimator.samples == 0


class Raises(nn.Module):
    """Raises an error for some batches."""

    def __init__(self, error: BaseException, when: Callable[[nn.Module, torch.Tensor], bool]) -> None:
        super().__init__()
        # A function: devices have copies of a module, and of what it holds.
        self.linear, self.error, self.when = nn.Linear(WIDTH, WIDTH), lambda: error, when

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.when(self, x):
            raise self.error() from KeyError("cause")
        return self.linear(x)


WRAPS: dict[str, Callable[..., Any]] = {
    "part": lambda module, runtime: apart(Holder(module), runtime),
    "row": lambda module, runtime: wrap(nn.Sequential(module), runtime=runtime, model_run_config=THREE),
}


@pytest.fixture(params=WRAPS)
def wrapped_as(request: pytest.FixtureRequest) -> Callable[[nn.Module, Runtime], Any]:
    """What wraps a module as a part, or as a row."""
    return WRAPS[request.param]


def test_an_error_of_the_batch_reaches_the_caller_as_itself_and_decides_nothing(two, wrapped_as):
    wanted = ValueError("negative")
    module = Raises(wanted, lambda _, x: bool((x < 0).any()))
    model, x = wrapped_as(module, two), torch.rand(6, WIDTH)

    with told() as whole:
        with pytest.raises(ValueError, match="negative") as raised:
            model(x - torch.arange(6)[:, None])
        found = model(x)

    assert raised.value is wanted
    assert isinstance(wanted.__cause__, KeyError)
    assert "RoundPipe: this was the whole batch in one piece, to see whether it can be split" in wanted.__notes__
    torch.testing.assert_close(found, module.linear(x))
    assert whole == []


def test_an_error_of_fewer_rows_alone_is_told_and_the_batch_runs_in_one_piece(two, wrapped_as):
    module = Raises(ValueError("6 rows are needed"), lambda _, x: len(x) != 6)

    with pytest.warns(TrainingWarning, match=r"one piece.*fewer rows raise ValueError: 6 rows are needed"):
        found = wrapped_as(module, two)(x := torch.randn(6, WIDTH))

    torch.testing.assert_close(found, module.linear(x))


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3), MachineFailed(1, "gone"), Busy("busy")])
def test_interrupts_and_the_engines_own_errors_are_no_reason_to_run_in_one_piece(two, wrapped_as, error):
    model = wrapped_as(Raises(error, lambda _, x: len(x) != 6), two)

    with told() as whole, pytest.raises(type(error)) as raised:
        model(torch.randn(6, WIDTH))

    assert raised.value is error
    assert whole == []


@pytest.mark.parametrize("error", [MemoryError("full"), HostMemoryShort("full"), torch.OutOfMemoryError("full")])
def test_where_memory_does_not_suffice_fewer_rows_are_tried(two, wrapped_as, error):
    module = Raises(error, lambda _, x: len(x) > 4)

    with told() as whole:
        found = wrapped_as(module, two)(x := torch.randn(6, WIDTH))

    torch.testing.assert_close(found, module.linear(x))
    assert whole == []


def test_an_error_of_evaluation_mode_alone_is_no_error_of_the_call(two, wrapped_as):
    class Trains(nn.BatchNorm1d):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            assert self.training, "not in evaluation"
            return super().forward(input)

    class Draws(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            assert self.training, "not in evaluation"
            return super().forward(input) + torch.rand(len(input), 1)

    for module in (nn.Sequential(nn.Linear(WIDTH, WIDTH), Trains(WIDTH)), Draws(WIDTH, WIDTH)):
        words = r"one piece.*modules in evaluation mode raise AssertionError: not in evaluation"
        with pytest.warns(TrainingWarning, match=words):
            wrapped_as(module, two)(torch.randn(6, WIDTH))


def test_an_error_that_the_batch_raises_in_its_own_modes_too_is_raised(two, wrapped_as):
    wanted = ValueError("negative")
    module = nn.Sequential(nn.BatchNorm1d(WIDTH), Raises(wanted, lambda _, x: bool((x < 0).any())))

    with told() as whole, pytest.raises(ValueError, match="negative"):
        wrapped_as(module, two)(torch.randn(6, WIDTH))

    assert whole == []


def test_an_error_of_fewer_rows_is_raised_where_the_batch_does_not_fit_in_one_piece(two):
    class Large(Raises):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if len(x) > 4:
                raise torch.OutOfMemoryError("no memory")
            return super().forward(x)

    wanted = ValueError("negative")

    with pytest.raises(ValueError, match="negative"):
        apart(Holder(Large(wanted, lambda _, x: bool((x < 0).any()))), two)(-torch.rand(6, WIDTH))


@pytest.mark.parametrize("plan", [None, Plan([range(1)], range(1, 2), [range(1)])])
def test_a_trial_changes_no_task_of_later_calls(plan):
    def devices(split: Any) -> tuple[Any, ...]:
        config = RoundPipeRunConfig(num_microbatch=3, split_input=split, execute_plan=plan)
        with Runtime("cpu:3") as runtime:
            model, x = wrap(row_of("samples"), runtime=runtime, model_run_config=config), torch.randn(6, WIDTH)
            for _ in range(2):
                model.forward_backward((x,), label=x, loss_fn=lambda y, _: y.square().sum())
            return runtime.next_device, runtime.assigner._clock.exact_state()

    assert devices(None) == devices(((rp_batch.Split(),), {}))


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounding_on_gpus_is_no_reason_to_run_in_one_piece(dtype):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(512, 8, 2048, 0.0, batch_first=True)
    model = Holder(nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)).to(dtype)

    with Runtime("cuda") as runtime, told() as whole, torch.no_grad():
        apart(model, runtime)(torch.randn(24, 100, 512, dtype=dtype))
        apart(Holder(BatchStatistics()).to(dtype), runtime)(torch.randn(24, WIDTH, dtype=dtype))

    assert len(whole) == 1
