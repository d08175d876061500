"""Find differences between machines that should run the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

Fact = str | int | float | bool | None
MOST_NAMED = 5


def differences(every: Sequence[Mapping[str, Fact]]) -> list[str]:
    """Return one sentence for each fact that differs between machines. `every`: the facts, by rank.

    >>> differences([{"layers": 12}, {"layers": 12}, {"layers": 13}])
    ['layers is 12 on ranks 0, 1 but 13 on rank 2']
    >>> differences([{"layers": 12}, {}])
    ['layers is 12 on rank 0 but not given on rank 1']
    """
    names = dict.fromkeys(name for facts in every for name in facts)
    return [text for name in names if (text := _difference(name, every))]


def _difference(name: str, every: Sequence[Mapping[str, Fact]]) -> str:
    ranks: dict[str, list[int]] = {}
    for rank, facts in enumerate(every):
        ranks.setdefault(repr(facts[name]) if name in facts else "not given", []).append(rank)
    return "" if len(ranks) == 1 else f"{name} is " + " but ".join(f"{v} on {_named(r)}" for v, r in ranks.items())


def _named(ranks: list[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
