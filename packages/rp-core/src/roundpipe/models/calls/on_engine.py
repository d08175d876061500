"""A wrapped model whose calls one engine runs: what it tells of its plans, its times and what was decided."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rp_checkpoint import ModelFacts
from rp_engine import CallTime, Engine, LaunchDecision, RoundPipeRunConfig
from rp_packing import Decision
from rp_sched import LayerCost, Mode

from roundpipe.models.base import RoundPipeBase
from roundpipe.models.saved.facts import facts_of, take_settings


class OnOneEngine(RoundPipeBase):
    """Base of `RoundPipe`. `model_run_config`: settings of all calls."""

    model_run_config: RoundPipeRunConfig
    _engine: Engine

    @property
    def engine(self) -> Engine:
        """The engine that runs the calls; for `AutoRoundPipe` models that contain this one."""
        return self._engine

    def checkpoint_facts(self) -> ModelFacts:
        """Return how the model was trained, for its checkpoints."""
        return facts_of(self.named_model, self.optim_dtype, {"": self})

    def take_settings(self, settings: Mapping[str, Mapping[str, Any]]) -> None:
        """Go on as was decided in the training of a checkpoint that is loaded. `settings`: its, by part."""
        take_settings({"": self}, settings)

    @property
    def compute_decision(self) -> Decision | None:
        """How linear layers multiply with ``compute="auto"``, and why, in words: its `recipe` and `reason`.

        >>> from roundpipe import RoundPipe, Runtime
        >>> from torch import nn
        >>> with Runtime("cpu:1") as runtime:
        ...     RoundPipe(nn.Linear(4, 4), runtime=runtime, compute="auto").compute_decision

        None until the first call that trains has decided it, and in models that were never told ``"auto"``.
        """
        return self._engine.auto_compute.decision

    @property
    def launch_decision(self) -> LaunchDecision | None:
        """Whether graphs launch the last training call's kind with ``launch="auto"``, and why, in words.

        >>> from roundpipe import RoundPipe, Runtime
        >>> from torch import nn
        >>> with Runtime("cpu:1") as runtime:
        ...     RoundPipe(nn.Linear(4, 4), runtime=runtime).launch_decision

        None until the first nine calls are measured, and on CPU devices, which have no choice.
        """
        return self._engine.launch_decision

    @property
    def num_microbatch(self) -> int | None:
        """Microbatches per batch in `model_run_config`; None: chosen at the first call, or devices + 1."""
        count = self.model_run_config.num_microbatch
        return None if count == "auto" else count

    def layer_costs(self, run_type: Mode = "fused") -> list[LayerCost]:
        """Return the planner's cost of each layer: measured in calls of this type, else guessed from sizes."""
        return self._engine.layer_costs(run_type)

    def call_times(self) -> list[CallTime]:
        """Return what the latest plan of each kind of call promises that a call takes, and what calls took.

        >>> from roundpipe import RoundPipe, Runtime
        >>> from torch import nn
        >>> with Runtime("cpu:1") as runtime:
        ...     RoundPipe(nn.Linear(4, 4), runtime=runtime).call_times()
        []

        Promises are simulated when this is called. Calls count once they are over: ask after `synchronize()`.
        """
        return self._engine.call_times()
