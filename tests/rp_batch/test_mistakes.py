"""A mistake of one line in the package makes a test fail: many mistakes, one at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from mistakes import MISTAKES, PACKAGE, Mistake
from mutants import started

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def ended() -> Iterator[Callable[[int], str]]:
    """How the tests end with the mistake of a number."""
    with started(Path(__file__).with_name("mistakes.py")) as how_it_ends:
        yield how_it_ends


@pytest.mark.parametrize("mistake", MISTAKES, ids=[mistake.what for mistake in MISTAKES])
def test_each_can_be_made(mistake: Mistake) -> None:
    mistake.made_in((PACKAGE / mistake.file).read_text())


@pytest.mark.mutation
def test_without_a_mistake_their_tests_pass(ended: Callable[[int], str]) -> None:
    assert ended(-1) == "passed"


@pytest.mark.mutation
@pytest.mark.parametrize("number", range(len(MISTAKES)), ids=[mistake.what for mistake in MISTAKES])
def test_every_mistake_is_noticed_by_the_test_that_should(ended: Callable[[int], str], number: int) -> None:
    assert ended(number) == "failed"
