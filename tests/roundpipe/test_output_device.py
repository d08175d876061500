"""Where outputs are returned: an ordinary copy, made after everything else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from plain import assert_near, batch, gradients, mlp, square_error, twin
from roundpipe import RoundPipe, RoundPipeRunConfig, Runtime
from torch import nn


class Tree(nn.Module):
    """Outputs tensors of several kinds, and what is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        return {"y": self.linear(x), "rank": x.detach().argmax(1), "none": None, "word": "top"}


@pytest.mark.parametrize("fused", [False, True])
def test_every_tensor_goes_there_and_nothing_else_changes(runtime: Runtime, fused: bool) -> None:
    # Every torch has this device, too.
    config = RoundPipeRunConfig(output_device="meta", num_microbatch=2)
    model = RoundPipe(Tree(), runtime=runtime, model_run_config=config)
    x, y = batch(5)
    if fused:
        loss_fn = lambda outputs, labels: square_error(outputs["y"], labels)  # noqa: E731
        loss, found = model.forward_backward(input_args=(x,), label=y, loss_fn=loss_fn, return_outputs=True)
        assert loss.device.type == "cpu"
    else:
        found = model(x)
        assert found["y"].requires_grad
    assert found["y"].device.type == found["rank"].device.type == "meta"
    assert (found["y"].shape, found["rank"].dtype) == ((5, 3), torch.int64)
    assert (found["none"], found["word"]) == (None, "top")


def test_a_call_may_ask_for_the_host_again(two: Runtime) -> None:
    layers = mlp()
    truth = twin(layers)
    model = RoundPipe(layers, runtime=two, model_run_config=RoundPipeRunConfig(output_device=torch.device("meta")))
    x, y = batch(5)
    outputs = model(x, roundpipe_run_config=RoundPipeRunConfig(output_device="cpu"))
    square_error(outputs, y).backward()
    model.synchronize()
    square_error(truth(x), y).backward()
    assert_near(gradients(layers), gradients(truth))


@pytest.mark.usefixtures("samples_first")
def test_a_device_that_is_not_there_is_refused_before_anything_runs(two: Runtime) -> None:
    model = RoundPipe(mlp(), runtime=two)
    ran: list[object] = []
    model.model[0].register_forward_hook(lambda *_: ran.append(None))
    x, y = batch(5)
    config = RoundPipeRunConfig(output_device="cuda:99")
    with pytest.raises(ValueError, match="output_device is cuda:99"):
        model(x, roundpipe_run_config=config)
    with pytest.raises(ValueError, match="output_device is cuda:99"):
        model.forward_backward(input_args=(x,), label=y, loss_fn=square_error, run_config=config)
    assert not ran
    model.forward_backward(input_args=(x,), label=y, loss_fn=square_error)
    assert ran
