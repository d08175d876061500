"""Rows of a loop's batch that forward does not compute: prompts that repeat, and samples that have ended."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from rp_generate.by_samples import BySamples
from rp_generate.row import GeneratingLayers

# So many of the rows must have ended before they leave: those that stay are copied then.
_LEAVING_SHARE = 1 / 8


@dataclass(frozen=True, slots=True)
class Chosen:
    """A call with some of its rows. `whole`: makes of its output the output of all rows."""

    kwargs: dict[str, Any]
    whole: Callable[[Any], Any]


class FewerRows:
    """Chooses the rows of each call of a loop, and lets caches hold those alone.

    Prompts that follow each other and are the same, as those of one sample's beams or sequences, are computed
    once; then their keys are repeated. Samples that have ended leave, if the loop has said which have
    (`note_ended`). Their logits, which it does not read, are zeros, so that it draws as many random numbers.

    Nothing is chosen for layers in training mode, whose dropout differs from row to row, in calls with results
    beside logits, and where an argument's first dimension is not the batch.

    `make_room`: is told, before a cache grows, how many times as large it becomes, and how much more rows the next
    call has than the present one's rows have tokens.
    """

    def __init__(self, row: GeneratingLayers, make_room: Callable[[float, float], None]) -> None:
        self._row = row
        self._make_room = make_room
        # (batch,), of all rows; None: it is not known of any.
        self._ended: Tensor | None = None
        # Which rows a cache holds of those of the batch, if not all. With the cache, whose `id` may come again.
        self._held: dict[int, tuple[Any, Tensor]] = {}

    def note_ended(self, ended: Tensor) -> None:
        """Note which rows need no more tokens. `ended`: (batch,) bool."""
        self._ended = ended if self._ended is None else self._ended | ended

    def of_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Chosen:
        """Return a call with the rows that must be computed."""
        caches = [kwargs[name] for name in self._row.cache_arguments if kwargs.get(name) is not None]
        num_rows = None if args else self._num_rows(kwargs)
        if num_rows is None or len(caches) != 1 or not self._row.cache_tells_samples(caches[0]):
            return Chosen(kwargs, _as_it_is)
        cache = caches[0]
        if _is_empty(cache):
            return self._once(cache, kwargs, num_rows)
        self._let_go(cache, num_rows)
        held = self._held.get(id(cache))
        if held is None:
            return Chosen(kwargs, _as_it_is)
        rows = held[1]

        def whole(output: Any) -> Any:
            logits = output.logits
            full = logits.new_zeros(num_rows, *logits.shape[1:])
            output.logits = full.index_copy(0, rows.to(logits.device), logits)
            return output

        return Chosen(BySamples(self._row, kwargs).chosen(rows, num_rows), whole)

    def _once(self, cache: Any, kwargs: dict[str, Any], num_rows: int) -> Chosen:
        """A prompt's call with one row of those that are the same, if there are such."""
        arguments = BySamples(self._row, kwargs)
        again = arguments.repeats(num_rows)
        if not again.any():
            return Chosen(kwargs, _as_it_is)
        is_first = torch.cat([torch.ones(1, dtype=torch.bool), ~again])
        index = is_first.cumsum(0) - 1

        def whole(output: Any) -> Any:
            growth = num_rows / int(is_first.sum())
            # Caches of recurrent layers alone do not tell their length.
            self._make_room(growth, growth / self._main(kwargs)[0].shape[1])
            self._row.choose_in_cache(cache, index)
            output.logits = output.logits[index.to(output.logits.device)]
            return output

        return Chosen(arguments.chosen(is_first.nonzero()[:, 0], num_rows), whole)

    def _let_go(self, cache: Any, num_rows: int) -> None:
        """Remove samples from a cache that have ended, once they are many."""
        if self._ended is None or len(self._ended) != num_rows:
            return
        _, rows = self._held.get(id(cache), (cache, torch.arange(num_rows)))
        stays = ~self._ended.cpu()[rows]
        if stays.any() and int((~stays).sum()) >= max(_LEAVING_SHARE * len(rows), 1):
            self._row.choose_in_cache(cache, stays.nonzero()[:, 0])
            self._held[id(cache)] = cache, rows[stays]

    def _num_rows(self, kwargs: Mapping[str, Any]) -> int | None:
        """The number of rows of a call in which rows can be chosen; None of another one."""
        asks = any(name.startswith("output_") and value for name, value in kwargs.items())
        main = self._main(kwargs)
        if self._row.training or asks or not main:
            return None
        found = {len(tensor) if tensor.ndim else -1 for tensor in BySamples(self._row, kwargs).tensors}
        return found.pop() if len(found) == 1 else None

    def _main(self, kwargs: Mapping[str, Any]) -> list[Tensor]:
        return [kwargs[name] for name in self._row.main_arguments if kwargs.get(name) is not None]


def recorded(kwargs: Mapping[str, Any], note: Callable[[Tensor], None]) -> dict[str, Any]:
    """Return the arguments of a sampling loop, whose criteria for stopping note which samples have ended.

    Samples that have ended go on as padding only where there is a criterion of tokens that end a text; and a cache
    that the loop returns has all of them. Otherwise nothing is noted.
    """
    criteria, config = kwargs.get("stopping_criteria"), kwargs.get("generation_config")
    is_returned = getattr(config, "return_dict_in_generate", True)
    if is_returned or criteria is None or not any(hasattr(each, "eos_token_id") for each in criteria):
        return dict(kwargs)

    def call(self: Any, *args: Any, **options: Any) -> Tensor:
        ended = kind.__call__(self, *args, **options)
        note(ended)
        return ended

    # transformers' class is a list that is called.
    kind = cast("Any", type(criteria))
    noting = type(kind.__name__, (kind,), {"__call__": call})
    return {**kwargs, "stopping_criteria": noting(criteria)}


def _is_empty(cache: Any) -> bool:
    try:
        return int(cache.get_seq_length()) == 0
    except ValueError:
        # Of recurrent layers alone.
        return not cache.has_previous_state()


def _as_it_is(output: Any) -> Any:
    return output
