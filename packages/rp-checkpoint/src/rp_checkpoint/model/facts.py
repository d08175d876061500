"""How a model was trained: its class, and the settings and plans of its calls, as a checkpoint has them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, cast

import torch
from rp_sched import Mode, Plan


@dataclass(frozen=True, slots=True)
class PartFacts:
    """How the calls of a model, or of one of its parts, were run.

    `settings`: by name; ``num_microbatch`` is among them. `plans`: by mode and number of microbatches.
    """

    settings: Mapping[str, Any]
    num_devices: int
    plans: Mapping[tuple[Mode, int], Plan]

    def encoded(self) -> dict[str, Any]:
        """Return it as plain values."""
        plans = [
            {"mode": mode, "num_microbatch": count, "plan": encoded_plan(plan)}
            for (mode, count), plan in self.plans.items()
        ]
        return {"settings": dict(self.settings), "devices": self.num_devices, "plans": plans}


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """How a model was trained. `parts`: by the part's name, which is empty for a model in one part."""

    class_name: str
    optim_dtype: torch.dtype | None = None
    parts: Mapping[str, PartFacts] = field(default_factory=dict[str, PartFacts])

    def encoded(self) -> dict[str, Any]:
        """Return them as plain values."""
        parts = {name: part.encoded() for name, part in self.parts.items()}
        return {"class": self.class_name, "optim_dtype": self.optim_dtype, "parts": parts}


def class_name(value: object) -> str:
    """Return the full name of a value's class.

    >>> class_name(torch.nn.Linear(1, 1))
    'torch.nn.modules.linear.Linear'
    """
    return f"{type(value).__module__}.{type(value).__qualname__}"


def encoded_plan(plan: Plan) -> dict[str, Any]:
    """Return a plan as plain values.

    >>> plan = Plan((range(0, 2),), range(2, 3), (range(0, 2),))
    >>> encoded_plan(plan)["forward"], decoded_plan(encoded_plan(plan)) == plan
    ([[0, 2]], True)
    """
    return {one.name: _bounds(getattr(plan, one.name)) for one in fields(plan)}


def _bounds(value: Any) -> Any:
    if isinstance(value, range):
        return [value.start, value.stop]
    return [_bounds(one) for one in cast("tuple[Any, ...]", value)] if isinstance(value, tuple) else value


def decoded_plan(saved: Mapping[str, Any]) -> Plan:
    """Return the plan that was given to `encoded_plan`."""
    return Plan(**{name: _ranges(name, value) for name, value in saved.items()})


def _ranges(name: str, value: Any) -> Any:
    if name in ("in_turn", "devices") or value is None:
        return value
    return range(*value) if name == "fused" else tuple(range(*one) for one in value)
