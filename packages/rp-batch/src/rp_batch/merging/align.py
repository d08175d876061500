"""Match the leaves of several parts that have the same tree structure."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from typing import Any

from rp_batch import tree
from rp_batch.errors import MergeError
from rp_batch.merging.combine import brief

__all__ = ["aligned", "matched"]


def aligned(first: Any, part: Any, where: str, index: int) -> list[Any]:
    """Return the leaves of part `index` in the order of the first part's leaves.

    Raises `MergeError` if the structures differ in more than the order of dict keys.
    """
    node = tree.children(first)
    if node is None and tree.children(part) is None:
        return [part]
    if node is None:
        raise _different_structure(first, part, where, index)
    children = zip(node.values, matched(node, first, part, where, index), node.steps, strict=True)
    return [leaf for mine, its, step in children for leaf in aligned(mine, its, where + step, index)]


def matched(node: tree.Children, first: Any, part: Any, where: str, index: int) -> list[Any]:
    """Return the children of part `index` in the order of `node`, the first part's children."""
    other = tree.children(part)
    if other is None or type(first) is not type(part) or set(node.names) != set(other.names):
        raise _different_structure(first, part, where, index)
    # A dict's treedef records the key order, which may differ; other nodes must have equal metadata.
    if type(first) not in (dict, OrderedDict, defaultdict) and node.treedef != other.treedef:
        raise MergeError(
            where,
            f"the parts must have equal non-leaf data, but that of the {type(first).__name__} "
            f"in part {index} differs from part 0; make it the same for every microbatch",
        )
    children = dict(zip(other.names, other.values, strict=True))
    return [children[name] for name in node.names]


def _different_structure(first: Any, part: Any, where: str, index: int) -> MergeError:
    return MergeError(
        where,
        f"the parts must have one structure, but part 0 has {_kind(first)} and part {index} has {_kind(part)}; "
        "return the same structure for every microbatch, put lists that have an entry for each sample one after "
        "another with Join (merge_output), or keep the parts as a list with Parts",
    )


def _kind(value: Any) -> str:
    node = tree.children(value)
    if node is None:
        return brief(value)
    return f"a {type(value).__name__} of {', '.join(map(repr, node.names)) or 'nothing'}"
