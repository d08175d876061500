"""The probe of links and host memory: what it finds, what it leaves, and that training does not depend on it."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from plain import batch, mlp, square_error
from roundpipe import RoundPipe, Runtime
from rp_engine.planning import probe as probing
from rp_engine.planning.probe import probe, probed
from rp_sched import Host, Limits, Switch
from rp_telemetry.measurements import Rates, shared_by

patient = settings(deadline=None)
LITTLE: Any = {"nbytes": 1 << 12, "host_bytes": 1 << 14}


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process that has probed nothing."""
    monkeypatch.setattr(probing, "_known", {})


def test_every_rate_is_finite_and_nothing_stays_allocated(runtime: Runtime) -> None:
    used = [use.used_bytes for use in runtime.memory()], runtime.host_memory().used_bytes
    found = probe(runtime, **LITTLE)
    devices = len(runtime.lanes)
    assert len(found.up_gb_s) == len(found.down_gb_s) == devices
    assert all(rate is not None and 0 < rate < math.inf for rate in (*found.up_gb_s, *found.down_gb_s))
    assert found.memory_gb_s is not None
    assert 0 < found.memory_gb_s < math.inf
    # As the planner takes it.
    Limits(switches=found.switches, host=Host(memory_gb_s=found.memory_gb_s))
    runtime.backend.devices[0].synchronize()
    assert ([use.used_bytes for use in runtime.memory()], runtime.host_memory().used_bytes) == used


def test_training_goes_on_after_it_with_the_same_numbers(runtime: Runtime) -> None:
    def losses() -> list[float]:
        model = RoundPipe(mlp(), runtime=runtime)
        x, y = batch(8)
        return [model.forward_backward(input_args=(x,), label=y, loss_fn=square_error).item() for _ in range(3)]

    before = losses()
    probe(runtime, **LITTLE)
    assert losses() == before


def test_a_set_of_devices_is_probed_once_in_a_process(two: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[Runtime] = []
    monkeypatch.setattr(probing, "probe", lambda runtime: (counted.append(runtime), Rates(memory_gb_s=7.0))[1])
    with Runtime("cpu:2") as again, Runtime("cpu:3") as other:
        assert [probed(runtime).memory_gb_s for runtime in (two, again, two, other)] == [7.0] * 4
        assert counted == [two, other]


def test_a_probe_that_fails_is_logged_and_training_goes_on(
    two: Runtime, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object, **__: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("as arranged")

    with monkeypatch.context() as patched, caplog.at_level(logging.WARNING, logger="rp_engine.planning.probe"):
        patched.setattr(two.backend.devices[1], "empty", refuse)
        assert probed(two) == Rates()
    assert [record.getMessage() for record in caplog.records] == [
        "links and host memory could not be probed, so calls must measure them: as arranged"
    ]
    model = RoundPipe(mlp(), runtime=two)
    model.engine.planner.pricing.on_host = False
    x, y = batch(8)
    for _ in range(4):
        model.forward_backward(input_args=(x,), label=y, loss_fn=square_error)
    model.synchronize()
    assert two.measurements.is_probed
    assert any(two.measurements.rates().up_gb_s)


def test_cpu_devices_are_not_probed(two: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probing, "probe", lambda _: pytest.fail("probed"))
    model = RoundPipe(mlp(), runtime=two)
    x, y = batch(8)
    for _ in range(4):
        model.forward_backward(input_args=(x,), label=y, loss_fn=square_error)
    model.synchronize()
    assert not two.measurements.is_probed


def test_the_first_number_of_microbatches_that_is_tried_has_the_rates_of_the_probe_too(
    two: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = Rates(up_gb_s=(7.0, 7.0), down_gb_s=(6.0, 6.0))
    monkeypatch.setattr(probing, "probe", lambda _: measured)
    guesses = RoundPipe(mlp(), runtime=two).engine.planner.guesses
    guesses.pricing.on_host = False

    limits = [guesses.real_problem(8, count)[1] for count in (1, 2)]

    assert {(each.upload_gb_s, each.download_gb_s) for each in limits} == {(7.0, 6.0)}


# What links share


@patient
@given(st.lists(st.integers(0, 3), min_size=1, max_size=8), st.floats(1, 60), st.floats(0.3, 1.4))
def test_switches_are_found_from_what_devices_reach_together(behind: list[int], link: float, factor: float):
    # A switch carries so much for all devices behind it; devices behind another one do not matter.
    most = link * factor

    def tried(_: object, chosen: Sequence[int]) -> list[float]:
        return [min(link, most / sum(behind[other] == behind[at] for other in chosen)) for at in chosen]

    alone = [tried("up", [at])[0] for at in range(len(behind))]
    groups = {
        tuple(at for at, other in enumerate(behind) if other == number)
        for number in behind
        if behind.count(number) > 1
    }
    together = tried("up", range(len(behind)))
    # Whether all together, and any two behind one switch, are clearly slower than alone.
    part = min(link, most / 2) / min(link, most)
    if part > 0.86:
        return
    found = shared_by(alone, alone, tried)
    if part < 0.84 and sum(together) < 0.84 * sum(alone):
        assert {switch.devices for switch in found} == groups
        for switch in found:
            assert switch.upload_gb_s == pytest.approx(min(most, link * len(switch.devices)))
            assert switch.download_gb_s == switch.upload_gb_s


def test_links_that_reach_all_they_have_together_share_nothing():
    assert shared_by([25.0] * 4, [25.0] * 4, lambda _, chosen: [24.0] * len(chosen)) == ()
    assert shared_by([25.0], [25.0], lambda *_: pytest.fail("one device shares nothing")) == ()


def test_what_only_all_together_lack_all_share():
    def tried(way: str, chosen: Sequence[int]) -> list[float]:
        return [min(25.0, (60.0 if way == "up" else 200.0) / len(chosen))] * len(chosen)

    assert shared_by([25.0] * 4, [25.0] * 4, tried) == (
        Switch(devices=(0, 1, 2, 3), upload_gb_s=60.0, download_gb_s=100.0),
    )
