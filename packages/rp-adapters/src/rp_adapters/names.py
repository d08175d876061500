"""The parts of a model that can be adapted, and what tells names of layers from patterns."""

from __future__ import annotations

import re

# PEFT's name for all linear layers, stacked experts and routers.
ALL_LINEAR = "all-linear"
PARTS = ("attention", "dense", "experts", "router")
# Without routers: adapters on them change which experts learn, which costs balance and is seldom wanted.
USUAL_PARTS = PARTS[:3]
# What a name of a layer never has: a target with any of these is a regular expression.
_PATTERN = re.compile(r"[*+?()\[\]{}|\\^$]")


def is_pattern(target: str) -> bool:
    """Return whether a target is a regular expression, and not the name of a layer or the end of one.

    >>> is_pattern(r".*[qv]_proj"), is_pattern("mlp.experts.down_proj")
    (True, False)
    """
    return _PATTERN.search(target) is not None
