"""Merge the outputs of microbatches into one tree: by default the inverse of splitting."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from rp_batch import spec as specs
from rp_batch import tree
from rp_batch.errors import MergeError
from rp_batch.merging.align import aligned, matched
from rp_batch.merging.combine import Misfit, combine, default_rule, suits
from rp_batch.place import spec_for_each
from rp_batch.sizes import read_sizes
from rp_batch.spec import Join, MergeRule, Parts

__all__ = ["merge"]


def merge(
    parts: Sequence[Any], spec: Any = None, sizes: Sequence[int] | None = None, *, name: str = "output"
) -> Any:
    """Merge the parts of a tree, one per microbatch, into the whole.

    >>> import torch
    >>> parts = [(torch.zeros(3), torch.tensor(1.0)), (torch.ones(1), torch.tensor(5.0))]
    >>> merge(parts, sizes=(3, 1))
    (tensor([0., 0., 0., 1.]), tensor(2.))

    By default tensors are concatenated along dimension 0, zero-dimensional tensors are averaged, and everything
    else must be equal. `spec`: one spec for all leaves; a tree of specs over all or part of the output; or a
    function that takes the list of parts and returns the whole. The spec that `infer` returns for a call undoes
    the split of that call. `sizes`: the microbatch sizes, the weights of averages; by default `parts.sizes` if
    `parts` is a `Parts` that has them, else equal weights. `name`: the root of paths in errors. If there is only
    one part, its tensors are not copied; without a spec it is the whole itself.
    """
    _check_parts(parts, name)
    if spec is None and len(parts) == 1:
        return parts[0]
    if specs.is_function(spec):
        return spec(list(parts))
    sizes = _sizes(parts, sizes, name)
    # Without sizes, or with an empty batch, all parts have equal weight.
    weights = sizes if sizes is not None and sum(sizes) > 0 else (1,) * len(parts)
    return _Merge(sizes, weights).at(spec, list(parts), name)


def _check_parts(parts: object, name: str) -> None:
    if not isinstance(parts, Sequence) or isinstance(parts, (str, bytes)):
        raise MergeError(
            name, f"the parts must be a list, one for each microbatch, but are a {type(parts).__name__}"
        )
    if not parts:
        raise MergeError(name, "must have at least one part, but has none; pass the outputs of the microbatches")


def _sizes(parts: Sequence[Any], sizes: Sequence[int] | None, name: str) -> tuple[int, ...] | None:
    if sizes is None:
        return parts.sizes if isinstance(parts, Parts) else None
    try:
        return read_sizes(sizes, len(parts))
    except ValueError as error:
        raise MergeError(name, str(error)) from None


@dataclass(frozen=True, slots=True)
class _Merge:
    """One merge: the sizes of the parts, if known, and their weights in averages."""

    sizes: tuple[int, ...] | None
    weights: tuple[int, ...]

    def at(self, spec: Any, parts: list[Any], where: str) -> Any:
        """Merge the values that the parts have at one path."""
        rule = specs.merge_rule(spec)
        if rule is Parts:
            return Parts(parts, sizes=self.sizes)
        if isinstance(rule, Join):
            return _joined(parts, where)
        if rule is not None or spec is None:
            return self._whole(rule, parts, where)
        return self._node(spec, parts, where)

    def _node(self, spec: Any, parts: list[Any], where: str) -> Any:
        """Merge a node child by child, each by its own spec."""
        node = tree.children(parts[0])
        if node is None or tree.children(spec) is None:
            raise specs.unusable(spec, where, merging=True)
        others = [matched(node, parts[0], part, where, index) for index, part in enumerate(parts[1:], 1)]
        columns = map(list, zip(node.values, *others, strict=True))
        children = zip(spec_for_each(spec, node, where), columns, node.steps, strict=True)
        return tree.rebuild(node, [self.at(inner, column, where + step) for inner, column, step in children])

    def _whole(self, rule: MergeRule | None, parts: list[Any], where: str) -> Any:
        """Merge all leaves of a subtree by one rule, or by the default rules."""
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
        # An object that two leaves share in every part is shared in the result as well.
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
            return combine(rule, column, self.weights, self.sizes)
        except Misfit as error:
            raise MergeError(tree.paths_of(treedef, where)[index], str(error)) from error.__cause__
        except Exception as error:
            error.add_note(f"while {tree.paths_of(treedef, where)[index]} was merged by {rule}")
            raise


def _joined(parts: list[Any], where: str) -> Any:
    kinds = {type(part).__name__ for part in parts}
    if kinds not in ({"list"}, {"tuple"}):
        found = ", ".join(sorted(kinds))
        raise MergeError(where, f"Join() needs a list in each part, or a tuple in each, but found {found}")
    return type(parts[0])(chain.from_iterable(parts))


def _rules(rule: MergeRule | None, leaves: list[Any], *, alone: bool) -> list[MergeRule]:
    """Return the rule for each leaf: `rule` where it suits the leaf, else the default rule."""
    if rule is None:
        return [default_rule(leaf) for leaf in leaves]
    return [rule if alone or suits(rule, leaf) else default_rule(leaf) for leaf in leaves]
