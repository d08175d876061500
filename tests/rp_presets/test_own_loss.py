"""A model's own loss over a batch in parts, found by experiment on transformers' models: the unsplit loss."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers as hf
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from rp_presets import LossShare, OwnLoss, OwnLosses, UnknownLoss, observe_loss
from torch import Tensor, nn
from torch.nn import functional

VOCABULARY = 24
DECODER = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {"output_router_logits": True, "router_aux_loss_coef": 0.3}
BERT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}
GPT2 = {"vocab_size": VOCABULARY, "n_embd": 16, "n_layer": 1, "n_head": 2, "pad_token_id": 0, "eos_token_id": 2}
BART = {
    "vocab_size": VOCABULARY,
    "d_model": 16,
    "decoder_layers": 1,
    "encoder_layers": 1,
    "decoder_attention_heads": 2,
    "decoder_ffn_dim": 16,
    "max_position_embeddings": 32,
}
T5 = {
    "vocab_size": VOCABULARY,
    "d_model": 16,
    "d_kv": 8,
    "d_ff": 16,
    "num_layers": 1,
    "num_heads": 2,
    "decoder_start_token_id": 0,
}
VIT = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 8,
    "patch_size": 4,
    "num_labels": 3,
}
Batch = dict[str, Any]


def tokens(rows: int, columns: int, generator: torch.Generator) -> Tensor:
    return torch.randint(3, VOCABULARY, (rows, columns), generator=generator)


def ragged(labels: Tensor, generator: torch.Generator) -> Tensor:
    """Each row has another number of labels that count; some rows none."""
    columns = labels.shape[1]
    lengths = torch.randint(columns + 1, (len(labels), 1), generator=generator)
    return labels.masked_fill(torch.arange(columns)[None] >= lengths, -100)


def causal(rows: int, generator: torch.Generator) -> Batch:
    ids = tokens(rows, 6, generator)
    return {"input_ids": ids, "labels": ragged(ids, generator)}


def padded(rows: int, generator: torch.Generator) -> Batch:
    ids = tokens(rows, 6, generator)
    lengths = torch.randint(2, 7, (rows, 1), generator=generator)
    mask = (torch.arange(6)[None] < lengths).long()
    return {"input_ids": ids * mask, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def each_token(rows: int, generator: torch.Generator) -> Batch:
    labels = torch.randint(5, (rows, 6), generator=generator)
    return {"input_ids": tokens(rows, 6, generator), "labels": ragged(labels, generator)}


def classes(rows: int, generator: torch.Generator) -> Batch:
    labels = torch.randint(3, (rows,), generator=generator)
    labels[torch.rand(rows, generator=generator) < 0.3] = -100
    return {"input_ids": tokens(rows, 6, generator), "labels": labels}


def multi_label(rows: int, generator: torch.Generator) -> Batch:
    return {"input_ids": tokens(rows, 6, generator), "labels": torch.rand(rows, 3, generator=generator)}


def numbers(rows: int, generator: torch.Generator) -> Batch:
    return {"input_ids": tokens(rows, 6, generator), "labels": torch.rand(rows, 1, generator=generator)}


def images(rows: int, generator: torch.Generator) -> Batch:
    return {
        "pixel_values": torch.randn(rows, 3, 8, 8, generator=generator),
        "labels": torch.randint(3, (rows,), generator=generator),
    }


# Name -> the model, its batches, and what must be found: the rule, and whether num_items_in_batch divides.
FAMILIES: dict[str, tuple[Callable[[], nn.Module], Callable[[int, torch.Generator], Batch], str, bool]] = {
    "Qwen3": (lambda: hf.Qwen3ForCausalLM(hf.Qwen3Config(**DECODER, head_dim=8)), causal, "shifted", True),
    "Llama, padded": (lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**DECODER)), padded, "shifted", True),
    "Gemma2": (lambda: hf.Gemma2ForCausalLM(hf.Gemma2Config(**DECODER, head_dim=8)), causal, "shifted", True),
    "Cohere": (lambda: hf.CohereForCausalLM(hf.CohereConfig(**DECODER)), causal, "shifted", True),
    "Bart's decoder": (lambda: hf.BartForCausalLM(hf.BartConfig(**BART)), causal, "tokens", False),
    "GPT2, classes": (
        lambda: hf.GPT2ForSequenceClassification(hf.GPT2Config(**GPT2, num_labels=3)),
        classes,
        "tokens",
        False,
    ),
    "GPT2, several classes": (
        lambda: hf.GPT2ForSequenceClassification(hf.GPT2Config(**GPT2, num_labels=3)),
        multi_label,
        "rows",
        False,
    ),
    "GPT2, regression": (
        lambda: hf.GPT2ForSequenceClassification(hf.GPT2Config(**GPT2, num_labels=1)),
        numbers,
        "rows",
        False,
    ),
    "Bert, each token": (
        lambda: hf.BertForTokenClassification(hf.BertConfig(**BERT, num_labels=5)),
        each_token,
        "tokens",
        False,
    ),
    "Bert, masked": (lambda: hf.BertForMaskedLM(hf.BertConfig(**BERT)), causal, "tokens", False),
    "T5": (lambda: hf.T5ForConditionalGeneration(hf.T5Config(**T5)), causal, "tokens", False),
    "ViT": (lambda: hf.ViTForImageClassification(hf.ViTConfig(**VIT)), images, "tokens", True),
}
ROUTERS: dict[str, Callable[[], nn.Module]] = {
    "Mixtral": lambda: hf.MixtralForCausalLM(hf.MixtralConfig(**DECODER, **EXPERTS, num_local_experts=4)),
    "Qwen3Moe": lambda: hf.Qwen3MoeForCausalLM(
        hf.Qwen3MoeConfig(
            **DECODER,
            **EXPERTS,
            head_dim=8,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=8,
            decoder_sparse_step=1,
        )
    ),
}


def drawn(make: Callable[[], nn.Module]) -> nn.Module:
    """A model in eval mode, with weights large enough that rows have unlike losses."""
    torch.manual_seed(0)
    model = make().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def complete(batch: Batch) -> Batch:
    """The batch without ignored labels."""
    labels = batch["labels"]
    return {**batch, "labels": labels if labels.is_floating_point() else labels.where(labels != -100, 1)}


@cache
def observed(name: str) -> tuple[nn.Module, OwnLoss]:
    make, batch_of, *_ = FAMILIES[name] if name in FAMILIES else (ROUTERS[name], causal)
    model = drawn(make)
    probed = copy.deepcopy(model)
    batch = complete(batch_of(4, torch.Generator().manual_seed(3)))
    return model, observe_loss(lambda kwargs: probed(**kwargs), batch)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", FAMILIES)
def test_how_a_familys_loss_divides_is_found(name):
    _, own = observed(name)
    assert (own.rule, own.takes_total, own.coefficient) == (*FAMILIES[name][2:], 0.0)


@pytest.mark.parametrize("name", ROUTERS)
def test_the_coefficient_of_the_routers_loss_is_found(name):
    _, own = observed(name)
    assert (own.rule, own.takes_total) == ("shifted", True)
    assert own.coefficient == pytest.approx(0.3, rel=1e-4)


def parts_of(whole: Mapping[str, Any], parts: int) -> list[Batch]:
    """Row by row as evenly as they go; as many as there are rows at most."""
    rows = len(whole["labels"])
    pieces = torch.arange(rows).tensor_split(min(parts, rows))
    return [
        {
            name: value[piece] if isinstance(value, Tensor) and value.ndim and len(value) == rows else value
            for name, value in whole.items()
        }
        for piece in pieces
    ]


def gradient(model: nn.Module, loss: Tensor) -> Tensor:
    """All of them in one vector."""
    found = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    pairs = zip(found, model.parameters(), strict=True)
    return torch.cat(
        [torch.zeros_like(like).flatten() if grad is None else grad.flatten() for grad, like in pairs]
    )


def split_loss(model: nn.Module, own: OwnLoss, batch: Batch, parts: int) -> tuple[Tensor, Tensor]:
    """The loss and gradient of a batch in parts, each with a graph of its own."""
    whole = own.with_total(batch)
    found = [own.loss_fn(model(**part), own.share(part, whole)) for part in parts_of(whole, parts)]
    return torch.stack([loss.detach() for loss in found]).sum(), sum(gradient(model, loss) for loss in found)


def near(found: Tensor, wanted: Tensor, tolerance: float = 1e-6) -> bool:
    return bool((found - wanted).norm() <= tolerance * (wanted.norm() + 1e-3))


@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=examples(24), deadline=None)
@given(rows=st.integers(1, 8), parts=st.integers(1, 7), seed=st.integers(0, 1000))
def test_parts_add_up_to_the_unsplit_batch(name, rows, parts, seed):
    model, own = observed(name)
    batch = FAMILIES[name][1](rows, torch.Generator().manual_seed(seed))
    unsplit = model(**batch).loss
    wanted = gradient(model, unsplit)

    loss, found = split_loss(model, own, batch, parts)

    torch.testing.assert_close(loss, unsplit.detach(), rtol=1e-6, atol=1e-6, equal_nan=True)
    assert found.isfinite().all()
    assert near(found, wanted)


def test_means_of_means_would_be_wrong():
    model, own = observed("Llama, padded")
    batch = padded(5, torch.Generator().manual_seed(1))
    wanted = gradient(model, model(**batch).loss)
    naive = sum(gradient(model, model(**part).loss / 2) for part in parts_of(batch, 2))
    assert not near(naive, wanted, 1e-2)
    assert near(split_loss(model, own, batch, 2)[1], wanted)


@pytest.mark.parametrize("name", ROUTERS)
@pytest.mark.parametrize("parts", [1, 2, 3])
def test_a_routers_loss_is_averaged_over_the_parts_by_their_rows(name, parts):
    model, own = observed(name)
    batch = causal(5, torch.Generator().manual_seed(7))
    plain = model(**batch)
    pieces = [model(**part) for part in parts_of(batch, parts)]
    rows = [len(part["labels"]) for part in parts_of(batch, parts)]
    mean = sum(piece.aux_loss * count / 5 for piece, count in zip(pieces, rows, strict=True))
    wanted = plain.loss - 0.3 * plain.aux_loss + 0.3 * mean

    loss, found = split_loss(model, own, batch, parts)

    torch.testing.assert_close(loss, wanted.detach(), rtol=1e-6, atol=1e-6)
    assert near(found, gradient(model, wanted), 2e-6)


@pytest.mark.parametrize("name", ["Qwen3", "Bart's decoder", "Mixtral"])
def test_a_batch_with_no_label_that_counts_gives_nan_and_no_gradient_of_it(name):
    model, own = observed(name)
    batch = causal(4, torch.Generator().manual_seed(1))
    batch["labels"] = torch.full_like(batch["labels"], -100)
    loss, found = split_loss(model, own, batch, 2)
    assert loss.isnan()
    assert found.isfinite().all()
    assert model(**batch).loss.isnan()
    assert name == "Mixtral" or not found.any()


def test_a_number_of_items_that_the_caller_gives_is_honoured():
    model, own = observed("Qwen3")
    batch = {**causal(5, torch.Generator().manual_seed(1)), "num_items_in_batch": torch.tensor(37)}
    assert own.with_total(batch)["num_items_in_batch"] is batch["num_items_in_batch"]
    unsplit = model(**batch).loss
    loss, found = split_loss(model, own, batch, 3)
    torch.testing.assert_close(loss, unsplit.detach(), rtol=1e-6, atol=1e-6)
    assert near(found, gradient(model, unsplit))


def test_labels_that_are_shifted_already_are_counted_as_they_are():
    model, own = observed("Qwen3")
    assert own.shift_labels == "counted"
    batch = causal(5, torch.Generator().manual_seed(1))
    batch["shift_labels"] = ragged(
        tokens(5, 6, torch.Generator().manual_seed(2)), torch.Generator().manual_seed(4)
    )
    unsplit = model(**batch).loss
    loss, found = split_loss(model, own, batch, 3)
    torch.testing.assert_close(loss, unsplit.detach(), rtol=1e-6, atol=1e-6)
    assert near(found, gradient(model, unsplit))


# Losses that no rule gives


def logits_of(kwargs: Mapping[str, Any]) -> Tensor:
    """The same for a row whatever batch it is in."""
    return torch.stack(
        [torch.randn(6, 9, generator=torch.Generator().manual_seed(int(row))) for row in kwargs["row"]]
    )


def entropy(kwargs: Mapping[str, Any], **options: Any) -> Tensor:
    return functional.cross_entropy(
        logits_of(kwargs).double().flatten(0, 1), kwargs["labels"].flatten(), **options
    )


def of_rows(count: int = 4) -> Batch:
    return {"row": torch.arange(count), "labels": torch.randint(9, (count, 6))}


UNKNOWN: dict[str, tuple[Callable[[Mapping[str, Any]], Any], str]] = {
    "a sum": (lambda kwargs: entropy(kwargs, reduction="sum"), "is not a mean over shifted or tokens or rows"),
    "a square": (lambda kwargs: entropy(kwargs).square(), "is not a mean over"),
    "two divisors": (lambda kwargs: entropy(kwargs) + 0.1 * len(kwargs["row"]), "is not a mean over"),
    "all rows alike": (lambda kwargs: 0 * entropy(kwargs) + 1.5, "is not a mean over|too alike to tell"),
    "noise": (lambda kwargs: entropy(kwargs) + torch.rand(()), "the same each time: call eval"),
    "nan": (lambda kwargs: entropy(kwargs) * torch.nan, "must be finite"),
    "no scalar": (lambda kwargs: entropy(kwargs, reduction="none"), "no scalar tensor"),
    "another use of the total": (
        lambda kwargs: entropy(kwargs) * kwargs.get("num_items_in_batch", 1.0),
        "changes the loss, but does not divide it",
    ),
    "another divisor by default": (
        lambda kwargs: (
            entropy(kwargs)
            if "num_items_in_batch" not in kwargs
            else 2 * entropy(kwargs, reduction="sum") / kwargs["num_items_in_batch"]
        ),
        "the loss is .* instead of",
    ),
    "something undivided without a name": (
        lambda kwargs: (
            0.5
            + (
                entropy(kwargs)
                if "num_items_in_batch" not in kwargs
                else entropy(kwargs, reduction="sum") / kwargs["num_items_in_batch"]
            )
        ),
        "and the output has no aux_loss to explain it",
    ),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_a_loss_that_no_rule_gives_is_refused_by_name(name):
    loss_of, message = UNKNOWN[name]
    torch.manual_seed(0)
    with pytest.raises(UnknownLoss, match=message):
        observe_loss(lambda kwargs: SimpleNamespace(loss=loss_of(kwargs)), of_rows())


def test_two_means_of_unlike_things_are_refused():
    model = drawn(lambda: hf.BertForPreTraining(hf.BertConfig(**BERT)))
    batch = complete(causal(4, torch.Generator().manual_seed(3)))
    batch["next_sentence_label"] = torch.tensor([0, 1, 1, 0])
    with pytest.raises(UnknownLoss, match="is not a mean over"):
        observe_loss(lambda kwargs: model(**kwargs), batch)


def test_a_mean_over_what_is_attended_is_found():
    def run(kwargs: Mapping[str, Any]) -> Any:
        counted = kwargs["labels"].masked_fill(kwargs["attention_mask"] == 0, -100)
        return SimpleNamespace(loss=entropy({**kwargs, "labels": counted}))

    torch.manual_seed(0)
    batch = {**of_rows(), "attention_mask": torch.ones(4, 6).long()}
    assert observe_loss(run, batch).rule == "tokens and attended"


def test_a_model_that_takes_no_ignored_labels_is_observed_without():
    def run(kwargs: Mapping[str, Any]) -> Any:
        return SimpleNamespace(
            loss=(logits_of(kwargs)[:, 0] - functional.one_hot(kwargs["labels"], 9)).square().mean()
        )

    batch = {"row": torch.arange(4), "labels": torch.tensor([0, 3, 8, 1])}
    # Which of the two it is does not matter where no label may be ignored.
    assert observe_loss(run, batch).rule in ("tokens", "rows")


@pytest.mark.parametrize("batch", [{"row": torch.arange(4)}, of_rows(2), {"labels": torch.tensor(1)}])
def test_a_batch_to_try_needs_labels_and_three_rows(batch):
    with pytest.raises(ValueError, match="at least three rows"):
        observe_loss(lambda kwargs: SimpleNamespace(loss=entropy(kwargs)), batch)


# Mistakes in use


def test_labels_that_are_no_tensor_are_refused():
    own = OwnLoss("tokens", takes_total=False)
    with pytest.raises(TypeError, match=r"labels must be a tensor.*is a list"):
        own.with_total({"labels": [[1, 2]]})
    with pytest.raises(TypeError, match=r"labels must be a tensor.*is none"):
        OwnLoss("tokens", takes_total=True).with_total({})


def test_shift_labels_of_unknown_meaning_are_refused():
    own = OwnLoss("shifted", takes_total=False, shift_labels="unknown")
    with pytest.raises(ValueError, match="it is unknown how this model counts shift_labels"):
        own.with_total({"labels": torch.ones(2, 3).long(), "shift_labels": torch.ones(2, 3).long()})


def test_outputs_without_a_loss_are_refused():
    for outputs in (SimpleNamespace(loss=None), (torch.ones(()),)):
        with pytest.raises(TypeError, match="must return an object with its loss"):
            OwnLoss.loss_fn(outputs, LossShare(1.0, 1.0, 0.0))


def test_each_kind_of_labels_is_observed_once():
    seen: list[torch.dtype] = []

    def observe(kwargs: Mapping[str, Any]) -> OwnLoss:
        seen.append(kwargs["labels"].dtype)
        return OwnLoss("rows" if kwargs["labels"].is_floating_point() else "tokens", takes_total=False)

    losses = OwnLosses(observe)
    classes, targets = {"labels": torch.tensor([1, -100, 2, 0])}, {"labels": torch.ones(4, 2)}
    for _ in range(2):
        assert losses.share({"labels": torch.tensor([1, -100])}, losses.with_total(classes)).main == 1 / 3
        assert losses.share({"labels": torch.ones(1, 2)}, losses.with_total(targets)).main == 1 / 4
    assert seen == [torch.int64, torch.float32]
    with pytest.raises(TypeError, match="labels must be a tensor"):
        losses.with_total({})
