"""Layers that read their packed weights in unusual ways train as on the expanded ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from roundpipe import RoundPipe, RoundPipeRunConfig, Runtime, pack_frozen, unpack_frozen
from torch import nn
from torch.utils.checkpoint import checkpoint


class Recomputing(nn.Module):
    """Runs a part of its forward again in backward, by itself."""

    def __init__(self, *, is_reentrant: bool) -> None:
        super().__init__()
        self.frozen = nn.Linear(64, 64).requires_grad_(False)
        self.trained = nn.Linear(64, 64)
        self.is_reentrant = is_reentrant

    def body(self, x: torch.Tensor) -> torch.Tensor:
        return self.trained(torch.tanh(self.frozen(x)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + checkpoint(self.body, x, use_reentrant=self.is_reentrant)


class PassingOn(nn.Module):
    """A layer with an output that goes through the next layers as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Recomputing(is_reentrant=False)

    def forward(self, carry: Any) -> tuple[torch.Tensor, torch.Tensor]:
        x, first = carry if isinstance(carry, tuple) else (carry, None)
        out = self.layer(x)
        # Made before the other output, it comes after it in backward, next to the recomputation.
        first = out.sin() if first is None else first
        return out.cos(), first


class Joined(nn.Module):
    """The end of a row of those."""

    def forward(self, carry: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return carry[0] * carry[1]


class Handing(nn.Module):
    """Returns its weight beside its result."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(64, 64).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.frozen(x), self.frozen.weight


class Taking(nn.Module):
    """Reads the weight of the layer before beside its own packed one."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(64, 64).requires_grad_(False)

    def forward(self, carry: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return self.frozen(carry[0]) @ carry[1]


ROWS = {
    "checkpoint": lambda: [Recomputing(is_reentrant=False), Recomputing(is_reentrant=False)],
    "reentrant checkpoint": lambda: [Recomputing(is_reentrant=True), Recomputing(is_reentrant=True)],
    "passed on": lambda: [PassingOn(), PassingOn(), PassingOn(), Joined()],
    "weight as output": lambda: [Handing(), Taking()],
}


@pytest.mark.parametrize("devices", ["cpu:1", "cpu:2"])
@pytest.mark.parametrize("row", ROWS)
def test_gradients_are_those_of_the_expanded_weights(row: str, devices: str) -> None:
    found = gradients(row, devices, is_expanded=False)
    wanted = gradients(row, devices, is_expanded=True)
    assert len(wanted) >= 4
    assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == []


def gradients(row: str, devices: str, *, is_expanded: bool) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(64, 64), *ROWS[row](), nn.Linear(64, 64))
    pack_frozen(layers, "nf4")
    if is_expanded:
        unpack_frozen(layers)
    with Runtime(devices) as runtime:
        model = RoundPipe(layers, runtime=runtime)
        config = RoundPipeRunConfig(num_microbatch=2)
        model.forward_backward((torch.ones(4, 64),), loss_fn=lambda out, _: out.square().sum(), run_config=config)
        model.synchronize()
    found = {name: one.grad for name, one in layers.named_parameters() if one.requires_grad}
    return {name: grad for name, grad in found.items() if grad is not None}
