"""Trees without an end: a node that is its own ancestor, or more levels than can be flattened."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rp_batch.errors import DepthError

# How many levels of a path an error shows for a tree that is too deep.
_SHOWN_LEVELS = 12

# The children of a node, each with the step that leads to it; none of a leaf.
Steps = Callable[[Any], Iterable[tuple[str, Any]]]


@dataclass(frozen=True, slots=True)
class _Level:
    """A node on the current path, the step from its parent, and the children not visited yet."""

    node: Any
    step: str
    rest: Iterator[tuple[str, Any]]


def find_endless(tree: Any, roots: Sequence[str], steps: Steps, most_levels: int) -> DepthError | None:
    """Return an error for the first node that is its own ancestor or too deep; None if there is none.

    Depth first, in the order of `flatten`, without recursion.
    """
    path = [_Level(tree, "", iter(steps(tree)))]
    while path:
        step, node = next(path[-1].rest, ("", None))
        if not step:
            path.pop()
            continue
        above = [level.node is node for level in path]
        path.append(_Level(node, step, iter(steps(node))))
        if True in above:
            start = _written(path[: above.index(True) + 1], roots) or "the whole tree"
            return DepthError(_written(path, roots), f"must not be {start}, which contains it; break the cycle")
        if len(path) > most_levels:
            return DepthError(
                f"{_written(path[:_SHOWN_LEVELS], roots)}...",
                f"a tree must not have more than {most_levels} levels, but this one has more; "
                "pass a list of its nodes, or mark their class with rp_batch.leaf",
            )
    return None


def _written(path: Sequence[_Level], roots: Sequence[str]) -> str:
    """Return the path of the last node on the path from the root."""
    steps = [level.step for level in path[1:]]
    if len(roots) > 1 and steps:
        names = {f"[{index}]": name for index, name in enumerate(roots)}
        return names[steps[0]] + "".join(steps[1:])
    return "".join((*roots[:1], *steps))
