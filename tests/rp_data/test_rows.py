"""Data as it comes: every form of it, read from every format, makes the same tokens; what is no data is told."""

from __future__ import annotations

import csv
import gzip
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import finetuning
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from rp_data.documents import Documents
from rp_data.notes import DataNotes
from rp_data.rows.documents import read_samples
from rp_data.rows.json_rows import json_rows, without_nulls
from rp_data.rows.shapes import sample_of
from rp_data.rows.tables import present, stored_rows
from rp_data.samples import Chat, Completion, Sample, Text
from rp_data.tokens import Reader

# As templates of models that use tools.
CALLS = (
    "{% if tools %}TOOLS {{ tools | tojson }}\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<call>{{ c.function.name }} {{ c.function.arguments | tojson }}{% endfor %}"
    "<|im_end|>\n{% endfor %}"
)


def says(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


def using(name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """A sample as data sets of tool calls have it."""
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    properties = {argument: {"type": "string"} for argument in arguments}
    tool = {
        "type": "function",
        "function": {"name": name, "parameters": {"type": "object", "properties": properties}},
    }
    said = {"role": "assistant", "content": "", "tool_calls": [call]}
    return {"messages": [says("user", "one"), said], "tools": [tool]}


SPOKEN = [{"from": "human", "value": "one"}, {"from": "gpt", "value": "two"}]
# Each form in which data comes.
FORMS: dict[str, list[dict[str, Any]]] = {
    "texts": finetuning.texts(4),
    "completions": finetuning.pairs(4),
    "conversations": finetuning.chats(4),
    "tools": [using("weather", {"city": "Rome"}), using("add", {"a": 1, "b": 2})],
    "tools as text": [
        {"messages": [says("user", "one"), says("assistant", "two")], "tools": json.dumps([{"name": name}])}
        for name in ("add", "sum")
    ],
    "messages as text": [{"messages": json.dumps([says("user", "one"), says("assistant", "two")])}],
    "parts": [{"messages": [says("user", [{"type": "text", "text": "one"}]), says("assistant", [])]}],
    "prompts in messages": [{"prompt": [says("user", "one")], "completion": [says("assistant", "two")]}],
    "ShareGPT": [{"conversations": SPOKEN}, {"conversations": SPOKEN * 2, "system": "three"}],
    "Alpaca": [
        {"instruction": "one", "input": "", "output": "two"},
        {"instruction": "one", "input": "three", "output": "two", "history": [["four", "five"]]},
    ],
    "several": [{"text": "one"}, {"prompt": "one", "completion": "two"}, {"messages": [says("user", "one")]}],
}


def json_lines(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    return finetuning.json_lines(path.with_suffix(".jsonl"), rows)


def json_list(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    path.with_suffix(".json").write_text(json.dumps(rows, indent=1))
    return path.with_suffix(".json")


def parquet(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    # Arrow looks at the first row only for the names of columns.
    names = list(dict.fromkeys(name for row in rows for name in row))
    table = pa.table({name: [row.get(name) for row in rows] for name in names})
    pq.write_table(table, path.with_suffix(".parquet"))
    return path.with_suffix(".parquet")


def gzipped(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    packed = path.with_suffix(".jsonl.gz")
    packed.write_bytes(gzip.compress(json_lines(path, rows).read_bytes()))
    return packed


def zstd(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    packed, codec = path.with_suffix(".jsonl.zst"), pa.Codec("zstd")
    halves = json_lines(path, rows[:1]).read_bytes(), json_lines(path, rows[1:]).read_bytes()
    # As parallel compressors do, in several frames.
    packed.write_bytes(b"".join(codec.compress(half, asbytes=True) for half in halves if half))
    return packed


FORMATS: dict[str, Callable[[Path, Sequence[Mapping[str, Any]]], Path]] = {
    "a list": json_list,
    "Parquet": parquet,
    "gzip": gzipped,
    "zstd": zstd,
}


def documents(samples: Sequence[Sample], *, only: bool = False) -> Documents:
    return Reader(finetuning.tokenizer(CALLS), sequence=4096, completions_only=only).read(samples)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("file", FORMATS)
def test_a_form_of_data_makes_the_same_tokens_from_each_format(form: str, file: str, tmp_path: Path) -> None:
    lines = json_lines(tmp_path / "a", FORMS[form])
    other = FORMATS[file](tmp_path / "b", FORMS[form])

    ours, theirs = (documents(list(read_samples("--data", [path]))) for path in (lines, other))

    assert len(ours.all) == len(FORMS[form])
    assert theirs.all == ours.all


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".csv.gz"])
def test_tables_make_the_tokens_of_json(suffix: str, tmp_path: Path) -> None:
    rows = [{"prompt": 'one, "two"\nthree', "completion": "007"}, {"prompt": "four\tfive", "completion": " six"}]
    with (tmp_path / "a").open("w", newline="") as file:
        writer = csv.DictWriter(file, ["prompt", "id", "completion"], delimiter="\t" if suffix == ".tsv" else ",")
        writer.writeheader()
        writer.writerows(rows)
    content = (tmp_path / "a").read_bytes()
    table = tmp_path / f"a{suffix}"
    table.write_bytes(gzip.compress(content) if suffix.endswith(".gz") else b"\xef\xbb\xbf" + content)

    found = list(read_samples("--data", [table]))

    assert found == [Completion(f"{table}:{line}", **row) for line, row in zip((2, 4), rows, strict=True)]


def nested() -> st.SearchStrategy[Any]:
    """Rows with keys that not all have, nulls, and lists, which a table can have, too: a key has one type."""
    types = st.recursive(
        st.sampled_from(["text", "number"]),
        lambda inner: st.one_of(
            st.tuples(st.just("list"), inner),
            st.tuples(st.just("keys"), st.dictionaries(st.sampled_from("abcd"), inner, min_size=1, max_size=3)),
        ),
        max_leaves=6,
    )
    return types.flatmap(
        lambda kind: st.lists(st.fixed_dictionaries({"row": value(kind)}), min_size=1, max_size=4)
    )


def value(kind: Any) -> st.SearchStrategy[Any]:
    if kind == "text":
        return st.text("ab", max_size=3)
    if kind == "number":
        return st.integers(-9, 9)
    name, inner = kind
    if name == "list":
        return st.lists(st.one_of(value(inner), st.none()), max_size=3)
    return st.fixed_dictionaries(
        {}, optional={key: st.one_of(value(one), st.none()) for key, one in inner.items()}
    )


@settings(max_examples=examples(150), deadline=None)
@given(rows=nested())
def test_nested_rows_are_the_same_from_json_and_parquet(rows: list[dict[str, Any]], tmp_path_factory: Any) -> None:
    folder = tmp_path_factory.mktemp("rows")
    try:
        table = parquet(folder / "a", rows)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        # Parquet has no empty structs.
        return
    lines = json_lines(folder / "a", rows)

    ours = [row for _, row in json_rows("--data", lines, DataNotes())]
    theirs = [row for _, row in stored_rows("--data", table)]

    assert theirs == ours
    assert not any(map(has_null_key, ours))


def has_null_key(value: Any) -> bool:
    if isinstance(value, dict):
        return any(one is None or has_null_key(one) for one in value.values())
    return isinstance(value, list) and any(map(has_null_key, value))


def test_a_call_of_a_tool_has_its_own_arguments_only(tmp_path: Path) -> None:
    rows = FORMS["tools"]

    (first, second) = read_samples("--data", [parquet(tmp_path / "a", rows)])

    assert isinstance(first, Chat)
    assert isinstance(second, Chat)
    assert [dict(message) for message in first.messages] == rows[0]["messages"]
    assert second.tools == rows[1]["tools"]


def test_nulls_in_json_are_counted_and_told(tmp_path: Path) -> None:
    rows = [{"text": "one"}, {"text": "two", "messages": None, "meta": {"a": [None, {"b": None}]}}]
    path, notes = json_lines(tmp_path / "a", rows), DataNotes()

    assert [type(sample) for sample in read_samples("--data", [path], notes=notes)] == [Text, Text]
    assert list(notes.lines("--data")) == [
        f"--data: 2 keys were null and count as absent, the first in {path}:2",
        "--data: fields that are not read: 'meta' (1 row)",
    ]
    assert without_nulls(rows[1]["meta"]) == ({"a": [None, {}]}, 1)


def samples(*rows: Mapping[str, Any]) -> list[Sample]:
    return [sample_of("--data", f"a:{number}", present(row)) for number, row in enumerate(rows, 1)]


def test_forms_are_the_conversations_that_they_mean() -> None:
    talk = [says("user", "one"), says("assistant", "two")]
    parts = [{"type": "text", "text": "o"}, {"type": "text", "text": "ne"}]
    asked = [says("user", "one\nthree"), says("assistant", "two")]

    for row, messages in (
        ({"conversations": SPOKEN}, talk),
        ({"conversations": SPOKEN, "system": "six"}, [says("system", "six"), *talk]),
        ({"messages": [says("user", parts), talk[1]]}, talk),
        ({"messages": json.dumps(talk)}, talk),
        ({"prompt": talk[:1], "completion": talk[1:]}, talk),
        ({"prompt": json.dumps(talk[:1]), "completion": json.dumps(talk[1:])}, talk),
        ({"prompt": talk[:1], "completion": talk[1:], "system": "six"}, [says("system", "six"), *talk]),
        ({"messages": [says("system", "six "), *talk], "system": "six"}, [says("system", "six "), *talk]),
        ({"instruction": "one", "output": "two"}, talk),
        ({"instruction": "one", "input": "three", "output": "two"}, asked),
        (
            {"instruction": "one", "output": "two", "history": [["a", "b"]]},
            [says("user", "a"), says("assistant", "b"), *talk],
        ),
    ):
        (sample,) = samples(row)
        assert isinstance(sample, Chat)
        assert sample.messages == messages, row


def test_calls_of_tools_in_share_gpts_form_are_calls() -> None:
    call = {"name": "add", "arguments": {"a": 1}}
    spoken = [
        {"from": "human", "value": "one"},
        {"from": "function_call", "value": json.dumps(call)},
        {"from": "observation", "value": "2"},
    ]

    (sample,) = samples({"conversations": spoken, "tools": json.dumps([{"name": "add"}])})

    assert isinstance(sample, Chat)
    assert sample.messages[1] == {"role": "assistant", "tool_calls": [{"type": "function", "function": call}]}
    assert sample.messages[2] == says("tool", "2")
    assert sample.tools == [{"name": "add"}]


def test_an_instruction_has_alpacas_prompt_where_there_is_no_chat_template() -> None:
    (sample,) = samples({"instruction": "one", "input": "two", "output": "three"})
    tokenizer = finetuning.tokenizer(None)

    (document,) = Reader(tokenizer, sequence=4096, completions_only=True).read([sample]).all

    text = tokenizer.decode(document.tokens)
    assert "### Instruction:\none\n\n### Input:\ntwo\n\n### Response:\nthree<|end|>" in text
    labels = document.tensors()[1]
    assert tokenizer.decode(labels[labels >= 0]) == "three<|end|>"


def test_only_the_completion_of_a_prompt_in_messages_is_learned() -> None:
    talk = [says("user", "one"), says("assistant", "two"), says("user", "three"), says("assistant", "four")]
    tokenizer = finetuning.tokenizer()

    read = Reader(tokenizer, sequence=99, completions_only=True).read(
        samples({"prompt": talk[:3], "completion": talk[3:]})
    )

    labels = read.all[0].tensors()[1]
    assert tokenizer.decode(labels[labels >= 0]) == "four<|im_end|>\n"


def test_a_longer_sequence_leaves_what_the_message_says() -> None:
    long = [Completion("a", "the cat " * number, "sat") for number in (20, 30)]
    needs = Reader(finetuning.tokenizer(), sequence=24, completions_only=True).read(long).counts.needs

    assert needs is not None
    for size, lost in ((needs[0] - 1, 2), (needs[0], 1), (needs[1] - 1, 1), (needs[1], 0)):
        read = Reader(finetuning.tokenizer(), sequence=size, completions_only=True).read(long)
        assert read.counts.lost == lost, size
