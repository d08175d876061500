"""Machines write one checkpoint together, from which any number of machines goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from on_machines import on_machines
from safetensors.torch import load_file

STEPS = 5


def _run(
    machines: int, folder: Path, steps: int = STEPS, function: str = "trained", **options: Any
) -> list[dict[str, Any]]:
    return on_machines(
        machines, "machine_checkpoints", function, "cpu:1", folder=str(folder), steps=steps, **options
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after", "is_async", "double_buffer"),
    [
        (2, 1, True, True),
        *(
            pytest.param(*case, marks=pytest.mark.nightly)
            for case in (
                (2, 3, True, True),
                (3, 1, True, False),
                (1, 2, True, False),
                (4, 3, True, True),
                (2, 2, False, False),
                (3, 2, False, True),
            )
        ),
    ],
)
def test_training_goes_on_as_if_it_had_not_stopped_on_any_number_of_machines(
    tmp_path: Path, before: int, after: int, is_async: bool, double_buffer: bool
) -> None:
    options = {"is_async": is_async, "double_buffer": double_buffer}
    truth = _run(1, tmp_path / "never stopped", **options)[0]

    _run(before, tmp_path / "stopped", 3, **options)
    resumed = _run(after, tmp_path / "stopped", **options)

    for found in resumed:
        assert found["first"] == 3
        assert found["scale"] == truth["scale"]
        torch.testing.assert_close(found["losses"], truth["losses"][3:], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(found["weights"], truth["weights"], rtol=1e-3, atol=1e-4)
    # Each loads the moments of its own parameters only.
    assert sum(found["state bytes"] for found in resumed) == truth["state bytes"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after", "is_async", "double_buffer"),
    [
        (2, 3, True, True),
        *(
            pytest.param(*case, marks=pytest.mark.nightly)
            for case in (
                (1, 2, True, True),
                (2, 1, True, False),
                (3, 2, True, False),
                (3, 1, False, True),
                (1, 3, False, False),
                (2, 2, True, True),
                (3, 3, True, False),
                (1, 1, True, True),
            )
        ),
    ],
)
def test_a_model_taken_apart_goes_on_from_a_checkpoint_on_any_number_of_machines(
    tmp_path: Path, before: int, after: int, is_async: bool, double_buffer: bool
) -> None:
    options = {"function": "trained_apart", "is_async": is_async, "double_buffer": double_buffer}
    truth = _run(before, tmp_path / "never stopped", **options)[0]

    _run(before, tmp_path / "stopped", 3, **options)
    resumed = _run(after, tmp_path / "stopped", **options)

    # On as many machines every sum is added in the same order.
    tolerance = {"rtol": 0.0, "atol": 0.0} if before == after else {"rtol": 1e-3, "atol": 1e-4}
    for found in resumed:
        assert found["first"] == 3
        torch.testing.assert_close(found["losses"], truth["losses"][6:], **tolerance)
        torch.testing.assert_close(found["weights"], truth["weights"], **tolerance)
    assert len(resumed[0]["losses"]) == 2 * (STEPS - 3)


@pytest.mark.nightly
def test_owners_write_their_own_files_of_one_folder(tmp_path: Path) -> None:
    _run(3, tmp_path / "three", 3, is_async=True, double_buffer=True, bits=16)
    _run(1, tmp_path / "one", 3, is_async=True, double_buffer=True, bits=16)

    (three,), (one,) = (sorted((tmp_path / name).iterdir()) for name in ("three", "one"))
    names = {path.name for path in (three / "roundpipe").iterdir()}
    assert {f"masters-of-machine-{rank}.safetensors" for rank in range(3)} <= names
    assert {f"optimizers-of-machine-{rank}.safetensors" for rank in range(3)} <= names
    shards = [load_file(path) for path in sorted(three.glob("model-*.safetensors"))]
    assert len(shards) == 3
    whole = load_file(one / "model.safetensors")
    assert {name for shard in shards for name in shard} == set(whole)
    for shard in shards:
        for name, tensor in shard.items():
            torch.testing.assert_close(tensor, whole[name], rtol=2e-2, atol=2e-2)


@pytest.mark.slow
def test_checkpoints_that_one_machine_cannot_use_are_told_to_all_and_training_goes_on(tmp_path: Path) -> None:
    first, second = on_machines(2, "machine_checkpoints", "mistaken", "cpu:1", folder=str(tmp_path))
    assert first[0].startswith("CheckpointError: ")
    assert second[0].startswith("MachineFailed: in the folder of a checkpoint, machine 0 failed: CheckpointError")
    for said in (first[1], second[1]):
        assert said.startswith("Disagreement: in loading a checkpoint, checkpoint differs: machine 0 has '0, ")
    assert first[2].startswith("MachineFailed: in loading a checkpoint, machine 1 failed: CheckpointDamaged")
    assert second[2].startswith("CheckpointDamaged")
    # What was loaded then trains on as before.
    assert first[3] == second[3] == first[4] == second[4]


@pytest.mark.nightly
def test_a_machine_that_cannot_save_tells_the_others(tmp_path: Path) -> None:
    first, second = on_machines(2, "machine_checkpoints", "refused", "cpu:1", folder=str(tmp_path / "run"))
    assert first[0].startswith("MachineFailed: in the contents of a checkpoint, machine 1 failed: CheckpointError")
    assert second[0].startswith("CheckpointError: parameter 0 of optimizer 0")
    assert first[1:] == second[1:] == ["step-00000002", "True"]
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["step-00000002"]


@pytest.mark.nightly
def test_a_checkpoint_that_one_machine_could_not_write_ends_no_training(tmp_path: Path) -> None:
    every = on_machines(2, "machine_checkpoints", "unwritten", "cpu:1", folder=str(tmp_path / "run"))
    for told, checkpoints in every:
        (words,) = told
        assert words.startswith("an earlier checkpoint failed: ")
        assert "No space left on device" in words
        assert checkpoints == ["step-00000001"]
