"""The kinds of tasks: one row of answers each, which all other code asks."""

from collections.abc import Set
from dataclasses import dataclass
from enum import StrEnum, nonmember
from typing import Self

from rp_sched.problem.modes import Mode


@dataclass(frozen=True, slots=True)
class _Row:
    """A kind: its letters, a word for people, the modes of its calls, and what it answers with yes."""

    letters: str
    word: str
    modes: tuple[Mode, ...]
    yes: Set[str]


class TaskKind(StrEnum):
    """The work of a task on its layers. A kind equals its letters as a string.

    >>> TaskKind("FB").computes_loss, TaskKind.FORWARD == "F"
    (True, True)

    `FORWARD`: forward pass. `BACKWARD`: recomputation, then backward pass. `FUSED`: forward pass, loss and
    backward pass, microbatch by microbatch.

    Code asks a kind these questions instead of comparing kinds, so that a new one needs no change elsewhere.
    """

    word: str
    """For people."""
    modes: tuple[Mode, ...]
    """The modes whose calls have tasks of this kind."""

    runs_forward = nonmember(False)
    """Whether it runs the first forward pass of its layers, which writes buffers; recomputation does not."""
    recomputes = nonmember(False)
    """Whether it runs the forward pass again, from saved inputs."""
    runs_backward = nonmember(False)
    """Whether it runs the backward pass of its layers."""
    computes_loss = nonmember(False)
    """Whether it takes labels and computes the loss; it must then end with the last layer."""
    saves_inputs = nonmember(False)
    """Whether it saves inputs of its layers on the host, for the backward stages that start at them."""
    keeps_activations = nonmember(False)
    """Whether the device keeps a microbatch's activations between its forward and its backward pass."""
    adds_gradients = nonmember(False)
    """Whether it adds to the gradients of its layers' weights."""
    sends_outputs = nonmember(False)
    """Whether it passes its last layer's outputs to the next stage or to the caller."""
    takes_gradients = nonmember(False)
    """Whether it needs gradients of its last layer's outputs, from the next stage or from the caller."""
    sends_gradients = nonmember(False)
    """Whether it passes gradients of its first layer's inputs to the stage below."""
    may_exceed_room_ahead = nonmember(False)
    """Whether its weights may exceed the memory for weights fetched ahead (`Limits.ahead_bytes`)."""

    FORWARD = _Row(
        "F",
        "forward",
        ("infer", "train", "fused"),
        {"runs_forward", "saves_inputs", "sends_outputs"},
    )
    BACKWARD = _Row(
        "B",
        "backward",
        ("train", "fused"),
        {
            "recomputes",
            "runs_backward",
            "keeps_activations",
            "adds_gradients",
            "takes_gradients",
            "sends_gradients",
        },
    )
    FUSED = _Row(
        "FB",
        "both",
        ("fused",),
        {
            "runs_forward",
            "runs_backward",
            "computes_loss",
            "keeps_activations",
            "adds_gradients",
            "sends_gradients",
            "may_exceed_room_ahead",
        },
    )

    def __new__(cls, row: _Row) -> Self:
        """A member, whose answers are attributes, since planners read them millions of times."""
        kind = str.__new__(cls, row.letters)
        kind._value_, kind.word, kind.modes = row.letters, row.word, row.modes
        for question in row.yes:
            if getattr(cls, question, None) is not False:
                raise TypeError(f"{row.letters} answers {question!r}, which is not a question")
            setattr(kind, question, True)
        return kind


Kind = TaskKind
"""The former name of `TaskKind`."""
