"""Estimates follow the measurements, and bytes until there are any."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rp_sched import Estimator, LayerCost

# Other work shares the machine, so no example has a deadline.
patient = settings(deadline=None)

ONE = [LayerCost(0)]
sample_lists = st.lists(st.floats(0, 1e4), min_size=1, max_size=30)


def measured(samples: list[float]) -> LayerCost:
    estimator = Estimator(1)
    for ms in samples:
        estimator.add(0, forward_ms=ms, backward_ms=2 * ms)
    return estimator.costs(ONE)[0]


@patient
@given(st.floats(0, 1e6), sample_lists)
def test_the_average_is_the_weighted_mean_of_all_samples_but_the_first(first: float, samples: list[float]):
    weights = [0.9**age for age in range(len(samples))][::-1]
    mean = math.fsum(w * ms for w, ms in zip(weights, samples, strict=True)) / math.fsum(weights)
    cost = measured([first, *samples])
    assert cost.forward_ms == pytest.approx(mean, rel=1e-9, abs=1e-9)
    assert cost.backward_ms == pytest.approx(2 * mean, rel=1e-9, abs=1e-9)


def test_before_samples_times_are_in_proportion_to_bytes():
    costs = Estimator(3).costs([LayerCost(0, weight_bytes=size) for size in (10, 30, 0)])
    assert costs[1].forward_ms == pytest.approx(3 * costs[0].forward_ms)
    assert all(cost.backward_ms == pytest.approx(2 * cost.forward_ms) for cost in costs)
    assert costs[2].forward_ms > 0


def test_a_layer_without_samples_is_as_fast_by_byte_as_those_with_them():
    estimator = Estimator(3)
    for layer, ms in ((0, 1.0), (1, 5.0)):
        estimator.add(layer, forward_ms=100.0)
        estimator.add(layer, forward_ms=ms)
    costs = estimator.costs([LayerCost(0, weight_bytes=size) for size in (10, 20, 40)])
    assert [cost.forward_ms for cost in costs] == pytest.approx([1.0, 5.0, 8.0])


def test_other_fields_are_left_as_they_are():
    given_cost = LayerCost(0, weight_bytes=9, trainable_bytes=3, boundary_bytes=2, kept_bytes=1)
    (cost,) = Estimator(1).costs([given_cost])
    assert (cost.weight_bytes, cost.trainable_bytes, cost.boundary_bytes, cost.kept_bytes) == (9, 3, 2, 1)


def test_samples_counts_what_every_layer_has():
    estimator = Estimator(2)
    for layer in (0, 0, 0, 1):
        estimator.add(layer, forward_ms=1.0)
    assert estimator.samples == 0
    estimator.add(1, forward_ms=1.0)
    assert estimator.samples == 1


def test_replanning_pays_first_then_once_times_move():
    estimator = Estimator(2)
    layers = [LayerCost(0, weight_bytes=10**8)] * 2
    assert estimator.moved(0.1)
    estimator.costs(layers)
    for ms in (900.0, 4.0):
        assert not estimator.moved(0.1), "the guess stands until a sample counts"
        for layer in (0, 1):
            estimator.add(layer, forward_ms=ms, backward_ms=3 * ms)
    assert estimator.moved(0.1)
    estimator.costs(layers)
    assert not estimator.moved(0.1)
    estimator.add(1, backward_ms=12.0 * 1.1)
    assert not estimator.moved(0.1), "one sample moves an average of two by about half"
    estimator.add(1, backward_ms=12.0 * 1.6)
    assert estimator.moved(0.1)
    assert not estimator.moved(0.5)


@patient
@given(
    st.lists(st.tuples(st.integers(0, 2), st.booleans(), st.floats(0, 100)), max_size=40),
    st.integers(0, 40),
    st.floats(0, 2),
)
def test_moved_is_what_a_look_at_every_layer_says(
    samples: list[tuple[int, bool, float]], planned_after: int, threshold: float
):
    layers = [LayerCost(0, weight_bytes=size) for size in (10**6, 3 * 10**6, 0)]
    estimator, current = Estimator(3), Estimator(3)
    before = None
    for number, (layer, is_forward, ms) in enumerate(samples):
        if number == planned_after:
            before = estimator.costs(layers)
        for each in (estimator, current):
            each.add(layer, **{"forward_ms" if is_forward else "backward_ms": ms})
    if before is None:
        assert estimator.moved(threshold)
        return
    counts = {
        (layer, up): sum(s[:2] == (layer, up) for s in samples) for layer in range(3) for up in (True, False)
    }
    off = []
    for name, up in (("forward_ms", True), ("backward_ms", False)):
        old = [getattr(cost, name) for cost in before]
        new = [getattr(cost, name) for cost in current.costs(layers)]
        measured = [layer for layer in range(3) if counts[layer, up] > 1]
        near = [max(old[layer], sum(old) / 3) for layer in range(3)]
        off += [
            abs(new[m] - old[m]) / near[m] if near[m] else math.inf * (new[m] > 0)
            for m in measured
            if new[m] != old[m]
        ]
    if all(part != pytest.approx(threshold) for part in off):
        assert estimator.moved(threshold) == (max(off, default=0.0) > threshold)


def test_noise_in_a_small_layer_is_measured_against_the_mean():
    estimator = Estimator(2)
    for ms in ((1.0, 100.0), (1.0, 100.0)):
        for layer in (0, 1):
            estimator.add(layer, forward_ms=ms[layer])
    estimator.costs([LayerCost(0)] * 2)
    for _ in range(20):
        estimator.add(0, forward_ms=2.0)
    assert not estimator.moved(0.1)


def test_bad_arguments_are_refused_in_words():
    with pytest.raises(ValueError, match="num_layers must be at least 1"):
        Estimator(0)
    estimator = Estimator(2)
    with pytest.raises(ValueError, match="layer must be below 2, but is 2"):
        estimator.add(2, forward_ms=1.0)
    with pytest.raises(ValueError, match="backward_ms must be a finite time"):
        estimator.add(0, backward_ms=-1.0)
    with pytest.raises(ValueError, match="layers must have 2 entries, but has 1"):
        estimator.costs(ONE)
    with pytest.raises(ValueError, match="threshold must be"):
        estimator.moved(math.nan)


# Launching

LAUNCHES = ("forward_launch_ms", "backward_launch_ms", "recompute_launch_ms")


@patient
@given(
    st.lists(st.tuples(st.integers(0, 2), st.sampled_from(LAUNCHES), st.floats(0, 1e3)), min_size=1, max_size=60)
)
def test_launches_are_averages_of_their_own_and_a_recomputation_is_launched_like_a_forward_pass(
    samples: list[tuple[int, str, float]],
):
    estimator = Estimator(3)
    for layer, name, ms in samples:
        estimator.add(layer, **{name: ms})
    before = LayerCost(0, forward_launch_ms=1.0, backward_launch_ms=2.0, recompute_launch_ms=3.0)
    costs = estimator.costs([before] * 3)
    counted = {
        (layer, name): [ms for found, kind, ms in samples if (found, kind) == (layer, name)][1:]
        for layer in range(3)
        for name in LAUNCHES
    }
    if not any(counted.values()):
        assert all(getattr(cost, name) == getattr(before, name) for cost in costs for name in LAUNCHES)
        return
    for layer, cost in enumerate(costs):
        for name in LAUNCHES:
            mine = counted[layer, name]
            weights = [0.9**age for age in range(len(mine))][::-1]
            mean = math.fsum(w * ms for w, ms in zip(weights, mine, strict=True)) / (math.fsum(weights) or 1)
            guess = cost.forward_launch_ms if name == "recompute_launch_ms" else 0.0
            assert getattr(cost, name) == pytest.approx(mean if mine else guess, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("name", LAUNCHES)
def test_replanning_pays_when_launching_moves(name: str):
    estimator = Estimator(1)
    for ms in (9.0, 1.0):
        estimator.add(0, **{name: ms})
    estimator.costs(ONE)
    assert not estimator.moved(0.1)
    for _ in range(3):
        estimator.add(0, **{name: 2.0})
    assert estimator.moved(0.1)


@patient
@given(sample_lists, sample_lists)
def test_after_a_restart_only_later_samples_count_and_moved_still_compares(old: list[float], new: list[float]):
    fresh = measured([0.0, *new])
    estimator = Estimator(1)
    for ms in (0.0, *old):
        estimator.add(0, forward_ms=ms, backward_ms=2 * ms)
    before = estimator.costs(ONE)[0]
    estimator.restart()
    assert not estimator.moved(0.0), "estimates stand until there are samples"
    for ms in new:
        estimator.add(0, forward_ms=ms, backward_ms=2 * ms)
    moved = estimator.moved(1.0)
    after = estimator.costs(ONE)[0]
    assert after.forward_ms == pytest.approx(fresh.forward_ms)
    if abs(after.forward_ms - 2 * before.forward_ms) > 1e-6:
        assert moved == (after.forward_ms > 2 * before.forward_ms)
