"""`CachedCalls`: calls with a key-value cache, and the `generate` of users' models that makes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from rp_calls import CachingLayers, WithCaches, num_microbatches_of_state, placed
from rp_engine import Arrivals, Engine, RoundPipeRunConfig, Runtime
from rp_generate import GeneratingLayers, generated
from torch import nn

from roundpipe.models.wrapped.options import given_config


class CachedCalls:
    """Calls of the layers `row` on an engine, in which they write a cache that stays where they run."""

    def __init__(self, row: nn.Module, engine: Engine, runtime: Runtime) -> None:
        self._row = row
        self._aside = engine.aside
        self._backend = runtime.backend

    @property
    def arguments(self) -> tuple[str, ...]:
        """Names of arguments that hold a key-value cache; empty for rows that take none."""
        return getattr(self._row, "cache_arguments", ())

    def is_one(self, kwargs: Mapping[str, Any]) -> bool:
        """Return whether a call with these arguments has a cache."""
        return any(kwargs.get(name) is not None for name in self.arguments)

    def forward(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        config: RoundPipeRunConfig,
        count: int,
        *,
        for_loop: bool,
    ) -> Any:
        """Return the outputs. `count`: of microbatches. `for_loop`: `generate` makes the call."""
        divided = WithCaches(cast("CachingLayers", self._row), count, config.split_input)
        parts = divided.split(args, kwargs)
        outputs = self._aside.forward_with_state(parts, Arrivals(self._backend, (args, kwargs)), config)
        return placed(divided.merge(outputs, parts, kwargs, for_loop=for_loop), config)

    def generate(
        self, model: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run `generate` of the user's own model with this forward, which calls the wrapped model."""
        device = self._aside.state_device
        given = given_config("roundpipe_run_config", kwargs.pop("roundpipe_run_config", None))
        count = num_microbatches_of_state(given)
        run = partial(forward, roundpipe_run_config=replace(given, output_device=device, num_microbatch=count))
        # Each token has keys of another length, which layers would be compiled for anew.
        with torch.no_grad(), torch.compiler.set_stance("force_eager"), self._aside.keeping_weights():
            row, make_room = cast("GeneratingLayers", self._row), self._aside.make_room
            dividing = partial(WithCaches, cast("CachingLayers", self._row), count, None)
            return generated(model, run, device, row, dividing, make_room, args, kwargs)


def refuse_gradients(config: RoundPipeRunConfig) -> None:
    """Raise `ValueError` if a call with a cache would have gradients."""
    if torch.is_grad_enabled() if config.requires_grad is None else config.requires_grad:
        raise ValueError(
            "a key-value cache must not be given in a call with gradients: layers write it, and would write "
            "it again when they are recomputed; call the model under torch.no_grad()"
        )
