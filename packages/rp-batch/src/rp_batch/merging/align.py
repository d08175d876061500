"""Match the leaves of several parts that have the same tree structure."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from typing import Any

from rp_batch import tree
from rp_batch.errors import MergeError
from rp_batch.merging.combine import brief

__all__ = ["aligned", "matched"]


def aligned(first: Any, part: Any, where: str, index: int) -> list[Any]:
    """The leaves of part `index` in the order of the first part's leaves.

    Raises `MergeError` if the structures differ in more than the order of dict keys.
    """
    opened = tree.children(first)
    if opened is None and tree.children(part) is None:
        return [part]
    if opened is None:
        raise _unlike(first, part, where, index)
    children = zip(opened.values, matched(opened, first, part, where, index), opened.steps, strict=True)
    return [leaf for mine, its, step in children for leaf in aligned(mine, its, where + step, index)]


def matched(opened: tree.Children, first: Any, part: Any, where: str, index: int) -> list[Any]:
    """The children of part `index` in the order of the first part's children, `opened`."""
    other = tree.children(part)
    if other is None or type(first) is not type(part) or set(opened.names) != set(other.names):
        raise _unlike(first, part, where, index)
    # A dict's treedef records the key order, which may differ; other nodes must have equal metadata.
    if type(first) not in (dict, OrderedDict, defaultdict) and opened.treedef != other.treedef:
        raise MergeError(
            where,
            f"the parts must have equal non-leaf data, but that of the {type(first).__name__} "
            f"in part {index} differs from part 0; make it the same for every microbatch",
        )
    children = dict(zip(other.names, other.values, strict=True))
    return [children[name] for name in opened.names]


def _unlike(first: Any, part: Any, where: str, index: int) -> MergeError:
    return MergeError(
        where,
        f"the parts must have one structure, but part 0 has {_kind(first)} and part {index} has {_kind(part)}; "
        "return the same structure for every microbatch, or keep the parts as a list with Parts (merge_output)",
    )


def _kind(value: Any) -> str:
    opened = tree.children(value)
    if opened is None:
        return brief(value)
    return f"a {type(value).__name__} of {', '.join(map(repr, opened.names)) or 'nothing'}"
