"""User-written execution plans: which layers form each forward and backward stage."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol, overload, runtime_checkable

import rp_sched
from rp_sched import InvalidPlan, LayerCost, Limits, Mode, Plan, RoundRobin

from rp_engine.runtime.runtime import Runtime

# Share of a device's memory for weights and gradients; the rest is for activations.
MODEL_SHARE = 0.6


@runtime_checkable
class Plannable(Protocol):
    """The properties of a model that automatic planning needs. `RoundPipe` implements them."""

    @property
    def runtime(self) -> Runtime:
        """The devices that the model runs on."""
        ...

    @property
    def num_microbatch(self) -> int | None:
        """Microbatches per batch as configured; None: chosen at the first call, or number of devices + 1."""
        ...

    def layer_costs(self, run_type: Mode) -> list[LayerCost]:
        """Return the assumed cost of each layer."""
        ...


@dataclass(slots=True)
class ModelExecutePlan:
    """The stages that a model is divided into.

    `fwd_plan`: the forward stages, from the first layers up. `bwd_plan`: the backward stages, from the last layers
    down. In a ``forward_backward`` (run type ``"fused"``) the first backward stage also runs its layers forward.
    There `fwd_plan` ends where ``bwd_plan[0]`` starts. Such a plan also serves the model's other run types.

    >>> plan = ModelExecutePlan([range(0, 3)], [range(3, 5), range(0, 3)])
    >>> plan.check_valid(5, "fused")
    >>> plan.to_plan("train")
    Plan(F[0:3] F[3:5] B[3:5] B[0:3])

    Pass it to `RoundPipeRunConfig` as `execute_plan`.
    """

    fwd_plan: list[range] = field(default_factory=list[range])
    bwd_plan: list[range] = field(default_factory=list[range])

    @overload
    @classmethod
    def auto(
        cls,
        run_type: Mode,
        model: Plannable,
        /,
        *,
        min_stages: int | None = None,
        upper_threshold: float = 1.1,
        model_memory_limit: float | None = None,
    ) -> ModelExecutePlan: ...

    @overload
    @classmethod
    def auto(
        cls,
        run_type: Mode,
        /,
        *models: Plannable,
        min_stages: int | None = None,
        upper_threshold: float = 1.1,
        model_memory_limit: float | None = None,
    ) -> ModelExecutePlan | tuple[ModelExecutePlan, ...]: ...

    @classmethod
    def auto(
        cls,
        run_type: Mode,
        /,
        *models: Plannable,
        min_stages: int | None = None,
        upper_threshold: float = 1.1,
        model_memory_limit: float | None = None,
    ) -> ModelExecutePlan | tuple[ModelExecutePlan, ...]:
        """Plan stages of similar duration from the layer times known now; several models are planned together.

        Args:
            run_type: ``"infer"`` (no backward), ``"train"`` (`forward`, then ``backward()``) or ``"fused"``
                (`forward_backward`).
            models: `RoundPipe` models on the same runtime. One gives a plan; several give a tuple of plans, whose
                stages are balanced across the models.
            min_stages: least number of stages of all models together, if they have that many layers; default: the
                number of devices.
            upper_threshold: longest allowed stage, as a multiple of the slowest layer's time; at least 1.
            model_memory_limit: GB (10^9 bytes) of a device's memory for weights and gradients. A stage takes half
                of it at most, since the next stage is prefetched meanwhile. Default: 0.6 of the smallest device.

        >>> from torch import nn
        >>> from roundpipe import RoundPipe, Runtime
        >>> with Runtime("cpu:2") as runtime:
        ...     model = RoundPipe(nn.Sequential(*(nn.Linear(8, 8) for _ in range(6))), runtime=runtime)
        ...     ModelExecutePlan.auto("infer", model, upper_threshold=3.0)
        ModelExecutePlan(fwd_plan=[range(0, 3), range(3, 6)], bwd_plan=[])

        Raises `ValueError` or `TypeError` for invalid arguments, `rp_sched.Infeasible` if a layer exceeds the
        limit.
        """
        runtime = _shared_runtime(models)
        if model_memory_limit is None:
            smallest = min(use.total_bytes for use in runtime.memory())
            model_memory_limit = smallest * MODEL_SHARE / 1e9
        published = RoundRobin(
            min_stages=min_stages, upper_threshold=upper_threshold, model_memory_limit=model_memory_limit
        )
        plans = rp_sched.plan_together(
            *(model.layer_costs(run_type) for model in models),
            devices=len(runtime.lanes),
            microbatches=max(model.num_microbatch or len(runtime.lanes) + 1 for model in models),
            mode=run_type,
            limits=Limits(device_memory_bytes=max(int(model_memory_limit * 1e9), 2)),
            strategy=published,
        )
        converted = tuple(map(cls._of, plans))
        return converted[0] if len(converted) == 1 else converted

    @classmethod
    def _of(cls, plan: Plan) -> ModelExecutePlan:
        fused = [] if plan.fused is None else [plan.fused]
        return cls(list(plan.forward), [*fused, *plan.backward])

    def check_valid(self, num_layers: int, run_type: Mode) -> None:
        """Refuse a plan that does not run each of `num_layers` layers exactly once each way.

        >>> ModelExecutePlan([range(0, 2)]).check_valid(3, "infer")
        Traceback (most recent call last):
        rp_sched.errors.InvalidPlan: ModelExecutePlan(fwd_plan=[range(0, 2)], bwd_plan=[]) ...

        Raises `rp_sched.InvalidPlan`, a `ValueError`, and `ValueError` for a run type that does not exist.
        """
        try:
            self.to_plan(run_type).check(num_layers, run_type)
        except InvalidPlan as error:
            raise InvalidPlan(
                f"{self!r} cannot run {run_type!r} calls of {num_layers} layers: {error} "
                "(forward is fwd_plan; fused is the first stage of bwd_plan, backward the others)"
            ) from error

    def to_plan(self, run_type: Mode) -> Plan:
        """Convert to an `rp_sched.Plan` with the same stages."""
        # `Plan` checks that both lists hold ranges, which the code below relies on.
        whole = Plan(tuple(self.fwd_plan), None, tuple(self.bwd_plan))
        if run_type == "fused":
            fused = self.bwd_plan[0] if self.bwd_plan else None
            return Plan(whole.forward, fused, whole.backward[1:])
        return Plan(tuple(self._whole_forward()), None, whole.backward if run_type == "train" else ())

    def _whole_forward(self) -> list[range]:
        # In a plan for fused calls the first backward stage covers the rest of the forward pass.
        top = self.fwd_plan[-1].stop if self.fwd_plan else 0
        is_fused = bool(self.bwd_plan) and self.bwd_plan[0].start == top
        return [*self.fwd_plan, *self.bwd_plan[:1]] if is_fused else self.fwd_plan


def _shared_runtime(models: tuple[Plannable, ...]) -> Runtime:
    if not models:
        raise ValueError("ModelExecutePlan.auto needs at least one model, but got none")
    for model in models:
        if not isinstance(model, Plannable):  # pyright: ignore[reportUnnecessaryIsInstance] - callers may be untyped
            raise TypeError(f"ModelExecutePlan.auto plans RoundPipe models, but got a {type(model).__name__}")
    if len({id(model.runtime) for model in models}) > 1:
        raise ValueError("models that are planned together must share a runtime; wrap them with the same one")
    return models[0].runtime
