"""Which tasks a call becomes: the user's plan or a planned one, as a list with a device for each task."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace

import rp_sched
from rp_sched import Course, LayerCost, Limits, Mode, Plan, Task

from roundpipe.config import RoundPipeRunConfig
from roundpipe.measure import LayerTimes, ModelTimer
from roundpipe.plans import MODEL_SHARE, ModelExecutePlan
from roundpipe.replanning import PlanInUse
from roundpipe.runtime import Runtime
from roundpipe.state import LayerState, ModelState

# Guesses, until times are measured; only their proportions matter. A byte of weights takes so many ms for one
# microbatch's forward pass, and twice as long over the link: about what an H100 on PCIe 5 needs for 4096 tokens.
_FORWARD_MS_PER_BYTE = 1e-6
_LINK_GB_S = 0.5


class Planner:
    """Plans one model's calls on a runtime, from guesses at first and then from measured layer times.

    Plans and measurements are kept until the model's blocks change.
    """

    def __init__(self, name: str, state: ModelState, runtime: Runtime) -> None:
        self._name = name
        self._state = state
        self._runtime = runtime
        self._timers: dict[tuple[Mode, int], ModelTimer] = {}
        self._plans: dict[object, PlanInUse] = {}

    def forget(self) -> None:
        """Plan and measure anew, the layers as they are now."""
        self._timers = {}
        self._plans = {}

    def watch(self, config: RoundPipeRunConfig, mode: Mode, microbatches: int) -> LayerTimes | None:
        """Where the layer times of a call go, if they are wanted; a user's plan does not depend on them."""
        timer = self._timer(mode, microbatches)
        return None if config.execute_plan is not None and not timer.VERBOSE else timer.watch()

    def improve_while(
        self, config: RoundPipeRunConfig, mode: Mode, microbatches: int, wait: Callable[[float], bool]
    ) -> None:
        """See `PlanInUse.improve_while`. The cores of CPU devices are never idle while a call waits for them."""
        on_host = self._runtime.lanes[0].device.torch_device.type == "cpu"
        if config.execute_plan is None and not on_host:
            self._plan(mode, microbatches).improve_while(wait)

    def _timer(self, mode: Mode, microbatches: int) -> ModelTimer:
        key = (mode, microbatches)
        if key not in self._timers:
            what = f"model {self._name!r}, {mode} calls of {microbatches} microbatches"
            self._timers[key] = ModelTimer(what, len(self._state.layers))
        return self._timers[key]

    def tasks(
        self, config: RoundPipeRunConfig, mode: Mode, microbatches: int, *, input_grads: bool
    ) -> tuple[Task, ...]:
        """The tasks of a call, dealt as the plan asks: in turns that go round from call to call, or not.

        Raises `rp_sched.SchedError` (a `ValueError`) for a user's plan that does not fit the model or the call.
        """
        tasks = self._dealt(config, mode, microbatches)
        self._runtime.next_device = (tasks[-1].device + 1) % len(self._runtime.lanes)
        # Below the lowest layer that is trained there is nothing to propagate to.
        lowest = 0 if input_grads else self._state.first_trainable()
        return tuple(task for task in tasks if task.kind != "B" or task.layers.stop > lowest)

    def _dealt(self, config: RoundPipeRunConfig, mode: Mode, microbatches: int) -> tuple[Task, ...]:
        if config.execute_plan is not None:
            plan = self._checked(config.execute_plan, mode)
            return self._turns(plan, mode, microbatches)
        course = self._course(mode, microbatches)
        if course.plan.in_turn:
            return self._turns(course.plan, mode, microbatches)
        return self._runtime.dealer.deal(course)

    def _checked(self, plan: Plan | ModelExecutePlan, mode: Mode) -> Plan:
        if isinstance(plan, ModelExecutePlan):
            plan.check_valid(len(self._state.layers), mode)
            return plan.to_plan(mode)
        found = _for_mode(plan, mode)
        found.check(len(self._state.layers), mode)
        return found

    def _turns(self, plan: Plan, mode: Mode, microbatches: int) -> tuple[Task, ...]:
        count, first = len(self._runtime.lanes), self._runtime.next_device
        return rp_sched.order(plan, mode=mode, devices=count, microbatches=microbatches, first_device=first)

    def _course(self, mode: Mode, microbatches: int) -> Course:
        return self._plan(mode, microbatches).course()

    def _plan(self, mode: Mode, microbatches: int) -> PlanInUse:
        # Whether a layer writes its buffers is known once it has run.
        writers = tuple(layer.index for layer in self._state.layers if _may_write(layer))
        key = (mode, microbatches, writers)
        if key not in self._plans:
            self._plans[key] = self._new_plan(mode, microbatches)
        return self._plans[key]

    def costs(self, mode: Mode) -> list[LayerCost]:
        """What each layer is taken to cost: as measured in calls of this mode, if there were any."""
        guesses = [_guessed_cost(layer) for layer in self._state.layers]
        timers = [timer for (kind, _), timer in self._timers.items() if kind == mode]
        best = max((timer.estimator for timer in timers), key=lambda found: found.samples, default=None)
        if best is None or not best.samples:
            return guesses
        # A copy: the estimator remembers which times it last gave, to tell when they have moved.
        return list(copy.deepcopy(best).costs(guesses))

    def _new_plan(self, mode: Mode, microbatches: int) -> PlanInUse:
        smallest = min(use.total_bytes for use in self._runtime.memory())
        return PlanInUse(
            self._timer(mode, microbatches),
            [_guessed_cost(layer) for layer in self._state.layers],
            Limits(
                device_memory_bytes=int(smallest * MODEL_SHARE),
                upload_gb_s=_LINK_GB_S,
                download_gb_s=_LINK_GB_S,
            ),
            devices=len(self._runtime.lanes),
            microbatches=microbatches,
            mode=mode,
        )


def _for_mode(plan: Plan, mode: Mode) -> Plan:
    # A plan for training calls also says how other calls are cut: its fused stage is one more stage there.
    if mode == "fused":
        return plan
    tail = () if plan.fused is None else (plan.fused,)
    up = replace(plan, forward=(*plan.forward, *tail), fused=None, groups=())
    if mode == "infer":
        return replace(up, backward=(), backward_groups=())
    return replace(up, backward=(*tail, *plan.backward))


def _may_write(layer: LayerState) -> bool:
    return any(block.kind == "buffer" and block.writes is not False for block in layer.blocks)


def _guessed_cost(layer: LayerState) -> LayerCost:
    nbytes = layer.nbytes()
    return LayerCost(
        _FORWARD_MS_PER_BYTE * (nbytes + 1),
        weight_bytes=nbytes,
        trainable_bytes=layer.nbytes("trainable"),
        writes_buffers=_may_write(layer),
    )
