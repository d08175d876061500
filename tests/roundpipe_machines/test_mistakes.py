"""What fails on one machine is a named error on all; what several machines cannot do is refused on each."""

from __future__ import annotations

from functools import cache

import pytest
from machine_mistakes import MISTAKES
from on_machines import on_machines

# The weights after the training that went on, which a test below compares.
TRAINED = ("", "", None)
# What the errors begin with and have in them: on machine 0, and on machine 1 if that differs.
SAID = {
    "layer": [
        ("MachineFailed", "ZeroDivisionError('in a layer')", "ZeroDivisionError: in a layer"),
        ("GradientsIncomplete", "an earlier call of model 'm' failed", None),
        TRAINED,
    ],
    "backward": [
        ("MachineFailed", "ZeroDivisionError('in backward')", "ZeroDivisionError: in backward"),
        (("GradientsIncomplete", "StepFailed", "MachineFailed"), "", None),
        ("True", "", None),
    ],
    "step_function": [
        found
        for place in range(3)
        for found in (
            (
                "MachineFailed",
                f"in the step function, {place}",
                f"ZeroDivisionError: in the step function, {place}",
            ),
            ("StepFailed", "reset()", None),
        )
    ],
    "other_microbatches": [("Disagreement", "machine 0 has 5, machine 1 has 6", None)],
    "other_batch": [("Disagreement", "leave out DistributedSampler", None)],
    "other_seed": [("Disagreement", "torch.random.fork_rng()", None)],
    "other_weights": [("Disagreement", "weights differs", None)],
    "other_model": [("Disagreement", "trained parameters differs", None)],
    "other_mode": [("Disagreement", "training mode of the layers differs", None)],
    "other_autocast": [("Disagreement", "autocast differs", None)],
    "other_numbers": [("Disagreement", "batch differs", None)],
    "other_frozen": [("Disagreement", "written to weights and buffers differs", None)],
    "other_values": [("Disagreement", "written to weights and buffers differs", None)] * 2,
    "other_order": [("Disagreement", "number in the order of wrapping differs", None)],
    "other_settings": [
        ("Disagreement", "what optimizers stepped differs", None),
        ("Disagreement", "parameters [2, 3] with", None),
    ],
    "optimizer_states": [("AloneOnly", "save_checkpoint", None)] * 2,
    "other_step": [("Disagreement", "is_async differs: machine 0 has True, machine 1 has False", None)],
    "other_calls": [("Disagreement", "machine 0: publishing the weights", None)],
    "other_norms": [
        ("Disagreement", "machine 0: clipping to 1.0 the norm of order 2.0, machine 1: ending a step", None)
    ],
    "other_kinds_of_state": [
        ("Disagreement", "optim_dtype differs: machine 0 has 'None', machine 1 has 'torch.float32'", None),
        ("Disagreement", "double_buffer differs: machine 0 has False, machine 1 has True", None),
    ],
    "other_scale": [("Disagreement", "machine 1: a check of gradients of a loss that was scaled by 128.0", None)],
    "other_clipping": [("Disagreement", "machine 1: clipping to 2.0 the norm", None)],
    "dropped_on_one": [
        ("Disagreement", "steps since gradients were dropped outside of step functions differs", None),
    ]
    * 2,
    "frozen_on_one": [("Disagreement", "machine 1: rebuilding model 'm', whose tensors changed", None)],
    "taken_apart": [
        ("MachineFailed", "machine 1 failed: ZeroDivisionError(\"in the model's own", "ZeroDivisionError"),
        ("MachineFailed", "machine 1 failed: ZeroDivisionError(\"in the model's own", "ZeroDivisionError"),
        ("Disagreement", "in a call of model 'm', batch differs", None),
        TRAINED,
    ],
    "forward_and_backward": [
        ("MachineFailed", "in forward of model 'm', machine 1 failed: ZeroDivisionError", "ZeroDivisionError"),
        ("MachineFailed", "in backward of model 'm', machine 1 failed: ZeroDivisionError", "ZeroDivisionError"),
        ("Disagreement", "the norm of the gradients of the outputs differs", None),
        ("AloneOnly", "merge_output=False", None),
    ],
    "bad_arguments": [("MachineFailed", "machine 1 failed: SizeError(", "SizeError")],
    "decided_otherwise": [("MachineFailed", "in the step function", "ZeroDivisionError"), ("0 bytes", "", None)],
    "masters_changed_late": [("AloneOnly", "were changed after their step", None)],
    "masters_changed_late_on_one": [("MachineFailed", "were changed after their step", "AloneOnly")],
    "gradients_read": [("AloneOnly", "roundpipe.optim.clip_grad_norm_", None)] * 2,
    "outputs": [("AloneOnly", "return_outputs=True", None)],
    "inputs_with_gradients": [("AloneOnly", "an input requires grad", None)],
    "written_buffers": [("AloneOnly", "layer 1 (BatchNorm1d) writes a buffer", None)] * 2,
    "other_losses": [("TypeError: loss_fn must return as many", "returned 2 for one and 1 for another", None)],
    "in_one_piece": [
        *[("AloneOnly: m.part must run its batch in one piece", "differ", None)] * 2,
        *[("AloneOnly: m must run its batch in one piece", "differ", None)] * 2,
        ("AloneOnly: m.part must run its batch in one piece", "machines found different things", None),
        ("AloneOnly: m.part must run its batch in one piece", "no dimension of its arguments", None),
        TRAINED,
    ],
    "too_few_microbatches": [("ValueError", "num_microbatch=2", None)],
    "loss_fails": [
        ("MachineFailed", "in loss of model 'm', machine 1 failed: SizeError(", "SizeError"),
        ("MachineFailed", "ZeroDivisionError('in a layer')", "ZeroDivisionError: in a layer"),
    ]
    * 2,
    "loss_otherwise": [
        ("Disagreement", "in loss of model 'm', batch differs", None),
        ("AloneOnly", "return_outputs=True", None),
        ("ValueError", "num_microbatch=2", None),
        ("Disagreement", "training mode of the layers differs", None),
        ("AloneOnly", "layer 1 (BatchNorm1d) writes a buffer", None),
        ("no error", "", None),
    ],
}


@cache
def _found() -> list[dict[str, list[str]]]:
    return on_machines(2, "machine_mistakes", "make_all")


@pytest.mark.parametrize("name", MISTAKES)
def test_every_machine_has_a_named_error(name: str) -> None:
    for rank, machine in enumerate(_found()):
        for found, (begins, has, at_fault) in zip(machine[name], SAID[name], strict=True):
            if rank == 1 and at_fault is not None:
                assert found.startswith(at_fault)
            else:
                assert found.startswith(begins)
                assert has in found


@pytest.mark.slow
def test_another_machines_error_says_where_it_happened() -> None:
    said = _found()[0]["layer"][0]
    assert "machine 1 failed: ZeroDivisionError('in a layer')" in said
    assert "in layer 1 (Fails), forward, microbatch 8, on cpu:" in said


def test_gradients_of_a_failed_call_are_not_used_until_they_are_dropped() -> None:
    for machine in _found():
        assert machine["layer"][1].startswith("GradientsIncomplete")
        # Where the failing machine refused the step before it began, the other one is told of it again.
        begun, _, told = machine["backward"][1].partition("machine 1 failed: ")
        named = ("GradientsIncomplete", "StepFailed")
        assert begun.startswith(named) or (begun.startswith("MachineFailed") and told.startswith(named))


def test_a_failed_step_leaves_the_weights_whole_on_every_machine() -> None:
    assert [machine["backward"][2] for machine in _found()] == ["True", "True"]


def test_after_an_error_the_machines_train_on_together() -> None:
    for name, place in (("layer", 2), ("taken_apart", 3), ("in_one_piece", 6)):
        one, other = (float(machine[name][place]) for machine in _found())
        assert one == other
