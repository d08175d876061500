"""Which weights a gradient is of, and what may make up for late ones: the variants of `staleness.py`."""

from __future__ import annotations

import math
from dataclasses import dataclass

_WARM_UP = 0.1
_LAST_RATE = 0.1


@dataclass(frozen=True)
class Variant:
    """How a run differs from synchronous steps with the usual coefficients.

    `late_after`: the part of the steps that is synchronous before late ones begin, as ZeRO-Offload's delayed
    updates have it (Ren et al., 2021); 1: all. `first_beta1`: that of the first step; it grows to `beta1` over the
    warm-up. `is_extrapolated`: calls read the weights plus the last update, which is where they will be when the
    gradient is applied, if steps repeat (SpecTrain, Chen et al., 2018). `present`: the part of each update that is
    the gradient itself instead of its mean; ``1 - beta1`` is Nesterov's. `rate`, `warm_up`: factors of the
    learning rate and of the length of the warm-up. `is_shorter`: as many steps as synchronous ones take in the
    time of late ones.
    """

    name: str
    late_after: float = 0.0
    beta1: float = 0.9
    first_beta1: float | None = None
    is_extrapolated: bool = False
    present: float = 0.0
    rate: float = 1.0
    warm_up: float = 1.0
    is_shorter: bool = False


VARIANTS = {
    variant.name: variant
    for variant in (
        Variant("synchronous", late_after=1.0),
        Variant("late"),
        Variant("late after 10 %", late_after=0.1),
        Variant("late after 30 %", late_after=0.3),
        Variant("late, extrapolated", is_extrapolated=True),
        Variant("late, Nesterov", present=0.1),
        Variant("late, beta1 0.5", beta1=0.5),
        Variant("late, beta1 from 0.5", first_beta1=0.5),
        Variant("synchronous, same seconds", late_after=1.0, is_shorter=True),
        Variant("synchronous, beta1 0.5", late_after=1.0, beta1=0.5),
        Variant("late, warm-up x 2", warm_up=2.0),
        Variant("late, rate x 0.7", rate=0.7),
    )
}


@dataclass(frozen=True)
class Run:
    """One training of a workload. `rate`: the highest learning rate, before the variant's factor."""

    variant: Variant
    seed: int
    steps: int
    rate: float
    beta2: float

    def rate_at(self, step: int) -> float:
        """The learning rate of a step, counted from 1: linear warm-up, then cosine decay to a tenth.

        >>> run = Run(VARIANTS["late"], seed=0, steps=20, rate=1.0, beta2=0.95)
        >>> [round(run.rate_at(step), 2) for step in (1, 2, 11, 20)]
        [0.5, 1.0, 0.55, 0.1]
        """
        rise = self.warm_up_steps
        highest = self.rate * self.variant.rate
        if step <= rise:
            return highest * step / rise
        done = (step - rise) / max(1, self.steps - rise)
        return highest * (_LAST_RATE + (1 - _LAST_RATE) * (1 + math.cos(math.pi * done)) / 2)

    @property
    def warm_up_steps(self) -> int:
        """Steps until the highest rate."""
        return max(1, round(_WARM_UP * self.variant.warm_up * self.steps))

    def is_late_at(self, step: int) -> bool:
        """Whether the call after this step, counted from 1, reads the weights before it."""
        return step > self.variant.late_after * self.steps

    def betas_at(self, step: int) -> tuple[float, float]:
        """Adam's coefficients of a step, counted from 1.

        >>> run = Run(VARIANTS["late, beta1 from 0.5"], seed=0, steps=40, rate=1.0, beta2=0.95)
        >>> [round(run.betas_at(step)[0], 2) for step in (1, 2, 4, 5, 40)]
        [0.5, 0.6, 0.8, 0.9, 0.9]
        """
        last = self.variant.beta1
        first = last if self.variant.first_beta1 is None else self.variant.first_beta1
        grown = min(1.0, (step - 1) / self.warm_up_steps)
        return first + (last - first) * grown, self.beta2
