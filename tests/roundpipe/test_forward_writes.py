"""A layer whose forward writes its weights, or moves its buffers, is refused by name, however it does that."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from plain import batch, square_error
from roundpipe import RoundPipe, RoundPipeRunConfig, Runtime
from torch import nn

X, Y = batch(6)
TWO = RoundPipeRunConfig(num_microbatch=2)


def clamped(layer: nn.Linear) -> None:
    layer.weight.data.clamp_(-0.1, 0.1)


def clamped_by_dlpack(layer: nn.Linear) -> None:
    torch.from_dlpack(layer.weight.detach()).clamp_(-0.1, 0.1)


def renormed(layer: nn.Linear) -> None:
    layer.weight.data = torch.renorm(layer.weight.data, p=2, dim=0, maxnorm=0.3)


def counted(layer: nn.Linear) -> None:
    layer.count.data = layer.count + 1


def set_anew(layer: nn.Linear) -> None:
    with torch.no_grad():
        layer.count.set_(layer.count + 1)


WRITES: dict[Callable[[nn.Linear], None], str] = {
    clamped: "wrote its parameter 'weight' in forward",
    clamped_by_dlpack: "wrote its parameter 'weight' in forward",
    renormed: "gave its 'weight' other memory in forward",
    counted: "gave its 'count' other memory in forward",
    set_anew: "gave its 'count' other memory in forward",
}


# What no attribute of a layer shows.
HAS_BEGUN = [True]


class Writing(nn.Linear):
    """Writes something in forward, once it has begun."""

    def __init__(self, write: Callable[[nn.Linear], None], *, has_buffer: bool) -> None:
        super().__init__(4, 3)
        self.write = write
        if has_buffer:
            self.register_buffer("count", torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if HAS_BEGUN[0]:
            self.write(self)
        return super().forward(x)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("write", WRITES)
def test_a_write_in_forward_is_refused(two: Runtime, write: Callable[[nn.Linear], None], training: bool) -> None:
    layer = Writing(write, has_buffer=write in (counted, set_anew))
    model = RoundPipe(nn.Sequential(nn.Identity(), layer), runtime=two, model_run_config=TWO).train(training)
    before = {name: value.clone() for name, value in model.state_dict().items()}

    with pytest.raises(TypeError, match=f"layer 1 {WRITES[write]}"), torch.set_grad_enabled(training):
        model(X)

    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def trained_until_it_writes(model: RoundPipe) -> None:
    """Four calls in which no layer writes, and four more."""
    for number in range(8):
        HAS_BEGUN[0] = number >= 4
        model.forward_backward((X,), label=Y, loss_fn=square_error)
        model.synchronize()


@pytest.mark.parametrize("write", [clamped, renormed])
def test_a_write_that_begins_later_is_refused_too(
    two: Runtime, write: Callable[[nn.Linear], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rp_engine.engine.runs._COMPARED_EACH", 4)
    layer = Writing(write, has_buffer=False)
    monkeypatch.setattr(f"{__name__}.HAS_BEGUN", [False])
    model = RoundPipe(nn.Sequential(nn.Identity(), layer), runtime=two, model_run_config=TWO)

    with pytest.raises(TypeError, match=f"layer 1 {WRITES[write]}"):
        trained_until_it_writes(model)


class Late(nn.Module):
    """Writes a buffer past its version counter, and counts its calls in another one, once that has begun."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("seen", torch.zeros(4))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if HAS_BEGUN[0]:
            self.calls += 1
            self.seen.data.copy_(x.detach()[0])
        return self.linear(x)


def test_a_buffer_that_is_written_past_its_counter_later_is_refused_by_name(
    two: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rp_engine.engine.runs._COMPARED_EACH", 4)
    monkeypatch.setattr(f"{__name__}.HAS_BEGUN", [False])
    layers = nn.Sequential(nn.Identity(), Late(), nn.Linear(4, 3))
    model = RoundPipe(layers, runtime=two, model_run_config=TWO)

    with pytest.raises(TypeError, match=r"layer 1 \(Late\) wrote its buffer 'seen' past .* self\.seen\.copy_"):
        trained_until_it_writes(model)
    assert layers[1].calls > 0
