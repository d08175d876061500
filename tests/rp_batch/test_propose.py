"""What shapes propose, and what values say of it."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import rp_batch
import torch
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from rp_batch import Concat, Equal, Mean, Replicate, Split, Sum

zeros = torch.zeros


def specs(*args: object, likely: int | None = None) -> list[object]:
    return [each.spec[0] for each in rp_batch.propose(args, likely=likely).found]


def test_a_batch_first_is_proposed_before_a_batch_second():
    assert specs(zeros(4, 3, 2)) == [(Split(0),), (Split(1),)]


def test_a_batch_size_that_is_known_comes_first():
    assert specs(zeros(4, 3, 2), likely=3) == [(Split(1),), (Split(0),)]


def test_a_batch_of_one_is_not_split_along_anything_else():
    assert specs(zeros(1, 5, 2), likely=1) == []


def test_states_of_a_recurrent_layer_may_have_the_batch_second():
    assert (Split(0), Split(1)) in specs(zeros(4, 5, 2), zeros(6, 4, 2))
    assert (Split(1), Split(1)) in specs(zeros(5, 4, 2), zeros(6, 4, 2), likely=4)


def test_a_multiple_of_the_batch_may_be_folded_in_either_order_or_not_at_all():
    found = specs(zeros(4, 5), zeros(8, 3))

    assert [(Split(0), rule) for rule in (Replicate(), Split(0, 2), Split(0, 2, inner=True))] == found[:3]


@pytest.mark.parametrize("other", [(6, 9), (6, 11), (5, 7), (7, 5)])
def test_calls_that_differ_in_sizes_alone_have_one_pattern(other):
    patterns = {rp_batch.propose((zeros(rows, steps, 3), 0.5)).pattern for rows, steps in ((4, 9), other)}

    assert len(patterns) == 1


def test_what_may_change_the_work_changes_the_pattern():
    calls = [
        (zeros(4, 9), True),
        (zeros(4, 4), True),
        (zeros(4, 9), False),
        (zeros(4, 9).double(), True),
        (zeros(4, 9), None),
        (zeros(4, 9), "x"),
        (zeros(4, 9), 2),
        (zeros(4, 9), 3),
        (zeros(4, 1), True),
        ([zeros(4, 9)], True),
    ]

    assert len({rp_batch.propose(call).pattern for call in calls}) == len(calls)


def folded(batch: int, factor: int, *, inner: bool) -> torch.Tensor:
    shape = (factor, batch) if inner else (batch, factor)
    return torch.arange(batch * factor * 2).view(*shape, 2).flatten(0, 1)


@given(
    st.integers(1, 6), st.integers(1, 4), st.booleans(), st.integers(1, 6), st.sampled_from([0, 1]), st.randoms()
)
@settings(max_examples=examples(200))
def test_a_split_along_a_fold_is_undone_by_its_merge(batch, factor, inner, parts, dim, random):
    whole = folded(batch, factor, inner=inner)
    whole = whole if dim == 0 else whole.T
    rule = Split(dim - random.choice([0, 2]), factor, inner)

    found = rp_batch.split(((whole,), {}), min(parts, batch), ((rule,), {}))

    merged = rp_batch.merge([part[0][0] for part in found], Concat(rule.dim, inner), sizes=found.sizes)
    assert torch.equal(merged, whole)
    unfolded = whole.movedim(dim, 0).unflatten(0, (factor, batch) if inner else (batch, factor))
    for start, (args, _), size in zip(starts(found.sizes), found, found.sizes, strict=True):
        samples = unfolded[:, start : start + size] if inner else unfolded[start : start + size]
        assert torch.equal(args[0].movedim(dim, 0), samples.flatten(0, 1))


def starts(sizes: tuple[int, ...] | None) -> list[int]:
    assert sizes is not None
    return [sum(sizes[:index]) for index in range(len(sizes))]


def test_a_factor_must_divide_the_dimension():
    with pytest.raises(rp_batch.SizeError, match="3 entries for each sample"):
        rp_batch.split(((zeros(8),), {}), 2, ((Split(0, 3),), {}))
    for mistake in (lambda: Split(0, 0), lambda: Split(0, 2, 1), lambda: Concat(0, 1)):
        with pytest.raises((TypeError, ValueError), match="must be"):
            mistake()


def test_an_interleaved_merge_needs_sizes_that_fit():
    with pytest.raises(rp_batch.MergeError, match="sizes of the microbatches"):
        rp_batch.merge([zeros(2), zeros(4)], Concat(inner=True))
    with pytest.raises(rp_batch.MergeError, match="as many rows"):
        rp_batch.merge([zeros(3), zeros(4)], Concat(inner=True), sizes=(2, 2))


# --- one part is the whole ---------------------------------------------------------------------------------------


def test_one_part_is_the_value_itself_whatever_its_sizes():
    value = ((zeros(4), zeros(6)), {"size": torch.Size([3, 4])})

    parts = rp_batch.split(value, 1)

    assert parts[0] is value
    assert parts.sizes is None
    assert rp_batch.merge(parts) is value


def test_one_part_knows_its_size_where_all_agree():
    assert rp_batch.split(((zeros(4), zeros(4)), {}), 1).sizes == (4,)


def test_a_torch_size_is_a_leaf():
    parts = rp_batch.split(((zeros(4, 2), torch.Size([4, 2])), {}), 2)

    assert [part[0][1] for part in parts] == [torch.Size([4, 2])] * 2
    assert type(rp_batch.merge(parts)[0][1]) is torch.Size


# --- values decide -----------------------------------------------------------------------------------------------


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


WHOLE, SQUARE = random(6, 4), random(6, 6)
PARTS: dict[str, tuple[object, list[object], object]] = {
    "rows": (WHOLE, [WHOLE[:4], WHOLE[4:]], Concat(0)),
    "columns": (WHOLE.T, [WHOLE.T[:, :4], WHOLE.T[:, 4:]], Concat(1)),
    "rows of a square": (SQUARE, [SQUARE[:4], SQUARE[4:]], Concat(0)),
    "folded": (WHOLE.T.flatten(), [WHOLE.T[:, :4].flatten(), WHOLE.T[:, 4:].flatten()], Concat(0, inner=True)),
    "equal": (WHOLE, [WHOLE, WHOLE], Equal()),
    "mean": (WHOLE.mean(), [WHOLE[:4].mean(), WHOLE[4:].mean()], Mean()),
    "sum": (WHOLE.sum(), [WHOLE[:4].sum(), WHOLE[4:].sum()], Sum()),
    "sum of rows": (WHOLE.sum(0), [WHOLE[:4].sum(0), WHOLE[4:].sum(0)], Sum()),
    "object": ("x", ["x", "x"], Equal()),
    "count": (6, [4, 2], Sum()),
    "nothing": (None, [None, None], Equal()),
    "empty": (zeros(0, 3), [zeros(0, 3), zeros(0, 3)], Equal()),
}


@pytest.mark.parametrize("name", PARTS)
def test_the_spec_that_makes_the_whole_is_found(name):
    whole, parts, wanted = PARTS[name]

    spec = rp_batch.fit({"leaf": whole}, [{"leaf": part} for part in parts], (4, 2), tolerance=lambda _: 1e-6)

    assert spec == {"leaf": wanted}


@pytest.mark.parametrize(
    "parts",
    [
        [WHOLE[4:], WHOLE[:4]],
        [WHOLE[:4], WHOLE[4:] + 1],
        [WHOLE, WHOLE + 1],
        [WHOLE[:4], None],
        [WHOLE[:4], WHOLE[:3]],
    ],
)
def test_parts_that_do_not_make_the_whole_are_named_by_path(parts):
    with pytest.raises(rp_batch.MergeError, match=r"output\['leaf'\]"):
        rp_batch.fit({"leaf": WHOLE}, [{"leaf": part} for part in parts], (4, 2), tolerance=lambda _: 1e-6)


DIFFERENT: list[tuple[torch.Tensor, Callable[[torch.Tensor], torch.Tensor], float]] = [
    (torch.ones(4, 2), lambda x: x, 0.0),
    (torch.ones(4, 2), lambda x: x * 1.5, 0.5),
    (torch.tensor([[1.0, math.nan], [math.inf, 1.0]]), lambda x: x, 0.0),
    (torch.tensor([[1.0, math.nan]]), lambda x: x.nan_to_num(1.0), math.inf),
    (torch.tensor([[1.0, math.inf]]), lambda x: -x, math.inf),
    (torch.zeros(2, 2), lambda x: x + torch.tensor([[1.0], [0.0]]), math.inf),
    (torch.arange(8).view(2, 4), lambda x: x.where(x != 5, 0), 0.25),
    (torch.ones(2), lambda x: x.double(), math.inf),
    (torch.ones(2), lambda x: x[:1], math.inf),
    (torch.eye(2).to_sparse(), lambda x: x, 0.0),
]


@pytest.mark.parametrize(("whole", "change", "wanted"), DIFFERENT)
def test_the_distance_is_that_of_the_worst_row(whole, change, wanted):
    assert rp_batch.distance(whole, change(whole), 0) == pytest.approx(wanted)


def test_one_wrong_row_of_many_is_as_far_as_if_all_were():
    whole = random(1000, 8)
    other = whole.clone()
    other[7] *= 2

    assert rp_batch.distance(whole, other, 0) > 0.5
    assert rp_batch.distance(whole, other) < 0.1


def test_a_packed_sequence_may_be_among_the_arguments() -> None:
    packed = torch.nn.utils.rnn.pack_padded_sequence(torch.randn(3, 4, 2), [4, 2, 1], batch_first=True)

    found = rp_batch.propose((packed, torch.zeros(3)), {}).found
    (parts,) = rp_batch.split(((packed,), {}), 1)

    assert found is not None
    assert torch.equal(parts[0][0].data, packed.data)
    assert type(parts[0][0]) is type(packed)
