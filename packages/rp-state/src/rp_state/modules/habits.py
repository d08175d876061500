"""What a model's layers were seen to do, so that a call need not look at it again."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Habits:
    """What was seen in the first runs of layers, loss function and `prepare`; replaced when layers change.

    `not_drawing`: the consumers (see `rp_recompute.randomness`) that were last seen to draw from none of the
    process's generators. `sources`: for each consumer that was looked at, the generators of Python and NumPy that
    it draws from. `examined`: how often each layer was examined for what leaves it beside its output, in calls
    without gradients (False) and with them (True). `writers`: consumers that write their input in place.
    `drawing_on_device`: consumers that were seen to draw from a device's generator. `told`: why layers run
    without graphs, as it was logged. `evaluates_randomly`: whether anything draws though all modules are in
    evaluation mode; None: not seen yet. `looks`: how often objects of a class, in what a layer takes or returns,
    were looked into.

    >>> Habits().not_drawing
    set()
    """

    not_drawing: set[Any] = field(default_factory=set[Any])
    sources: dict[Any, tuple[Any, ...]] = field(default_factory=dict[Any, tuple[Any, ...]])
    examined: Counter[tuple[int, bool]] = field(default_factory=Counter[tuple[int, bool]])
    writers: set[Any] = field(default_factory=set[Any])
    drawing_on_device: set[Any] = field(default_factory=set[Any])
    told: set[str] = field(default_factory=set[str])
    evaluates_randomly: bool | None = None
    looks: Counter[Any] = field(default_factory=Counter[Any])
