"""The kinds of tasks, and all that is true of each."""

from enum import StrEnum
from functools import cached_property
from typing import assert_never

from rp_sched.problem.modes import Mode


class TaskKind(StrEnum):
    """What a task does with its layers. A kind is also its letters, as they are written.

    >>> TaskKind("FB").computes_loss, TaskKind.FORWARD == "F"
    (True, True)

    `FORWARD`: forward. `BACKWARD`: forward again, then backward. `FUSED`: forward, loss and backward, microbatch
    by microbatch.

    Code asks a kind a question rather than which kind it is. Each question has an answer for every kind, or the
    type checker says where one is missing.
    """

    FORWARD = "F"
    BACKWARD = "B"
    FUSED = "FB"

    # Each answer is computed once: planners ask millions of times.

    @cached_property
    def modes(self) -> tuple[Mode, ...]:
        """The modes whose calls have such tasks."""
        match self:
            case TaskKind.FORWARD:
                return "infer", "train", "fused"
            case TaskKind.BACKWARD:
                return "train", "fused"
            case TaskKind.FUSED:
                return ("fused",)
            case _:
                assert_never(self)

    @cached_property
    def runs_forward(self) -> bool:
        """Whether it is the forward pass of its layers, the one that writes buffers; a recomputation is not."""
        match self:
            case TaskKind.FORWARD | TaskKind.FUSED:
                return True
            case TaskKind.BACKWARD:
                return False
            case _:
                assert_never(self)

    @cached_property
    def recomputes(self) -> bool:
        """Whether it runs the forward pass again, from what the first one saved."""
        match self:
            case TaskKind.BACKWARD:
                return True
            case TaskKind.FORWARD | TaskKind.FUSED:
                return False
            case _:
                assert_never(self)

    @cached_property
    def runs_backward(self) -> bool:
        """Whether it is the backward pass of its layers, for which their inputs are saved."""
        match self:
            case TaskKind.BACKWARD | TaskKind.FUSED:
                return True
            case TaskKind.FORWARD:
                return False
            case _:
                assert_never(self)

    @cached_property
    def computes_loss(self) -> bool:
        """Whether it takes labels and computes the loss, so that it must end with the last layer."""
        match self:
            case TaskKind.FUSED:
                return True
            case TaskKind.FORWARD | TaskKind.BACKWARD:
                return False
            case _:
                assert_never(self)

    @cached_property
    def saves_inputs(self) -> bool:
        """Whether it leaves inputs of its layers on the host, for the backward stages that start there."""
        match self:
            case TaskKind.FORWARD:
                return True
            case TaskKind.BACKWARD | TaskKind.FUSED:
                return False
            case _:
                assert_never(self)

    @cached_property
    def keeps_activations(self) -> bool:
        """Whether the device keeps a microbatch's activations from its forward to its backward pass."""
        match self:
            case TaskKind.BACKWARD | TaskKind.FUSED:
                return True
            case TaskKind.FORWARD:
                return False
            case _:
                assert_never(self)

    @cached_property
    def adds_gradients(self) -> bool:
        """Whether it adds to the gradients of its layers' weights."""
        match self:
            case TaskKind.BACKWARD | TaskKind.FUSED:
                return True
            case TaskKind.FORWARD:
                return False
            case _:
                assert_never(self)

    @cached_property
    def sends_outputs(self) -> bool:
        """Whether it hands its last layer's outputs on, to the stage above or to the caller."""
        match self:
            case TaskKind.FORWARD:
                return True
            case TaskKind.BACKWARD | TaskKind.FUSED:
                return False
            case _:
                assert_never(self)

    @cached_property
    def takes_gradients(self) -> bool:
        """Whether it needs the gradients of its last layer's outputs, from the stage above or from the caller."""
        match self:
            case TaskKind.BACKWARD:
                return True
            case TaskKind.FORWARD | TaskKind.FUSED:
                return False
            case _:
                assert_never(self)

    @cached_property
    def sends_gradients(self) -> bool:
        """Whether it hands the gradients of its first layer's inputs on, to the stage below."""
        match self:
            case TaskKind.BACKWARD | TaskKind.FUSED:
                return True
            case TaskKind.FORWARD:
                return False
            case _:
                assert_never(self)

    @cached_property
    def may_exceed_room_ahead(self) -> bool:
        """Whether its weights may take more than the room for weights that are fetched ahead."""
        match self:
            case TaskKind.FUSED:
                return True
            case TaskKind.FORWARD | TaskKind.BACKWARD:
                return False
            case _:
                assert_never(self)


Kind = TaskKind
"""`TaskKind`, by its first name."""
