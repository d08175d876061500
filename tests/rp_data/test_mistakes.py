"""Mistakes in data that would be learned silently: they are refused by row, or told."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import finetuning
import pytest
from rp_data.documents import Documents
from rp_data.notes import DataNotes
from rp_data.rows.documents import read_samples
from rp_data.rows.shapes import sample_of
from rp_data.rows.tables import present
from rp_data.samples import Chat, Sample, Text
from rp_data.tokens import Reader
from rp_trainer.errors import Refused
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast


def says(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


def samples(*rows: Mapping[str, Any]) -> list[Sample]:
    return [sample_of("--data", f"a:{number}", present(row)) for number, row in enumerate(rows, 1)]


def test_what_a_row_has_beside_its_messages_is_read_also_as_json_or_refused() -> None:
    talk = [says("user", "one"), says("assistant", "two")]
    tools, documents, variables = [{"name": "add"}], [{"title": "three"}], {"enable_thinking": False}
    beside = {"tools": tools, "documents": documents, "chat_template_kwargs": variables}

    for row in (beside, {name: json.dumps(value) for name, value in beside.items()}):
        (sample,) = samples({"messages": talk, **row})
        assert isinstance(sample, Chat)
        assert (sample.tools, sample.documents, sample.options) == (tools, documents, variables)
    empty, alone = samples(
        {"messages": talk, "tools": "", "system": "", "chat_template_kwargs": ""},
        {"instruction": "one", "output": "two", "tools": tools},
    )
    assert empty == Chat("a:1", talk)
    assert isinstance(alone, Chat)
    assert alone.plain is None
    for row in (
        {"tools": {"name": "add"}},
        {"tools": '{"name": "add"}'},
        {"documents": "three"},
        {"chat_template_kwargs": [1]},
        {"chat_template_kwargs": "enable_thinking=false"},
        {"system": ["six"]},
        {"system": "six", "messages": [says("system", "seven"), *talk]},
    ):
        with pytest.raises(Refused, match=f"^--data a:1: '{next(iter(row))}' must be "):
            samples({"messages": talk, **row})


@pytest.mark.parametrize("template", [finetuning.CHATML, finetuning.MARKED])
@pytest.mark.parametrize("mark", [{"weight": 0}, {"train": False}, {"loss": 0.0, "training": False}])
def test_a_message_that_is_marked_not_to_be_learned_is_not(template: str, mark: dict[str, Any]) -> None:
    talk = [
        {**says("user", "one"), "weight": 0},
        {**says("assistant", "two"), **mark},
        {**says("assistant", "three"), "weight": 1},
        says("assistant", "four"),
    ]
    tokenizer = finetuning.tokenizer(template)

    (document,) = Reader(tokenizer, sequence=99, completions_only=True).read(samples({"messages": talk})).all

    labels = document.tensors()[1]
    assert tokenizer.decode(labels[labels >= 0]) == "three<|im_end|>\nfour<|im_end|>\n"


def test_what_would_be_learned_by_mistake_is_refused() -> None:
    seen = {"type": "text", "text": "one", "image": "a.png"}
    for row, words in (
        ({"prompt": "one", "completion": "two", "label": False}, "said to be a bad answer"),
        ({"messages": [says("user", [seen])]}, "has the type 'text', but 'image', too"),
        ({"messages": [says("user", [{**seen, "type": "image"}])]}, "has the type 'image', but 'text', too"),
        ({"conversations": [{"from": "gpt", "value": "one", "content": "two"}]}, "both 'value' and 'content'"),
    ):
        with pytest.raises(Refused, match=f"^--data a:1.*{words}"):
            samples(row)
    assert samples({"text": "one", "label": False}) == [Text("a:1", "one")]


def test_an_answer_that_says_nothing_is_told_and_nothing_else_is_refused() -> None:
    said = [says("assistant", "two"), says("user", "three")]
    one, other = ({"messages": [says("user", "one"), *talk, says("assistant", "")]} for talk in ((), said))
    reader = Reader(finetuning.tokenizer(), sequence=99, completions_only=True)

    with pytest.raises(Refused, match="a:1 has nothing to learn: the assistant says nothing"):
        reader.read(samples(one))
    reader.notes.empty = 0
    reader.read(samples(other))

    assert list(reader.notes.lines("--data")) == ["--data: the assistant says nothing in 1 message, as is learned"]


def test_a_conversation_without_the_assistants_role_is_told_with_the_roles_that_it_has() -> None:
    talk = samples({"messages": [says("Benutzer", "one"), says("Assistent", "two")]})

    with pytest.raises(Refused, match="no message has the role 'assistant', but 'Benutzer', 'Assistent'"):
        Reader(finetuning.tokenizer(), sequence=99, completions_only=True).read(talk)
    reader = Reader(finetuning.tokenizer(), sequence=99, completions_only=False)
    reader.read(talk)
    reader.read(samples({"messages": [says("user", "one"), says("assistant", "two")]}))

    (told,) = reader.notes.lines("--data")
    assert told.startswith("--data: without a message of the assistant's, by their roles: ")
    assert "'Benutzer' (1 conversation)" in told
    assert "'Assistent' (1 conversation)" in told
    assert "user" not in told


def test_a_mark_that_cannot_be_followed_is_refused() -> None:
    def read(*talk: Any, only: bool = True, template: str = finetuning.CHATML) -> Documents:
        reader = Reader(finetuning.tokenizer(template), sequence=99, completions_only=only)
        return reader.read(samples({"messages": [*talk]}))

    def said(**mark: Any) -> dict[str, Any]:
        return {**says("assistant", "two"), **mark}

    nothing = finetuning.MARKED.replace("== 'assistant'", "in ('assistant', 'user')")
    for words, make in (
        ("'weight' of a message must be 0 or 1, .* but is 0.5", lambda: read(said(weight=0.5))),
        (
            "'weight' and 'train' of a message must be 0 or 1, .* are 1, False",
            lambda: read(said(weight=1, train=False)),
        ),
        ("not to be learned, but all are; give --completions-only", lambda: read(said(weight=0), only=False)),
        (
            "to be learned that the assistant does not say",
            lambda: read({**says("user", "one"), "train": True}, said()),
        ),
        (
            "the assistant says nothing that is marked to be learned",
            lambda: read(says("user", "one"), said(weight=0)),
        ),
        ("unknown which tokens are theirs", lambda: read(says("user", "one"), said(weight=0), template=nothing)),
    ):
        with pytest.raises(Refused, match=words):
            make()


def test_letters_that_the_tokenizer_does_not_know_are_counted() -> None:
    words = Tokenizer(models.WordLevel({"?": 0, "one": 1, ".": 2}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    for unknown, told in (
        ("?", ["--data: 2 tokens stand for letters that the tokenizer does not know"]),
        (".", []),
    ):
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token=".", unk_token=unknown)
        reader = Reader(tokenizer, sequence=9, completions_only=False)
        reader.read(samples({"text": "one two one three"}))
        assert list(reader.notes.lines("--data")) == told


def test_a_folder_of_other_files_is_refused_with_their_names(tmp_path: Path) -> None:
    (tmp_path / "data.arrow").touch()

    with pytest.raises(Refused, match=r"no files that end with .*; name others yourself, such as .*data.arrow"):
        list(read_samples("--data", [tmp_path]))


@pytest.mark.parametrize(
    "whole", ['{"text": "one"}\n{"text": "two"}', '\n[\n {"messages": []}\n]', '[{"text": "one"}]']
)
@pytest.mark.parametrize("name", ["a.txt", "a.jsonlines", "a"])
def test_json_is_not_learned_as_text(name: str, whole: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(whole)

    with pytest.raises(
        Refused, match=r"has JSON, but would be learned as text, as its name has it; name it .jsonl"
    ):
        list(read_samples("--data", [tmp_path / name]))
    for text in ("[one]", "{}", '{"a": 1}', "{% if a %}"):
        (tmp_path / name).write_text(text)
        assert list(read_samples("--data", [tmp_path / name])) == [Text(str(tmp_path / name), text)]


def test_a_name_that_is_in_an_object_twice_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"messages": [{"role": "user", "content": "one", "content": "two"}]}')

    with pytest.raises(
        Refused, match=r"a.jsonl:1 must be one JSON object, but is not: 'content' is in one object twice"
    ):
        list(read_samples("--data", [path]))


def test_what_is_about_a_data_set_is_not_learned_and_what_is_for_evaluation_told(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("one")
    (tmp_path / "notes.txt").write_text("two")
    notes = DataNotes()
    assert len(list(read_samples("--data", [tmp_path], notes=notes))) == 2

    (tmp_path / "data").mkdir()
    for name in ("train", "test", "contest"):
        (tmp_path / "data" / f"{name}.jsonl").write_text('{"text": "one"}')

    assert len(list(read_samples("--data", [tmp_path], notes=notes))) == 4
    told = [*notes.lines("--data")]
    assert told[0].startswith(f"--data: 1 of 3 files in {tmp_path} are named for evaluation, such as")
    assert told[1:] == ["--data: files in folders that are not read: 'README.md' (1 file)"]
    (tmp_path / "data" / "train.jsonl").unlink()
    (tmp_path / "data" / "contest.jsonl").unlink()
    assert len(list(read_samples("--data", [tmp_path / "data"], notes=(alone := DataNotes())))) == 1
    assert not [*alone.lines("--data")]


@pytest.mark.parametrize("name", ["a.csv", "a.txt", "a.jsonl", "a.json", "a.csv.gz"])
@pytest.mark.parametrize("order", ["le", "be"])
def test_a_file_in_utf_16_is_refused_with_what_makes_it_utf_8(name: str, order: str, tmp_path: Path) -> None:
    path = tmp_path / name
    whole = "\ufeffprompt,completion\none,two\n".encode(f"utf-16-{order}")
    path.write_bytes(gzip.compress(whole) if name.endswith(".gz") else whole)

    with pytest.raises(
        Refused, match=rf"{name} is in UTF-16; write it in UTF-8, as `iconv -f UTF-16 -t UTF-8` does"
    ):
        list(read_samples("--data", [path]))


@pytest.mark.parametrize(
    ("name", "whole", "told"),
    [
        ("a.csv", "prompt;completion\none;two", "must have commas between its columns, but has ';'"),
        ("a.tsv", "prompt,completion|x\none,two", "must have tabs between its columns, but has '|'"),
        ("b.csv", "messages\n\"[{'role': 'user'}]\"", "write it by json.dumps, not as Python shows it"),
    ],
)
def test_tables_of_other_programs_are_refused_in_words(name: str, whole: str, told: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(whole)

    with pytest.raises(Refused, match=re.escape(told)):
        list(read_samples("--data", [tmp_path / name]))
