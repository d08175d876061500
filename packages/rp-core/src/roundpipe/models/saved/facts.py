"""How a wrapped model was trained, for its checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from rp_checkpoint import ModelFacts, PartFacts
from rp_checkpoint.model.facts import class_name
from rp_engine import Engine, RoundPipeRunConfig, Runtime
from torch import nn

# Settings of calls that a checkpoint has.
_SETTINGS = ("preserve_rng_state", "recompute_grain", "num_microbatch")


class Planned(Protocol):
    """A model whose calls have settings and plans: a `RoundPipe`."""

    model_run_config: RoundPipeRunConfig
    runtime: Runtime

    @property
    def engine(self) -> Engine:
        """What launches its calls."""
        ...


def facts_of(module: nn.Module, optim_dtype: torch.dtype | None, parts: Mapping[str, Planned]) -> ModelFacts:
    """Return the facts of the user's own model and of the parts that it runs in."""
    return ModelFacts(class_name(module), optim_dtype, {name: _part(part) for name, part in parts.items()})


def _part(part: Planned) -> PartFacts:
    settings = {name: getattr(part.model_run_config, name) for name in _SETTINGS}
    return PartFacts(settings, len(part.runtime.lanes), part.engine.plans())
