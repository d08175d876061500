"""Copies are spread over gaps: each once, and the fullest gap is not much fuller than it must be."""

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rp_sched import balance

patient = settings(deadline=None)


@patient
@given(st.lists(st.integers(0, 100)), st.integers(1, 6))
def test_every_copy_is_in_one_gap(sizes: list[int], gaps: int):
    found = balance(sizes, gaps)
    assert len(found) == gaps
    assert sorted(index for gap in found for index in gap) == list(range(len(sizes)))


@patient
@given(st.lists(st.integers(0, 20), max_size=6), st.integers(1, 3))
def test_the_fullest_gap_keeps_grahams_bound(sizes: list[int], gaps: int):
    fullest = max(sum(sizes[index] for index in gap) for gap in balance(sizes, gaps))
    best = min(
        max(sum(size for size, gap in zip(sizes, chosen, strict=True) if gap == wanted) for wanted in range(gaps))
        for chosen in product(range(gaps), repeat=len(sizes))
    )
    assert fullest <= (4 / 3 - 1 / (3 * gaps)) * best + 1e-9


def test_the_longest_go_first_to_the_emptiest_gap():
    assert balance([1, 8, 5, 4], 2) == ((0, 1), (2, 3))
    assert balance([3, 3, 2, 2, 2], 2) == ((0, 2, 4), (1, 3))
    assert balance([], 2) == ((), ())


def test_what_cannot_be_is_refused_by_name():
    with pytest.raises(ValueError, match="gaps must be at least 1, but is 0"):
        balance([1], 0)
    with pytest.raises(ValueError, match=r"sizes\[1\] must be at least 0, but is -1"):
        balance([1, -1], 2)
    with pytest.raises(TypeError, match=r"sizes\[0\] must be a whole number"):
        balance([1.5], 2)  # type: ignore[list-item]
