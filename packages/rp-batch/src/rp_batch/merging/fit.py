"""Find out, from the values of a whole output and of its parts, how the parts are merged to the whole."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from rp_batch import tree
from rp_batch.arrays import is_array
from rp_batch.errors import MergeError
from rp_batch.merging.align import aligned
from rp_batch.merging.combine import Misfit, brief, combine
from rp_batch.merging.distance import distance
from rp_batch.same import same
from rp_batch.sizes import read_sizes
from rp_batch.spec import Concat, Equal, Mean, MergeRule, Sum

__all__ = ["fit"]


def fit(
    whole: Any,
    parts: Sequence[Any],
    sizes: Sequence[int],
    *,
    tolerance: Callable[[torch.Tensor], float] = lambda _: 0.0,
    name: str = "output",
) -> Any:
    """Return the spec with which `merge` makes the whole from its parts.

    >>> whole = {"states": torch.arange(8).view(2, 4), "count": 4}
    >>> parts = [{"states": whole["states"][:, :3], "count": 3}, {"states": whole["states"][:, 3:], "count": 1}]
    >>> fit(whole, parts, sizes=(3, 1))
    {'states': Concat(dim=1), 'count': Sum()}

    `sizes`: the sizes of the parts. `tolerance`: how far a tensor, of the whole, may be from its parts, in the
    terms of `distance`.

    Raises `MergeError` if no spec does.
    """
    sizes = read_sizes(sizes, len(parts))
    leaves, treedef = tree.flatten_named(whole, name)
    rows = [aligned(whole, part, name, index) for index, part in enumerate(parts)]
    columns = zip(leaves, zip(*rows, strict=True), strict=True)
    rules: list[MergeRule] = []
    for index, (leaf, column) in enumerate(columns):
        try:
            rules.append(_rule(leaf, column, sizes, tolerance))
        except Misfit as error:
            raise MergeError(tree.paths_of(treedef, name)[index], str(error)) from None
    return tree.unflatten(treedef, rules)


def _rule(
    whole: Any, parts: Sequence[Any], sizes: Sequence[int], tolerance: Callable[[torch.Tensor], float]
) -> MergeRule:
    if not (isinstance(whole, torch.Tensor) or is_array(whole)):
        return _rule_of_objects(whole, parts, sizes)
    if not all(type(part) is type(whole) and part.dtype == whole.dtype for part in parts):
        raise Misfit(f"the whole has {brief(whole)}, but the parts have {', '.join(map(brief, parts))}")
    is_tensor = isinstance(whole, torch.Tensor)
    allowed, least = tolerance(whole) if is_tensor else 0.0, math.inf
    for rule in _candidates(whole, parts, sizes):
        try:
            merged = combine(rule, parts, sizes, sizes)
        except (Misfit, RuntimeError):
            continue
        dim = rule.dim if isinstance(rule, Concat) else None
        found = distance(whole, merged, dim) if is_tensor else (0.0 if same(whole, merged) else math.inf)
        if found <= allowed:
            return rule
        least = min(least, found)
    raise _differs(whole, parts, least)


def _rule_of_objects(whole: Any, parts: Sequence[Any], sizes: Sequence[int]) -> MergeRule:
    if all(same(whole, part) for part in parts):
        return Equal()
    if type(whole) in (int, float) and all(type(part) is type(whole) for part in parts):
        for rule in (Sum(), Mean()):
            if math.isclose(combine(rule, parts, sizes), whole, rel_tol=1e-6):
                return rule
    raise Misfit(f"the whole has {brief(whole)}, but the parts have {', '.join(map(brief, parts))}")


def _candidates(whole: Any, parts: Sequence[Any], sizes: Sequence[int]) -> Iterator[Concat | Equal | Mean | Sum]:
    """Yield the rules that give the shape of the whole, the likeliest first."""
    if any(part.ndim != whole.ndim for part in parts):
        return
    if all(part.shape == whole.shape for part in parts) and (len(parts) > 1 or not whole.ndim):
        # Equality first: of its rule alone a later violation shows.
        yield from (Equal(), Mean(), Sum())
    for dim in range(whole.ndim):
        if sum(part.shape[dim] for part in parts) == whole.shape[dim]:
            yield Concat(dim)
            if _is_multiple([part.shape[dim] for part in parts], sizes):
                yield Concat(dim, inner=True)


def _is_multiple(lengths: Sequence[int], sizes: Sequence[int]) -> bool:
    """Return whether each length is the same multiple of its size, and more than it."""
    factor = lengths[0] // max(sizes[0], 1)
    return factor > 1 and all(length == factor * size for length, size in zip(lengths, sizes, strict=True))


def _differs(whole: Any, parts: Sequence[Any], least: float) -> Misfit:
    shapes = ", ".join(str(tuple(part.shape)) for part in parts)
    how = "their shapes do not add up to it" if least == math.inf else f"merged they differ from it by {least:.2g}"
    return Misfit(f"the whole has the shape {tuple(whole.shape)} and its parts have {shapes}, but {how}")
