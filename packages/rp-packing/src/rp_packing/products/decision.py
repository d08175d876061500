"""`decide`: whether linear layers multiply in bf16 or in FP8, by what was measured of their products."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from rp_packing.products.recipe import Fp8

# FP8 rounds each factor once more: for less than this part of the products' time it is not worth that.
LEAST_SAVED = 0.05


@dataclass(frozen=True, slots=True)
class Decision:
    """How the linear layers of a model multiply, `recipe`, or None for bf16; and why, in words.

    >>> print(Decision(None, "bf16, since no linear layer can multiply in FP8"))
    compute='auto': bf16, since no linear layer can multiply in FP8
    """

    recipe: Fp8 | None
    reason: str

    def __str__(self) -> str:
        """Return it as for a log."""
        return f"compute='auto': {self.reason}"

    def encoded(self) -> dict[str, Any]:
        """Return it as plain values, for a checkpoint or another machine.

        >>> Decision.decoded(Decision(Fp8(), "FP8").encoded()) == Decision(Fp8(), "FP8")
        True
        """
        return {"recipe": None if self.recipe is None else asdict(self.recipe), "reason": self.reason}

    @classmethod
    def decoded(cls, values: Mapping[str, Any]) -> Decision:
        """Return the decision that `encoded` has given, also after JSON, which has no tuples."""
        recipe = values["recipe"]
        if recipe is None:
            return cls(None, values["reason"])
        made: dict[str, Any] = {**recipe, "skip": tuple(recipe["skip"])}
        return cls(Fp8(**made), values["reason"])


def candidates(*, trains_weights: bool) -> tuple[Fp8 | None, ...]:
    """Return what to measure; without gradients of weights, how these are computed makes no difference.

    >>> len(candidates(trains_weights=True)), len(candidates(trains_weights=False))
    (3, 2)
    """
    return (None, Fp8(), Fp8(weights="bf16")) if trains_weights else (None, Fp8())


def decide(times_ms: Mapping[Fp8 | None, float], measured: str) -> Decision:
    """Choose the recipe whose products take the least time; bf16 unless it saves at least 5 % of that in bf16.

    Args:
        times_ms: by recipe, None for bf16, which must be there.
        measured: of what, in words: how many linear layers, with how many rows.

    >>> print(decide({None: 8.0, Fp8(): 6.4}, "7 linear layers, 4096 rows").reason)
    FP8: 1.25 times bf16 for 7 linear layers, 4096 rows (measured 6.4 and 8.0 ms)

    The first of equal ones is chosen. Raises `ValueError` without a time of bf16, or for one that is none.
    """
    if None not in times_ms or not all(math.isfinite(ms) and ms > 0 for ms in times_ms.values()):
        raise ValueError(f"times must be positive, that of bf16 among them, but are {dict(times_ms)}")
    plain_ms = times_ms[None]
    others = [recipe for recipe in times_ms if recipe is not None]
    best = min(others, key=times_ms.__getitem__, default=None)
    if best is None:
        return Decision(None, f"bf16, the only one that was measured for {measured}")
    told = f"{plain_ms / times_ms[best]:.2f} times bf16 for {measured}"
    taken = f"(measured {times_ms[best]:.1f} and {plain_ms:.1f} ms)"
    if times_ms[best] > (1 - LEAST_SAVED) * plain_ms:
        return Decision(
            None, f"bf16, since {_name(best)} does not save {100 * LEAST_SAVED:.0f} %: it is {told} {taken}"
        )
    return Decision(best, f"{_name(best)}: {told} {taken}")


def _name(recipe: Fp8) -> str:
    return "FP8 with bf16 gradients of weights" if recipe.weights == "bf16" else "FP8"
