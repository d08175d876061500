"""The kinds of tasks and their properties."""

from enum import StrEnum
from functools import cached_property
from typing import assert_never

from rp_sched.problem.modes import Mode


class TaskKind(StrEnum):
    """The work of a task on its layers. A kind equals its letters as a string.

    >>> TaskKind("FB").computes_loss, TaskKind.FORWARD == "F"
    (True, True)

    `FORWARD`: forward pass. `BACKWARD`: recomputation, then backward pass. `FUSED`: forward pass, loss and
    backward pass, microbatch by microbatch.

    Code tests these properties instead of comparing kinds, so that a new kind needs no change elsewhere. The type
    checker reports a property that does not cover every kind.
    """

    FORWARD = "F"
    BACKWARD = "B"
    FUSED = "FB"

    # Cached, since planners read them millions of times.

    @cached_property
    def modes(self) -> tuple[Mode, ...]:
        """The modes whose calls have tasks of this kind."""
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
        """Whether it runs the first forward pass of its layers, which writes buffers; recomputation does not."""
        match self:
            case TaskKind.FORWARD | TaskKind.FUSED:
                return True
            case TaskKind.BACKWARD:
                return False
            case _:
                assert_never(self)

    @cached_property
    def recomputes(self) -> bool:
        """Whether it runs the forward pass again, from saved inputs."""
        match self:
            case TaskKind.BACKWARD:
                return True
            case TaskKind.FORWARD | TaskKind.FUSED:
                return False
            case _:
                assert_never(self)

    @cached_property
    def runs_backward(self) -> bool:
        """Whether it runs the backward pass of its layers."""
        match self:
            case TaskKind.BACKWARD | TaskKind.FUSED:
                return True
            case TaskKind.FORWARD:
                return False
            case _:
                assert_never(self)

    @cached_property
    def computes_loss(self) -> bool:
        """Whether it takes labels and computes the loss; it must then end with the last layer."""
        match self:
            case TaskKind.FUSED:
                return True
            case TaskKind.FORWARD | TaskKind.BACKWARD:
                return False
            case _:
                assert_never(self)

    @cached_property
    def saves_inputs(self) -> bool:
        """Whether it saves inputs of its layers on the host, for the backward stages that start at them."""
        match self:
            case TaskKind.FORWARD:
                return True
            case TaskKind.BACKWARD | TaskKind.FUSED:
                return False
            case _:
                assert_never(self)

    @cached_property
    def keeps_activations(self) -> bool:
        """Whether the device keeps a microbatch's activations between its forward and its backward pass."""
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
        """Whether it passes its last layer's outputs to the next stage or to the caller."""
        match self:
            case TaskKind.FORWARD:
                return True
            case TaskKind.BACKWARD | TaskKind.FUSED:
                return False
            case _:
                assert_never(self)

    @cached_property
    def takes_gradients(self) -> bool:
        """Whether it needs gradients of its last layer's outputs, from the next stage or from the caller."""
        match self:
            case TaskKind.BACKWARD:
                return True
            case TaskKind.FORWARD | TaskKind.FUSED:
                return False
            case _:
                assert_never(self)

    @cached_property
    def sends_gradients(self) -> bool:
        """Whether it passes gradients of its first layer's inputs to the stage below."""
        match self:
            case TaskKind.BACKWARD | TaskKind.FUSED:
                return True
            case TaskKind.FORWARD:
                return False
            case _:
                assert_never(self)

    @cached_property
    def may_exceed_room_ahead(self) -> bool:
        """Whether its weights may exceed the memory for weights fetched ahead (`Limits.ahead_bytes`)."""
        match self:
            case TaskKind.FUSED:
                return True
            case TaskKind.FORWARD | TaskKind.BACKWARD:
                return False
            case _:
                assert_never(self)


Kind = TaskKind
"""The former name of `TaskKind`."""
