"""A call's arguments by samples: tensors with a row for each, and images, of which a sample has any number."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, cast

import rp_batch
import torch
from torch import Tensor

from rp_generate.row import GeneratingLayers


class BySamples:
    """The arguments of one call of a row.

    `tensors`: those with a row for each sample, which is their first dimension here. `images`: what each sample
    has of every argument that holds images, by its name.

    Raises what the row raises for images that do not fit the samples.
    """

    def __init__(self, row: GeneratingLayers, kwargs: Mapping[str, Any]) -> None:
        self._kwargs = kwargs
        self._dims = row.sample_dimensions(kwargs)
        self.images = {
            name: _apart(kwargs[name], counts, self._dims.get(name, 0))
            for name, counts in row.entries_of_samples(kwargs).items()
        }
        self._others = kwargs.keys() - self.images.keys() - set(row.whole_arguments)
        self.tensors = [
            leaf.movedim(self._dims.get(name, 0), 0)
            for name, value in kwargs.items()
            if name in self._others
            for leaf in rp_batch.flatten(value)[0]
            if isinstance(leaf, Tensor)
        ]

    def repeats(self, num_rows: int) -> Tensor:
        """Return which samples are the same as the one before them: (num_rows - 1,) bool, on the host."""
        found = torch.ones(num_rows - 1, dtype=torch.bool)
        for tensor in self.tensors:
            found &= (tensor[1:] == tensor[:-1]).flatten(1).all(1).cpu()
        for parts in self.images.values():
            found &= torch.tensor([torch.equal(*pair) for pair in zip(parts[1:], parts, strict=False)]) > 0
        return found

    def chosen(self, rows: Tensor, num_rows: int) -> dict[str, Any]:
        """Return the arguments with these samples, by index, in this order; what has no row for each stays."""

        def of_rows(leaf: Any, dim: int) -> Any:
            has_rows = isinstance(leaf, Tensor) and leaf.ndim > dim and leaf.shape[dim] == num_rows
            return leaf.index_select(dim, rows.to(leaf.device)) if has_rows else leaf

        return {
            name: self.images_of(rows)[name]
            if name in self.images
            else rp_batch.map_leaves(partial(of_rows, dim=self._dims.get(name, 0)), value)
            if name in self._others
            else value
            for name, value in self._kwargs.items()
        }

    def images_of(self, rows: Tensor) -> dict[str, Tensor]:
        """Return the images of these samples, in this order, by name of their argument. `rows`: indices."""
        order = cast("list[int]", rows.tolist())  # pyright: ignore[reportUnknownMemberType]
        return {
            name: torch.cat([parts[sample] for sample in order], self._dims.get(name, 0))
            for name, parts in self.images.items()
        }


def _apart(images: Tensor, counts: Sequence[int], dim: int) -> list[Tensor]:
    starts = accumulate(counts, initial=0)
    return [images.narrow(dim, start, count) for start, count in zip(starts, counts, strict=False)]
