"""`HostOptions`: what users say of a model's weights on the host, as `RoundPipe` is told it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from rp_optim import Disk

from rp_state.frozen.store import FrozenDisk
from rp_state.layers import PinMode

MasterKind = Literal["whole", "split"]
Coded = Callable[[Sequence[torch.nn.Module]], frozenset[int]]
"""Returns the ids of the weights of a row of modules whose FP8 codes are published."""


def code_none(modules: Sequence[torch.nn.Module]) -> frozenset[int]:
    """No codes are published: see `Coded`."""
    return frozenset()


@dataclass(frozen=True, slots=True)
class HostOptions:
    """A model's options for its weights on the host, as passed to `RoundPipe`.

    `optim_dtype`: the masters' dtype; None for the weights'. `double_buffer`: whether trained weights have second
    blocks; None if the engine decides, before the first step. `master`: whether bf16 weights are the upper halves
    of their masters. `disk`: where the lower halves are; None for memory. `steps_in_backward`: the optimizer steps
    during each training call, and layers pass their gradients' memory on. `frozen`: where the frozen weights are;
    None for memory. `coded`: which weights' FP8 codes are published, too.
    """

    pin: PinMode = "alloc"
    optim_dtype: torch.dtype | None = None
    double_buffer: bool | None = None
    master: MasterKind = "whole"
    steps_in_backward: bool = False
    disk: Disk | None = None
    frozen: FrozenDisk | None = None
    coded: Coded = code_none

    @property
    def will_train(self) -> bool:
        """Whether the model is wrapped to be trained, rather than perhaps: its masters have a dtype."""
        return self.optim_dtype is not None
