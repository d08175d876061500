"""What one machine alone does, or leaves undone, is a named error on the others in time, and all train on."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch
from machine_alone import ALONE
from on_machines import on_machines
from safetensors.torch import load_file

_LEFT = "MachineFailed: in backward of model 'm', machine 0 left this call unfinished and went on with "
_OTHER_CALLS = "Disagreement: the machines do not do the same (machine 0: backward of model 'm', of call "
_DROPPED = "Disagreement: in forward_backward of model 'm', calls and steps since gradients were dropped outside"
_DROPPED_INSIDE = (
    "Disagreement: in a step, gradients that the step function dropped or set to zero differs: machine 0 has '0, "
)
_NOT_HERE = "AloneOnly: the last step's result is not on this machine yet"
# What errors begin with, on machine 0 and on machine 1.
SAID = {
    "loss_fails": (
        ["no error", "ValueError: in the loss", "no error"],
        ["no error", f"{_LEFT}forward of model 'm'", "no error"],
    ),
    "loss_fails_apart": (
        ["no error", "ValueError: in the loss", "no error"],
        ["no error", "MachineFailed: in backward of model 'm.last', machine 0 left this call", "no error"],
    ),
    "loss_fails_before_another_error": (
        ["ValueError: in the loss", "SizeError"],
        [f"{_LEFT}forward of model 'm'", "MachineFailed: in forward of model 'm', machine 0 failed: SizeError"],
    ),
    "backward_twice": ([_OTHER_CALLS], [_OTHER_CALLS]),
    "step_instead": (
        ["no error", "MachineFailed: in a step of model 'm', machine 1 failed: GradientsIncomplete"],
        [f"{_LEFT}a step of model 'm'", "GradientsIncomplete"],
    ),
    "read_by_one": (["no error", "no error", "AloneOnly: state_dict(keep_vars=True)", *[_NOT_HERE] * 3], []),
    "checkpoint_of_one": (["Disagreement: the machines do not do the same (machine 0: saving a checkpoint"],) * 2,
    "packed_whole_by_one": (
        ["ValueError: packed data go into microbatches part by part", "no error"],
        ["MachineFailed: in forward of model 'm', machine 0 failed: ValueError('packed data", "no error"],
    ),
    "replaced_by_all": (["no error"] * 3,) * 2,
    "dropped_after_a_step": ([_DROPPED] * 2,) * 2,
    "dropped_in_a_step_function": ([*[_DROPPED_INSIDE] * 8, *["no error"] * 4],) * 2,
}


@cache
def _found() -> list[dict[str, list[str]]]:
    return on_machines(2, "machine_alone", "do_all")


@pytest.mark.slow
@pytest.mark.parametrize("name", ALONE)
def test_every_machine_is_told_and_all_train_on(name: str) -> None:
    found = [machine[name] for machine in _found()]
    for said, machine in zip(SAID[name], found, strict=True):
        for begins, each in zip(said, machine[:-1], strict=True):
            assert each.startswith(begins)
    # The weights, after a step that all took in the end.
    assert found[0][-1] == found[1][-1]


@pytest.mark.slow
def test_one_machine_alone_saves_what_all_have_or_is_refused_at_once(tmp_path: Path) -> None:
    first, second = on_machines(2, "machine_alone", "saved_by_hand", folder=str(tmp_path))

    assert second == []
    for kind, said in ((False, first[:9]), (True, first[9:])):
        assert said[:6] == ["no error"] * 6
        assert said[6].startswith(_NOT_HERE)
        assert said[7].startswith(_NOT_HERE)
        assert said[8] == "no error"
        for steps in ("False False", "True True"):
            place = tmp_path / f"{kind} {steps}"
            truth = _saved(Path(f"{place} truth"))
            assert truth
            for found in (_saved(place), _saved(Path(f"{place} by itself"))):
                assert found.keys() == truth.keys()
                assert all(torch.equal(found[name], value) for name, value in truth.items())


def _saved(folder: Path) -> dict[str, torch.Tensor]:
    return {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}
