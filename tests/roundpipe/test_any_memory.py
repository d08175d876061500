"""Whatever the model, batch and memory: a call succeeds if any plan of its microbatches fits, else it says so."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import combinations, pairwise

import pytest
import torch
from examples import examples
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from plain import assert_near, gradients, square_error, weights
from roundpipe import DeviceMemoryWarning, RoundPipe, RoundPipeRunConfig, Runtime
from rp_engine.execution.task_job import TaskJob
from rp_sched import Plan
from torch import nn

pytestmark = pytest.mark.usefixtures("small_departures")

WIDTH = 8
MAKE = {
    "linear": lambda: nn.Linear(WIDTH, WIDTH),
    "large weights": lambda: nn.Sequential(nn.Linear(WIDTH, 8 * WIDTH), nn.Linear(8 * WIDTH, WIDTH)),
    "large activations": lambda: nn.Sequential(
        nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
    ),
    "frozen": lambda: nn.Linear(WIDTH, WIDTH).requires_grad_(False),
    "tanh": nn.Tanh,
    "dropout": lambda: nn.Dropout(0.5),
    "batch norm": lambda: nn.BatchNorm1d(WIDTH),
}


@dataclass(frozen=True)
class Problem:
    """A model, a batch, and the share of the memory that the whole model in one stage takes.

    `planned`: the engine chooses the plan; otherwise all is in one stage. `apart`: backward is a call of its own.
    """

    kinds: tuple[str, ...]
    microbatches: int
    rows: int
    share: float
    apart: bool
    planned: bool

    def layers(self) -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), *(MAKE[kind]() for kind in self.kinds))

    def batch(self) -> torch.Tensor:
        torch.manual_seed(1)
        return torch.randn(self.microbatches * self.rows, WIDTH)

    @property
    def whole(self) -> Plan:
        depth = range(len(self.kinds) + 1)
        return Plan([depth], None, [depth]) if self.apart else Plan(fused=depth)

    def every_plan(self) -> Iterator[Plan]:
        """All ways to cut the layers."""
        depth = len(self.kinds) + 1
        for top in [depth] if self.apart else range(depth):
            fused = None if self.apart else range(top, depth)
            for up in cuts(top):
                for down in cuts(top):
                    yield Plan(up, fused, down[::-1])


def cuts(stop: int) -> Iterator[tuple[range, ...]]:
    """All ways to cut the layers below `stop`."""
    for count in range(max(stop, 1)):
        for inner in combinations(range(1, stop), count):
            edges = [0, *inner, stop]
            yield tuple(range(a, b) for a, b in pairwise(edges) if b > a)


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    return Problem(
        kinds=tuple(draw(st.lists(st.sampled_from(list(MAKE)), min_size=1, max_size=3))),
        microbatches=draw(st.integers(1, 3)),
        rows=draw(st.sampled_from([2, 16, 64])),
        share=draw(st.floats(0.5, 1.0)),
        apart=draw(st.booleans()),
        planned=draw(st.booleans()),
    )


Found = dict[str, torch.Tensor | None]


def train(model: RoundPipe, problem: Problem) -> Found:
    """One call; its loss, gradients and buffers."""
    model.zero_grad()
    torch.manual_seed(2)
    x = problem.batch()
    if problem.apart:
        loss = square_error(model(x), x)
        loss.backward()
    else:
        loss = model.forward_backward((x,), None, x, square_error)
    model.synchronize()
    return {"loss": loss.detach(), **gradients(model.model)}


def wrap(problem: Problem, runtime: Runtime, plan: Plan | None) -> RoundPipe:
    config = RoundPipeRunConfig(num_microbatch=problem.microbatches, execute_plan=plan)
    return RoundPipe(problem.layers(), runtime=runtime, model_run_config=config)


def fits(problem: Problem, plan: Plan, limit: int) -> bool:
    """Whether a plan runs as it is."""
    with Runtime("cpu:1", device_memory_bytes=limit) as runtime:
        try:
            train(wrap(problem, runtime, plan), problem)
        except torch.OutOfMemoryError:
            return False
        return True


@contextmanager
def without_retreat() -> Iterator[None]:
    """Tasks that run out of memory fail."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TaskJob, "_run", lambda job: job._stage.run())
        yield


def check(problem: Problem) -> str:
    """Whether it succeeded, as it was, in smaller parts, or not at all."""
    with Runtime("cpu:1", device_memory_bytes=1 << 30) as runtime:
        model = wrap(problem, runtime, problem.whole)
        wanted = [train(model, problem), train(model, problem), weights(model.model)]
        limit = int(runtime.memory()[0].peak_bytes * problem.share)
    with Runtime("cpu:1", device_memory_bytes=limit) as runtime, warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        model = wrap(problem, runtime, None if problem.planned else problem.whole)
        found, notes = attempt(model, problem)
        if found is None:
            assert "to need less memory" in notes[-1]
            model.reset()
            check_goes_on(model, problem, runtime)
            with without_retreat():
                assert not [plan for plan in problem.every_plan() if fits(problem, plan, limit)], "a plan fits"
            return "nothing fits"
    for part, true_part in zip(found, wanted, strict=True):
        assert_near(part, true_part, 1e-4)
    return "in parts" if any(one.category is DeviceMemoryWarning for one in told) else "as planned"


def attempt(model: RoundPipe, problem: Problem) -> tuple[list[Found] | None, list[str]]:
    """What two calls lead to; None, and the error's notes, if memory is too small."""
    try:
        return [train(model, problem), train(model, problem), weights(model.model)], []
    except torch.OutOfMemoryError as error:
        return None, error.__notes__


def check_goes_on(model: RoundPipe, problem: Problem, runtime: Runtime) -> None:
    """With more memory the model trains on, with the gradients of an undisturbed one."""
    runtime.lanes[0].device._limit_bytes = 1 << 30
    model.eval()
    found = train(model, problem)
    with Runtime("cpu:1") as other:
        undisturbed = wrap(problem, other, None)
        undisturbed.load_state_dict(model.state_dict())
        undisturbed.eval()
        assert_near(found, train(undisturbed, problem), 1e-4)


def check_any(count: int) -> Counter[str]:
    seen: Counter[str] = Counter()

    @settings(
        max_examples=count,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    @given(problem=problems())
    def any_memory(problem: Problem) -> None:
        assume(any(kind not in ("frozen", "tanh", "dropout") for kind in problem.kinds))
        seen[check(problem)] += 1

    any_memory()
    return seen


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_call_succeeds_if_any_plan_of_its_microbatches_fits() -> None:
    seen = check_any(examples(60))
    assert set(seen) == {"as planned", "in parts", "nothing fits"}


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_many_calls_succeed_if_any_plan_of_their_microbatches_fits() -> None:
    assert len(check_any(400)) == 3
