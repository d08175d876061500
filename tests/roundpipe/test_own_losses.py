"""`forward_backward(input_kwargs=batch)` with labels in it: the model's own loss, as if it were not split."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from plain import assert_near, gradients
from roundpipe import OwnLoss as Protocol
from roundpipe import RoundPipe, RoundPipeRunConfig, Runtime, TrainingWarning
from rp_presets import OwnLoss, UnknownLoss, to_sequential
from torch import nn
from torch.nn import functional
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.modeling_outputs import CausalLMOutput, MoeCausalLMOutputWithPast

pytestmark = pytest.mark.filterwarnings("ignore:.*parts were requested")


class First(nn.Module):
    """Takes what the model takes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)

    def forward(self, input_ids=None, labels=None, num_items_in_batch=None):
        return self.embed(input_ids), labels, num_items_in_batch


class Middle(nn.Module):
    """A layer of the row."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, carry):
        return self.linear(carry[0]).tanh(), *carry[1:]


class Last(nn.Module):
    """The head and the model's own loss, with a penalty like a router's where there is a coefficient."""

    def __init__(self, *, takes_total: bool, coefficient: float) -> None:
        super().__init__()
        self.head = nn.Linear(6, 11)
        self.takes_total, self.coefficient = takes_total, coefficient

    def forward(self, carry):
        hidden, labels, total = carry
        logits = self.head(hidden)
        if labels is None:
            return CausalLMOutput(logits=logits)
        rows, targets = logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
        if total is not None and self.takes_total:
            loss = functional.cross_entropy(rows, targets, reduction="sum") / total
        else:
            loss = functional.cross_entropy(rows, targets)
        if not self.coefficient:
            return CausalLMOutput(loss=loss, logits=logits)
        penalty = hidden.square().mean().sqrt()
        return MoeCausalLMOutputWithPast(loss=loss + self.coefficient * penalty, aux_loss=penalty, logits=logits)


def row(*, takes_total: bool = True, coefficient: float = 0.0, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    found = nn.Sequential(First(), Middle(), Last(takes_total=takes_total, coefficient=coefficient))
    found.own_loss = OwnLoss("shifted", takes_total, coefficient)
    return found


def run_plain(model: nn.Sequential, batch: dict[str, Any]) -> Any:
    carry = model[0](**batch)
    for layer in model[1:]:
        carry = layer(carry)
    return carry


def ragged(rows: int, columns: int, seed: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(11, (rows, columns), generator=generator)
    lengths = torch.randint(columns + 1, (rows, 1), generator=generator)
    return {"input_ids": ids, "labels": ids.masked_fill(torch.arange(columns)[None] >= lengths, -100)}


def wrap(model: nn.Module, runtime: Runtime, parts: int) -> RoundPipe:
    return RoundPipe(model, runtime=runtime, model_run_config=RoundPipeRunConfig(num_microbatch=parts))


@settings(max_examples=examples(120), deadline=None)
@given(
    rows=st.integers(1, 9),
    columns=st.integers(2, 7),
    parts=st.integers(1, 7),
    takes_total=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_any_split_gives_the_loss_and_gradients_of_the_batch(rows, columns, parts, takes_total, seed):
    batch = ragged(rows, columns, seed)
    model, truth = row(takes_total=takes_total), row(takes_total=takes_total)
    wanted = run_plain(truth, batch)
    wanted.loss.backward()
    with Runtime("cpu:2") as runtime:
        wrapped = wrap(model, runtime, parts)
        loss, outputs = wrapped.forward_backward(input_kwargs=batch, return_outputs=True)
        wrapped.synchronize()
        found = gradients(model)
    torch.testing.assert_close(loss, wanted.loss.detach(), rtol=1e-6, atol=1e-6, equal_nan=True)
    torch.testing.assert_close(outputs.loss, loss, rtol=0, atol=0, equal_nan=True)
    assert_near(outputs.logits, wanted.logits, 1e-6)
    if wanted.loss.isnan():
        # Nothing is what the engine leaves where torch leaves zeros.
        assert all(grad is None or not grad.any() for grad in found.values())
    else:
        assert_near(found, gradients(truth), 1e-6)


@pytest.mark.parametrize("takes_total", [True, False])
@pytest.mark.parametrize("parts", [1, 3, 5])
def test_the_loss_among_the_outputs_of_a_call_is_that_of_the_batch(two, parts, takes_total):
    batch = ragged(5, 6, 3)
    batch["labels"][4] = -100
    model, truth = row(takes_total=takes_total), row(takes_total=takes_total)
    wanted = run_plain(truth, batch)
    wanted.loss.backward()
    wrapped = wrap(model, two, parts)
    outputs = wrapped(**batch)
    assert_near([outputs.loss, outputs.logits], [wanted.loss, wanted.logits], 1e-6)
    outputs.loss.backward()
    wrapped.synchronize()
    assert_near(gradients(model), gradients(truth), 1e-6)
    with torch.no_grad():
        assert_near(wrapped(**batch).loss, wanted.loss, 1e-6)


def test_each_microbatch_has_its_own_loss_where_outputs_stay_in_microbatches(two):
    config = RoundPipeRunConfig(num_microbatch=2, merge_output=False)
    batch = ragged(4, 6, 3) | {"labels": ragged(4, 6, 3)["input_ids"]}
    outputs = RoundPipe(row(), runtime=two, model_run_config=config)(**batch)
    outputs.synchronize()
    for number, output in enumerate(outputs):
        part = {name: value[2 * number : 2 * number + 2] for name, value in batch.items()}
        assert_near(output.loss, run_plain(row(), part).loss, 1e-6)


def test_a_call_whose_loss_divides_in_an_unknown_way_is_refused(two):
    ids = ragged(6, 6, 3)["input_ids"]
    with pytest.raises(ValueError, match="unknown: the model has no own_loss"):
        wrap(hugging_face(), two, 2)(input_ids=ids, labels=ids)
    assert wrap(hugging_face(), two, 2)(ids).loss is None


def test_a_loss_that_is_seen_to_divide_otherwise_is_that_of_the_batch_in_one_piece(two):
    batch, wanted = ragged(5, 6, 3), hugging_face()(**ragged(5, 6, 3)).loss
    with pytest.warns(TrainingWarning, match="loss'.*off by"):
        found = wrap(hugging_face(), two, 2)(**batch).loss
    assert_near(found, wanted, 1e-6)


def test_it_runs_on_any_devices(runtime):
    batch, model, truth = ragged(7, 6, 3), row(), row()
    wanted = run_plain(truth, batch)
    wanted.loss.backward()
    wrapped = wrap(model, runtime, 3)
    assert_near(wrapped.forward_backward(input_kwargs=batch), wanted.loss, 1e-6)
    wrapped.synchronize()
    assert_near(gradients(model), gradients(truth), 1e-6)


@pytest.mark.parametrize("takes_total", [True, False])
def test_an_auxiliary_loss_is_averaged_over_the_microbatches(two, takes_total):
    batch = ragged(5, 6, 4)
    model, truth = row(takes_total=takes_total, coefficient=0.3), row(takes_total=takes_total, coefficient=0.3)
    plain = run_plain(truth, batch)
    pieces = [
        run_plain(truth, {name: value[ends] for name, value in batch.items()}) for ends in (slice(3), slice(3, 5))
    ]
    averaged = pieces[0].aux_loss * 0.6 + pieces[1].aux_loss * 0.4
    wanted = plain.loss + 0.3 * (averaged - plain.aux_loss)
    wanted.backward()
    wrapped = wrap(model, two, 2)
    assert_near(wrapped.forward_backward(input_kwargs=batch), wanted, 1e-6)
    wrapped.synchronize()
    assert_near(gradients(model), gradients(truth), 2e-6)


def test_a_microbatch_without_labels_that_count_adds_nothing(two):
    batch = ragged(4, 6, 4)
    batch["labels"][:2] = -100
    batch["labels"][2:] = 3
    model, truth = row(takes_total=False), row(takes_total=False)
    wanted = run_plain(truth, batch).loss
    wanted.backward()
    wrapped = wrap(model, two, 2)
    assert_near(wrapped.forward_backward(input_kwargs=batch), wanted, 1e-6)
    wrapped.synchronize()
    assert_near(gradients(model), gradients(truth), 1e-6)


def test_accumulated_batches_share_the_number_that_the_caller_gives(two):
    first, second = ragged(5, 6, 1), ragged(3, 6, 2)
    both = {name: torch.cat([first[name], second[name]]) for name in first}
    model, truth = row(), row()
    wanted = run_plain(truth, both).loss
    wanted.backward()
    total = (both["labels"][:, 1:] != -100).sum()
    wrapped = wrap(model, two, 2)
    losses = [
        wrapped.forward_backward(input_kwargs={**each, "num_items_in_batch": total}) for each in (first, second)
    ]
    wrapped.synchronize()
    assert_near(sum(losses), wanted, 1e-6)
    assert_near(gradients(model), gradients(truth), 1e-6)


def hugging_face() -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    sizes = {"vocab_size": 11, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4}
    return Qwen3ForCausalLM(Qwen3Config(**sizes, **heads, use_cache=False))


def test_a_whole_model_of_transformers_with_an_own_loss(two):
    batch, model, truth = ragged(5, 6, 3), hugging_face(), hugging_face()
    model.own_loss = OwnLoss("shifted", takes_total=True)
    wanted = truth(**batch).loss
    wanted.backward()
    wrapped = wrap(model, two, 3)
    assert_near(wrapped.forward_backward(input_kwargs=batch), wanted, 1e-6)
    wrapped.synchronize()
    assert_near(gradients(model), gradients(truth), 1e-6)


@pytest.mark.parametrize("own", [OwnLoss("shifted", takes_total=True), UnknownLoss("no count gives it")])
def test_tuples_in_which_the_loss_of_microbatches_would_be_averaged_are_refused(two, own):
    batch, model = ragged(5, 6, 3), hugging_face()
    model.own_loss = own
    wanted = model(**batch).loss.detach()
    wrapped = wrap(model, two, 3)
    with pytest.raises(TypeError, match=r"the loss of 3 microbatches cannot be told; omit return_dict=False"):
        wrapped(**batch, return_dict=False)
    whole = RoundPipeRunConfig(num_microbatch=1)
    assert_near(wrapped(**batch, return_dict=False, roundpipe_run_config=whole)[0], wanted, 1e-6)


class Tuples(nn.Module):
    """Returns its loss in a tuple without being asked, as models do whose configuration says so."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x, labels=None):
        out = self.linear(x)
        return (out - labels).square().mean(), out


@pytest.mark.parametrize("how", ["an own loss that nobody knows", "a configuration"])
def test_tuples_that_nobody_asked_for_in_the_call_are_refused_as_well(two, how):
    model = Tuples()
    if how == "a configuration":
        model.config = SimpleNamespace(return_dict=False)
    else:
        model.own_loss = UnknownLoss("no count gives it")
    with pytest.raises(TypeError, match="3 microbatches cannot be told"):
        wrap(model, two, 3)(torch.ones(6, 3), labels=torch.zeros(6, 3))


def test_without_own_loss_a_batch_in_one_piece_has_the_models_loss(two):
    batch, model, truth = ragged(5, 6, 3), hugging_face(), hugging_face()
    wanted = truth(**batch).loss
    wanted.backward()
    wrapped = wrap(model, two, 1)
    assert_near(wrapped.forward_backward(input_kwargs=batch), wanted, 1e-6)
    wrapped.synchronize()
    assert_near(gradients(model), gradients(truth), 1e-6)


def test_without_own_loss_several_losses_are_refused_with_what_to_do(two):
    wrapped = wrap(hugging_face(), two, 2)
    with pytest.raises(ValueError, match=r"unknown: the model has no own_loss; give a loss_fn.*num_microbatch=1"):
        wrapped.forward_backward(input_kwargs=ragged(5, 6, 3))


def test_the_reason_why_there_is_no_own_loss_is_told(two):
    model = hugging_face()
    model.own_loss = UnknownLoss("no count gives it")
    with pytest.raises(ValueError, match="unknown: UnknownLoss: no count gives it"):
        wrap(model, two, 2).forward_backward(input_kwargs=ragged(5, 6, 3))


def test_outputs_without_a_loss_are_refused_with_what_to_do(two):
    with pytest.raises(TypeError, match="returned a CausalLMOutput without a loss; give it labels"):
        wrap(row(), two, 2).forward_backward(input_kwargs={"input_ids": ragged(5, 6, 3)["input_ids"]})


def test_an_own_loss_of_another_kind_is_refused(two):
    model = row()
    model.own_loss = "shifted"
    with pytest.raises(TypeError, match="own_loss of the model must be an OwnLoss, but is a str"):
        wrap(model, two, 2).forward_backward(input_kwargs=ragged(5, 6, 3))


@pytest.mark.parametrize("with_labels", [True, False])
def test_a_label_that_nothing_reads_is_refused(two, with_labels):
    batch = ragged(5, 6, 3)
    labels = batch["labels"] if with_labels else batch.pop("labels")
    with pytest.raises(
        ValueError, match="both given, but no loss_fn" if with_labels else "no loss_fn that reads it"
    ):
        wrap(row(), two, 2).forward_backward(input_kwargs=batch, label=labels)


def test_a_loss_fn_decides_though_labels_are_in_the_batch(two):
    batch = ragged(5, 6, 3)
    seen: list[Any] = []

    def loss_fn(outputs, label):
        seen.append(label)
        return outputs.logits.square().sum()

    found = wrap(row(), two, 2).forward_backward(input_kwargs=batch, loss_fn=loss_fn)
    assert_near(found, run_plain(row(), batch).logits.square().sum(), 1e-6)
    assert seen == [None, None]


def test_labels_that_are_no_tensor_are_refused_before_anything_runs(two):
    with pytest.raises(TypeError, match=r"labels must be a tensor.*is a list"):
        wrap(row(), two, 2).forward_backward(input_kwargs={**ragged(5, 6, 3), "labels": [1, 2]})


def test_a_batch_without_rows_is_refused(two):
    with pytest.raises(ValueError, match="the batch is empty: labels has no rows"):
        wrap(row(), two, 1).forward_backward(input_kwargs={name: t[:0] for name, t in ragged(5, 6, 3).items()})


def test_positions_to_keep_are_no_rows_of_the_batch(two):
    model = hugging_face()
    kept = {"input_ids": ragged(4, 6, 3)["input_ids"], "logits_to_keep": torch.tensor([0, 2, 3, 5])}
    with torch.no_grad():
        assert_near(wrap(to_sequential(model), two, 2)(**kept).logits, model(**kept).logits, 1e-6)


@pytest.mark.few(1)
@pytest.mark.parametrize("sequences", [1, 2, 3])
def test_a_batch_without_padding_is_one_row_whatever_its_lengths(two, sequences):
    batch = ragged(1, 12, 3)
    ends = torch.linspace(0, 12, sequences + 1).int()
    lengths = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": 12, "max_length_k": 12}
    positions = torch.arange(12)[None]
    batch = {**batch, "labels": batch["input_ids"], "position_ids": positions, **lengths}
    model, truth = hugging_face(), hugging_face()
    wanted = truth(**batch)
    wanted.loss.backward()
    wrapped = wrap(to_sequential(model), two, 2)
    assert_near(wrapped.forward_backward(input_kwargs=batch), wanted.loss, 1e-6)
    wrapped.synchronize()
    assert_near(gradients(model), gradients(truth), 1e-6)
    with torch.no_grad():
        outputs = wrapped(**batch)
    assert outputs.logits.shape == wanted.logits.shape
    assert_near([outputs.loss, outputs.logits], [wanted.loss, wanted.logits], 1e-6)


def test_tensors_are_the_loss_as_ever(two):
    class Squares(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, x, labels):
            return (x * self.weight - labels).square().sum()

    x, labels = torch.rand(5, 3), torch.rand(5, 3)
    found = wrap(Squares(), two, 2).forward_backward(input_kwargs={"x": x, "labels": labels})
    assert_near(found, (x - labels).square().sum(), 1e-6)


def test_rp_presets_meets_the_protocol():
    assert isinstance(OwnLoss("tokens", takes_total=False), Protocol)
    assert not isinstance(SimpleNamespace(share=1), Protocol)


class AttrDict(dict[str, Any]):
    """A dict whose items are attributes, as many write it: without an item it raises `KeyError`."""

    __getattr__ = dict.__getitem__


class AttrHead(nn.Linear):
    """Returns such a dict."""

    def forward(self, x: torch.Tensor) -> AttrDict:
        return AttrDict(y=super().forward(x))


@pytest.mark.parametrize("microbatches", [1, 2])
def test_outputs_may_be_dicts_whose_items_are_attributes(two: Runtime, microbatches: int) -> None:
    row = nn.Sequential(nn.Linear(4, 4), AttrHead(4, 3))
    x = torch.randn(4, 4)
    wanted = row(x).y
    config = RoundPipeRunConfig(num_microbatch=microbatches)

    model = RoundPipe(row, runtime=two, model_run_config=config)
    loss = model.forward_backward((x,), loss_fn=lambda outputs, _: outputs.y.square().sum())

    assert_near(loss, wanted.square().sum())
    assert_near(model(x).y, wanted)
