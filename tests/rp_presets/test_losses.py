"""The chunked loss against torch's own cross entropy."""

from dataclasses import dataclass

import pytest
import torch
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from rp_presets import causal_lm_loss
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

IGNORED = -100


@dataclass
class Output:
    logits: Tensor | None


def make_batch(seed: int, shape: tuple[int, ...], vocabulary: int, dtype=torch.float32, ignored=0.3):
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(*shape, vocabulary, generator=generator) * 3).to(dtype).requires_grad_()
    labels = torch.randint(vocabulary, shape, generator=generator)
    labels[torch.rand(shape, generator=generator) < ignored] = IGNORED
    return logits, labels


def plain_loss(logits: Tensor, labels: Tensor, reduction: str, aligned: bool) -> Tensor:
    """The slow truth: shift by slicing, upcast everything, ask torch."""
    if not aligned:
        logits, labels = logits[..., :-1, :], labels[..., 1:]
    flat = logits.reshape(-1, logits.shape[-1]).float()
    return functional.cross_entropy(flat, labels.reshape(-1), ignore_index=IGNORED, reduction=reduction)


@settings(max_examples=examples(60), deadline=None)
@given(
    seed=st.integers(0, 10_000),
    shape=st.one_of(st.tuples(st.integers(1, 9)), st.tuples(st.integers(1, 4), st.integers(1, 9))),
    vocabulary=st.integers(1, 20),
    chunk_positions=st.integers(1, 40),
    reduction=st.sampled_from(["sum", "mean"]),
    aligned=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_loss_and_gradient_equal_torchs_cross_entropy(
    seed, shape, vocabulary, chunk_positions, reduction, aligned, dtype
):
    logits, labels = make_batch(seed, shape, vocabulary, dtype)
    expected = plain_loss(logits, labels, reduction, aligned)
    (expected_gradient,) = torch.autograd.grad(expected, logits)

    loss = causal_lm_loss(logits, labels, reduction=reduction, aligned=aligned, chunk_positions=chunk_positions)
    (gradient,) = torch.autograd.grad(loss, logits)

    assert loss.dtype == torch.float32
    assert loss.shape == ()
    torch.testing.assert_close(loss, expected, equal_nan=True)
    if torch.isfinite(expected):
        torch.testing.assert_close(gradient, expected_gradient)
        assert gradient.dtype == dtype


@pytest.mark.parametrize("chunk_positions", [1, 7, 8, 9, 15, 16, 17])
def test_chunk_boundaries_change_nothing(chunk_positions):
    logits, labels = make_batch(0, (2, 8), 11)
    whole = causal_lm_loss(logits, labels, reduction="sum", chunk_positions=1000)
    loss = causal_lm_loss(logits, labels, reduction="sum", chunk_positions=chunk_positions)
    torch.testing.assert_close(loss, whole)
    torch.testing.assert_close(torch.autograd.grad(loss, logits), torch.autograd.grad(whole, logits))


def test_gradient_is_the_derivative_in_double_precision():
    logits, labels = make_batch(1, (2, 3), 5, torch.float64)

    def loss(logits: Tensor) -> Tensor:
        return causal_lm_loss(logits, labels, reduction="mean", chunk_positions=2) * 1.7

    assert loss(logits).dtype == torch.float64
    assert torch.autograd.gradcheck(loss, logits)


def test_sums_of_microbatches_over_a_token_count_equal_the_mean_over_the_batch():
    logits, labels = make_batch(2, (6, 5), 7)
    labels[3:] = IGNORED  # microbatches with unlike counts, one with none
    expected = plain_loss(logits, labels, "mean", aligned=False)
    tokens = (labels[:, 1:] != IGNORED).sum()

    losses = [
        causal_lm_loss(part, targets, reduction="sum") / tokens
        for part, targets in zip(logits.split(2), labels.split(2), strict=True)
    ]

    torch.testing.assert_close(sum(losses), expected)
    torch.testing.assert_close(torch.autograd.grad(sum(losses), logits), torch.autograd.grad(expected, logits))


@pytest.mark.parametrize("make_output", [lambda logits: logits, Output])
def test_logits_may_come_bare_or_in_an_output_object(make_output):
    logits, labels = make_batch(3, (2, 4), 5)
    loss = causal_lm_loss(make_output(logits), labels, reduction="mean")
    torch.testing.assert_close(loss, plain_loss(logits, labels, "mean", aligned=False))


def test_loss_equals_that_of_transformers():
    from transformers.loss.loss_utils import ForCausalLMLoss

    logits, labels = make_batch(4, (3, 6), 9, torch.bfloat16)
    torch.testing.assert_close(
        causal_lm_loss(logits, labels, reduction="mean"), ForCausalLMLoss(logits, labels, vocab_size=9)
    )
    torch.testing.assert_close(
        causal_lm_loss(logits, labels, reduction="sum") / 5,
        ForCausalLMLoss(logits, labels, vocab_size=9, num_items_in_batch=5),
    )


def test_labels_and_logits_are_left_as_they_were():
    logits, labels = make_batch(5, (2, 4), 5)
    kept = logits.detach().clone(), labels.clone()
    causal_lm_loss(logits, labels, reduction="sum").backward()
    assert torch.equal(logits, kept[0])
    assert torch.equal(labels, kept[1])


def test_a_sum_over_no_label_is_zero_with_zero_gradient():
    logits, labels = make_batch(6, (2, 4), 5)
    loss = causal_lm_loss(logits, torch.full_like(labels, IGNORED), reduction="sum")
    loss.backward()
    assert loss.item() == 0
    assert logits.grad is not None
    assert not logits.grad.any()


def test_a_position_without_label_may_hold_anything():
    logits, labels = make_batch(7, (1, 4), 5, ignored=0.0)
    labels[0, 2] = IGNORED
    broken = logits.detach().clone()
    broken[0, 2] = torch.nan
    broken.requires_grad_()

    loss = causal_lm_loss(broken, labels, reduction="sum", aligned=True)
    (gradient,) = torch.autograd.grad(loss, broken)

    torch.testing.assert_close(loss, plain_loss(logits, labels, "sum", aligned=True))
    assert not gradient[0, 2].any()
    assert gradient.isfinite().all()


def test_any_number_may_mark_what_is_ignored():
    logits, labels = make_batch(8, (2, 4), 5)
    expected = causal_lm_loss(logits, labels, reduction="mean")
    labels[labels == IGNORED] = 0xBAD
    torch.testing.assert_close(causal_lm_loss(logits, labels, reduction="mean", ignore_index=0xBAD), expected)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16])
def test_labels_may_be_any_integers(dtype):
    logits, labels = make_batch(9, (2, 4), 5)
    torch.testing.assert_close(
        causal_lm_loss(logits, labels.to(dtype), reduction="sum"),
        causal_lm_loss(logits, labels, reduction="sum"),
    )


class LargestWide(TorchDispatchMode):
    """Remembers the most bytes that a tensor of more than 16 bits a number had."""

    bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, (tuple, list)) else (made,):
            if isinstance(tensor, Tensor) and tensor.itemsize > 2:
                self.bytes = max(self.bytes, tensor.nbytes)
        return made


def test_float32_never_holds_more_than_a_chunk():
    logits, labels = make_batch(10, (4, 16), 32, torch.bfloat16)
    with LargestWide() as largest:
        causal_lm_loss(logits, labels, reduction="mean", chunk_positions=8).backward()
    assert largest.bytes == 8 * 32 * 4


def test_what_is_kept_for_backward_is_the_logits_and_columns():
    logits, labels = make_batch(11, (4, 16), 32, torch.bfloat16)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda kept: kept):
        causal_lm_loss(logits, labels, reduction="sum", chunk_positions=8)
    large = [tensor for tensor in kept if tensor.numel() > 64]
    assert [tensor.data_ptr() for tensor in large] == [logits.data_ptr()]


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"reduction": "none"}, ValueError, "reduction must be 'sum' or 'mean', but is 'none'"),
        ({"chunk_positions": 0}, ValueError, "chunk_positions must be at least 1, but is 0"),
        ({"outputs": Output(None)}, TypeError, "Output"),
        ({"outputs": "logits"}, TypeError, "str"),
        ({"outputs": torch.zeros(2, 4, 5, dtype=torch.int64)}, TypeError, "floating point, but are torch.int64"),
        ({"labels": torch.zeros(2, 4)}, TypeError, "integers, but are torch.float32"),
        ({"labels": torch.zeros(2, 3, dtype=torch.int64)}, ValueError, r"\(2, 4\), but have \(2, 3\)"),
        ({"labels": torch.zeros(8, dtype=torch.int64)}, ValueError, r"\(2, 4\), but have \(8,\)"),
    ],
)
def test_wrong_arguments_are_named(change, error, message):
    logits, labels = make_batch(12, (2, 4), 5)
    arguments = {"outputs": logits, "labels": labels, "reduction": "sum"} | change
    with pytest.raises(error, match=message):
        causal_lm_loss(**arguments)


def test_a_reduction_must_be_chosen():
    logits, labels = make_batch(13, (2, 4), 5)
    with pytest.raises(TypeError, match="reduction"):
        causal_lm_loss(logits, labels)


@pytest.mark.parametrize("is_constant", [True, False])
def test_a_gradient_of_the_gradient_is_refused(is_constant: bool):
    logits, labels = make_batch(0, (2, 5), 7)
    loss = causal_lm_loss(Output(logits), labels, reduction="sum")
    (grad,) = torch.autograd.grad(loss if is_constant else loss.square(), logits, create_graph=True)
    (plain,) = torch.autograd.grad(plain_loss(logits, labels, "sum", False), logits)
    assert grad.requires_grad
    if is_constant:
        torch.testing.assert_close(grad.detach(), plain)

    penalty = grad.norm() + logits.sum()

    with pytest.raises(RuntimeError, match="must not be differentiated"):
        penalty.backward(inputs=[logits], retain_graph=True)
    with pytest.raises(RuntimeError, match="must not be differentiated"):
        penalty.backward()
