"""Training with everything on one GPU, which engines that keep nothing there are compared with."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn


class Resident:
    """A Hugging Face model on the GPU, each block recomputed, and fused AdamW on fp32 masters of its weights."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model.to("cuda").train()
        self.model.gradient_checkpointing_enable({"use_reentrant": False})  # pyright: ignore[reportCallIssue]
        self._weights = [weight for weight in self.model.parameters() if weight.requires_grad]
        self._masters = [nn.Parameter(weight.detach().float()) for weight in self._weights]
        self._optimizer = torch.optim.AdamW(self._masters, lr=1e-5, fused=True)

    def step(self, losses: Iterable[Callable[[], Tensor]]) -> float:
        """Add up the gradients of these losses, one a microbatch, and update; return their sum."""
        total = torch.zeros((), device="cuda")
        for compute in losses:
            loss = compute()
            loss.backward()
            total += loss.detach()
        with torch.no_grad():
            for weight, master in zip(self._weights, self._masters, strict=True):
                master.grad, weight.grad = weight.grad.float(), None  # pyright: ignore[reportOptionalMemberAccess]
            self._optimizer.step()
            self._optimizer.zero_grad()
            torch._foreach_copy_(self._weights, self._masters)
        return total.item()
