"""Which gradients a backward pass wants: `backward(inputs=...)` and `torch.autograd.grad` with weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from plain import Scaled, assert_near, batch, gradients, mlp, square_error, twin
from roundpipe import RoundPipe, RoundPipeError, RoundPipeRunConfig, Runtime
from roundpipe import wrap_model_to_roundpipe as wrap
from torch import nn

TWO = RoundPipeRunConfig(num_microbatch=2)
X, Y = batch(6)


@pytest.fixture(params=["row", "apart"])
def made(request: pytest.FixtureRequest, two: Runtime) -> tuple[nn.Module, Any, nn.Module]:
    """A module whose first layer is frozen, the model around it, and a copy for plain PyTorch."""
    net = mlp() if request.param == "row" else Scaled()
    (net if isinstance(net, nn.Sequential) else net.inner)[0].requires_grad_(False)
    truth = twin(net)
    if request.param == "row":
        return net, RoundPipe(net, name="mine", runtime=two, model_run_config=TWO), truth
    return net, wrap(net, name="mine", runtime=two, lower_threshold=1, model_run_config=TWO), truth


def trained(net: nn.Module) -> list[torch.Tensor]:
    return [each for each in net.parameters() if each.requires_grad]


def test_a_backward_for_the_weights_alone_gives_them_their_gradients(made: Any) -> None:
    net, model, truth = made
    x = X.clone().requires_grad_()

    for each, own in ((net, model), (truth, truth)):
        square_error(own(x), Y).backward(inputs=trained(each))
    model.synchronize()

    assert x.grad is None
    assert_near(gradients(net), gradients(truth))


def test_a_backward_for_others_leaves_the_weights_without(made: Any) -> None:
    net, model, truth = made
    x = X.clone().requires_grad_()

    found, wanted = (torch.autograd.grad(square_error(each(x), Y), x)[0] for each in (model, truth))
    model.synchronize()

    assert_near(found, wanted)
    assert all(each.grad is None for each in net.parameters())


def test_gradients_of_some_weights_alone_or_returned_are_refused_and_others_are_not_touched(made: Any) -> None:
    net, model, _ = made

    with pytest.raises(RoundPipeError, match=r"names 1 of \d weights that model 'mine.*all, or none, or freeze"):
        square_error(model(X), Y).backward(inputs=trained(net)[-1:])
    with pytest.raises(RoundPipeError, match=r"autograd\.grad was asked for gradients of weights of model 'mine"):
        torch.autograd.grad(square_error(model(X), Y), trained(net), allow_unused=True)

    model.synchronize()
    parts = [each for name, each in net.named_parameters() if name != "scale"]
    assert all(each.grad is None for each in parts)


def test_masters_which_no_loss_depends_on_are_refused_in_backward_and_grad(made: Any) -> None:
    net, model, _ = made
    masters = list(model.optim_parameters())

    with pytest.raises(RoundPipeError, match=r"names optim_parameters\(\) of model 'mine.*model\.model\.param"):
        square_error(model(X), Y).backward(inputs=masters)
    with pytest.raises(RoundPipeError, match=r"autograd\.grad was asked for gradients of weights of model 'mine"):
        torch.autograd.grad(square_error(model(X), Y), masters, allow_unused=True)

    model.synchronize()
    assert all(each.grad is None for each in (*net.parameters(), *masters))


def test_a_backward_that_names_the_weights_may_name_their_masters_too(made: Any) -> None:
    net, model, truth = made
    masters = list(model.optim_parameters())

    square_error(model(X), Y).backward(inputs=[*trained(net), *masters])
    square_error(truth(X), Y).backward()
    model.synchronize()

    assert_near(gradients(net), gradients(truth))
