"""`compute="fp16-sums"`: fp16 weights, scaled losses, and torch's setting for sums, which is the process's."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator

import pytest
import torch
from plain import batch, mlp, square_error
from roundpipe import GradScaler, RoundPipe, RoundPipeRunConfig, Runtime
from torch import nn


@pytest.fixture(autouse=True)
def fp32_sums_before_and_after() -> Iterator[None]:
    torch.backends.cuda.matmul.allow_fp16_accumulation = False
    yield
    torch.backends.cuda.matmul.allow_fp16_accumulation = False


def trained(layers: nn.Module, runtime: Runtime, **options: str) -> list[float]:
    model = RoundPipe(layers, torch.float32, runtime=runtime, name="m", **options)  # type: ignore[arg-type]
    optimizer = torch.optim.SGD(model.optim_parameters(), lr=0.05)
    scaler, losses = GradScaler(init_scale=128.0, runtime=runtime), list[float]()
    x, y = batch(6)
    for _ in range(3):
        loss = model.forward_backward(
            (x.half(),), label=y, loss_fn=lambda out, label: scaler.scale(square_error(out.float(), label))
        )
        model.step(lambda: (scaler.step(optimizer), optimizer.zero_grad()), is_async=False)
        scaler.update()
        losses.append(float(loss) / 128.0)  # type: ignore[arg-type]  # one loss
    return losses


def test_it_is_set_for_the_process_and_said(two: Runtime, caplog: pytest.LogCaptureFixture) -> None:
    layers = mlp().half()
    plain = trained(copy.deepcopy(layers), two)
    assert not torch.backends.cuda.matmul.allow_fp16_accumulation
    with caplog.at_level(logging.INFO, "rp_engine"):
        found = trained(layers, two, compute="fp16-sums")
    assert torch.backends.cuda.matmul.allow_fp16_accumulation
    assert "'m': products of its" in caplog.text
    # CPU devices sum as before.
    assert found == plain
    assert found[-1] < found[0]


def test_weights_in_other_numbers_and_other_calls_are_refused(two: Runtime) -> None:
    with pytest.raises(ValueError, match=r"float16, but those of model 'm' are in float32; .*GradScaler"):
        RoundPipe(mlp(), name="m", runtime=two, compute="fp16-sums")
    x, _ = batch(6)
    usual = RoundPipe(mlp().half(), runtime=two)
    with pytest.raises(ValueError, match="say so when the model is wrapped"):
        usual(x.half(), roundpipe_run_config=RoundPipeRunConfig(compute="fp16-sums"))
    model = RoundPipe(mlp().half(), runtime=two, compute="fp16-sums")
    for compute in ("bf16", "fp8"):
        with pytest.raises(ValueError, match=f"cannot have compute='{compute}'"):
            model(x.half(), roundpipe_run_config=RoundPipeRunConfig(compute=compute))  # type: ignore[arg-type]


@pytest.mark.cuda
def test_gpus_train_so_about_as_with_fp32_sums() -> None:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(4, 512), nn.Tanh(), nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 3)).half()
    with Runtime("cuda:0") as runtime:
        usual = trained(copy.deepcopy(layers), runtime)
        found = trained(layers, runtime, compute="fp16-sums")
    torch.testing.assert_close(found, usual, rtol=2e-2, atol=1e-3)
