"""Adam and AdamW against torch's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from rp_optim import Adam, AdamW

OPTIONS: list[dict[str, Any]] = [
    {},
    {"lr": 0.1, "betas": (0.5, 0.9), "eps": 1e-3},
    {"weight_decay": 0.3},
    {"amsgrad": True},
    {"maximize": True},
    {"lr": torch.tensor(0.05)},
]


def parameters() -> list[torch.nn.Parameter]:
    torch.manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape)) for shape in ((3, 4), (5,), ())]


def train(optimizer: torch.optim.Optimizer, weights: list[torch.nn.Parameter], steps: int = 5) -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        for weight in weights:
            weight.grad = torch.randn(weight.shape, generator=generator)
        optimizer.step()


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize(("ours", "torchs"), [(Adam, torch.optim.Adam), (AdamW, torch.optim.AdamW)])
def test_results_equal_torchs(ours: Any, torchs: Any, options: dict[str, Any]) -> None:
    mine, theirs = parameters(), parameters()
    train(ours(mine, **options), mine)
    train(torchs(theirs, **options), theirs)
    for left, right in zip(mine, theirs, strict=True):
        torch.testing.assert_close(left, right)


def test_decoupled_weight_decay_makes_adam_adamw() -> None:
    mine, theirs = parameters(), parameters()
    train(Adam(mine, weight_decay=0.3, decoupled_weight_decay=True), mine)
    train(torch.optim.AdamW(theirs, weight_decay=0.3), theirs)
    for left, right in zip(mine, theirs, strict=True):
        torch.testing.assert_close(left, right)


@pytest.mark.parametrize("ours_first", [True, False])
def test_each_loads_the_others_state(ours_first: bool) -> None:
    kinds: list[Any] = [AdamW, torch.optim.AdamW] if ours_first else [torch.optim.AdamW, AdamW]
    mine, whole = parameters(), parameters()
    first = kinds[0](mine)
    train(first, mine)
    second = kinds[1](mine)
    second.load_state_dict(first.state_dict())
    train(second, mine)
    reference = torch.optim.AdamW(whole)
    train(reference, whole)
    train(reference, whole)
    for left, right in zip(mine, whole, strict=True):
        torch.testing.assert_close(left, right)


def test_placeholders_change_nothing() -> None:
    mine, theirs = parameters(), parameters()
    train(Adam(mine, foreach=True, fused=False), mine)
    train(Adam(theirs), theirs)
    for left, right in zip(mine, theirs, strict=True):
        assert torch.equal(left, right)


@pytest.mark.parametrize("name", ["capturable", "differentiable"])
@pytest.mark.parametrize("kind", [Adam, AdamW])
def test_what_makes_no_sense_on_the_host_is_refused(kind: Any, name: str) -> None:
    with pytest.raises(ValueError, match=f"{kind.__name__} runs on the host, so {name} must be False"):
        kind(parameters(), **{name: True})


def test_a_parameter_without_gradient_stays() -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    AdamW([weight], lr=1.0).step()
    assert torch.equal(weight, torch.ones(3))
