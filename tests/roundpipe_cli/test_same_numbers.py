"""The main job's losses and final weights: the same on any devices, and those of a plain PyTorch loop."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from roundpipe import Runtime
from roundpipe.cli.options import Given, Options, read_options
from roundpipe.cli.training.data import Corpus, read_corpus
from roundpipe.cli.training.job import BETAS, WEIGHT_DECAY, Job, learning_rate
from roundpipe.cli.training.model import ModelSize, make_model
from torch.nn.functional import cross_entropy

SIZE = ModelSize(layers=3, hidden=32, intermediate=48, heads=2, key_value_heads=1, head_numbers=16)
STEPS = 10
DEVICES = ["cpu:1", "cpu:2", "cpu:4", pytest.param("cuda", marks=pytest.mark.cuda)]
Weights = dict[str, torch.Tensor]


def options(sync: bool, **more: Any) -> Options:
    # No epsilon of Adam's is large enough for gradients that are zero but for rounding: the rate stays small.
    given: dict[str, Any] = {"steps": str(STEPS), "batch_size": "6", "seq_len": "16", "lr": "1e-3"}
    return read_options(Given(**given, sync=sync, **{"dtype": "float32", "devices": "cpu:2", **more}))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_bytes(b"".join(b"%d green bottles hang on the wall; " % count for count in range(300)))
    return read_corpus([path])


def streamed(corpus: Corpus, devices: str, *, sync: bool, **more: Any) -> tuple[list[float], Weights]:
    with Runtime(devices) as runtime:
        job = Job(options(sync, **more), corpus, SIZE, runtime)
        losses = [job.step(step).loss for step in range(1, STEPS + 1)]
        job.model.synchronize()
        return losses, {name: weight.detach().clone() for name, weight in job.source.named_parameters()}


def plain(corpus: Corpus, *, sync: bool) -> tuple[list[float], Weights]:
    """The same job without the engine: gradients are taken at weights that are one step old, unless `sync`."""
    chosen = options(sync)
    newest = make_model(SIZE, dtype=torch.float32, seed=chosen.seed, seq_len=chosen.seq_len)
    optimizer = torch.optim.AdamW(newest.parameters(), betas=BETAS, weight_decay=WEIGHT_DECAY)
    with Runtime("cpu:1") as runtime:
        batches = Job(chosen, corpus, SIZE, runtime)
    read = copy.deepcopy(newest)
    losses: list[float] = []
    for step in range(1, STEPS + 1):
        inputs, labels = batches.training.at(batches._starts(step))
        loss = cross_entropy(read(input_ids=inputs).logits.flatten(0, 1), labels.flatten())
        gradients = torch.autograd.grad(loss, list(read.parameters()))
        losses.append(loss.item())
        before = copy.deepcopy(newest.state_dict())
        for weight, gradient in zip(newest.parameters(), gradients, strict=True):
            weight.grad = gradient
        optimizer.param_groups[0]["lr"] = learning_rate(step, steps=STEPS, highest=chosen.lr)
        optimizer.step()
        read.load_state_dict(newest.state_dict() if sync else before)
    return losses, {name: weight.detach() for name, weight in newest.named_parameters()}


@pytest.mark.parametrize("sync", [False, True], ids=["asynchronous", "synchronous"])
@pytest.mark.parametrize("devices", DEVICES)
def test_losses_and_final_weights_are_those_of_a_plain_loop(corpus: Corpus, devices: str, sync: bool) -> None:
    losses, weights = streamed(corpus, devices, sync=sync)
    wanted_losses, wanted_weights = plain(corpus, sync=sync)
    assert losses == pytest.approx(wanted_losses, rel=1e-4)
    assert weights.keys() == wanted_weights.keys()
    for name, wanted in wanted_weights.items():
        error = (weights[name] - wanted).norm() / wanted.norm()
        assert error < 1e-4, f"{name}: off by {error:.2g} of its norm"


def test_steps_in_backward_have_the_bits_of_those_after_it(corpus: Corpus) -> None:
    how: dict[str, Any] = {"sync": True, "dtype": "bfloat16", "master": "split"}
    losses, weights = streamed(corpus, "cpu:1", **how, step_in_backward=True)
    wanted_losses, wanted_weights = streamed(corpus, "cpu:1", **how)
    assert losses == wanted_losses
    assert all(torch.equal(weights[name], wanted) for name, wanted in wanted_weights.items())
