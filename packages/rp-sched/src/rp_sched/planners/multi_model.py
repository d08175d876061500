"""Plan several models that share the devices."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rp_sched.errors import Infeasible
from rp_sched.planners.adaptive import Search
from rp_sched.planners.local_search import EQUAL
from rp_sched.planners.planner import Strategy, published
from rp_sched.planners.roundrobin import RoundRobin
from rp_sched.planners.search_space import Space
from rp_sched.problem.costs import LayerCost
from rp_sched.problem.limits import NO_LIMITS, Limits
from rp_sched.problem.modes import Mode
from rp_sched.problem.plan import Plan
from rp_sched.problem.validation import check_problem
from rp_sched.simulation.makespan import PricedPlan, pace
from rp_sched.simulation.stage_costs import Loads

# How many plans of each model are tried in addition to its best one.
OTHERS = 12


def plan_together(
    *models: Sequence[LayerCost],
    devices: int,
    microbatches: int,
    mode: Mode,
    limits: Limits = NO_LIMITS,
    strategy: Strategy | RoundRobin = "adaptive",
) -> tuple[Plan, ...]:
    """Return a plan for each of several models that are called in turn on the same devices.

    >>> small, large = [LayerCost(1.0)] * 2, [LayerCost(3.0)] * 4
    >>> plan_together(small, large, devices=2, microbatches=2, mode="infer")
    (Plan(F[0:2] m0:1 m1:2, first free), Plan(F[0:4] m0:1 m1:2, first free))

    A call of one model is launched when the results of the call before it, of another model, are available. A
    bounded search minimises the steady-state time of one call of each: it takes the fastest plans of each model
    alone and improves the combination by changing one plan at a time. The result is never slower than the
    `roundrobin` plans. `Limits.host_memory_bytes` applies to all models together.

    With strategy `roundrobin` the stages of all models take about equal time: `upper_threshold` refers to the
    slowest layer of all models, and `min_stages` to the stages of all models.

    Raises `Infeasible` as `plan` does.
    """
    if not models:
        raise ValueError("plan_together needs the costs of at least one model, but got none")
    for costs in models:
        check_problem(costs, devices=devices, microbatches=microbatches, mode=mode)
    limits.check_devices(devices)
    if strategy != "adaptive":
        return _published(models, published(strategy), devices, microbatches, mode, limits)
    parts = [_Model.of(costs, devices, microbatches, mode, limits) for costs in models]
    group = _Group(parts, devices, microbatches, limits)
    return tuple(priced.plan for priced in group.best())


def _published(
    models: Sequence[Sequence[LayerCost]],
    strategy: RoundRobin,
    devices: int,
    microbatches: int,
    mode: Mode,
    limits: Limits,
) -> tuple[Plan, ...]:
    loads = [Loads(costs, limits) for costs in models]
    for each in loads:
        each.check_feasible(mode)
    plans = strategy.together(loads, devices=devices, microbatches=microbatches, mode=mode)
    need = sum(each.host_bytes(plan, microbatches) for each, plan in zip(loads, plans, strict=True))
    if limits.host_memory_bytes is not None and need > limits.host_memory_bytes:
        raise Infeasible(None, need, limits.host_memory_bytes)
    return plans


@dataclass(frozen=True, slots=True)
class _Model:
    """The candidates of one model: the fastest alone, that of `roundrobin`, the one with the least host memory,
    then others."""

    priced_plans: tuple[PricedPlan, ...]

    @classmethod
    def of(
        cls, costs: Sequence[LayerCost], devices: int, microbatches: int, mode: Mode, limits: Limits
    ) -> "_Model":
        loads = Loads(costs, limits)
        search = Search(costs, devices=devices, microbatches=microbatches, mode=mode, limits=limits)
        best = search.finish().plan
        published = RoundRobin().plan(loads, devices=devices, microbatches=microbatches, mode=mode)
        leanest = Space(loads, mode=mode, devices=devices, microbatches=microbatches).leanest()
        plans = dict.fromkeys([best, published, leanest, *search.others(OTHERS)])
        return cls(tuple(PricedPlan.unchecked(plan, loads, mode, microbatches) for plan in plans))


class _Group:
    """The search for the fastest combination of one priced plan per model."""

    def __init__(self, models: Sequence[_Model], devices: int, microbatches: int, limits: Limits) -> None:
        self._models = models
        self._devices = devices
        self._microbatches = microbatches
        self._limits = limits
        self._known: dict[tuple[PricedPlan, ...], float] = {}

    def best(self) -> tuple[PricedPlan, ...]:
        chosen = min(self._starts(), key=self._call_ms)
        if self._call_ms(chosen) == float("inf"):
            need = min(map(self._host_bytes, self._starts()))
            raise Infeasible(None, need, self._limits.host_memory_bytes or 0)
        while True:
            better = min(self._changes(chosen), key=self._call_ms, default=chosen)
            if self._call_ms(better) >= self._call_ms(chosen) * (1 - EQUAL):
                return chosen
            chosen = better

    def _starts(self) -> list[tuple[PricedPlan, ...]]:
        """Return all models' first candidates, all second ones, and so on; shorter lists repeat their last one."""
        most = max(len(model.priced_plans) for model in self._models)
        return [
            tuple(model.priced_plans[min(at, len(model.priced_plans) - 1)] for model in self._models)
            for at in range(most)
        ]

    def _changes(self, chosen: tuple[PricedPlan, ...]) -> Iterator[tuple[PricedPlan, ...]]:
        for at, model in enumerate(self._models):
            for priced in model.priced_plans:
                if priced is not chosen[at]:
                    yield (*chosen[:at], priced, *chosen[at + 1 :])

    def _call_ms(self, priced_plans: tuple[PricedPlan, ...]) -> float:
        if priced_plans not in self._known:
            host = self._limits.host_memory_bytes
            fits = host is None or self._host_bytes(priced_plans) <= host
            self._known[priced_plans] = pace(priced_plans, self._devices).call_ms if fits else float("inf")
        return self._known[priced_plans]

    def _host_bytes(self, priced_plans: tuple[PricedPlan, ...]) -> int:
        return sum(priced.loads.host_bytes(priced.plan, self._microbatches) for priced in priced_plans)
