"""The losses and final weights of our own loop: the same on any devices, and those of a plain PyTorch loop."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from roundpipe import RoundPipeRunConfig, Runtime, wrap_model_to_roundpipe
from rp_trainer.finetuning import InTurn, Settings
from rp_trainer.finetuning.settings import learning_rate
from rp_trainer.finetuning.training import Training
from tiny import causal_lm

STEPS = 10
DEVICES = ["cpu:1", "cpu:2", "cpu:4", pytest.param("cuda", marks=pytest.mark.cuda)]
Weights = dict[str, torch.Tensor]


def settings(**given: Any) -> Settings:
    # No epsilon of Adam's is large enough for gradients that are zero but for rounding: the rate stays small.
    return Settings(steps=STEPS, lr=1e-3, betas=(0.5, 0.95), weight_decay=0.1, **{"clip": 0, **given})


@pytest.fixture(scope="module")
def batches() -> list[dict[str, torch.Tensor]]:
    numbers = torch.Generator().manual_seed(0)
    # Each token is drawn from few, so that something can be learned.
    tokens = [torch.randint(5, 12, (6, 16), generator=numbers) for _ in range(4)]
    return [{"input_ids": each, "labels": each} for each in tokens]


def streamed(
    batches: Sequence[dict[str, torch.Tensor]],
    devices: str,
    *,
    steps: int = STEPS,
    parts: int = 4,
    dtype: torch.dtype = torch.float32,
    master: Any = "whole",
    **given: Any,
) -> tuple[list[float], Weights]:
    source = causal_lm().to(dtype)
    with Runtime(devices) as runtime:
        model = wrap_model_to_roundpipe(
            source,
            optim_dtype=torch.float32,
            master=master,
            step_in_backward=given.get("step_in_backward", False),
            model_run_config=RoundPipeRunConfig(num_microbatch=parts),
            runtime=runtime,
        )
        training = Training(model, InTurn(batches), settings(**given))
        losses = [training.step(step)[0].loss for step in range(1, steps + 1)]
        model.synchronize()
        return losses, {name: weight.detach().clone() for name, weight in source.named_parameters()}


def plain(batches: Sequence[dict[str, torch.Tensor]], *, sync: bool) -> tuple[list[float], Weights]:
    """The same without the engine: gradients are taken at weights that are one step old, unless `sync`."""
    newest = causal_lm()
    decayed = [weight for weight in newest.parameters() if weight.ndim > 1]
    others = [weight for weight in newest.parameters() if weight.ndim == 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.5, 0.95))
    read = copy.deepcopy(newest)
    losses: list[float] = []
    for step in range(1, STEPS + 1):
        loss = read(**batches[(step - 1) % len(batches)]).loss
        gradients = torch.autograd.grad(loss, list(read.parameters()))
        losses.append(loss.item())
        before = copy.deepcopy(newest.state_dict())
        for weight, gradient in zip(newest.parameters(), gradients, strict=True):
            weight.grad = gradient
        for group in optimizer.param_groups:
            group["lr"] = settings().rate(step)
        optimizer.step()
        read.load_state_dict(newest.state_dict() if sync else before)
    return losses, {name: weight.detach() for name, weight in newest.named_parameters()}


@pytest.mark.few(1)
@pytest.mark.parametrize("sync", [False, True], ids=["asynchronous", "synchronous"])
@pytest.mark.parametrize("devices", DEVICES)
def test_losses_and_final_weights_are_those_of_a_plain_loop(batches: Any, devices: str, sync: bool) -> None:
    wanted_losses, wanted_weights = plain(batches, sync=sync)

    losses, weights = streamed(batches, devices, sync=sync)

    assert losses == pytest.approx(wanted_losses, rel=1e-4)
    assert weights.keys() == wanted_weights.keys()
    for name, wanted in wanted_weights.items():
        error = (weights[name] - wanted).norm() / wanted.norm()
        assert error < 1e-4, f"{name}: off by {error:.2g} of its norm"


@pytest.mark.later
@pytest.mark.parametrize("clip", [0, 0.1])
def test_norms_are_those_of_gradients_before_they_are_clipped(batches: Any, clip: float) -> None:
    def norms(**given: Any) -> list[float | None]:
        config = RoundPipeRunConfig(num_microbatch=2)
        how = {"step_in_backward": given.get("step_in_backward", False), "optim_dtype": torch.float32}
        with Runtime("cpu:2") as runtime:
            model = wrap_model_to_roundpipe(causal_lm(), runtime=runtime, model_run_config=config, **how)
            training = Training(model, InTurn(batches), settings(clip=clip, **given))
            return [training.step(step)[0].grad_norm for step in (1, 2)]

    first = causal_lm()
    first(**batches[0]).loss.backward()
    wanted = torch.nn.utils.get_total_norm([weight.grad for weight in first.parameters()]).item()

    assert norms(sync=True)[0] == pytest.approx(wanted, rel=1e-4)
    assert norms(sync=False) == [None, pytest.approx(wanted, rel=1e-4)]
    if not clip:
        assert norms(step_in_backward=True) == [None, None]


@pytest.mark.later
def test_steps_in_backward_have_the_bits_of_those_after_it(batches: Any) -> None:
    how: dict[str, Any] = {"dtype": torch.bfloat16, "master": "split"}

    losses, weights = streamed(batches, "cpu:1", **how, step_in_backward=True)
    wanted_losses, wanted_weights = streamed(batches, "cpu:1", **how)

    assert losses == wanted_losses
    assert all(torch.equal(weights[name], wanted) for name, wanted in wanted_weights.items())


@pytest.mark.later
def test_an_asynchronous_step_reads_weights_one_step_older(batches: Any) -> None:
    (delayed, _), (current, _) = (streamed(batches, "cpu:2", steps=3, sync=sync) for sync in (False, True))

    assert delayed[0] == pytest.approx(current[0], rel=1e-5)
    # Step 2 repeats the first weights, unless steps are synchronous.
    assert delayed[1] != pytest.approx(current[1], rel=1e-5)


@pytest.mark.later
def test_the_loss_is_that_of_the_whole_batch_whatever_the_microbatches(batches: Any) -> None:
    (whole, _), (parts, _) = (streamed(batches, "cpu:2", steps=3, parts=count) for count in (1, 5))

    assert parts == pytest.approx(whole, rel=1e-4)


@pytest.mark.later
@pytest.mark.parametrize("sync", [True, False])
def test_masters_in_halves_give_the_same_losses(batches: Any, sync: bool) -> None:
    (whole, _), (split, _) = (
        streamed(batches, "cpu:1", dtype=torch.bfloat16, master=master, sync=sync) for master in ("whole", "split")
    )

    # Planned calls add in another order.
    assert split == pytest.approx(whole, rel=1e-2)


def test_the_rate_rises_to_its_height_and_falls_to_a_tenth() -> None:
    rates = [learning_rate(step, steps=100, highest=2.0) for step in range(1, 101)]

    assert max(rates) == rates[9] == 2.0
    assert rates[-1] == pytest.approx(0.2)
    assert all(earlier < later for earlier, later in itertools.pairwise(rates[:10]))
    assert all(earlier > later for earlier, later in itertools.pairwise(rates[9:]))


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_a_short_training_has_rates_above_zero(steps: int) -> None:
    assert all(0 < learning_rate(step, steps=steps, highest=1.0) <= 1 for step in range(1, steps + 1))
