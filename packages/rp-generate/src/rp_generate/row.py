"""What generation asks of a row of layers that takes key-value caches, and of whoever divides its calls."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

import torch


class GeneratingLayers(Protocol):
    """What a row of layers that takes caches knows of them.

    `cache_arguments`: names of arguments of forward that hold one. `main_arguments`: names of those whose first
    dimension is the batch. `whole_arguments`: of those that have no such dimension. `image_arguments`: of those
    that hold images, or describe them. `training`: the layers' flag.
    """

    cache_arguments: Sequence[str]
    main_arguments: Sequence[str]
    whole_arguments: Collection[str]
    image_arguments: Collection[str]
    training: bool

    def sample_dimensions(self, arguments: Mapping[str, Any]) -> Mapping[str, int]:
        """Return which dimension is the batch, by name of the arguments in which it is not the first."""
        ...

    def entries_of_samples(self, arguments: Mapping[str, Any]) -> Mapping[str, Sequence[int]]:
        """Return how many entries each sample has, by name of the arguments that hold images."""
        ...

    def cache_tells_samples(self, cache: Any) -> bool:
        """Return whether samples of a cache can be divided and chosen."""
        ...

    def choose_in_cache(self, cache: Any, index: torch.Tensor) -> None:
        """Let a cache hold the samples of this index, of those that it has, in their order."""
        ...


class DividesCaches(Protocol):
    """Who divides the caches of a call's microbatches, before forward is called: `rp_calls.WithCaches`."""

    def divide(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, is_by_sample: bool = False) -> object:
        """Divide the caches among the arguments of a call. `is_by_sample`: the call has one row a sample."""
        ...
