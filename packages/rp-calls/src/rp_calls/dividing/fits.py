"""How the outputs of microbatches are compared with those of the whole batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import rp_batch
import torch

from rp_calls.dividing.rows import RowKey, Rows, whole_shape

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
) -> str | None:
    """Check that each tensor of the whole is its parts, one after another, where these have as many rows.

    There rows must have one shape: as many columns as there are samples, for example, are no samples' own. Other
    outputs, such as losses, say nothing: what microbatches contribute to them is up to the model. But if it
    `is_one_layer`, whose input shows nothing either, and has no others, they must be the parts' sum or mean.

    >>> whole, part = {("output", ()): torch.arange(4.0)}, {("output", ()): torch.arange(2.0)}
    >>> fit_rows(False, whole, [part, part], (2, 2), lambda _: 0.0)
    Traceback (most recent call last):
    rp_batch.errors.MergeError: output: differs from its parts by 1

    Returns why default rules do not make the whole's outputs of the parts', for calls that return them; None if
    they do.
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
    returned = (place for place in others if place[0].startswith("output"))
    reasons = (
        _why_not_merged(place, whole[place], [output.get(place) for output in outputs], sizes, tolerance)
        for place in returned
    )
    return next((reason for reason in reasons if reason is not None), None)


def _refuse_other_shapes(whole: Rows, outputs: Sequence[Rows]) -> None:
    """Refuse rows of other shapes in parts, where a place of the whole has as many rows as the parts together."""
    found = [{path: (len(rows), shape) for (path, shape), rows in output.items()} for output in outputs]
    for (path, shape), rows in whole.items():
        parts = [output.get(path, (0, shape)) for output in found]
        if sum(length for length, _ in parts) == len(rows) and any(own != shape for _, own in parts):
            shapes = ", ".join(str(whole_shape(*part)) for part in parts)
            raise rp_batch.MergeError(
                path, f"has the shape {whole_shape(len(rows), shape)}, and its parts have {shapes}"
            )


def _why_not_merged(
    place: RowKey,
    whole: torch.Tensor,
    parts: Sequence[torch.Tensor | None],
    sizes: Sequence[int],
    tolerance: Tolerance,
) -> str | None:
    """Return why default rules, which average single numbers, do not make this output of its parts."""
    path, shape = place
    there = [part for part in parts if part is not None]
    if shape is not None or len(there) < len(parts):
        found = whole_shape(len(whole), shape)
        return f"{path}: has the shape {found}, which is not that of its parts, one after another"
    average = rp_batch.merge(there, rp_batch.Mean(), sizes=sizes)
    found = rp_batch.distance(whole.to(average.dtype), average)
    return f"{path}: is off by {found:.2g} from the mean of its parts" if found > tolerance(whole) else None


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
