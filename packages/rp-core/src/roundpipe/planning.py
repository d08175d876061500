"""Which tasks a call becomes: the user's plan or a planned one, as a list with a device for each task."""

from __future__ import annotations

import rp_sched
from rp_sched import LayerCost, Limits, Mode, Plan, Task

from roundpipe.config import RoundPipeRunConfig
from roundpipe.runtime import Runtime
from roundpipe.state import LayerState, ModelState

# The share of a device's memory that weights and gradients may take; the rest is for activations.
_MODEL_SHARE = 0.6


class Planner:
    """Plans one model's calls on a runtime; a plan is kept until the model's blocks change."""

    def __init__(self, state: ModelState, runtime: Runtime) -> None:
        self._state = state
        self._runtime = runtime
        self._plans: dict[tuple[Mode, int], Plan] = {}

    def forget(self) -> None:
        """Plan anew from the layers as they are now."""
        self._plans = {}

    def tasks(
        self, config: RoundPipeRunConfig, mode: Mode, microbatches: int, *, input_grads: bool
    ) -> tuple[Task, ...]:
        """The tasks of a call, the devices taking turns from call to call.

        Raises `rp_sched.SchedError` (a `ValueError`) for a user's plan that does not fit the model or the call.
        """
        count = len(self._runtime.lanes)
        first = self._runtime.next_device
        plan = self._plan(config, mode, microbatches)
        tasks = rp_sched.order(plan, mode=mode, devices=count, microbatches=microbatches, first_device=first)
        self._runtime.next_device = (tasks[-1].device + 1) % count
        # Below the lowest layer that is trained there is nothing to propagate to.
        lowest = 0 if input_grads else self._state.first_trainable()
        return tuple(task for task in tasks if task.kind != "B" or task.layers.stop > lowest)

    def _plan(self, config: RoundPipeRunConfig, mode: Mode, microbatches: int) -> Plan:
        if config.execute_plan is not None:
            plan = _for_mode(config.execute_plan, mode)
            plan.check(len(self._state.layers), mode)
            plan.check_microbatches(microbatches)
            return plan
        if (mode, microbatches) not in self._plans:
            self._plans[mode, microbatches] = self._make_plan(mode, microbatches)
        return self._plans[mode, microbatches]

    def _make_plan(self, mode: Mode, microbatches: int) -> Plan:
        smallest = min(use.total_bytes for use in self._runtime.memory())
        return rp_sched.plan(
            [_guessed_cost(layer) for layer in self._state.layers],
            devices=len(self._runtime.lanes),
            microbatches=microbatches,
            mode=mode,
            limits=Limits(device_memory_bytes=int(smallest * _MODEL_SHARE)),
        )


def _for_mode(plan: Plan, mode: Mode) -> Plan:
    # A plan for training calls also says how other calls are cut: its fused stage is one more stage there.
    if mode == "fused" or plan.fused is None:
        return plan
    backward = (plan.fused, *plan.backward) if mode == "train" else ()
    return Plan((*plan.forward, plan.fused), None, backward)


def _guessed_cost(layer: LayerState) -> LayerCost:
    # Time in proportion to the bytes of weights that are multiplied; only the proportions matter.
    nbytes = layer.nbytes()
    return LayerCost(1e-6 * (nbytes + 1), weight_bytes=nbytes, trainable_bytes=layer.nbytes("trainable"))
