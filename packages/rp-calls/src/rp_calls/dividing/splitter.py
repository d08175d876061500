"""The division of a row's calls: as their settings say or, where these leave it open, as values show."""

from __future__ import annotations

from functools import partial
from typing import Any

import rp_batch
from rp_engine import Arrivals, Engine, RoundPipeRunConfig, Runtime
from rp_sched import Mode
from torch import nn

from rp_calls.dividing.fits import fit_rows
from rp_calls.dividing.trial_splitter import ROW, CallToSplit, TrialSplitter
from rp_calls.microbatching import (
    declared_spec,
    has_parts,
    in_one_piece,
    knows_batch,
    num_microbatches,
)


class CallSplitter:
    """Splits the arguments of one row's calls into microbatches. `model`: the row. `name`: in warnings."""

    def __init__(self, name: str, model: nn.Module, engine: Engine, runtime: Runtime) -> None:
        self._name = name
        self._engine = engine
        self.model = model
        self.runtime = runtime
        # None: the model says which of its arguments have samples first.
        self._trial_splitter = None if knows_batch(model) else TrialSplitter(engine, runtime, (model,), ROW)

    def split(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        arrivals: Arrivals,
        config: RoundPipeRunConfig,
        mode: Mode = "train",
        *,
        returns: bool = True,
    ) -> rp_batch.Parts[Any]:
        """Return the pairs (args, kwargs) of all microbatches.

        `mode`: of the call. `returns`: whether it returns outputs.
        """
        spec = declared_spec(self.model, kwargs) if config.split_input is None else config.split_input
        count = num_microbatches(self._engine, self.runtime, (args, kwargs), spec, config, mode)
        parts = rp_batch.split((args, kwargs), count, spec)
        arrivals.check(count, parts)
        if spec is None and len(parts) > 1:
            is_own = getattr(self.model, "own_loss", None) is not None
            merges = returns and config.merge_output is None and not is_own
            if not self._may_split(args, kwargs, len(parts), config, mode, merges=merges):
                return in_one_piece(self._name, (args, kwargs), config)
        return parts

    def _may_split(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        count: int,
        config: RoundPipeRunConfig,
        mode: Mode,
        *,
        merges: bool,
    ) -> bool:
        """Return whether a call gives the same split along the first dimension, as it has shown."""
        if self._trial_splitter is None or has_parts((args, kwargs)):
            return True
        found = rp_batch.infer(args, kwargs)
        assert found.batch_size is not None
        way = rp_batch.Way("inferred", 0, 0, "none")
        pattern = rp_batch.propose(args, kwargs).pattern
        proposals = rp_batch.Proposals(pattern, (rp_batch.Proposal(way, found.spec, found.batch_size),))
        fit = partial(fit_rows, len(self._engine.host.state.layers) == 1)
        asked = CallToSplit(
            self._name, None, config, (args, kwargs), lambda parts: parts, fit, is_loss=mode == "infer"
        )
        return self._trial_splitter.is_right(asked, proposals, count, merges=merges)
