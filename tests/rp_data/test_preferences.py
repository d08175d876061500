"""Preferences of all forms become the columns that TRL's trainers take, as TRL's own functions make them."""

from __future__ import annotations

import csv
import json
import logging
from pathlib import Path
from typing import Any

import pytest
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from rp_data import read_preferences
from rp_trainer.errors import Refused

trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def shared(speaker: str, text: str) -> dict[str, str]:
    return {"from": speaker, "value": text}


ASKED, BETTER, WORSE = [user("1+1?")], [assistant("2")], [assistant("3")]
SYSTEM = {"role": "system", "content": "Be brief."}
SAID = {"prompt": ASKED, "chosen": BETTER, "rejected": WORSE}
TEXT = {"prompt": "1+1=", "chosen": " 2", "rejected": " 3"}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
# By name: a row, and what it becomes.
PAIRS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "text": (TEXT, TEXT),
    "text without a prompt": ({"chosen": "1+1= 2", "rejected": "1+1= 3"}, TEXT),
    "messages": ({**SAID, "score_chosen": 5, "messages": [*ASKED, *BETTER]}, SAID),
    "messages without a prompt": ({"chosen": ASKED + BETTER, "rejected": ASKED + WORSE}, SAID),
    "a prompt that is repeated": ({"prompt": "1+1?", "chosen": ASKED + BETTER, "rejected": ASKED + WORSE}, SAID),
    "a prompt that is repeated beside a system": (
        {"system": "Be brief.", "prompt": ASKED, "chosen": ASKED + BETTER, "rejected": ASKED + WORSE},
        {**SAID, "prompt": [SYSTEM, *ASKED]},
    ),
    "messages that repeat it": ({"prompt": ASKED, "chosen": ASKED + BETTER, "rejected": ASKED + WORSE}, SAID),
    "a text and messages": ({"prompt": "1+1?", "chosen": BETTER, "rejected": WORSE}, SAID),
    "messages and texts": ({"prompt": ASKED, "chosen": "2", "rejected": "3"}, SAID),
    "one message": ({"prompt": ASKED, "chosen": BETTER[0], "rejected": WORSE[0]}, SAID),
    "ShareGPT": (
        {"conversations": [shared("human", "1+1?")], "chosen": shared("gpt", "2"), "rejected": shared("gpt", "3")},
        SAID,
    ),
    "messages as JSON": ({name: json.dumps(one) for name, one in SAID.items()}, SAID),
    "Alpaca": ({"instruction": "1+1?", "input": "", "chosen": "2", "rejected": "3"}, SAID),
    "a question": ({"question": "1+1?", "chosen": "2", "rejected": "3"}, SAID),
    "a system": (
        {"system": "Be brief.", "question": "1+1?", "chosen": "2", "rejected": "3"},
        {**SAID, "prompt": [SYSTEM, *ASKED]},
    ),
    "a system beside a text": (
        {"system": "Be brief.", "prompt": "1+1?", "chosen": ASKED + BETTER, "rejected": ASKED + WORSE},
        {**SAID, "prompt": [SYSTEM, *ASKED]},
    ),
    "parts": (
        {**SAID, "prompt": [{"role": "user", "content": [{"type": "text", "text": "1+1?"}]}]},
        SAID,
    ),
    "a call of a tool": (
        {**SAID, "chosen": [{"role": "assistant", "tool_calls": [CALL]}], "tools": [{"name": "add"}]},
        {**SAID, "chosen": [{"role": "assistant", "tool_calls": [CALL]}], "tools": '[{"name": "add"}]'},
    ),
    "options as JSON": (
        {**SAID, "chat_template_kwargs": '{"enable_thinking": false}'},
        {**SAID, "chat_template_kwargs": {"enable_thinking": False}},
    ),
    "options": (
        {**SAID, "chat_template_kwargs": {"enable_thinking": False}},
        {**SAID, "chat_template_kwargs": {"enable_thinking": False}},
    ),
}
JUDGED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "text": ({"prompt": "1+1=", "completion": " 3", "label": False}, {"prompt": "1+1=", "completion": " 3"}),
    "messages": ({"prompt": ASKED, "completion": WORSE, "label": 0}, {"prompt": ASKED, "completion": WORSE}),
    "a conversation": ({"messages": ASKED + WORSE, "kto_tag": False}, {"prompt": ASKED, "completion": WORSE}),
    "ShareGPT": (
        {"conversations": [shared("human", "1+1?"), shared("gpt", "3")], "label": "False"},
        {"prompt": ASKED, "completion": WORSE},
    ),
    "a conversation beside its question": (
        {"prompt": " 1+1?", "messages": [SYSTEM, *ASKED, *WORSE], "label": False, "kto_tag": 0},
        {"prompt": [SYSTEM, *ASKED], "completion": WORSE},
    ),
    "a conversation beside its prompt": (
        {"system": "Be brief.", "prompt": ASKED, "messages": ASKED + WORSE, "label": False},
        {"prompt": [SYSTEM, *ASKED], "completion": WORSE},
    ),
    "Alpaca": (
        {"instruction": "1+1?", "output": "3", "kto_tag": False},
        {"prompt": ASKED, "completion": WORSE},
    ),
}


@pytest.mark.parametrize("form", PAIRS)
def test_pairs_of_all_forms_become_prompt_chosen_and_rejected(form):
    row, wanted = PAIRS[form]

    assert read_preferences([row]).to_list() == [wanted]
    apart = read_preferences([row], unpaired=True).to_list()
    others = {name: one for name, one in wanted.items() if name not in ("chosen", "rejected")}
    assert apart == [
        {**others, "completion": wanted["chosen"], "label": True},
        {**others, "completion": wanted["rejected"], "label": False},
    ]


@pytest.mark.parametrize("form", JUDGED)
def test_judged_answers_of_all_forms_become_prompt_completion_and_label(form):
    row, wanted = JUDGED[form]

    assert read_preferences([row]).to_list() == [{**wanted, "label": False}]


TURNS = st.lists(st.sampled_from(["a", "b", "a b"]), min_size=1, max_size=3)


@settings(max_examples=examples(30))
@given(st.lists(st.tuples(TURNS, TURNS, TURNS), min_size=1, max_size=5))
def test_conversations_without_a_prompt_are_those_of_trl(rows):
    pairs = []
    for asked, one, other in rows:
        before = [*map(assistant, asked[1:]), user(asked[0])]
        chosen, rejected = (
            [assistant(f"{sign}{text}") for text in some] for sign, some in (("+", one), ("-", other))
        )
        pairs.append({"chosen": before + chosen, "rejected": before + rejected})

    found = read_preferences(pairs)

    assert found.to_list() == [trl.extract_prompt(one) for one in pairs]


@settings(max_examples=examples(100))
@given(st.text("ab ", min_size=1), st.text("ab "), st.text("ab "))
def test_texts_without_a_prompt_are_those_of_trl(prompt, one, other):
    pair = {"chosen": f"c{prompt}{one}x", "rejected": f"c{prompt}{other}y"}

    assert read_preferences([pair])[0] == trl.extract_prompt(pair)


def test_files_of_all_kinds_are_read_alike(tmp_path):
    rows = [{**row, "id": number} for number, (row, _) in enumerate(PAIRS.values()) if "conversations" in row] * 2
    rows += [{"prompt": "1+1?", "chosen": BETTER, "rejected": [assistant(f"{number}")]} for number in range(3, 9)]
    wanted = read_preferences(rows)
    lines = "\n".join(map(json.dumps, rows))
    tmp_path.joinpath("a.jsonl").write_text(lines)
    tmp_path.joinpath("a.json").write_text(json.dumps(rows))
    names = sorted({name for row in rows for name in row})
    datasets.Dataset.from_list(
        [{name: row.get(name) for name in names} for row in rows], on_mixed_types="use_json"
    ).to_parquet(str(tmp_path / "a.parquet"))
    with tmp_path.joinpath("a.csv").open("w") as file:
        table = csv.writer(file)
        table.writerow(names)
        for row in rows:
            values = [row.get(name, "") for name in names]
            table.writerow([one if isinstance(one, str) else json.dumps(one) for one in values])

    for name in ("a.jsonl", "a.json", "a.parquet", "a.csv"):
        assert read_preferences(tmp_path / name).to_list() == wanted.to_list(), name
    assert len(read_preferences(str(tmp_path / "a.csv"), rows)) == 2 * len(rows)


WRONG = {
    "must have 'chosen' and 'rejected', or 'label' beside .*, but has 'prompt', 'chosen'": {
        **TEXT,
        "rejected": None,
    },
    "'chosen' and 'rejected' must differ, but are the same": {**TEXT, "rejected": " 2"},
    "'rejected' must say something, but is empty": {**TEXT, "rejected": ""},
    "'chosen' must be text or messages, but is a int": {**TEXT, "chosen": 2},
    "must have a 'prompt', or .* differ from the beginning": {"chosen": "2", "rejected": "3"},
    "'chosen' and 'rejected' must both be text": {"chosen": "2", "rejected": ASKED},
    "'label' must be true or false, .* but is 'good'": {"prompt": "1", "completion": "2", "label": "good"},
    "'label' must be true or false, .* but is 0.5": {"prompt": "1", "completion": "2", "label": 0.5},
    "must have a 'prompt' for its 'completion'": {"completion": "2", "label": True},
    "'chosen' must be what the assistant says .*, but begins with a message of the user": {
        **SAID,
        "chosen": ASKED,
    },
    "'messages' must be what the assistant says .*, but is nothing": {"messages": ASKED, "label": True},
    "the prompt must be .*, but ends with a message of the assistant": {**SAID, "prompt": ASKED + BETTER},
    "has 'images', which are not read from preferences": {**SAID, "images": ["a.png"]},
    "has a 'system', .* but is text; give it a 'prompt'": {"system": "Be", "chosen": "q: 2", "rejected": "q: 3"},
    "'chat_template_kwargs' must be names and values": {**SAID, "chat_template_kwargs": "thinking"},
    "'system' must be text, but is a list": {**TEXT, "system": ["Be brief."]},
    "'chosen' and 'rejected' must be what comes after 'prompt'": {
        "prompt": "1+1?",
        "chosen": "1+1? 2",
        "rejected": "1+1? 3",
    },
    "'completion' must be what comes after 'prompt'": {"prompt": "Hello", "completion": "Hello!", "label": True},
    "'prompt' must be in the conversation, but is not": {
        "prompt": "2+2?",
        "chosen": ASKED + BETTER,
        "rejected": ASKED + WORSE,
    },
    "'question' must be in the conversation": {"question": "2+2?", "messages": ASKED + BETTER, "label": True},
    "'label' and 'kto_tag' must say the same, .*; leave one": {
        **JUDGED["text"][0],
        "label": True,
        "kto_tag": False,
    },
    "'messages' has images": {
        "messages": [{"role": "user", "content": [{"type": "image", "url": "a.png"}]}, *BETTER],
        "label": True,
    },
    "'chosen' has a message with 'weight', .* nothing of a prompt; remove it": {
        **SAID,
        "chosen": [{**BETTER[0], "weight": 0}],
    },
    "'prompt' has a message with 'train'": {**SAID, "prompt": [{**ASKED[0], "train": True}]},
    "'from' must be one of": {**SAID, "prompt": [{"from": ["human"], "value": "1+1?"}]},
    "must be text, but has half of a surrogate pair": {**TEXT, "prompt": json.dumps([user("\ud800")])},
    "each message must have a 'role' and a 'content'": {**SAID, "prompt": [{"role": "user"}]},
}


@pytest.mark.parametrize("told", WRONG)
def test_what_is_wrong_is_told_with_its_row_or_omitted(told, tmp_path, caplog):
    path = tmp_path / "data.jsonl"
    path.write_text("\n".join(map(json.dumps, [SAID, WRONG[told], SAID])))

    with pytest.raises(Refused, match=f"data {path}:2:? {told}"):
        read_preferences(path)
    with caplog.at_level(logging.WARNING):
        assert read_preferences(path, skip_bad_rows=True).to_list() == [SAID, SAID]
    assert f"1 bad rows are skipped: data {path}:2" in caplog.text


def test_fields_that_prefer_nothing_are_told(caplog):
    with caplog.at_level(logging.WARNING):
        assert read_preferences([{**SAID, "margin": 0.5, "history": []}]).column_names == [*SAID]
    assert "data: fields that are not read: 'margin' (1 row)" in caplog.text


def test_rows_of_several_kinds_are_not_mixed(tmp_path):
    judged = JUDGED["messages"][0]

    with pytest.raises(
        Refused, match="row 2 says whether one answer is good, but row 1 chooses one of two answers"
    ):
        read_preferences([SAID, judged])
    assert read_preferences([SAID, judged], unpaired=True)["label"][:] == [True, False, False]
    with pytest.raises(Refused, match="row 2 is text, but row 1 is a conversation; read them apart"):
        read_preferences([SAID, TEXT])
    with pytest.raises(Refused, match="has no preferences"):
        read_preferences([])
    with pytest.raises(Refused, match="load it without streaming"):
        read_preferences(iter([SAID]))
    tmp_path.joinpath("a.txt").write_text("one")
    with pytest.raises(Refused, match="is text, which prefers nothing"):
        read_preferences(Path(tmp_path / "a.txt"))


@pytest.mark.parametrize("data", [SAID, datasets.DatasetDict(train=datasets.Dataset.from_list([SAID]))], ids=type)
def test_what_is_no_list_of_rows_is_refused(data):
    with pytest.raises(Refused, match=f"must be rows, but is a {type(data).__name__}; choose one of its splits"):
        read_preferences(data)


@pytest.mark.parametrize("row", ["a.jsonl", None, {**TEXT, "chosen": "\ud800"}, {**SAID, "tools": [print]}])
def test_rows_of_python_that_cannot_be_kept_are_told_or_omitted(row):
    with pytest.raises(Refused, match=r"data row 2 must (have|be)"):
        read_preferences([TEXT, row])
    assert read_preferences([TEXT, row], skip_bad_rows=True).to_list() == [TEXT]


def test_calls_of_tools_keep_their_own_arguments():
    other = {"type": "function", "function": {"name": "look", "arguments": {"place": "here"}}}
    rows = [{**SAID, "chosen": [{"role": "assistant", "tool_calls": [one]}]} for one in (CALL, other)]

    found = read_preferences([*rows, SAID])

    assert found.to_list() == [*rows, SAID]
    apart = [trl.unpair_preference_dataset(found), read_preferences([*rows, SAID], unpaired=True)]
    one, other = ([json.dumps(row, sort_keys=True) for row in data] for data in apart)
    assert sorted(one) == sorted(other)
