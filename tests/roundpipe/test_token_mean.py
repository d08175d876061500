"""`token_mean`: the divisor is counted over the batch, so the loss is that of the batch in one piece."""

from __future__ import annotations

from typing import Any

import pytest
import roundpipe
import torch
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from plain import assert_near, gradients, twin
from roundpipe import RoundPipe, RoundPipeRunConfig, Runtime, token_mean
from torch import nn
from torch.nn import functional

pytestmark = pytest.mark.filterwarnings("ignore:.*parts were requested")


def language_model(seed: int = 0) -> nn.Sequential:
    """Token ids (batch, positions) to logits (batch, positions, 11)."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Embedding(11, 6), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 11))


def ragged(rows: int, columns: int, seed: int) -> torch.Tensor:
    """Labels of which each row has another number that count, some rows none."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(11, (rows, columns), generator=generator)
    lengths = torch.randint(columns + 1, (rows, 1), generator=generator)
    return labels.masked_fill(torch.arange(columns)[None] >= lengths, -100)


def aligned_sum(logits: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), label.flatten(), reduction="sum")


def shifted_sum(logits: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    return aligned_sum(logits[:, :-1], label[:, 1:])


def whole(model: nn.Module, ids: torch.Tensor, labels: torch.Tensor, *, shift: bool) -> torch.Tensor:
    """The slow truth: torch's own mean over the batch in one piece."""
    logits = model(ids)
    if shift:
        logits, labels = logits[:, :-1], labels[:, 1:]
    loss = functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    loss.backward()
    return loss.detach()


def split(model: nn.Module, ids: torch.Tensor, label: Any, loss_fn: Any, parts: int, runtime: Runtime) -> Any:
    wrapped = RoundPipe(model, runtime=runtime, model_run_config=RoundPipeRunConfig(num_microbatch=parts))
    loss = wrapped.forward_backward((ids,), label=label, loss_fn=loss_fn)
    wrapped.synchronize()
    return loss


@settings(max_examples=examples(120), deadline=None)
@given(
    rows=st.integers(1, 9),
    columns=st.integers(2, 7),
    parts=st.integers(1, 7),
    shift=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_any_split_gives_the_loss_and_gradients_of_the_batch(rows, columns, parts, shift, seed):
    labels = ragged(rows, columns, seed)
    ids = torch.randint(11, (rows, columns), generator=torch.Generator().manual_seed(seed + 1))
    model = language_model(seed)
    truth = twin(model)
    wanted = whole(truth, ids, labels, shift=shift)
    with Runtime("cpu:2") as runtime:
        loss_fn = token_mean(shifted_sum if shift else aligned_sum, shift=shift)
        loss = split(model, ids, labels, loss_fn, parts, runtime)
        found = gradients(model)
    torch.testing.assert_close(loss, wanted, rtol=1e-6, atol=1e-6, equal_nan=True)
    assert_near(found, gradients(truth), tolerance=1e-6)


def test_means_of_means_would_be_wrong(two):
    ids, labels = torch.arange(10).view(2, 5), torch.tensor([[1, 2, 3, 4, 5], [1, -100, -100, -100, -100]])
    model, truth = language_model(), language_model()
    wanted = whole(truth, ids, labels, shift=False)
    naive = split(
        model, ids, labels, lambda out, label: aligned_sum(out, label) / (label != -100).sum() / 2, 2, two
    )
    assert abs(naive - wanted) > 1e-3
    with pytest.raises(AssertionError):
        assert_near(gradients(model), gradients(truth), tolerance=1e-6)


def test_it_runs_on_any_devices(runtime):
    ids, labels = torch.arange(40).view(5, 8) % 11, ragged(5, 8, 3)
    model, truth = language_model(), language_model()
    wanted = whole(truth, ids, labels, shift=False)
    assert_near(split(model, ids, labels, token_mean(aligned_sum, shift=False), 3, runtime), wanted, 1e-6)
    assert_near(gradients(model), gradients(truth), tolerance=1e-6)


def test_no_label_that_counts_gives_nan_and_no_gradient(two):
    ids, model = torch.arange(12).view(3, 4) % 11, language_model()
    loss = split(model, ids, torch.full((3, 4), -100), token_mean(aligned_sum, shift=False), 2, two)
    assert loss.isnan()
    assert all(grad is None or not grad.any() for grad in gradients(model).values())


def test_several_losses_have_one_divisor_or_one_each(two):
    ids, labels = torch.arange(12).view(3, 4) % 11, ragged(3, 4, 5)

    def two_sums(logits, label):
        return [aligned_sum(logits, label), logits.square().sum()]

    tokens = int((labels != -100).sum())
    one = split(language_model(), ids, labels, token_mean(two_sums, shift=False), 2, two)
    each = split(language_model(), ids, labels, token_mean(two_sums, count=lambda _: [tokens, 7.0]), 2, two)
    plain = two_sums(language_model()(ids), labels)
    assert_near(one, [loss / tokens for loss in plain], 1e-6)
    assert_near(each, [plain[0] / tokens, plain[1] / 7], 1e-6)


def test_labels_may_have_other_tensors_and_another_ignored_value(two):
    ids, labels = torch.arange(12).view(3, 4) % 11, torch.tensor([[1, 2, 0, 0], [0, 0, 0, 3], [0, 0, 0, 0]])
    weights = torch.rand(3, 4)

    def weighted(logits, label):
        losses = functional.cross_entropy(logits.flatten(0, 1), label["ids"].flatten(), reduction="none")
        return (losses * label["weights"].flatten() * (label["ids"].flatten() != 0)).sum()

    label = {"ids": labels, "weights": weights}
    found = split(language_model(), ids, label, token_mean(weighted, shift=False, ignore_index=0), 3, two)
    assert_near(found, weighted(language_model()(ids), label) / 3, 1e-6)


def test_called_by_itself_it_is_the_mean():
    ids, labels = torch.arange(12).view(3, 4) % 11, ragged(3, 4, 5)
    model = language_model()
    found = token_mean(shifted_sum, shift=True)(model(ids), labels)
    assert_near(found, whole(model, ids, labels, shift=True), 1e-6)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "either shift or count"),
        ({"shift": True, "count": len}, "either shift or count"),
    ],
)
def test_one_way_to_count_must_be_chosen(arguments, message):
    with pytest.raises(TypeError, match=message):
        token_mean(aligned_sum, **arguments)


def test_what_is_summed_must_be_callable():
    with pytest.raises(TypeError, match="sum_loss must be callable, but is a float"):
        token_mean(1.0, shift=False)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("label", "loss_fn", "error", "message"),
    [
        (torch.rand(3, 4), token_mean(aligned_sum, shift=False), TypeError, "one tensor of integers.*float32 of"),
        (None, token_mean(aligned_sum, shift=False), TypeError, "has no tensor"),
        ((torch.ones(3, 4).long(),) * 2, token_mean(aligned_sum, shift=False), TypeError, "give count"),
        (torch.ones(3).long(), token_mean(aligned_sum, shift=True), ValueError, "first label of each row"),
        (torch.ones(3, 4).long(), token_mean(aligned_sum, count=lambda _: "3"), TypeError, "count must return"),
        (torch.ones(3, 4).long(), token_mean(aligned_sum, count=lambda _: -1), TypeError, "0 or more"),
        (torch.ones(3, 4).long(), token_mean(aligned_sum, count=lambda _: [3]), TypeError, "sum_loss one loss"),
        (
            torch.ones(3, 4).long(),
            token_mean(lambda out, _: [out.sum()], count=lambda _: [3, 4]),
            TypeError,
            "2 numbers, but sum_loss 1 losses",
        ),
    ],
)
def test_labels_that_cannot_be_counted_are_refused(two, label, loss_fn, error, message):
    with pytest.raises(error, match=message):
        split(language_model(), torch.ones(3, 4).long(), label, loss_fn, 2, two)


def test_labels_in_microbatches_are_refused(two):
    import rp_batch

    parts = rp_batch.Parts([torch.ones(2, 4).long(), torch.ones(1, 4).long()], sizes=(2, 1))
    with pytest.raises(TypeError, match="in one piece"):
        split(language_model(), torch.ones(3, 4).long(), parts, token_mean(aligned_sum, shift=False), 2, two)


@pytest.mark.usefixtures("samples_first")
def test_the_loss_may_use_logits_that_were_not_computed(runtime):
    import rp_presets

    class Head(nn.Linear):
        def forward(self, x):
            plain = nn.Linear(1, 1)
            plain.weight, plain.bias = self.weight, self.bias
            found = rp_presets.lazy_logits(plain, x)
            made.append(found)
            return found

    made: list[torch.Tensor] = []
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(11, 6), nn.Tanh(), Head(6, 11))
    truth = nn.Sequential(nn.Embedding(11, 6), nn.Tanh(), nn.Linear(6, 11))
    truth.load_state_dict(model.state_dict())
    ids, labels = torch.arange(40).view(5, 8) % 11, ragged(5, 8, 3)
    wanted = whole(truth, ids, labels, shift=True)
    wrapped = RoundPipe(model, runtime=runtime, model_run_config=RoundPipeRunConfig(num_microbatch=2))
    loss_fn = token_mean(shifted_sum, shift=True)
    loss = wrapped.forward_backward((ids,), label=labels, loss_fn=loss_fn)
    wrapped.synchronize()
    assert_near(loss, wanted, 1e-6)
    assert_near(gradients(model), gradients(truth), tolerance=1e-6)
    assert all(type(each) is rp_presets.LazyLogits and each._real is None for each in made)

    _, outputs = wrapped.forward_backward((ids,), label=labels, loss_fn=loss_fn, return_outputs=True)
    assert type(outputs) is torch.Tensor
    assert_near(outputs, truth(ids), 1e-6)
    wrapped.zero_grad()
    truth.zero_grad()
    found, real = wrapped(ids), truth(ids)
    assert_near(found, real, 1e-6)
    found.square().sum().backward()
    real.square().sum().backward()
    wrapped.synchronize()
    assert_near(gradients(model), gradients(truth), tolerance=1e-5)


def test_within_another_loss_function_it_is_refused_where_that_has_a_part_of_the_labels(runtime: Runtime):
    model, ids, labels = language_model(), torch.arange(40).view(5, 8) % 11, ragged(5, 8, 3)
    mean = token_mean(aligned_sum, shift=False)

    def doubled(logits: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        return 2 * mean(logits, label)

    wanted = 2 * whole(language_model(), ids, labels, shift=False)
    assert_near(split(model, ids, labels, doubled, 1, runtime), wanted, 1e-6)
    with pytest.raises(TypeError, match=r"labels of one of 3 microbatches.*move what is around it inside"):
        split(language_model(), ids, labels, doubled, 3, runtime)
    # The threads that ran it have not kept that.
    inside = token_mean(lambda logits, label: 2 * aligned_sum(logits, label), shift=False)
    assert_near(split(language_model(), ids, labels, inside, 3, runtime), wanted, 1e-6)
    assert_near(split(language_model(), ids, labels, doubled, 1, runtime), wanted, 1e-6)


def test_it_is_exported():
    assert roundpipe.token_mean is token_mean
