"""A module whose layers an engine trains, saved under the names of its own state dict."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rp_engine import Runtime
from torch import nn

from rp_checkpoint.model.facts import ModelFacts, class_name
from rp_checkpoint.model.layout import CheckpointLayout, layout_of
from rp_checkpoint.model.saveable import SaveableModel


@dataclass(frozen=True, slots=True)
class PlainModel:
    """A `Saveable` for whoever drives rp-engine without a wrapper. `module`: its parameters are the engine's."""

    runtime: Runtime
    whole: SaveableModel
    module: nn.Module

    def checkpoint_layout(self) -> CheckpointLayout:
        """Return the names of its state dict."""
        return layout_of(self.module)

    def checkpoint_facts(self) -> ModelFacts:
        """Return its class."""
        return ModelFacts(class_name(self.module))

    def take_settings(self, settings: Mapping[str, Mapping[str, Any]]) -> None:
        """Take none: whoever drives the engine decides."""
