"""Memory of a machine, and bytes that a step sends, are what docs/machines.md computes."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from on_machines import on_machines


@cache
def _measured(machines: int, double_buffer: bool) -> list[dict[str, Any]]:
    return on_machines(machines, "machine_sizes", "measured", "cpu:1", double_buffer=double_buffer)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("machines", "double_buffer"),
    [
        (2, True),
        *(pytest.param(*one, marks=pytest.mark.nightly) for one in ((1, False), (1, True), (2, False), (3, True))),
    ],
)
def test_masters_and_moments_are_divided(machines: int, double_buffer: bool) -> None:
    for found in _measured(machines, double_buffer):
        host, numel = found["host"], found["numel"]
        assert host.weights == 2 * numel
        assert host.second_blocks == (2 * numel if double_buffer else 0)
        assert host.masters == 4 * numel // machines
        # Beside the moments each parameter has a counter.
        assert host.optimizer_state == 8 * numel // machines + 4 * 12 // machines
        # The sums over machines are in fp32, beside 16-bit parts.
        assert host.gradients == 2 * numel + (4 * numel // machines if machines > 1 else 0)
        # As `roundpipe plan` foresees it, from a model without memory.
        assert replace(host, optimizer_state=0, activations=0) == found["planned"]
        assert host.total - host.activations == found["foreseen"].total - found["foreseen"].activations


@pytest.mark.parametrize("machines", [2, pytest.param(3, marks=pytest.mark.nightly)])
def test_a_step_sends_two_bytes_a_parameter_each_way_to_each_other_machine(machines: int) -> None:
    every = _measured(machines, True)
    numel = every[0]["numel"]
    for step in range(3):
        sent = [found["sent"][step] for found in every]
        # Gradients to the owners, and weights from them: 2 * (n - 1) / n * 2 bytes a parameter.
        assert sent == [2 * (machines - 1) * 2 * numel // machines] * machines


@pytest.mark.parametrize("machines", [2, pytest.param(3, marks=pytest.mark.nightly)])
def test_all_machines_know_the_link_alike_and_tell_what_a_step_takes_of_it(machines: int) -> None:
    every = _measured(machines, True)
    # Measured by all, agreed on by all: what they decide by it is the same.
    assert len({found["network_gb_s"] for found in every}) == 1
    for found in every:
        assert found["network_ms"] == pytest.approx(found["sent"][0] / found["network_gb_s"] / 1e6)
        if found["promised_ms"] is not None:
            assert (found["bound_by"] == "network") == (found["promised_ms"] == found["network_ms"])


@pytest.mark.nightly
def test_a_model_is_wrapped_where_a_machines_share_of_it_fits() -> None:
    # Beside the weights: 2 bytes a parameter for gradients, and of a machine's own 4 for masters and 4 for sums.
    free = {"free_bytes_a_parameter": 5.4}
    assert on_machines(1, "machine_sizes", "wrapped_in", "cpu:1", **free) == ["short"]
    assert on_machines(3, "machine_sizes", "wrapped_in", "cpu:1", **free) == ["fits"] * 3
