"""The order in which a step takes parameters: as their gradients arrive, or by the turns of their links."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TypeVar

import torch

from rp_optim.masters import Ready, at_once, link_of

_Item = TypeVar("_Item")


def by_arrival(items: Sequence[_Item], parameter_of: Callable[[_Item], torch.Tensor]) -> Iterator[Sequence[_Item]]:
    """Yield `items` in batches as their gradients arrive, each batch in the order of `items`.

    A batch has all items whose gradients have arrived by then. Equal `Ready`s are called once for all their items.
    If no gradient has arrived, this waits for the last item's, since backward goes from the last layer to the
    first. Items whose links have turns come first, one batch per turn.
    """

    def together(places: Iterable[int]) -> list[_Together]:
        groups: dict[object, _Together] = {}
        for place in places:
            ready = _ready_of(parameter_of(items[place]))
            groups.setdefault(_key(ready), _Together(ready, [])).places.append(place)
        return list(groups.values())

    turns: dict[int, list[int]] = {}
    unordered: list[int] = []
    for place, item in enumerate(items):
        turn = _turn_of(parameter_of(item))
        (unordered if turn is None else turns.setdefault(turn, [])).append(place)
    for turn in sorted(turns):
        for group in together(turns[turn]):
            group.ready(True)
        yield [items[place] for place in turns[turn]]
    waiting = together(unordered)
    while waiting:
        arrived = [group for group in waiting if group.ready(False)]
        if not arrived:
            last = max(waiting, key=_Together.last)
            # A gradient that was dropped or read meanwhile need not arrive.
            now = together(last.places)
            waiting = [*now, *(group for group in waiting if group is not last)]
            others = [group for group in now if group.ready is not last.ready]
            arrived = [group for group in others if group.ready(False)] or [max(now, key=_Together.last)]
            arrived[0].ready(True)
        yield [items[place] for place in _places_of(arrived)]
        waiting = [group for group in waiting if group not in arrived]


@dataclass(slots=True, eq=False)
class _Together:
    """Items whose gradients arrive together, as their places among all items, ascending."""

    ready: Ready
    places: list[int]

    def last(self) -> int:
        return self.places[-1]


def _places_of(groups: Iterable[_Together]) -> list[int]:
    return sorted(chain.from_iterable(group.places for group in groups))


def _turn_of(parameter: torch.Tensor) -> int | None:
    link = link_of(parameter)
    return None if link is None else link.turn


def _ready_of(parameter: torch.Tensor) -> Ready:
    link = link_of(parameter)
    return at_once if link is None or link.gradient_in == "grad" else link.ready


def _key(ready: Ready) -> object:
    # An object that defines __eq__ without __hash__ cannot be a key, so it is compared by identity.
    return id(ready) if getattr(ready, "__hash__", None) is None else ready
