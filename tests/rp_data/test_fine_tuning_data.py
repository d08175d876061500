"""The data of a fine-tuning: what is learned of samples, how they are packed, and in which order they come."""

from __future__ import annotations

import codecs
from array import array
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import finetuning
import pytest
import torch
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from roundpipe import Runtime, wrap_model_to_roundpipe
from rp_cli.finetune.causality import check_causality
from rp_data.batching.batches import Sequences, StepBatches
from rp_data.batching.packing import packed
from rp_data.documents import Counts, Document, Documents, held_out
from rp_data.notes import DataNotes
from rp_data.rows.documents import read_samples
from rp_data.samples import Chat, Completion, Sample, Text
from rp_data.tokens import Reader
from rp_trainer.errors import Refused
from rp_trainer.finetuning.batches import labels_in
from tokenizers import processors
from transformers import AutoModelForCausalLM

TOKENIZER = finetuning.tokenizer()
MARKED = finetuning.tokenizer(finetuning.MARKED)
CHAT = Chat(
    "a:1",
    [
        {"role": "system", "content": "the cat"},
        {"role": "user", "content": "one two"},
        {"role": "assistant", "content": "three"},
        {"role": "user", "content": "four"},
        {"role": "assistant", "content": "five six"},
    ],
)


def read(*samples: Sample, only: bool = False, size: int = 100, tokenizer: Any = TOKENIZER) -> Documents:
    return Reader(tokenizer, sequence=size, completions_only=only).read(samples)


def learned(document: Document, tokenizer: Any = TOKENIZER) -> str:
    labels = document.tensors()[1]
    return tokenizer.decode(labels[labels >= 0])


def test_of_a_conversation_what_the_assistant_says_is_learned() -> None:
    said = "three<|im_end|>\nfive six<|im_end|>\n"
    for tokenizer in (TOKENIZER, MARKED):
        assert learned(read(CHAT, only=True, tokenizer=tokenizer).all[0]) == said

    (whole,) = read(CHAT).all
    assert TOKENIZER.decode(whole.tokens) == TOKENIZER.apply_chat_template(CHAT.messages, tokenize=False)
    assert whole.labels == len(whole) - 1


def test_a_template_that_marks_the_assistant_need_not_keep_its_words() -> None:
    template = finetuning.MARKED.replace("{% generation %}", "{% generation %}{% if loop.last %}and {% endif %}")
    tokenizer = finetuning.tokenizer(template)

    assert (
        learned(read(CHAT, only=True, tokenizer=tokenizer).all[0]) == "three<|im_end|>\nand five six<|im_end|>\n"
    )
    with pytest.raises(Refused, match="a:1: it is unknown which tokens are the assistant's"):
        read(CHAT, only=True, tokenizer=finetuning.tokenizer(finetuning.UNSTABLE))
    # Without the question which is whose, any template will do.
    assert read(CHAT, tokenizer=finetuning.tokenizer(finetuning.UNSTABLE)).labels


def test_marks_that_cannot_be_traced_to_tokens_are_refused() -> None:
    trimming = finetuning.tokenizer(finetuning.MARKED)
    trimming.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    spaced = Chat("a:1", [*CHAT.messages[1:4], {"role": "assistant", "content": " five six"}])

    assert learned(read(spaced, only=True, tokenizer=MARKED).all[0]) == "three<|im_end|>\n five six<|im_end|>\n"
    with pytest.raises(Refused, match="a:1: it is unknown which tokens are the assistant's: the tokenizer does"):
        read(spaced, only=True, tokenizer=trimming)


def test_a_text_that_begins_with_the_first_token_has_it_once() -> None:
    beginning = finetuning.tokenizer()
    beginning.add_special_tokens({"bos_token": "<|begin|>"})
    first = beginning.bos_token_id
    beginning.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|begin|> $A", special_tokens=[("<|begin|>", first)]
    )

    for text in ("one two", "<|begin|>one two"):
        for sample in (Text("", text), Completion("", text, " three")):
            tokens = list(read(sample, tokenizer=beginning).all[0].tokens)
            assert tokens.count(first) == 1, sample
            assert tokens[0] == first
    # This tokenizer adds none.
    twice = TOKENIZER.eos_token * 2
    kept = finetuning.tokenizer()
    kept.bos_token = kept.eos_token
    assert list(read(Text("", twice + "one"), tokenizer=kept).all[0].tokens)[:2] == [kept.eos_token_id] * 2


def test_messages_that_the_template_refuses_are_told_with_its_words() -> None:
    strict = finetuning.tokenizer("{{ raise_exception('roles must alternate') }}")

    with pytest.raises(Refused, match="a:1: the chat template refuses these messages: roles must alternate"):
        read(CHAT, tokenizer=strict)


@settings(max_examples=examples(60), deadline=None)
@given(prompt=st.text("one two ", max_size=12), completion=st.text("one two ", min_size=1, max_size=12))
def test_of_a_completion_all_is_learned_that_the_prompt_does_not_say(prompt: str, completion: str) -> None:
    (document,) = read(Completion("a:1", prompt, completion), only=True).all
    tokens = list(document.tokens)

    assert tokens == [*TOKENIZER(prompt + completion)["input_ids"], TOKENIZER.eos_token_id]
    first = document.learned.index(1)
    assert not any(document.learned[:first])
    assert all(document.learned[first:])
    # Everything before it is the prompt's, and the token itself is not.
    prompted = TOKENIZER(prompt)["input_ids"]
    assert tokens[:first] == prompted[:first]
    assert tokens[: first + 1] != prompted[: first + 1]


def test_texts_go_on_in_pieces_and_others_are_cut() -> None:
    text = Text("a", finetuning.words(1, 30))
    long = Completion("b", finetuning.words(2, 30), " one")

    texts = read(text, size=8)
    assert [token for document in texts.all for token in document.tokens][:-1] == TOKENIZER(text.text)["input_ids"]
    assert texts.counts == Counts(samples=1, longer=1)
    cut = read(long, text, size=8)
    assert len(cut.all[0]) == 8
    assert cut.counts == Counts(samples=2, longer=2)
    assert read(long, CHAT, size=8, only=True).counts == Counts(samples=2, longer=2, lost=2)


@settings(max_examples=examples(100), deadline=None)
@given(data=st.data(), size=st.integers(1, 30))
def test_packing_keeps_every_document_once_and_leaves_little_room(data: st.DataObject, size: int) -> None:
    lengths = data.draw(st.lists(st.integers(1, size), max_size=40))

    rows = packed(lengths, size)

    assert sorted(document for row in rows for document in row) == list(range(len(lengths)))
    filled = [sum(lengths[document] for document in row) for row in rows]
    assert all(total <= size for total in filled)
    # No two rows would fit into one.
    assert sum(sorted(filled)[:2]) > size or len(rows) < 2


def documents(lengths: list[int]) -> Documents:
    """Documents whose tokens tell which one they are."""
    made = [
        Document(array("i", [number + 1] * length), bytes([1] * length)) for number, length in enumerate(lengths)
    ]
    return Documents(made, Counts(len(made)))


@settings(max_examples=examples(40), deadline=None)
@given(data=st.data(), packing=st.booleans(), seed=st.integers(0, 5))
def test_every_epoch_has_every_document_once_in_an_order_of_its_own(
    data: st.DataObject, packing: bool, seed: int
) -> None:
    lengths = data.draw(st.lists(st.integers(2, 9), min_size=1, max_size=20))
    sequences = Sequences(documents(lengths), size=9, packing=packing, seed=seed)

    for epoch in range(3):
        rows = range(epoch * sequences.in_epoch, (epoch + 1) * sequences.in_epoch)
        found = [document.tokens[0] for row in rows for document in sequences.at(row)]
        assert sorted(found) == list(range(1, len(lengths) + 1))
    # Asked in any order, the same row is the same.
    again = Sequences(documents(lengths), size=9, packing=packing, seed=seed)
    last = 3 * sequences.in_epoch - 1
    assert again.at(last) == sequences.at(last)


@settings(max_examples=examples(40), deadline=None)
@given(
    lengths=st.lists(st.integers(2, 9), min_size=4, max_size=20),
    weights=st.tuples(*[st.sampled_from([0.5, 1.0, 1.75, 3.0])] * 2),
    packing=st.booleans(),
)
def test_an_epoch_has_the_documents_of_a_source_as_often_as_its_weight_says(
    lengths: list[int], weights: tuple[float, float], packing: bool
) -> None:
    sources = (len(lengths) - 2, 2)
    made = replace(documents(lengths), sources=sources)
    sequences = Sequences(made, size=9, packing=packing, seed=0, weights=weights)

    first = 0
    tokens = sum(len(one.tokens) for row in range(sequences.in_epoch) for one in sequences.at(row))
    assert sequences.filled == tokens / (9 * sequences.in_epoch) <= 1
    for epoch in range(4):
        end = sequences.in_epochs(epoch + 1)
        counts = Counter(one.tokens[0] - 1 for row in range(first, end) for one in sequences.at(row))
        for source, weight, start in zip(sources, weights, (0, sources[0]), strict=True):
            found = [counts[number] for number in range(start, start + source)]
            assert sum(found) == int(weight) * source + round(weight % 1 * source)
            assert set(found) <= {int(weight), int(weight) + 1}
        first = end
    # Asked in another order, rows are the same.
    again = Sequences(made, size=9, packing=packing, seed=0, weights=weights)
    assert again.at(first - 1) == sequences.at(first - 1)


def test_weights_of_one_change_nothing_and_parts_of_others_change_by_epoch() -> None:
    made = replace(documents([3] * 12), sources=(4, 8))
    plain = Sequences(made, size=3, packing=True, seed=0)
    ones, parts = (
        Sequences(made, size=3, packing=True, seed=0, weights=weights) for weights in ((1.0, 1.0), (1.0, 0.5))
    )

    assert [ones.at(row) for row in range(36)] == [plain.at(row) for row in range(36)]
    assert parts.in_epochs(3) == 24
    assert len({one.tokens[0] for row in range(24) for one in parts.at(row)}) > 8


def test_held_out_documents_leave_their_source() -> None:
    made = replace(documents([3] * 12), sources=(4, 8))

    training, evaluated = held_out(made, 0.25)

    assert sum(training.sources) == len(training.all) == 9
    assert training.sources[0] == sum(one.tokens[0] <= 4 for one in training.all)
    assert len(evaluated.all) == 3


def test_orders_differ_between_epochs_and_seeds() -> None:
    def order(seed: int, epoch: int) -> list[int]:
        sequences = Sequences(documents([3] * 30), size=3, packing=True, seed=seed)
        return [sequences.at(epoch * 30 + row)[0].tokens[0] for row in range(30)]

    assert len({tuple(order(seed, epoch)) for seed in (0, 1) for epoch in (0, 1)}) == 4


def test_a_batch_tells_documents_and_padding_apart() -> None:
    batches = {
        packing: Sequences(documents([4, 3]), size=9, packing=packing, seed=0).batch(0, 1 if packing else 2, pad=0)
        for packing in (True, False)
    }

    tokens, positions, labels = (batches[True][name].tolist() for name in ("input_ids", "position_ids", "labels"))
    assert tokens == [[1, 1, 1, 1, 2, 2, 2, 0, 0]]
    assert positions == [[0, 1, 2, 3, 0, 1, 2, 0, 1]]
    assert labels == [[-100, 1, 1, 1, -100, 2, 2, -100, -100]]
    assert labels_in(batches[True]) == labels_in(batches[False]) == 5
    assert batches[False]["attention_mask"].sum(1).tolist() == (batches[False]["input_ids"] > 0).sum(1).tolist()
    assert batches[False]["input_ids"].shape == (2, 8)


def test_steps_go_on_through_epochs() -> None:
    sequences = Sequences(documents([3] * 5), size=3, packing=True, seed=0)
    steps = StepBatches(sequences, batch=2, accumulation=2, pad=0)

    assert steps.in_epochs(1) == 2
    assert steps.in_epochs(4) == 5
    rows = [row for step in range(1, 6) for call in steps.calls(step) for row in call["input_ids"][:, 0].tolist()]
    assert sorted(rows) == sorted([1, 2, 3, 4, 5] * 4)
    assert steps.tokens(1) == 12


@settings(max_examples=examples(60), deadline=None)
@given(
    numbers=st.lists(st.integers(1, 12), min_size=2, max_size=30).filter(lambda numbers: len(set(numbers)) > 1),
    part=st.floats(0.01, 0.5),
)
def test_equal_documents_are_held_out_together_whatever_their_order(numbers: list[int], part: float) -> None:
    def parts(numbers: list[int]) -> tuple[set[int], set[int]]:
        made = Documents([Document(array("i", [number] * 3), bytes(3)) for number in numbers], Counts())
        one, other = held_out(made, part)
        assert len(one.all) + len(other.all) == len(numbers)
        return {document.tokens[0] for document in one.all}, {document.tokens[0] for document in other.all}

    training, evaluated = parts(numbers)
    assert training
    assert evaluated
    assert not training & evaluated
    assert parts(numbers[::-1]) == (training, evaluated)


@pytest.mark.few(2)
@pytest.mark.parametrize("family", finetuning.FAMILIES)
def test_the_logits_of_a_packed_document_are_those_of_the_document_alone(family: str, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(finetuning.make_model(tmp_path, family)).eval()
    chosen = read(*[Text("", finetuning.words(number, 3 + number)) for number in range(6)], size=40)
    sequences = Sequences(chosen, size=40, packing=True, seed=0)
    rows = range(sequences.in_epoch)
    batch = sequences.batch(0, len(rows), pad=0)
    assert max(len(sequences.at(row)) for row in rows) > 1
    del batch["labels"]
    with torch.no_grad():
        alone = {
            document.digest: model(input_ids=document.tensors()[0][None], use_cache=False).logits[0]
            for document in chosen.all
        }
        with Runtime("cpu:2") as runtime:
            wrapped: Any = wrap_model_to_roundpipe(model, runtime=runtime, optim_dtype=torch.float32)
            logits = wrapped(**batch).logits
            check_causality(wrapped, finetuning.VOCABULARY, is_packed=True)

    for row in rows:
        start = 0
        for document in sequences.at(row):
            end = start + len(document)
            torch.testing.assert_close(logits[row, start:end], alone[document.digest], rtol=1e-4, atol=1e-4)
            start = end


def test_files_of_all_kinds_are_read_in_the_order_of_their_names(tmp_path: Path) -> None:
    finetuning.json_lines(tmp_path / "b.jsonl", [{"text": "two"}, {"prompt": "p", "completion": "c", "text": "t"}])
    (tmp_path / "a.txt").write_text("one")
    (tmp_path / "folder").mkdir()
    finetuning.json_lines(tmp_path / "folder" / "c.ndjson", [{"messages": CHAT.messages, "prompt": "p"}])
    (tmp_path / ".cache").mkdir()
    for name in ("README", "config.json", ".hidden.txt", ".cache/copy.txt"):
        (tmp_path / name).write_text("not this")
    # As some systems write them: suffixes in capitals, and a mark before the text.
    (tmp_path / "d.JSONL").write_bytes(codecs.BOM_UTF8 + b'{"text": "three"}\n')
    (tmp_path / "e.TXT").write_bytes(codecs.BOM_UTF8 + b"four")

    notes = DataNotes()
    found = list(read_samples("--data", [tmp_path], notes=notes))

    assert list(notes.lines("--data")) == [
        "--data: files in folders that are not read: 'README' (1 file), '.json' (1 file)",
        "--data: fields that are not read: 'text' (1 row), 'prompt' (1 row)",
    ]
    assert found == [
        Text(str(tmp_path / "a.txt"), "one"),
        Text(f"{tmp_path / 'b.jsonl'}:1", "two"),
        Completion(f"{tmp_path / 'b.jsonl'}:2", "p", "c"),
        Text(f"{tmp_path / 'd.JSONL'}:1", "three"),
        Text(str(tmp_path / "e.TXT"), "four"),
        Chat(f"{tmp_path / 'folder' / 'c.ndjson'}:1", CHAT.messages),
    ]


def test_parquet_is_read_where_datasets_is_installed(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    records = [*finetuning.texts(2), {"messages": CHAT.messages}]
    columns = {name: [record.get(name) for record in records] for name in ("text", "messages")}
    datasets.Dataset.from_dict(columns).to_parquet(str(tmp_path / "a.parquet"))

    found = list(read_samples("--data", [tmp_path / "a.parquet"]))

    assert [type(sample) for sample in found] == [Text, Text, Chat]
    assert read(found[2]).all == read(CHAT).all
