"""`GlooGroup`: one set of connections between all machines, which gloo made."""

from __future__ import annotations

from typing import Protocol

import torch.distributed as dist
from torch import Tensor


class GlooGroup(Protocol):
    """What is used of torch's `ProcessGroupGloo`; its own description leaves these out."""

    def send(self, tensors: list[Tensor], dst: int, tag: int, /) -> dist.Work:
        """Start to send one tensor."""
        ...

    def recv(self, tensors: list[Tensor], src: int, tag: int, /) -> dist.Work:
        """Start to receive one tensor."""
        ...
