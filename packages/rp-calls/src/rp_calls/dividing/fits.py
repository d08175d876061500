"""How the outputs of microbatches are compared with those of the whole batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import rp_batch
import torch

from rp_calls.dividing.rows import RowKey, Rows

Tolerance = Callable[[torch.Tensor], float]


def fit_any(
    merge_output: Any,
    collects: bool,
    whole: Any,
    outputs: Sequence[Any],
    sizes: Sequence[int],
    tolerance: Tolerance,
) -> Any:
    """Return the spec that merges the outputs to the whole; None if `merge_output` of the settings says how.

    `collects`: outputs are pairs, with what hooks have collected.

    >>> whole = torch.arange(4.0)
    >>> fit_any(None, False, whole, [whole[:2], whole[2:]], (2, 2), lambda _: 0.0)
    Concat(dim=0)

    Raises `rp_batch.MergeError` if the outputs do not make the whole.
    """
    if merge_output is None or merge_output is False:
        return rp_batch.fit(whole, outputs, sizes, tolerance=tolerance)
    if collects:
        whole, outputs = whole[0], [output for output, _ in outputs]
    merged = rp_batch.merge(outputs, merge_output, sizes=sizes)
    in_one = rp_batch.merge([whole], merge_output, sizes=[sum(sizes)])
    rp_batch.fit(in_one, [merged], [sum(sizes)], tolerance=tolerance)
    return None


def fit_rows(
    is_one_layer: bool, whole: Rows, outputs: Sequence[Rows], sizes: Sequence[int], tolerance: Tolerance
) -> None:
    """Check that each tensor of the whole is its parts, one after another, where these have as many rows.

    There rows must have one shape: as many columns as there are samples, for example, are no samples' own. Other
    outputs, such as losses, say nothing: what microbatches contribute to them is up to the model. But if it
    `is_one_layer`, whose input shows nothing either, and has no others, they must be the parts' sum or mean.

    >>> whole, part = {("output", ()): torch.arange(4.0)}, {("output", ()): torch.arange(2.0)}
    >>> fit_rows(False, whole, [part, part], (2, 2), lambda _: 0.0)
    Traceback (most recent call last):
    rp_batch.errors.MergeError: output: differs from its parts by 1
    """
    _refuse_other_shapes(whole, outputs)
    others: list[RowKey] = []
    for place, rows in whole.items():
        parts = [output[place] for output in outputs if place in output]
        if len(parts) < len(outputs) or sum(map(len, parts)) != len(rows):
            others.append(place)
            continue
        found = rp_batch.distance(rows, torch.cat(parts), 0)
        if found > tolerance(rows):
            raise rp_batch.MergeError(place[0], f"differs from its parts by {found:.2g}")
    if is_one_layer and not any(place[0].startswith("output") for place in whole.keys() - others):
        for place in others:
            _fit_sum(place, whole[place], [output.get(place) for output in outputs], sizes, tolerance)


def _refuse_other_shapes(whole: Rows, outputs: Sequence[Rows]) -> None:
    """Refuse rows of other shapes in parts, where a place of the whole has as many rows as the parts together."""
    found = [{path: (shape, len(rows)) for (path, shape), rows in output.items()} for output in outputs]
    for (path, shape), rows in whole.items():
        parts = [output.get(path, (shape, 0)) for output in found]
        if sum(length for _, length in parts) == len(rows) and any(own != shape for own, _ in parts):
            shapes = ", ".join(str((length, *own)) for own, length in parts)
            raise rp_batch.MergeError(path, f"has the shape {(len(rows), *shape)}, and its parts have {shapes}")


def _fit_sum(
    place: RowKey,
    whole: torch.Tensor,
    parts: Sequence[torch.Tensor | None],
    sizes: Sequence[int],
    tolerance: Tolerance,
) -> None:
    if any(part is None or part.shape != whole.shape for part in parts) or not whole.is_floating_point():
        return
    merged = [rp_batch.merge(parts, rule, sizes=sizes) for rule in (rp_batch.Mean(), rp_batch.Sum())]
    found = min(rp_batch.distance(whole, one) for one in merged)
    if found > tolerance(whole):
        raise rp_batch.MergeError(place[0], f"is off by {found:.2g} from the mean and the sum of its parts")
