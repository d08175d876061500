"""Match a tree of specs with a tree of values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

from rp_batch import spec as specs
from rp_batch import tree
from rp_batch.arrays import has_dimensions
from rp_batch.errors import SpecError
from rp_batch.spec import Ragged, Split, SplitRule

__all__ = ["Rules", "place", "spec_for_each"]

# One entry per leaf; None means the default rule.
Rules: TypeAlias = list[SplitRule | None]


def place(spec: Any, value: Any, where: str) -> Rules:
    """Return the split rule that a spec gives each leaf of a value; None for the default rule."""
    if spec is None:
        return [None] * len(tree.flatten(value)[0])
    rule = specs.split_rule(spec, where)
    node = tree.children(value)
    if node is None and rule is not None:
        return [rule]
    if node is None or (rule is None and tree.children(spec) is None):
        raise specs.unusable(spec, where, merging=False)
    return _at_each_child(spec, node, where) if rule is None else _spread(rule, value)


def _at_each_child(spec: Any, value: tree.Children, where: str) -> Rules:
    children = zip(spec_for_each(spec, value, where), value.values, value.steps, strict=True)
    return [rule for inner, child, step in children for rule in place(inner, child, where + step)]


def _spread(rule: SplitRule, value: Any) -> Rules:
    """Apply a rule to a whole node. Leaves that it cannot split get the default rule."""
    leaves, _ = tree.flatten(value)
    if not isinstance(rule, Split | Ragged):
        return [rule] * len(leaves)
    return [rule if has_dimensions(item) else None for item in leaves]


def spec_for_each(spec: Any, value: tree.Children, where: str) -> list[Any]:
    """Return the spec for each child of a node: by name if the spec has names, else by position.

    A spec with names may omit some; an omitted name is None, the default rule.
    """
    node = tree.children(spec)
    if node is None:
        raise specs.unusable(spec, where, merging=False)
    if isinstance(spec, Mapping) or any(isinstance(name, str) for name in node.names):
        return _by_name(node, value, where)
    return _by_position(node, value, where)


def _by_position(spec: tree.Children, value: tree.Children, where: str) -> list[Any]:
    if len(spec.values) != len(value.values):
        raise SpecError(
            where,
            f"the spec must have {len(value.values)} entries, one for each value here, but has "
            f"{len(spec.values)}; write None for values that take the default rule",
        )
    return list(spec.values)


def _by_name(spec: tree.Children, value: tree.Children, where: str) -> list[Any]:
    given = dict(zip(spec.names, spec.values, strict=True))
    for name in given:
        if name not in value.names:
            raise SpecError(
                where,
                f"the spec must use the names of this value, {_listed(value)}, but has {name!r}; correct the name",
            )
    return [given.get(name) for name in value.names]


def _listed(value: tree.Children) -> str:
    return ", ".join(map(repr, value.names)) or "nothing"
