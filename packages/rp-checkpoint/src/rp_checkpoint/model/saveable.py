"""The models that can be saved, by what a checkpoint asks of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

from rp_engine import Runtime
from rp_engine.saving import ModelBetweenSteps, ModelTensor
from rp_optim.jobs import Outcome

from rp_checkpoint.model.facts import ModelFacts
from rp_checkpoint.model.layout import CheckpointLayout


class LoadPlaces(Protocol):
    """The places that a checkpoint is loaded into, while the caller holds the launch lock.

    Call `begin`, `refuse_training`, write weights and masters, then `end`. `is_behind`: see `ModelBetweenSteps`.
    """

    def begin(self, *, is_behind: bool) -> tuple[ModelTensor, ...]:
        """Wait for all work, and return the places."""
        ...

    def refuse_training(self, *, is_behind: bool) -> None:
        """Refuse to train until `end`, since the caller overwrites weights and masters."""
        ...

    def end(self, *, is_behind: bool) -> None:
        """Go on from what the caller has written."""
        ...


class SaveableModel(Protocol):
    """A whole model between two steps, as `rp_engine.WholeModel` has it."""

    @property
    def restoring(self) -> LoadPlaces:
        """The places that a checkpoint is loaded into."""
        ...

    def capture(
        self, read: Callable[[Callable[[], ModelBetweenSteps]], None], note: Callable[[Outcome[None]], None]
    ) -> Outcome[None]:
        """Queue a reader behind the steps launched so far; the next step waits until it has returned."""
        ...


@runtime_checkable
class Saveable(Protocol):
    """A model that checkpoints are written of and loaded into: `PlainModel`, and roundpipe's wrapped models."""

    @property
    def runtime(self) -> Runtime:
        """The devices and threads that run it."""
        ...

    @property
    def whole(self) -> SaveableModel:
        """Its weights, masters and buffers between two steps."""
        ...

    def checkpoint_layout(self) -> CheckpointLayout:
        """Return the names of its tensors, in the model and in files."""
        ...

    def checkpoint_facts(self) -> ModelFacts:
        """Return how it was trained."""
        ...

    def take_settings(self, settings: Mapping[str, Mapping[str, Any]]) -> None:
        """Go on as was decided in the training of a checkpoint that is loaded; called before anything else is.

        `settings`: its `PartFacts.settings`, by part. Raises `CheckpointMismatch` if it cannot.
        """
        ...


def check_saveable(model: object) -> None:
    """Raise `TypeError` for what cannot be saved, such as a model that was not wrapped."""
    # A class has the names of its objects.
    if isinstance(model, type) or not isinstance(model, Saveable):
        raise TypeError(
            f"model must be a RoundPipe or AutoRoundPipe, but is a {type(model).__name__}; wrap it first"
        )
