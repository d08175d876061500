"""Merging the parts of a tree into one: by default the inverse of splitting."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rp_batch import spec as specs
from rp_batch import tree
from rp_batch.errors import MergeError
from rp_batch.merging.align import aligned, matched
from rp_batch.merging.combine import Misfit, combine, default_rule, suits
from rp_batch.place import spec_for_each
from rp_batch.sizes import read_sizes
from rp_batch.spec import MergeRule, Parts

__all__ = ["merge"]


def merge(
    parts: Sequence[Any], spec: Any = None, sizes: Sequence[int] | None = None, *, name: str = "output"
) -> Any:
    """Merge the parts of a tree, one a microbatch, into the whole.

    >>> import torch
    >>> parts = [(torch.zeros(3), torch.tensor(1.0)), (torch.ones(1), torch.tensor(5.0))]
    >>> merge(parts, sizes=(3, 1))
    (tensor([0., 0., 0., 1.]), tensor(2.))

    By default tensors are concatenated along dimension 0, tensors without dimensions averaged, and everything else
    must be equal. `spec`: one spec for all, or a tree of specs over the output, or over some of it; or a function
    that is called with the list of parts and returns the whole. What `infer` found for a split undoes that split.
    `sizes`: those of the microbatches, weights for averages; by default those that `parts` know, else all one.
    `name` is what errors call the whole. A single part's tensors are not copied.
    """
    _check_parts(parts, name)
    if specs.is_function(spec):
        return spec(list(parts))
    sizes = _sizes(parts, sizes, name)
    # Without sizes, and in an empty batch, no part weighs more than another.
    weights = sizes if sizes is not None and sum(sizes) > 0 else (1,) * len(parts)
    return _Merge(sizes, weights).at(spec, list(parts), name)


def _check_parts(parts: object, name: str) -> None:
    if not isinstance(parts, Sequence) or isinstance(parts, (str, bytes)):
        raise MergeError(
            name, f"the parts must be a list, one for each microbatch, but are a {type(parts).__name__}"
        )
    if not parts:
        raise MergeError(name, "wants at least one part, but there is none; merge what the microbatches returned")


def _sizes(parts: Sequence[Any], sizes: Sequence[int] | None, name: str) -> tuple[int, ...] | None:
    if sizes is None:
        return parts.sizes if isinstance(parts, Parts) else None
    try:
        return read_sizes(sizes, len(parts))
    except ValueError as error:
        raise MergeError(name, str(error)) from None


@dataclass(frozen=True, slots=True)
class _Merge:
    """One merge: what is known of all parts."""

    sizes: tuple[int, ...] | None
    weights: tuple[int, ...]

    def at(self, spec: Any, parts: list[Any], where: str) -> Any:
        """Merge what the parts hold at one place."""
        rule = specs.merge_rule(spec)
        if rule is Parts:
            return Parts(parts, sizes=self.sizes)
        if rule is not None or spec is None:
            return self._whole(rule, parts, where)
        return self._node(spec, parts, where)

    def _node(self, spec: Any, parts: list[Any], where: str) -> Any:
        """Merge by a tree of specs, child by child."""
        opened = tree.children(parts[0])
        if opened is None or tree.children(spec) is None:
            raise specs.unusable(spec, where, merging=True)
        others = [matched(opened, parts[0], part, where, index) for index, part in enumerate(parts[1:], 1)]
        columns = map(list, zip(opened.values, *others, strict=True))
        children = zip(spec_for_each(spec, opened, where), columns, opened.steps, strict=True)
        return tree.rebuild(opened, [self.at(inner, column, where + step) for inner, column, step in children])

    def _whole(self, rule: MergeRule | None, parts: list[Any], where: str) -> Any:
        """Merge by one rule, or by the default rules, all leaves at once."""
        first, treedef = tree.flatten_named(parts[0], where)
        types = list(map(type, first))
        rows = [first]
        for index, part in enumerate(parts[1:], 1):
            rows.append(tree.flatten_like(treedef, types, part) or aligned(parts[0], part, where, index))
        chosen = _rules(rule, first, alone=treedef.is_leaf())
        return treedef.unflatten(self._columns(chosen, rows, treedef, where))

    def _columns(
        self, rules: list[MergeRule], rows: list[list[Any]], treedef: tree.TreeDef, where: str
    ) -> list[Any]:
        # What stands at two places in every part is one object in the whole, too.
        done: dict[int, tuple[tuple[Any, ...], Any]] = {}
        whole: list[Any] = []
        for index, (rule, column) in enumerate(zip(rules, zip(*rows, strict=True), strict=True)):
            known = done.get(id(column[0]))
            if known is None or any(map(operator.is_not, known[0], column)):
                known = done[id(column[0])] = (column, self._leaf(rule, column, treedef, index, where))
            whole.append(known[1])
        return whole

    def _leaf(
        self, rule: MergeRule, column: tuple[Any, ...], treedef: tree.TreeDef, index: int, where: str
    ) -> Any:
        try:
            return combine(rule, column, self.weights)
        except Misfit as error:
            raise MergeError(tree.paths_of(treedef, where)[index], str(error)) from error.__cause__
        except Exception as error:
            error.add_note(f"while {tree.paths_of(treedef, where)[index]} was merged by {rule}")
            raise


def _rules(rule: MergeRule | None, leaves: list[Any], *, alone: bool) -> list[MergeRule]:
    """The rule for each leaf. One that was given for a whole node holds for the leaves that it suits."""
    if rule is None:
        return [default_rule(leaf) for leaf in leaves]
    return [rule if alone or suits(rule, leaf) else default_rule(leaf) for leaf in leaves]
