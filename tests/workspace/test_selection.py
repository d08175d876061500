"""Of tests with many cases as many run as cover each value or, marked ``pairwise``, every pair, and no more."""

from __future__ import annotations

from itertools import pairwise, product
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pairwise import covering, pairs, singles, superfluous, with_each_value
from sometimes import beyond_few
from traced import spaced, traced

pytest_plugins = "pytester"
ROOT = Path(__file__).parents[2]
SIZES = st.lists(st.integers(1, 5), min_size=1, max_size=4)

THREE_AXES = """
    import pytest

    @pytest.fixture(params=["cpu:1", "cpu:2", pytest.param("cuda", marks=pytest.mark.cuda)])
    def devices(request):
        return request.param

    @pytest.mark.{mark}
    @pytest.mark.parametrize("plan", ["fused", "cut", None])
    @pytest.mark.parametrize(("layers", "options"), [(1, {{}}), (1, {{"a": 1}}), (2, {{}})])
    def test_it(devices, plan, layers, options):
        pass
"""


def every_pair(rows: list[tuple[int, ...]]) -> set[object]:
    return set().union(*map(pairs, rows))


@given(SIZES, st.integers(0, 99), st.sampled_from([0, 0.2, 0.9]))
def test_every_pair_that_occurs_is_covered(sizes: list[int], seed: int, left_out: float) -> None:
    chance = Random(seed)
    rows = [row for row in product(*map(range, sizes)) if chance.random() >= left_out]
    chosen = covering(rows)
    assert every_pair([rows[index] for index in chosen]) == every_pair(rows)
    assert chosen == sorted(set(chosen)) == covering(rows)


@given(SIZES)
def test_few_are_chosen(sizes: list[int]) -> None:
    chosen = covering(list(product(*map(range, sizes))))
    largest, second = [*sorted(sizes, reverse=True), 1][:2]
    assert largest * second <= len(chosen) <= 1.5 * largest * second


@given(SIZES, st.integers(0, 99), st.sampled_from([0, 0.2, 0.9]))
def test_each_value_that_occurs_is_chosen(sizes: list[int], seed: int, left_out: float) -> None:
    chance = Random(seed)
    rows = [row for row in product(*map(range, sizes)) if chance.random() >= left_out]
    chosen = with_each_value(rows)
    assert set().union(*(singles(rows[index]) for index in chosen)) == set().union(*map(singles, rows))
    assert chosen == sorted(set(chosen)) == with_each_value(rows)


@given(st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=4), min_size=1, max_size=20))
def test_so_it_is_of_rows_of_several_lengths(rows: list[list[int]]) -> None:
    chosen = with_each_value(rows)
    assert set().union(*(singles(rows[index]) for index in chosen)) == set().union(*map(singles, rows))
    assert len(chosen) == len(set(chosen))


@given(SIZES)
def test_as_many_are_chosen_as_the_longest_axis_has_values_and_the_others_take_turns(sizes: list[int]) -> None:
    rows = list(product(*map(range, sizes)))
    chosen = [rows[index] for index in with_each_value(rows)]
    assert len(chosen) == max(sizes)
    for axis in zip(*chosen, strict=True):
        uses = [axis.count(value) for value in set(axis)]
        assert max(uses) - min(uses) <= 1


def test_without_pairs_each_value_of_any_test_occurs_and_gpus_have_what_they_had(
    pytester: pytest.Pytester,
) -> None:
    items = pytester.getitems(THREE_AXES.format(mark="timeout(9)"))
    left = [item.name for item in items if item not in superfluous(items, pairs=False)]
    assert [sum("cuda" in name for name in left), sum("cuda" not in name for name in left)] == [9, 3]


def test_tests_of_devices_alone_take_turns_in_them(pytester: pytest.Pytester) -> None:
    tests = "".join(f"    def test_{number}(devices):\n        pass\n" for number in range(20))
    items = pytester.getitems(THREE_AXES.format(mark="timeout(9)") + tests)
    alone = [item for item in items if "test_it" not in item.name]
    left = [item.name for item in alone if item not in superfluous(items, pairs=False)]
    assert len({name.split("[")[0] for name in left}) == 20
    found = [name.split("[")[1] for name in left]
    assert found.count("cuda]") == found.count("cpu:1]") + found.count("cpu:2]") == 20
    assert min(map(found.count, ("cpu:1]", "cpu:2]"))) > 3
    assert superfluous(alone) == set()


def test_few_cases_run_of_what_is_marked_so_and_two_of_what_has_devices_and_more(
    pytester: pytest.Pytester,
) -> None:
    marked = """
    @pytest.mark.few(3)
    @pytest.mark.parametrize("number", [*range(10), pytest.param(10, marks=pytest.mark.slow)])
    def test_marked(number):
        pass
    """
    tests = "".join(f"    def test_{number}(devices):\n        pass\n" for number in range(20))
    items = pytester.getitems(THREE_AXES.format(mark="pairwise") + tests + marked)

    left = [item.name for item in items if item not in beyond_few(items)]

    names = [name for name in left if "cuda" not in name]
    assert [sum(name.startswith(test) for name in names) for test in ("test_it", "test_marked")] == [2, 3 + 1]
    assert len(names) == 2 + 4 + 20 * 2
    assert [name for name in left if "cuda" in name] == [item.name for item in items if "cuda" in item.name]


def test_tests_take_turns_in_the_cases_that_run(pytester: pytest.Pytester) -> None:
    cases = '    @pytest.mark.few(2)\n    @pytest.mark.parametrize("number", range(9))\n'
    tests = "".join(f"{cases}    def test_{number}(number):\n        pass\n" for number in range(20))
    items = pytester.getitems("    import pytest\n\n" + tests)

    left = [item.name.split("[")[1] for item in items if item not in beyond_few(items)]

    assert len(left) == 40
    assert len(set(left)) == 8


def test_what_is_parametrized_together_is_one_axis_and_gpus_are_covered_by_themselves(
    pytester: pytest.Pytester,
) -> None:
    items = pytester.getitems(THREE_AXES.format(mark="pairwise"))
    left = [item for item in items if item not in superfluous(items)]
    kinds = [("cuda" in item.name, item.name) for item in left]
    assert [sum(is_cuda for is_cuda, _ in kinds), sum(not is_cuda for is_cuda, _ in kinds)] == [9, 9]
    for two in product(("cpu:1", "cpu:2"), ("fused", "cut", "None")):
        assert any(all(part in name for part in two) for _, name in kinds), two


def test_the_entries_of_a_dict_are_axes_of_their_own_if_that_is_asked_for(pytester: pytest.Pytester) -> None:
    items = pytester.getitems("""
        import itertools, pytest
        FLAGS = [dict(zip("abcd", values)) for values in itertools.product([0, 1], repeat=4)]

        @pytest.mark.pairwise(apart="options")
        @pytest.mark.parametrize(("kind", "options"), [(kind, flags) for kind in "xy" for flags in FLAGS])
        @pytest.mark.parametrize("kernel", ["one", "other"])
        def test_it(kernel, kind, options):
            pass
    """)
    left = [item.callspec.params for item in items if item not in superfluous(items)]
    assert len(left) < len(items) / 3
    for kind, kernel, key, value in product("xy", ("one", "other"), "abcd", (0, 1)):
        wanted = {"kind": kind, "kernel": kernel}
        assert any(wanted.items() <= found.items() and found["options"][key] == value for found in left)
    for kind, (one, other), values in product("xy", product("abcd", repeat=2), product((0, 1), repeat=2)):
        wanted = {one: values[0], other: values[1]}
        if wanted[one] == values[0]:
            assert any(found["kind"] == kind and wanted.items() <= found["options"].items() for found in left)


def test_nothing_else_is_left_out(pytester: pytest.Pytester) -> None:
    assert superfluous(pytester.getitems(THREE_AXES.format(mark="timeout(9)"))) == set()


@given(st.integers(0, 500), st.integers(1, 9))
def test_places_are_evenly_spaced(length: int, most: int) -> None:
    places = spaced(length, most)
    assert len(places) == min(length, most)
    assert places[:1] == [0][:length]
    steps = {after - before for before, after in pairwise([*places, length])}
    assert not steps or max(steps) - min(steps) <= 1


def test_of_many_cases_coverage_looks_at_three_and_the_others_run_without(pytester: pytest.Pytester) -> None:
    items = pytester.getitems("""
        import pytest

        @pytest.mark.parametrize("number", range(20))
        def test_many(number):
            pass

        def test_one():
            pass

        @pytest.mark.slow
        def test_slow():
            pass
    """)
    chosen = [item.name for item in items if item in traced(items)]
    assert chosen == [*(f"test_many[{number}]" for number in (0, 6, 13)), "test_one"]


def test_coverage_does_not_look_at_what_is_listed(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    many, _, one = pytester.getitems("""
        import pytest

        @pytest.mark.parametrize("number", range(2))
        def test_many(number):
            pass

        def test_one():
            pass
    """)
    monkeypatch.setattr("traced._LISTED", {many.nodeid.split("[")[0]})

    assert traced([many, one]) == {one}


def test_what_is_listed_exists() -> None:
    names = [line.partition("::") for line in (ROOT / "tests/untraced.txt").read_text().splitlines()]
    missing = [name for file, _, name in names if f"def {name}(" not in (ROOT / file).read_text()]

    assert missing == [], "take them out of tests/untraced.txt, or write their new names there"
