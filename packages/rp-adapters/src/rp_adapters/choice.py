"""Which adapters a model gets: new ones, or those of a folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rp_adapters.names import USUAL_PARTS


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapters:
    """Which adapters a model gets, in PEFT's terms.

    >>> Adapters(rank=8, parts=("attention",)).settings["lora_alpha"]
    16.0

    `alpha`: the scale times the rank, None for twice the rank. `targets`: as PEFT takes them, and names of stacked
    experts; None for the layers of `parts`. `bias`: as PEFT has it, or ``adapters`` for new ones of the adapters.
    `saved`: modules trained whole. `dtype`: torch's name of the adapters' on the devices, None for PEFT's.
    """

    rank: int
    alpha: float | None = None
    parts: tuple[str, ...] = USUAL_PARTS
    targets: tuple[str, ...] | None = None
    dropout: float = 0.0
    dora: bool = False
    rslora: bool = False
    bias: str = "none"
    saved: tuple[str, ...] = ()
    dtype: str | None = None

    @property
    def settings(self) -> dict[str, Any]:
        """The arguments of `peft.LoraConfig`, apart from those that say where adapters are."""
        return {
            "r": self.rank,
            "lora_alpha": 2.0 * self.rank if self.alpha is None else self.alpha,
            "lora_dropout": self.dropout,
            "use_dora": self.dora,
            "use_rslora": self.rslora,
            "bias": "none" if self.bias == "adapters" else self.bias,
            "lora_bias": self.bias == "adapters",
            "modules_to_save": list(self.saved) or None,
            "task_type": "CAUSAL_LM",
        }


@dataclass(frozen=True, slots=True)
class Continued:
    """The adapter in a folder, whose weights training begins with. `dtype`: as `Adapters` has it."""

    folder: Path
    dtype: str | None = None
