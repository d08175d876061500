"""Calls of a row with a key-value cache: divided by samples, each microbatch with a cache of its own."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

import rp_batch
import torch
from rp_engine import RoundPipeRunConfig

from rp_calls.microbatching import declared_spec
from rp_calls.outputs import of_batch


class CachingLayers(Protocol):
    """What a row of layers that takes caches knows of them.

    `cache_arguments`: names of arguments of forward that hold one. `main_arguments`: names of those whose first
    dimension is the batch. `whole_arguments`: of those that have no such dimension. `training`: the layers' flag.
    """

    cache_arguments: Sequence[str]
    main_arguments: Sequence[str]
    whole_arguments: Collection[str]
    training: bool

    def sample_dimensions(self, arguments: Mapping[str, Any]) -> Mapping[str, int]:
        """Return which dimension is the batch, by name of the arguments in which it is not the first."""
        ...

    def cache_in_parts(self, cache: Any, sizes: Sequence[int]) -> list[Any]:
        """Return a cache for each microbatch; the cache stands for all of them from then on."""
        ...

    def cache_sizes(self, cache: Any) -> tuple[int, ...] | None:
        """Return the sizes of the microbatches that a cache is in; None: it is in one piece."""
        ...

    def cache_tells_samples(self, cache: Any) -> bool:
        """Return whether samples of a cache can be divided and chosen."""
        ...

    def choose_in_cache(self, cache: Any, index: torch.Tensor) -> None:
        """Let a cache hold the samples of this index, of those that it has, in their order."""
        ...


def num_microbatches_of_state(config: RoundPipeRunConfig) -> int:
    """Return in how many microbatches a call with a cache runs, by the call's own settings.

    >>> num_microbatches_of_state(RoundPipeRunConfig(num_microbatch="auto"))
    1
    """
    # More are for prompts whose activations do not fit. A token's call takes longer with more: it is bound by
    # launching and by reading weights, which each microbatch does anew.
    return config.num_microbatch if isinstance(config.num_microbatch, int) else 1


def sizes_by_samples(num_rows: int, count: int, rows_a_sample: int) -> tuple[int, ...]:
    """Return the sizes of microbatches, the rows of one sample together, such as its beams.

    >>> sizes_by_samples(10, 3, 2)
    (4, 4, 2)

    Raises `ValueError` unless there are so many rows a sample.
    """
    num_samples, rest = divmod(num_rows, rows_a_sample)
    if rest:
        raise ValueError(
            f"{num_rows} rows cannot be divided by samples of {rows_a_sample} beams; give num_microbatch=1"
        )
    count = max(min(count, num_samples), 1)
    least, more = divmod(num_samples, count)
    return tuple((least + (part < more)) * rows_a_sample for part in range(count))


class WithCaches:
    """Divides the calls of a row by samples, also the caches that they are given.

    `count`: of microbatches, at most one a sample. `rows_a_sample`: how many rows of the batch stay together.
    """

    def __init__(self, row: CachingLayers, count: int, split_input: Any = None, rows_a_sample: int = 1) -> None:
        self._row = row
        self._count = count
        self._split_input = split_input
        self._rows_a_sample = rows_a_sample

    def divide(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, is_by_sample: bool = False
    ) -> tuple[int, ...] | None:
        """Divide the caches among the arguments of a call; return the sizes of its microbatches.

        Caches that are divided already say how. None: there is one microbatch. `is_by_sample`: the call has one
        row a sample.
        """
        caches = self._caches(kwargs).values()
        held = [sizes for cache in caches if (sizes := self._row.cache_sizes(cache)) is not None]
        if held:
            sizes = held[0]
        elif self._count == 1 or (num_rows := self._num_rows(args, kwargs)) is None:
            return None
        else:
            sizes = sizes_by_samples(num_rows, self._count, 1 if is_by_sample else self._rows_a_sample)
        if len(sizes) == 1 and not held:
            return None
        for cache in caches:
            self._row.cache_in_parts(cache, sizes)
        return sizes

    def split(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> rp_batch.Parts[Any]:
        """Return the pairs (args, kwargs) of all microbatches, each with its own caches."""
        sizes = self.divide(args, kwargs)
        if sizes is None:
            return rp_batch.Parts([(args, kwargs)])
        apart = {
            name: rp_batch.Parts(self._row.cache_in_parts(cache, sizes), sizes=sizes)
            for name, cache in self._caches(kwargs).items()
        }
        return rp_batch.split((args, {**kwargs, **apart}), len(sizes), self._spec(kwargs))

    def merge(
        self,
        outputs: Sequence[Any],
        parts: rp_batch.Parts[Any],
        kwargs: Mapping[str, Any],
        *,
        for_loop: bool = False,
    ) -> Any:
        """Return the output of the batch, with the caches that the call was given.

        `for_loop`: the caller is the model's own `generate`, which reads logits and caches, and what it asks for:
        of the rest, such as lists with an entry for each image, microbatches may have other numbers.
        """
        if for_loop and not any(name.startswith("output_") and value for name, value in kwargs.items()):
            outputs = [_of_loop(output, self._row.cache_arguments) for output in outputs]
        given = {id(part[1][name]): cache for name, cache in self._caches(kwargs).items() for part in parts}
        whole = [rp_batch.map_leaves(lambda leaf: given.get(id(leaf), leaf), output) for output in outputs]
        return of_batch(whole, parts, self._row)

    def _caches(self, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        return {name: kwargs[name] for name in self._row.cache_arguments if kwargs.get(name) is not None}

    def _spec(self, kwargs: Mapping[str, Any]) -> Any:
        return declared_spec(self._row, kwargs) if self._split_input is None else self._split_input

    def _num_rows(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int | None:
        others = {name: value for name, value in kwargs.items() if name not in self._caches(kwargs)}
        return rp_batch.split((args, others), 1, self._spec(others)).batch_size


def _of_loop(output: Any, caches: Collection[str]) -> Any:
    """An output of transformers with its logits and caches alone."""
    return type(output)(**{name: value for name, value in output.items() if name == "logits" or name in caches})
