"""Any model, plan, number of microbatches and settings trains on several machines as on one: drawn at random."""

from __future__ import annotations

import os
import select
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from any_training import MAKE, Recipe, trained
from examples import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from machine_trainings import Found
from on_machines import IMPORTS, environment
from processes import free_port
from programs import Program

_SERVE = "import sys, torch, any_training\ntorch.set_num_threads(1)\nany_training.serve(*sys.argv[1:])\n"
_LONG_S = 60
_FRACTION = st.floats(0, 1, exclude_max=True)


class Group:
    """Processes that wait for trainings, each a machine."""

    def __init__(self, machines: int, folder: Path, stack: ExitStack) -> None:
        port = free_port()
        self._ways: list[tuple[int, int]] = []
        self._programs: list[Program] = []
        for rank in range(machines):
            names = [str(folder / f"{rank}-{way}") for way in ("requests", "answers")]
            for name in names:
                os.mkfifo(name)
            # Opened for both, so that opening waits for nobody.
            ways = [os.open(name, os.O_RDWR) for name in names]
            for way in ways:
                stack.callback(os.close, way)
            self._ways.append((ways[0], ways[1]))
            self._programs.append(
                stack.enter_context(Program(_SERVE, *names, imports=IMPORTS, **environment(rank, machines, port)))
            )

    def trained(self, recipe: Recipe) -> list[Found]:
        """What each machine finds."""
        for requests, _ in self._ways:
            os.write(requests, f"{recipe!r}\n".encode())
        words = [self._answer(answers) for _, answers in self._ways]
        assert not [one for one in words if one.startswith("failed")], words
        found = [torch.load(one, weights_only=False) for one in words]
        for one in words:
            os.unlink(one)
        return found

    def _answer(self, way: int) -> str:
        said = b""
        while not said.endswith(b"\n"):
            assert select.select([way], [], [], _LONG_S)[0], "a machine does not answer"
            said += os.read(way, 1 << 16)
        return said.decode().strip()


@contextmanager
def _group(machines: int, folder: Path) -> Generator[Group]:
    with ExitStack() as stack:
        yield Group(machines, folder, stack)


@st.composite
def recipes(draw: st.DrawFn, machines: int) -> Recipe:
    """Trainings of so many machines."""
    microbatches = draw(st.integers(machines, 7))
    kinds = st.sampled_from([*MAKE, "tied", "same"])
    return {
        "seed": draw(st.integers(0, 99)),
        "layers": draw(st.lists(kinds, max_size=6)),
        "dtype": draw(st.sampled_from(["float32", "float64", "bfloat16", "bfloat16"])),
        "devices": draw(st.integers(1, 3)),
        "size": draw(st.integers(microbatches, 9)),
        "microbatches": microbatches,
        "separate": draw(st.booleans()),
        "top": draw(st.none() | _FRACTION),
        "cuts": [draw(st.lists(_FRACTION, max_size=2)) for _ in range(5)],
        "in_turn": draw(st.booleans()),
        "grain": draw(st.sampled_from(["stage", "layer"])),
        "is_async": draw(st.booleans()),
        "double_buffer": draw(st.sampled_from([None, True, False])),
        "master": draw(st.sampled_from(["whole", "split"])),
        "pin": draw(st.sampled_from(["alloc", "off"])),
        "optimizer": draw(st.sampled_from(["adamw", "sgd"])),
        "calls": draw(st.integers(1, 2)),
        "drops": draw(st.booleans()),
        "clip": draw(st.none() | st.sampled_from([0.1, 10.0])),
        "scale": draw(st.none() | st.just(8.0)),
    }


def _flat(found: Any) -> torch.Tensor:
    if isinstance(found, torch.Tensor):
        return found.double().flatten()
    values = cast("list[Any]", list(found.values()) if isinstance(found, dict) else found)
    return torch.cat([_flat(value) for value in values]) if values else torch.zeros(0).double()


def _check(group: Group, recipe: Recipe) -> None:
    first, *others = group.trained(recipe)
    truth = trained(recipe)
    for other in others:
        assert torch.equal(_flat(first), _flat(other))
    # 16-bit gradients are rounded once on each machine.
    tolerance = {"float32": 1e-4, "float64": 1e-11, "bfloat16": 0.1}[recipe["dtype"]]
    for part, wanted in truth.items():
        error = (_flat(first[part]) - _flat(wanted)).norm()
        assert error <= tolerance * (_flat(wanted).norm() + 1e-3), part


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("machines", "count"),
    [(2, 40), *(pytest.param(n, 400, marks=pytest.mark.nightly) for n in (2, 3, 4))],
)
def test_any_training_is_the_same_on_several_machines(machines: int, count: int, tmp_path: Path) -> None:
    with _group(machines, tmp_path) as group:

        @settings(
            max_examples=examples(count),
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=[HealthCheck.too_slow],
        )
        @given(recipe=recipes(machines))
        def any_training(recipe: Recipe) -> None:
            _check(group, recipe)

        any_training()
