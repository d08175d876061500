"""Masters in halves, divided between machines, have the bits of whole ones on the same machines."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from machine_halves import KINDS
from on_machines import on_machines
from safetensors.torch import load_file

MACHINES = [
    pytest.param(2, marks=pytest.mark.slow),
    pytest.param(3, marks=pytest.mark.nightly),
    pytest.param(1, marks=pytest.mark.nightly),
]


@cache
def _both(machines: int) -> list[dict[str, Any]]:
    return on_machines(machines, "machine_halves", "both", "cpu:1")


@pytest.mark.parametrize("machines", MACHINES)
@pytest.mark.parametrize("name", KINDS)
def test_numbers_are_those_of_whole_masters_to_the_last_bit(name: str, machines: int) -> None:
    first = _both(machines)[0][name][1]
    for each in _both(machines):
        whole, split = each[name]
        assert split["split"]
        _same(split, whole)
        torch.testing.assert_close(split["weights"], first["weights"], rtol=0.0, atol=0.0)


def _same(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    for what in ("losses", "weights", "masters"):
        torch.testing.assert_close(found[what], wanted[what], rtol=0.0, atol=0.0)


@pytest.mark.parametrize("machines", MACHINES)
def test_each_machine_keeps_two_bytes_of_what_it_owns(machines: int) -> None:
    for name in KINDS:
        numel = [sum(one.numel() for one in each[name][1]["masters"].values()) for each in _both(machines)]
        assert [each[name][1]["masters' bytes"] for each in _both(machines)] == [2 * own for own in numel]
        # Every parameter has one owner.
        every = sum(value.numel() for value in _both(machines)[0][name][1]["weights"].values())
        assert sum(numel) == every
    assert all(each["synchronous"][1]["second blocks"] == 0 for each in _both(machines))
    assert all(each["asynchronous"][1]["second blocks"] > 0 for each in _both(machines))


@pytest.mark.slow
def test_what_fails_in_place_is_torn_where_it_was_updated_and_a_state_mends_all() -> None:
    for rank, (kinds, failed, reset, called, split, total) in enumerate(
        found := on_machines(2, "machine_halves", "mistakes", "cpu:1")
    ):
        assert kinds.startswith(
            "Disagreement: in wrapping model 'm', master differs: machine 0 has 'whole', machine"
        )
        assert failed.startswith(("MachineFailed", "ZeroDivisionError")[rank])
        # Machine 1 has updated nothing.
        assert reset.startswith(("StepFailed: a step of model 'm' failed half-way", "no error")[rank])
        assert called.startswith(
            ("StepFailed", "MachineFailed: in forward_backward of model 'm', machine 0")[rank]
        )
        assert (split, total) == ("True", found[0][-1])


@pytest.mark.slow
def test_an_optimizer_of_torch_gets_whole_masters() -> None:
    for each in on_machines(2, "machine_halves", "by_torch", "cpu:1"):
        _same(each["split"], each["whole"])
        assert not each["split"]["split"]
        assert each["split"]["masters' bytes"] == each["whole"]["masters' bytes"]


# Checkpoints


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after", "is_async"),
    [
        (2, 3, True),
        *(
            pytest.param(*case, marks=pytest.mark.nightly)
            for case in ((2, 2, True), (2, 2, False), (1, 2, True), (3, 1, True), (3, 2, False), (2, 1, False))
        ),
    ],
)
def test_checkpoints_of_either_kind_go_on_as_the_other_on_any_number_of_machines(
    tmp_path: Path, before: int, after: int, is_async: bool
) -> None:
    how = {"folder": str(tmp_path), "is_async": is_async}
    truth = on_machines(before, "machine_halves", "saved", "cpu:1", **how)
    _same(truth[0]["split"], truth[0]["whole"])

    found = on_machines(after, "machine_halves", "resumed", "cpu:1", **how)

    for rank, each in enumerate(found):
        for name, one in each.items():
            assert one["split"] == name.endswith("split")
            # On as many machines every sum is added in the same order.
            tolerance = {"rtol": 0.0, "atol": 0.0} if before == after else {"rtol": 0.05, "atol": 0.05}
            wanted = truth[rank if before == after else 0]["split"]
            torch.testing.assert_close(one["losses"], wanted["losses"][2:], **tolerance)
            torch.testing.assert_close(one["weights"], wanted["weights"], **tolerance)
            if before == after:
                assert _equal(one["masters"], wanted["masters"])
            # Both kinds, from either, and all machines: the same bits.
            _same(one, each["whole whole"])
            torch.testing.assert_close(one["weights"], found[0]["whole whole"]["weights"], rtol=0.0, atol=0.0)


def _equal(found: dict[int, torch.Tensor], wanted: dict[int, torch.Tensor]) -> bool:
    return found.keys() == wanted.keys() and all(torch.equal(found[at], wanted[at]) for at in wanted)


@pytest.mark.slow
def test_weights_that_are_halves_of_masters_are_loaded_alike_on_all_machines_or_on_none(tmp_path: Path) -> None:
    on_machines(2, "machine_halves", "saved", "cpu:1", folder=str(tmp_path), is_async=True)
    results = load_file(tmp_path / "split" / "model-00001-of-00002.safetensors")
    results |= load_file(tmp_path / "split" / "model-00002-of-00002.safetensors")

    found = on_machines(2, "machine_halves", "without_second_blocks", "cpu:1", folder=str(tmp_path))

    assert found[0]["refused"].startswith("MachineFailed: in room for a checkpoint in model 'm', machine 1 failed")
    assert found[1]["refused"].startswith("HostMemoryShort: ")
    for each in found:
        assert each["told"]
        assert each["split"]
        # The last step's result, which the file of the model has.
        torch.testing.assert_close(each["loaded"], results, rtol=0.0, atol=0.0)
        torch.testing.assert_close(each["weights"], found[0]["weights"], rtol=0.0, atol=0.0)
