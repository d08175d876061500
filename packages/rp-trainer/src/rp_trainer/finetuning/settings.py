"""`Settings`: how a model is trained, and what messages call it."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rp_trainer.errors import Refused

SCHEDULES = ("cosine", "constant")
LAST_RATE = 0.1
# Settings that must be as they were where a run goes on.
_SAME = ("steps", "lr", "warm_up", "schedule", "optimizer", "optimizer_state", "betas", "weight_decay", "clip")


@dataclass(frozen=True, slots=True)
class Names:
    """What messages call the settings. A command line names its options instead: ``Names(lr="--lr")``.

    >>> Names(lr="--lr").lr, Names().lr
    ('--lr', 'lr')
    """

    model: str = "model"
    folder: str = "folder"
    overwrite: str = "overwrite=True"
    resume: str = "resume=True"
    same_call: str = "the same call with"
    lr: str = "lr"
    batch: str = "the batch"
    num_microbatch: str = "num_microbatch"
    accumulation: str = "accumulation"
    profile: str = "profile"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How a model is trained.

    `lr`: the highest learning rate. `warm_up`: steps in which the rate rises or, below 1, a part of all steps.
    `schedule`: ``"cosine"`` or ``"constant"`` afterwards. `optimizer`: a name of `rp_optim.OPTIMIZERS`;
    `optimizer_state`: ``"fp32"``, ``"bf16"`` or ``"8bit"``; `disk`: directories for files of it; None: memory.
    `betas`: None for the optimizer's own. `clip`: the largest norm of the gradients; 0: any. `sync`: wait for each
    optimizer step. `step_in_backward`: as the model was wrapped; needs ``clip=0`` and one call a step.
    `eval_every`: steps between evaluations, beside those before the first step and after the last.
    `early_stopping`: end after so many evaluations in a row whose loss is not lower than the lowest by more than
    `early_stopping_threshold`. `save_every`, `save_minutes`:
    steps or minutes between checkpoints.
    `keep`: how many checkpoints are kept, beside the best. `profile`: a file for a trace. `metrics`: write them,
    where anything is kept.

    >>> Settings(steps=100, lr=1e-3).rate(100)
    0.0001

    Raises `Refused` for what cannot be used.
    """

    steps: int
    lr: float = 2e-5
    warm_up: float = 0.03
    schedule: str = "cosine"
    optimizer: str = "adamw"
    optimizer_state: str = "fp32"
    disk: tuple[Path, ...] | None = None
    betas: tuple[float, float] | None = None
    weight_decay: float = 0.01
    clip: float = 1.0
    sync: bool = True
    step_in_backward: bool = False
    seed: int = 0
    eval_every: int | None = None
    early_stopping: int | None = None
    early_stopping_threshold: float = 0.0
    save_every: int | None = None
    save_minutes: float | None = 15.0
    keep: int = 3
    profile: Path | None = None
    metrics: bool = True
    names: Names = Names()

    def __post_init__(self) -> None:
        """Refuse what cannot be used."""
        refuse_unknown("schedule", self.schedule, SCHEDULES)
        for name in ("steps", "keep"):
            _check(name, getattr(self, name), "a whole number of at least 1", _is_count)
        for name in ("eval_every", "early_stopping", "save_every"):
            _check(name, getattr(self, name), "None or a whole number of at least 1", _is_count_if_given)
        for name in ("lr", "weight_decay", "clip", "early_stopping_threshold"):
            _check(name, getattr(self, name), "a number of at least 0", lambda value: 0 <= value < math.inf)
        _check("warm_up", self.warm_up, "a whole number of steps, or a part of them below 1", _is_warm_up)
        if self.step_in_backward and self.clip:
            raise Refused(
                f"clip must be 0 with step_in_backward=True, but is {self.clip}: gradients are gone before their "
                "norm is known"
            )

    def told(self) -> dict[str, object]:
        """Return the settings that must be the same where a run goes on, as JSON holds them."""
        betas = None if self.betas is None else list(self.betas)
        return {**{name: getattr(self, name) for name in _SAME}, "betas": betas}

    def rate(self, step: int) -> float:
        """Return the learning rate of a step, counted from 1."""
        return learning_rate(step, steps=self.steps, highest=self.lr, warm_up=self.warm_up, schedule=self.schedule)


def refuse_unknown(name: str, value: object, known: Iterable[str]) -> None:
    """Raise `Refused` for a value that is none of these, with the nearest one.

    >>> refuse_unknown("schedule", "cosin", ("cosine", "constant"))
    Traceback (most recent call last):
    rp_trainer.errors.Refused: schedule must be one of cosine, constant, but is 'cosin'; did you mean cosine?
    """
    names = list(known)
    if value not in names:
        near = difflib.get_close_matches(str(value), names, 1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise Refused(f"{name} must be one of {', '.join(names)}, but is {value!r}{hint}")


def _check(name: str, value: Any, wanted: str, is_fit: Callable[[Any], bool]) -> None:
    # Any: what a caller gave, which may be of any type.
    try:
        fits = is_fit(value)
    except TypeError:
        fits = False
    if not fits:
        raise Refused(f"{name} must be {wanted}, but is {value!r}")


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and value >= 1


def _is_count_if_given(value: Any) -> bool:
    return value is None or _is_count(value)


def _is_warm_up(value: Any) -> bool:
    return 0 <= value < 1 or (value >= 1 and float(value).is_integer())


def learning_rate(
    step: int, *, steps: int, highest: float, warm_up: float = 0.1, schedule: str = "cosine"
) -> float:
    """Return the rate of a step, counted from 1: linear warm-up, then cosine decay to a tenth, or constant.

    Args:
        warm_up: a number of steps or, below 1, a part of all steps.

    >>> [round(learning_rate(step, steps=20, highest=1.0), 2) for step in (1, 2, 11, 20)]
    [0.5, 1.0, 0.55, 0.1]
    >>> [learning_rate(step, steps=20, highest=1.0, warm_up=4, schedule="constant") for step in (1, 4, 20)]
    [0.25, 1.0, 1.0]
    """
    rise = warm_up if warm_up >= 1 else max(1, round(warm_up * steps))
    if step <= rise:
        return highest * step / rise
    if schedule == "constant":
        return highest
    done = (step - rise) / (steps - rise)
    return highest * (LAST_RATE + (1 - LAST_RATE) * (1 + math.cos(math.pi * done)) / 2)
