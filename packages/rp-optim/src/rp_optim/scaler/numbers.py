"""The scale and its settings, and the rule by which updates change them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from rp_optim.errors import InvalidOption

Setting = Literal["growth_factor", "backoff_factor", "growth_interval"]


@dataclass(frozen=True, slots=True)
class ScaleNumbers:
    """The state after `updates` updates. `tracker`: finite steps since the scale last changed."""

    updates: int
    scale: float
    growth_factor: float
    backoff_factor: float
    growth_interval: int
    tracker: int = 0

    @classmethod
    def loaded(cls, updates: int, state: Mapping[str, Any]) -> ScaleNumbers:
        """What a state dict holds. Raise `InvalidOption` if factors or interval are out of range."""
        loaded = cls(
            updates,
            fp32(state["scale"]),
            float(state["growth_factor"]),
            float(state["backoff_factor"]),
            int(state["growth_interval"]),
            int(state["_growth_tracker"]),
        )
        loaded.check()
        return loaded

    def state_dict(self) -> dict[str, Any]:
        """Under the names of torch's scaler."""
        return {
            "scale": self.scale,
            "growth_factor": self.growth_factor,
            "backoff_factor": self.backoff_factor,
            "growth_interval": self.growth_interval,
            "_growth_tracker": self.tracker,
        }

    def check(self) -> None:
        """Raise `InvalidOption` if factors or interval are out of range."""
        if not self.growth_factor > 1:
            raise InvalidOption(f"GradScaler needs growth_factor > 1, but has {self.growth_factor} instead")
        if not self.backoff_factor < 1:
            raise InvalidOption(f"GradScaler needs backoff_factor < 1, but has {self.backoff_factor} instead")
        if not self.growth_interval >= 1:
            raise InvalidOption(f"GradScaler needs growth_interval >= 1, but has {self.growth_interval} instead")

    def lowered(self) -> ScaleNumbers:
        """After a skipped step."""
        return replace(self, scale=fp32(self.scale * self.backoff_factor), tracker=0)

    def advanced(self) -> ScaleNumbers:
        """After a finite step: the scale grows if it was the last of `growth_interval` such steps."""
        if self.tracker + 1 < self.growth_interval:
            return replace(self, tracker=self.tracker + 1)
        grown = fp32(self.scale * self.growth_factor)
        return replace(self, scale=grown if math.isfinite(grown) else self.scale, tracker=0)


def fp32(value: float) -> float:
    """The number rounded to fp32."""
    return torch.tensor(float(value), dtype=torch.float64, device="cpu").to(torch.float32).item()


def one_number(value: float | torch.Tensor) -> float:
    """The scale that a user gives, in fp32.

    Raise `InvalidOption` if it is a tensor of several numbers or requires grad.
    """
    if isinstance(value, torch.Tensor) and (value.numel() != 1 or value.requires_grad):
        raise InvalidOption(
            "new_scale must be a number or a tensor of one that requires no grad, but is a tensor of shape "
            f"{tuple(value.shape)} with requires_grad={value.requires_grad} instead"
        )
    return fp32(float(value))
