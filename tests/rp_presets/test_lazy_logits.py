"""Logits that stand for themselves: cross entropy in chunks, and anything else as if they were real."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from rp_presets import LazyLogits, causal_lm_loss, lazy_logits
from rp_presets.losses import row_chunks
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]
Recipe = Callable[[Tensor], Tensor]

# What heads of language models do before the loss, over (batch, positions, vocabulary).
RECIPES: dict[str, Recipe] = {
    "nothing": lambda logits: logits,
    "upcast": lambda logits: logits.float(),
    "upcast by to": lambda logits: logits.to(torch.float32),
    "upcast and moved": lambda logits: logits.to(logits.device, torch.float32).contiguous(),
    "scaled": lambda logits: (logits * 0.25).float(),
    "scaled from the left": lambda logits: 2 * logits.float(),
    "divided": lambda logits: (logits / 7.0).float(),
    "soft-capped": lambda logits: 5.0 * torch.tanh(logits / 5.0),
    "soft-capped after the upcast": lambda logits: (logits.float() / 3).tanh() * 3,
    "shifted": lambda logits: logits[..., :-1, :],
    "shifted by slices": lambda logits: logits[:, slice(1, None), :],
    "shifted and upcast": lambda logits: logits[:, :-1].contiguous().float(),
    "the last": lambda logits: logits[:, -1],
    "masked positions": lambda logits: logits[
        torch.arange(logits.shape[0] * logits.shape[1], device=logits.device).view(logits.shape[:2]) % 3 != 1
    ],
}


def make(seed: int, shape: tuple[int, ...], features: int, vocabulary: int, *, bias: bool, dtype: torch.dtype):
    torch.manual_seed(seed)
    linear = nn.Linear(features, vocabulary, bias=bias).to(dtype)
    return linear, (2 * torch.randn(*shape, features)).to(dtype).requires_grad_()


def rows_and_targets(logits: Tensor, recipe: Recipe, seed: int, ignored: float = 0.3) -> tuple[Tensor, Tensor]:
    found = recipe(logits)
    rows = found.reshape(-1, logits.shape[-1])
    generator = torch.Generator().manual_seed(seed)
    targets = torch.randint(rows.shape[-1], rows.shape[:1], generator=generator)
    targets[torch.rand(targets.shape, generator=generator) < ignored] = -100
    return rows, targets.to(logits.device)


def gradients(loss: Tensor, linear: nn.Linear, hidden: Tensor, incoming: Tensor | None = None) -> list[Tensor]:
    return list(torch.autograd.grad(loss, [hidden, *linear.parameters()], incoming))


def in_chunks_of(rows: int, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(row_chunks, "_FEWEST_ROWS", rows)
    patch.setattr(row_chunks, "_MOST_ROWS", rows)


@settings(max_examples=examples(120), deadline=None)
@given(
    seed=st.integers(0, 10_000),
    shape=st.tuples(st.integers(1, 4), st.integers(2, 9)),
    features=st.integers(1, 6),
    vocabulary=st.integers(1, 30),
    bias=st.booleans(),
    recipe=st.sampled_from(sorted(RECIPES)),
    reduction=st.sampled_from(["sum", "mean", "none"]),
    smoothing=st.sampled_from([0.0, 0.1]),
    weighted=st.booleans(),
    rows=st.integers(1, 12),
)
def test_loss_and_gradients_are_those_of_the_logits(
    seed, shape, features, vocabulary, bias, recipe, reduction, smoothing, weighted, rows
):
    linear, hidden = make(seed, shape, features, vocabulary, bias=bias, dtype=torch.float32)
    real, targets = rows_and_targets(linear(hidden), RECIPES[recipe], seed)
    lazy, _ = rows_and_targets(lazy_logits(linear, hidden), RECIPES[recipe], seed)
    options: dict[str, Any] = {"reduction": reduction, "label_smoothing": smoothing}
    if weighted:
        options["weight"] = torch.rand(vocabulary) + 0.1

    assert type(lazy) is LazyLogits
    with pytest.MonkeyPatch.context() as patch:
        in_chunks_of(rows, patch)
        loss = functional.cross_entropy(lazy, targets, **options)
    wanted = functional.cross_entropy(real, targets, **options)

    assert lazy._real is None  # nothing has asked for them
    torch.testing.assert_close(loss, wanted, rtol=1e-6, atol=1e-6, equal_nan=True)
    # Not one, as where a gradient scaler or a divisor follows.
    incoming = torch.linspace(0.5, 3, loss.numel()).reshape(loss.shape)
    found = gradients(loss, linear, hidden, incoming)
    torch.testing.assert_close(found, gradients(wanted, linear, hidden, incoming), rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("reduction", ["sum", "mean", "none"])
@pytest.mark.parametrize("recipe", ["nothing", "upcast", "scaled", "soft-capped after the upcast"])
def test_in_16_bits_it_is_as_good_as_the_logits(device, dtype, reduction, recipe, monkeypatch):
    linear, hidden = make(3, (4, 40), 64, 300, bias=True, dtype=dtype)
    linear, hidden = linear.to(device), hidden.detach().to(device).requires_grad_()
    in_chunks_of(24, monkeypatch)

    def measured(logits: Callable[[], Tensor], linear: nn.Linear, hidden: Tensor) -> tuple[Tensor, list[Tensor]]:
        rows, targets = rows_and_targets(logits(), RECIPES[recipe], 5)
        loss = functional.cross_entropy(rows, targets, reduction=reduction)
        return loss, gradients((loss * 3.7).sum(), linear, hidden)

    exact_linear, exact_hidden = copy.deepcopy(linear).double(), hidden.detach().double().requires_grad_()

    def exact_run() -> tuple[Tensor, list[Tensor]]:
        logits = exact_linear(exact_hidden)
        no_cast: Recipe = {
            "nothing": lambda x: x,
            "upcast": lambda x: x,
            "scaled": lambda x: x * 0.25,
        }.get(recipe, lambda x: (x / 3).tanh() * 3)
        rows, targets = rows_and_targets(logits, no_cast, 5)
        loss = functional.cross_entropy(rows, targets, reduction=reduction)
        return loss, gradients((loss * 3.7).sum(), exact_linear, exact_hidden)

    truth, true_grads = exact_run()
    plain, plain_grads = measured(lambda: linear(hidden), linear, hidden)
    loss, grads = measured(lambda: lazy_logits(linear, hidden), linear, hidden)

    assert loss.dtype == plain.dtype
    assert distance(loss, truth) <= 1.05 * distance(plain, truth) + 1e-5
    for found, usual, wanted in zip(grads, plain_grads, true_grads, strict=True):
        assert found.dtype == dtype
        assert distance(found, wanted) <= 1.1 * distance(usual, wanted)


def distance(found: Tensor, wanted: Tensor) -> float:
    return ((found.double() - wanted).norm() / wanted.norm()).item()


class Largest(TorchDispatchMode):
    """Records the number of elements of the largest tensor that an operation returned."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        for each in found if isinstance(found, tuple | list) else (found,):
            # A stand-in is a tensor of that many elements, none of which is stored.
            if isinstance(each, Tensor) and type(each) is not LazyLogits:
                self.elements = max(self.elements, each.untyped_storage().nbytes() // each.itemsize)
        return found


def largest(positions: int, *, reduction: str = "sum", dtype: torch.dtype = torch.float32, **options: Any) -> int:
    linear, hidden = make(0, (2, positions), 16, 500, bias=True, dtype=dtype)
    targets = torch.randint(500, (2 * positions,))
    with Largest() as seen:
        logits = lazy_logits(linear, hidden)
        rows = (5 * torch.tanh(logits / 5)).float().view(-1, 500) if options.pop("capped", False) else logits
        loss = functional.cross_entropy(rows.float().view(-1, 500), targets, reduction=reduction, **options)
        loss.sum().backward()
    return seen.elements


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "options",
    [{}, {"reduction": "mean"}, {"reduction": "none"}, {"capped": True}, {"label_smoothing": 0.1}],
    ids=str,
)
def test_memory_does_not_grow_with_tokens_times_vocabulary(dtype, options, monkeypatch):
    in_chunks_of(8, monkeypatch)
    few, many = largest(40, dtype=dtype, **options), largest(240, dtype=dtype, **options)
    weight = 500 * 16
    assert few == many == weight
    assert 20 * weight < 480 * 500  # what all logits would have


def test_the_largest_tensor_of_ordinary_logits_is_seen():
    linear, hidden = make(0, (2, 240), 16, 500, bias=True, dtype=torch.float32)
    with Largest() as seen:
        linear(hidden)
    assert seen.elements == 480 * 500


def test_the_chunks_are_bounded():
    assert [row_chunks.chunk_rows(features) for features in (1, 1024, 2048, 1 << 20)] == [256, 512, 1024, 2048]


OPERATIONS: dict[str, Callable[[Tensor], Any]] = {
    "sum": lambda logits: logits.sum(),
    "plus a tensor": lambda logits: logits + torch.ones(7),
    "times a tensor": lambda logits: torch.linspace(0, 1, 7) * logits,
    "from the right": lambda logits: 1.0 / logits,
    "softmax": lambda logits: functional.softmax(logits, -1),
    "max": lambda logits: logits.max(-1).values,
    "argmax": lambda logits: torch.argmax(logits, -1),
    "some of the vocabulary": lambda logits: logits[..., :3],
    "one token": lambda logits: logits[:, 0, 2],
    "an index of each dimension": lambda logits: logits[
        torch.tensor([0, 1]), torch.tensor([1, 1]), torch.tensor([0, 6])
    ],
    "a new last dimension": lambda logits: logits[..., None],
    "transposed": lambda logits: logits.transpose(1, 2),
    "attribute": lambda logits: logits.mT,
    "view that mixes": lambda logits: logits.view(-1, 14),
    "cat": lambda logits: torch.cat([logits, logits], 0),
    "einsum": lambda logits: torch.einsum("btv,btv->b", logits, logits),
    "multiplied by bool": lambda logits: logits * True,
    "to integers": lambda logits: logits.to(torch.int64),
    "unpacked": lambda logits: torch.stack(list(logits)),
    "class probabilities": lambda logits: functional.cross_entropy(logits.view(-1, 7), torch.full((10, 7), 1 / 7)),
    "classes in the middle": lambda logits: functional.cross_entropy(
        logits.transpose(1, 2), torch.zeros(2, 5).long()
    ),
    "old reduction": lambda logits: functional.cross_entropy(
        logits.view(-1, 7), torch.zeros(10).long(), reduce=False
    ),
    "log softmax": lambda logits: functional.nll_loss(
        functional.log_softmax(logits.view(-1, 7), -1), torch.zeros(10).long()
    ),
    "in place": lambda logits: logits.mul_(2).sum(),
    "an item": lambda logits: logits.index_fill_(-1, torch.tensor([0]), -1.0),
    "assigned": lambda logits: (logits.__setitem__((0, 0), 3.0), logits)[1] * 1.0,
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_every_other_operation_sees_the_logits(name):
    linear, hidden = make(1, (2, 5), 3, 7, bias=True, dtype=torch.float32)
    found = OPERATIONS[name](lazy_logits(linear, hidden))
    wanted = OPERATIONS[name](linear(hidden))
    assert not isinstance(found, LazyLogits)
    torch.testing.assert_close(found, wanted)
    if wanted.requires_grad:
        torch.testing.assert_close(gradients(found.sum(), linear, hidden), gradients(wanted.sum(), linear, hidden))


def test_it_knows_what_it_is_without_the_logits():
    linear, hidden = make(1, (2, 5), 3, 7, bias=True, dtype=torch.bfloat16)
    logits = lazy_logits(linear, hidden)
    assert (logits.shape, logits.size(-1), logits.ndim, logits.numel(), len(logits)) == ((2, 5, 7), 7, 3, 70, 2)
    assert (logits.dtype, logits.float().dtype, logits.device) == (torch.bfloat16, torch.float32, hidden.device)
    assert logits.is_floating_point()
    assert logits.requires_grad
    assert not logits.is_leaf
    assert "shape=(2, 5, 7)" in repr(logits)
    assert logits._real is None


def test_the_logits_are_computed_once():
    linear, hidden = make(1, (2, 5), 3, 7, bias=True, dtype=torch.float32)
    logits = lazy_logits(linear, hidden)
    assert (logits + 1).data_ptr() != 0
    assert logits.materialize() is logits.materialize()


def test_indices_of_positions_stay_lazy_and_agree():
    linear, hidden = make(1, (3, 5), 4, 7, bias=True, dtype=torch.float32)
    keys = [
        0,
        slice(1, 3),
        (slice(None), -1),
        (slice(None), slice(None), slice(None)),
        (Ellipsis, slice(-2, None), slice(None)),
        (torch.tensor([2, 0]), torch.tensor([1, 4])),
        (torch.arange(3), -1),
        torch.tensor([True, False, True]),
        torch.rand(3, 5) > 0.5,
        (None, 1, Ellipsis),
        (Ellipsis,),
    ]
    for key in keys:
        found = lazy_logits(linear, hidden)[key]
        assert type(found) is LazyLogits, key
        torch.testing.assert_close(found.materialize(), linear(hidden)[key])
        assert found.shape == linear(hidden)[key].shape, key


def test_views_of_logits_that_are_written_are_refused():
    linear, hidden = make(1, (2, 5), 3, 7, bias=True, dtype=torch.float32)
    logits = lazy_logits(linear, hidden)
    view = logits[:, :-1]
    with pytest.raises(RuntimeError, match=r"mul_ writes in place to logits that have views.*materialize"):
        logits.mul_(2)
    with pytest.raises(RuntimeError, match="in place"):
        view[0] = 1.0
    with pytest.raises(RuntimeError, match="in place"):
        torch.add(torch.ones(2, 5, 7), 1, out=logits)


def test_after_a_write_everything_sees_it():
    linear, hidden = make(1, (2, 5), 3, 7, bias=True, dtype=torch.float32)
    targets = torch.arange(7)[:5].repeat(2)
    losses = []
    for logits in (lazy_logits(linear, hidden), linear(hidden)):
        with torch.no_grad():
            logits[..., 0] = -5.0
        losses.append(functional.cross_entropy(logits.view(-1, 7), targets))
    torch.testing.assert_close(*losses)


@pytest.mark.parametrize("cast", [torch.bfloat16, torch.float16])
def test_under_autocast_it_is_what_the_layer_would_return(cast):
    linear, hidden = make(1, (2, 5), 16, 33, bias=True, dtype=torch.float32)
    targets = torch.arange(10)
    found = []
    for make_logits in (lambda: lazy_logits(linear, hidden), lambda: linear(hidden)):
        with torch.autocast("cpu", cast):
            logits = make_logits()
            loss = functional.cross_entropy(logits.view(-1, 33), targets)
            upcast = functional.cross_entropy(logits.float().view(-1, 33), targets)
        found.append((logits.dtype, loss.dtype, upcast.dtype, loss, upcast, gradients(upcast, linear, hidden)))
    assert found[0][:3] == found[1][:3]
    torch.testing.assert_close(found[0][3:5], found[1][3:5])
    torch.testing.assert_close(found[0][5], found[1][5], rtol=1e-2, atol=1e-3)


def test_logits_made_before_autocast_stay_in_their_precision():
    linear, hidden = make(1, (2, 5), 16, 33, bias=True, dtype=torch.float32)
    wanted = functional.cross_entropy(linear(hidden).view(-1, 33), torch.arange(10))
    logits = lazy_logits(linear, hidden)
    with torch.autocast("cpu", torch.bfloat16):
        loss = functional.cross_entropy(lazy_logits(linear, hidden).view(-1, 33).float(), torch.arange(10))
        exact = functional.cross_entropy(logits.detach().view(-1, 33), torch.arange(10))
    torch.testing.assert_close(exact, wanted.detach(), rtol=1e-6, atol=1e-6)
    assert abs(loss - wanted) < 0.1


def test_without_grad_nothing_requires_any():
    linear, hidden = make(1, (2, 5), 3, 7, bias=True, dtype=torch.float32)
    with torch.no_grad():
        logits = lazy_logits(linear, hidden)
        loss = functional.cross_entropy(logits.view(-1, 7), torch.zeros(10).long())
    assert not logits.requires_grad
    assert not loss.requires_grad
    torch.testing.assert_close(
        loss, functional.cross_entropy(linear(hidden).view(-1, 7), torch.zeros(10).long()).detach()
    )


def test_frozen_weights_get_no_gradient():
    linear, hidden = make(1, (2, 5), 3, 7, bias=True, dtype=torch.float32)
    linear.requires_grad_(False)
    loss = functional.cross_entropy(lazy_logits(linear, hidden).view(-1, 7), torch.zeros(10).long())
    loss.backward()
    assert linear.weight.grad is None
    wanted = functional.cross_entropy(linear(hidden).view(-1, 7), torch.zeros(10).long())
    torch.testing.assert_close(hidden.grad, torch.autograd.grad(wanted, hidden)[0])


def test_backward_may_run_twice():
    linear, hidden = make(1, (2, 5), 3, 7, bias=True, dtype=torch.float32)
    loss = functional.cross_entropy(lazy_logits(linear, hidden).view(-1, 7), torch.zeros(10).long())
    first = torch.autograd.grad(loss, hidden, retain_graph=True)
    torch.testing.assert_close(torch.autograd.grad(loss, hidden), first)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("recipe", ["nothing", "divided"])  # by torch's operation, if it has one, and by ours
def test_no_target_that_counts_is_as_in_torch(reduction, smoothing, recipe):
    linear, hidden = make(1, (2, 5), 3, 7, bias=True, dtype=torch.float32)
    found = []
    for logits in (lazy_logits(linear, hidden), linear(hidden)):
        rows, targets = RECIPES[recipe](logits).view(-1, 7), torch.full((10,), -100)
        loss = functional.cross_entropy(rows, targets, reduction=reduction, label_smoothing=smoothing)
        found.append((loss, gradients(loss.sum(), linear, hidden)))
    torch.testing.assert_close(found[0][0], found[1][0], equal_nan=True)
    assert not any(grad.any() for grad in found[0][1])
    if not (reduction == "mean" and smoothing):  # where torch's gradient is NaN
        torch.testing.assert_close(found[0][1], found[1][1])


def test_an_ignored_row_may_hold_anything():
    linear, hidden = make(1, (2, 5), 3, 7, bias=True, dtype=torch.float32)
    with torch.no_grad():
        linear.bias[0] = -torch.inf
    targets = torch.tensor([1, -100, 2, 3, 4, 5, 6, -100, 1, 2])
    found, wanted = (
        functional.cross_entropy(logits.view(-1, 7), targets)
        for logits in (lazy_logits(linear, hidden).float() * 1.0, linear(hidden))
    )
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_may_return_it(reentrant):
    linear, hidden = make(1, (2, 5), 3, 7, bias=True, dtype=torch.float32)
    logits = checkpoint(lambda x: lazy_logits(linear, x.tanh()), hidden, use_reentrant=reentrant)
    functional.cross_entropy(logits.view(-1, 7), torch.arange(10) % 7).backward()
    found = [hidden.grad, *(each.grad for each in linear.parameters())]
    wanted = functional.cross_entropy(linear(hidden.tanh()).view(-1, 7), torch.arange(10) % 7)
    torch.testing.assert_close(found, gradients(wanted, linear, hidden))


class Doubled(torch.autograd.Function):
    """Takes tensors past `__torch_function__`."""

    @staticmethod
    def forward(_, logits):
        return logits * 2

    @staticmethod
    def backward(_, grad):
        return grad * 2


def test_a_function_of_ones_own_gets_values_and_passes_gradients():
    linear, hidden = make(1, (2, 5), 3, 7, bias=True, dtype=torch.float32)
    incoming = torch.randn(2, 5, 7)
    found, wanted = (
        Doubled.apply((logits / 3).tanh()) for logits in (lazy_logits(linear, hidden), linear(hidden))
    )
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(
        gradients(found, linear, hidden, incoming), gradients(wanted, linear, hidden, incoming)
    )


def test_autograd_takes_it_as_a_root_and_copies_hold_numbers():
    linear, hidden = make(1, (2, 5), 3, 7, bias=True, dtype=torch.float32)
    incoming = torch.randn(2, 5, 7)
    torch.autograd.backward([lazy_logits(linear, hidden)], [incoming])
    torch.testing.assert_close(hidden.grad, torch.autograd.grad(linear(hidden), hidden, incoming)[0])
    with torch.no_grad():
        for copied in (
            copy.deepcopy(lazy_logits(linear, hidden)),
            pickle.loads(pickle.dumps(lazy_logits(linear, hidden))),
        ):
            assert type(copied) is Tensor
            torch.testing.assert_close(copied, linear(hidden))


def test_the_hook_is_called_once_backward_arrives():
    linear, hidden = make(1, (2, 5), 3, 7, bias=True, dtype=torch.float32)
    calls: list[str] = []
    for name, loss_of in {
        "chunked": lambda logits: functional.cross_entropy(logits.view(-1, 7).float(), torch.zeros(10).long()),
        "real": lambda logits: logits.square().sum(),
    }.items():
        logits = lazy_logits(linear, hidden)
        logits.on_backward(lambda name=name: calls.append(name))
        loss = loss_of(logits)
        assert name not in calls
        loss.backward()
    assert calls == ["chunked", "real"]


def test_layers_that_are_no_plain_linear_are_called():
    class Other(nn.Linear):
        pass

    hidden, calls = torch.randn(2, 3), []
    hooked = nn.Linear(3, 7)
    hooked.register_forward_hook(lambda *arguments: calls.append(len(arguments)))
    assert type(lazy_logits(Other(3, 7), hidden)) is Tensor
    assert type(lazy_logits(hooked, hidden)) is Tensor
    assert calls == [3]


def test_wrong_targets_have_torchs_own_measured():
    linear, hidden = make(1, (2, 5), 3, 7, bias=True, dtype=torch.float32)
    logits = lazy_logits(linear, hidden).view(-1, 7)
    with pytest.raises(ValueError, match="batch_size"):
        functional.cross_entropy(logits, torch.zeros(9).long())
    with pytest.raises((RuntimeError, IndexError)):
        functional.cross_entropy(lazy_logits(linear, hidden).view(-1, 7).float() * 2, torch.full((10,), 7))


@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize("aligned", [True, False])
def test_the_next_token_loss_takes_it(reduction, aligned):
    linear, hidden = make(1, (2, 5), 3, 7, bias=True, dtype=torch.bfloat16)
    labels = torch.tensor([[1, 2, -100, 4, 5], [-100, 1, 2, 3, 6]])
    logits = lazy_logits(linear, hidden)
    found = causal_lm_loss(logits, labels, reduction=reduction, aligned=aligned)
    wanted = causal_lm_loss(linear(hidden), labels, reduction=reduction, aligned=aligned)
    assert logits._real is None
    assert found.dtype == wanted.dtype
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    for each, other in zip(gradients(found, linear, hidden), gradients(wanted, linear, hidden), strict=True):
        torch.testing.assert_close(each, other, rtol=2e-2, atol=1e-2)


@pytest.mark.skipif(not hasattr(functional, "linear_cross_entropy"), reason="needs torch 2.13")
def test_torchs_own_is_taken_where_its_numbers_are_the_same(monkeypatch):
    calls: list[str] = []
    usual = functional.linear_cross_entropy

    def watched(*args, **kwargs):
        calls.append(kwargs["reduction"])
        return usual(*args, **kwargs)

    monkeypatch.setattr(functional, "linear_cross_entropy", watched)
    for dtype, recipe, smoothing, taken in [
        (torch.float32, "nothing", 0.0, True),
        (torch.float32, "upcast", 0.0, True),
        (torch.bfloat16, "nothing", 0.0, False),
        (torch.bfloat16, "upcast", 0.0, False),
        (torch.float32, "scaled", 0.0, False),
        (torch.float32, "nothing", 0.1, False),
    ]:
        calls.clear()
        linear, hidden = make(1, (2, 5), 3, 7, bias=True, dtype=dtype)
        rows, targets = rows_and_targets(lazy_logits(linear, hidden), RECIPES[recipe], 0)
        functional.cross_entropy(rows, targets, label_smoothing=smoothing)
        assert bool(calls) == taken, (dtype, recipe, smoothing)
