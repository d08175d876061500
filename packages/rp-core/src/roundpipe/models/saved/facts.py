"""How a wrapped model was trained, for its checkpoints and from them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from rp_checkpoint import ModelFacts, PartFacts
from rp_checkpoint.errors import CheckpointMismatch
from rp_checkpoint.model.facts import class_name
from rp_engine import Engine, RoundPipeRunConfig, Runtime
from rp_packing import Decision
from torch import nn

# Settings of calls that a checkpoint has.
_SETTINGS = ("preserve_rng_state", "recompute_grain", "num_microbatch")
# Beside them, what ``compute="auto"`` was decided to be.
_DECISION = "compute"


class PlannedModel(Protocol):
    """A model whose calls have settings and plans: a `RoundPipe`."""

    model_run_config: RoundPipeRunConfig
    runtime: Runtime

    @property
    def engine(self) -> Engine:
        """What launches its calls."""
        ...


def facts_of(module: nn.Module, optim_dtype: torch.dtype | None, parts: Mapping[str, PlannedModel]) -> ModelFacts:
    """Return the facts of the user's own model and of the parts that it runs in."""
    return ModelFacts(class_name(module), optim_dtype, {name: _part(part) for name, part in parts.items()})


def _part(part: PlannedModel) -> PartFacts:
    settings = {name: getattr(part.model_run_config, name) for name in _SETTINGS}
    decision = part.engine.auto_compute.decision
    settings[_DECISION] = None if decision is None else decision.encoded()
    return PartFacts(settings, len(part.runtime.lanes), part.engine.plans())


def take_settings(parts: Mapping[str, PlannedModel], settings: Mapping[str, Mapping[str, Any]]) -> None:
    """Have the parts go on as was decided in the training that a checkpoint is of. `settings`: its, by part.

    Raises `CheckpointMismatch` if a device cannot.
    """
    found = {name: settings.get(name, {}).get(_DECISION) for name in parts}
    decisions = {name: Decision.decoded(one) for name, one in found.items() if one is not None}
    for name, decision in decisions.items():
        _check_decision(parts[name], decision)
    for name, decision in decisions.items():
        parts[name].engine.auto_compute.note(decision)


def _check_decision(part: PlannedModel, decision: Decision) -> None:
    refusal = part.engine.auto_compute.refusal()
    if part.model_run_config.compute == "auto" and decision.recipe is not None and refusal is not None:
        raise CheckpointMismatch(
            f"this checkpoint's training multiplied in FP8, as compute='auto' had decided, but {refusal}; wrap "
            "the model with compute='bf16' to go on in bf16"
        )
