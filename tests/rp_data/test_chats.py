"""Conversations as tokens: what templates write, and which of it the assistant says."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import finetuning
import pytest
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from rp_cli.finetune.options import TINY
from rp_data.chat import templates
from rp_data.chat.contents import in_parts
from rp_data.chat.turns import ChatTemplate
from rp_data.notes import DataNotes
from rp_data.samples import Chat
from rp_data.tokens import Reader
from rp_trainer.errors import Refused
from tokenizers import processors
from transformers import AutoTokenizer

DEFAULT_SYSTEM = (
    "{% if messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nthe cat<|im_end|>\n' }}{% endif %}"
)
CALLS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}ARGUMENTS{% endfor %}<|im_end|>\n{% endfor %}"
)
ENCODING = CALLS.replace("ARGUMENTS", "{{ c.function.arguments | tojson }}")
WRITING = CALLS.replace("ARGUMENTS", "{{ c.function.arguments }}")
# As DeepSeek-V3's: it adds texts, and asks whether a content is none.
JOINING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ '' if m['content'] is none else '' + m['content'] }}"
    "{% for c in m.tool_calls or [] %}{{ '(' + c.function.arguments + ')' }}{% endfor %}<|im_end|>\n{% endfor %}"
)
NAMING = CALLS.replace("ARGUMENTS", "{% for k, v in c.function.arguments | items %}{{ k }}={{ v }};{% endfor %}")


TYPED = ("<|im_end>", "hello <|im_end|>")


def says(role: str, content: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def calling(arguments: Any) -> Chat:
    call = {"type": "function", "function": {"name": "add", "arguments": arguments}}
    return Chat("a:1", [says("user", "one"), {"role": "assistant", "tool_calls": [call]}])


def of_bytes(template: str) -> Any:
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    tokenizer.chat_template = template
    return tokenizer


def learned(template: Any, chat: Chat) -> str:
    tokenizer = template if not isinstance(template, str | dict) else finetuning.tokenizer(template)
    tokens, said = ChatTemplate(tokenizer).tokens_and_assistant(chat)
    return tokenizer.decode([token for token, one in zip(tokens, said, strict=True) if one])


def written(template: Any, chat: Chat, notes: DataNotes | None = None) -> str:
    tokenizer = finetuning.tokenizer(template)
    return tokenizer.decode(ChatTemplate(tokenizer, notes=notes).tokens(chat))


@pytest.mark.parametrize(
    "template",
    [
        finetuning.CHATML,
        DEFAULT_SYSTEM + finetuning.CHATML,
        # It tells of the assistant's mark before it writes it.
        DEFAULT_SYSTEM.replace("the cat", "<|im_start|>assistant\nthe cat") + finetuning.CHATML,
    ],
)
@pytest.mark.parametrize("first", ["hello", "assistant", "<|im_start|>assistant\n", " ", "a", "b"])
def test_what_the_template_writes_before_an_assistant_who_begins_is_not_learned(template: str, first: str) -> None:
    chat = Chat("a:1", [says("assistant", first), says("user", "yes"), says("assistant", "no")])

    assert learned(template, chat) == f"{first}<|im_end|>\nno<|im_end|>\n"


def test_an_assistant_who_begins_says_what_marks_say() -> None:
    chat = Chat("a:1", [says("assistant", "one two"), says("user", "three")])

    assert learned(finetuning.MARKED, chat) == learned(finetuning.CHATML, chat) == "one two<|im_end|>\n"


def test_a_token_that_spans_the_border_is_learned_and_refuses_nothing() -> None:
    # Its end of a turn begins with white space, which becomes one token with a message of white space.
    template = finetuning.CHATML.replace("<|im_start|>assistant\n", "<|im_start|>assistant ")
    template = template.replace(
        "{{ message['role'] }}\n", "{{ message['role'] }}{{ ' ' if message['role'] == 'assistant' else '\n' }}"
    )
    tokenizer = finetuning.tokenizer(template)
    tokens, said = ChatTemplate(tokenizer).tokens_and_assistant(
        Chat("a:1", [says("user", "one"), says("assistant", "two")])
    )

    assert tokenizer.decode([token for token, one in zip(tokens, said, strict=True) if one]) == " two<|im_end|>\n"


@settings(max_examples=examples(60), deadline=None)
@given(texts=st.lists(st.text(" \nab", max_size=4), min_size=1, max_size=5), begins=st.booleans())
def test_marks_and_turns_tell_the_same_tokens_whatever_is_said(texts: list[str], begins: bool) -> None:
    roles = ("user", "assistant") if begins else ("assistant", "user")
    chat = Chat("a:1", [says(roles[at % 2], text) for at, text in enumerate(texts)])

    marked, turns = (
        ChatTemplate(finetuning.tokenizer(template)).tokens_and_assistant(chat)
        for template in (finetuning.MARKED, finetuning.CHATML)
    )

    assert marked == turns


def test_all_tokens_of_a_last_letter_are_learned() -> None:
    # The bytes of a letter are tokens of their own; transformers' masks end with the first.
    marked = finetuning.MARKED.replace(
        "{{ message['content'] }}<|im_end|>\n{% endgeneration %}",
        "{{ message['content'] }}{% endgeneration %}<|im_end|>\n",
    )
    tokenizer = of_bytes(marked)
    _, said = ChatTemplate(tokenizer).tokens_and_assistant(
        Chat("a:1", [says("user", "one"), says("assistant", "é")])
    )

    assert said.count(True) == 2


def test_a_tokenizer_that_trims_is_asked_for_whole_tokens() -> None:
    trimming = finetuning.tokenizer()
    trimming.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    chat = Chat("a:1", [says("user", "one"), says("assistant", " five six")])

    assert learned(trimming, chat) == " five six<|im_end|>\n"


@pytest.mark.parametrize("template", [finetuning.MARKED, finetuning.CHATML])
def test_of_a_prompt_in_messages_nothing_is_learned(template: str) -> None:
    messages = [says("user", "one"), says("assistant", "two"), says("user", "three"), says("assistant", "four")]

    assert learned(template, Chat("a:1", messages, prompted=3)) == "four<|im_end|>\n"


def test_templates_see_the_time_that_is_given() -> None:
    tokenizer = finetuning.tokenizer("{{ strftime_now('%d %b %Y') }}" + finetuning.CHATML)
    chat = Chat("a:1", [says("user", "one")])

    tokens = ChatTemplate(tokenizer, clock=datetime(2024, 2, 29, 12)).tokens(chat)

    assert tokenizer.decode(tokens).startswith("29 Feb 2024<|im_start|>")
    assert "29 Feb 2024" not in tokenizer.decode(ChatTemplate(tokenizer).tokens(chat))


@pytest.mark.parametrize(
    ("template", "expected"), [(ENCODING, '{"a": 1}'), (WRITING, '{"a":1}'), (NAMING, "a=1;")]
)
def test_arguments_as_text_are_decoded_where_the_template_would_encode_them(template: str, expected: str) -> None:
    notes = DataNotes()

    assert expected in written(template, calling('{"a":1}'), notes)
    assert notes.decoded == (template != WRITING)
    if template != WRITING:
        assert written(template, calling({"a": 1})) == written(template, calling('{"a":1}'))


@pytest.mark.parametrize("template", [JOINING, WRITING])
def test_arguments_that_are_objects_become_json_where_the_template_takes_text(template: str) -> None:
    notes = DataNotes()

    assert '{"a": "b"}' in written(template, calling({"a": "b"}), notes)
    assert "(no JSON)" in written(JOINING, calling("no JSON"), notes)
    assert (notes.encoded, notes.decoded) == (1, 0)
    with pytest.raises(Refused, match="the chat template refuses these messages"):
        written("{{ raise_exception('no tool_calls') }}", calling({"a": 1}))
    # What it does not know is told before what it says itself.
    with pytest.raises(Refused, match="calls tools \\('tool_calls'\\), which the chat template does not write"):
        written("{{ raise_exception('no calls') }}", calling({"a": 1}))


def test_control_tokens_in_messages_are_told_with_the_first() -> None:
    tokenizer = finetuning.tokenizer(finetuning.CHATML)
    chats = [Chat(f"a:{at}", [says("user", text), says("assistant", "no")]) for at, text in enumerate(TYPED)]

    notes = Reader(tokenizer, sequence=64, completions_only=False).read(chats).notes

    assert (notes.controlling, notes.control) == (1, "first '<|im_end|>' in a:1")
    ChatTemplate(tokenizer, notes=notes).prompt(chats[1])
    assert notes.controlling == 2
    assert "--data: messages say control tokens of the tokenizer in 2 conversations" in "".join(
        notes.lines("--data")
    )


def test_arguments_that_are_no_object_stay_as_they_are() -> None:
    assert json.dumps("[1") in written(ENCODING, calling("[1"))


def test_templates_with_names_are_for_tools_and_documents() -> None:
    named = {"default": "D", "tool_use": "T{{ tools | length }}", "rag": "R{{ documents | length }}"}
    named = {name: f"{text}{{{{ messages[0].content }}}}" for name, text in named.items()}
    messages = [says("user", "one")]

    assert written(named, Chat("a:1", messages)) == "Done"
    assert written(named, Chat("a:1", messages, tools=[{"name": "add"}])) == "T1one"
    assert written(named, Chat("a:1", messages, documents=[{"text": "two"}])) == "R1one"
    del named["default"]
    assert written(named, Chat("a:1", messages, tools=[{"name": "add"}])) == "T1one"
    with pytest.raises(Refused, match="rag, tool_use, none is named default"):
        written(named, Chat("a:1", messages))


def test_a_named_template_is_asked_for_its_own_marks() -> None:
    named = {"default": finetuning.CHATML, "tool_use": finetuning.MARKED.replace("<|im_end|>", "<|end|>")}
    messages = [says("user", "one"), says("assistant", "two")]

    assert learned(named, Chat("a:1", messages)) == "two<|im_end|>\n"
    assert learned(named, Chat("a:1", messages, tools=[{"name": "add"}])) == "two<|end|>\n"


def test_variables_of_the_template_come_from_the_row() -> None:
    chat = Chat("a:1", [says("user", "one")], options={"enable_thinking": False})

    assert written("{{ messages[0].content if enable_thinking is defined else 'two' }}", chat) == "one"


KNOWING = finetuning.CHATML.replace("%}<|im_start|>", "%}{% if ROLES %}<|im_start|>", 1).replace(
    "<|im_end|>\n", "<|im_end|>\n{% endif %}", 1
)
USUAL = KNOWING.replace("ROLES", "message.role in ('user', 'assistant', 'tool') or loop.first")


@pytest.mark.parametrize("role", ["developer", "function", "system"])
def test_a_message_that_the_template_passes_over_is_refused(role: str) -> None:
    talk = [says("user", "one"), says("assistant", "two"), says(role, "three")]

    with pytest.raises(Refused, match=f"a:1: the chat template does not write message 3, of the role '{role}'"):
        written(USUAL, Chat("a:1", talk))
    with pytest.raises(Refused, match="does not write message 3"):
        learned(USUAL, Chat("a:1", talk))
    assert "two" in written(USUAL, Chat("a:1", [*talk[:2], says("tool", "three")]))


def test_roles_that_others_are_meant_by_are_refused() -> None:
    for role, meant in (("gpt", "assistant"), ("Assistant", "assistant"), ("human", "user")):
        talk = [says("user", "one"), says("assistant", "two"), says(role, "three")]
        with pytest.raises(Refused, match=f"a:1 has the role '{role}', .*; write '{meant}'"):
            written(finetuning.CHATML, Chat("a:1", talk))
        assert "three" in written(f"{{# {role} #}}{finetuning.CHATML}", Chat("a:1", talk))


def test_what_templates_write_in_another_form_is_written() -> None:
    says_so = "<think>\nno\n</think>\n\n one\n'two'\n"
    for form in ("| trim", "| tojson", ".split('</think>')[-1] | trim", "| upper", "| replace('\n', ' ')"):
        template = finetuning.CHATML.replace("['content']", f"['content'] {form}".replace(" .", "."))
        assert "two" in written(template, Chat("a:1", [says("user", says_so)])).lower(), form


def test_what_the_template_does_not_read_is_told_and_calls_of_tools_are_refused() -> None:
    notes = DataNotes()
    talk = [says("user", "one", name="six"), says("assistant", "two", reasoning_content="three")]
    call = Chat(
        "a:1", [talk[0], says("assistant", "two", tool_calls=[{"function": {"name": "add", "arguments": {}}}])]
    )

    written(finetuning.CHATML, Chat("a:1", talk, tools=[{}], options={"enable_thinkng": False}), notes)
    written(ENCODING.replace("{{ m.content }}", "{{ m.content if not m.tool_calls }}"), call, notes)

    assert list(notes.lines("--data")) == [
        "--data: the chat template does not read 'name' (2 conversations), 'tools' (1 conversation), "
        "'enable_thinkng' (1 conversation), 'reasoning_content' (1 conversation), 'content beside tool_calls' "
        "(1 conversation)"
    ]
    for name in ("tool_calls", "function_call"):
        with pytest.raises(Refused, match=f"calls tools .'{name}'., which the chat template does not write"):
            written(finetuning.CHATML, Chat("a:1", [says("assistant", "two", **{name: [{"name": "add"}]})]))


# TRL's training templates


def trl_templates() -> dict[str, tuple[str, str]]:
    """TRL's templates and those for training, by their names."""
    found = find_spec("trl")
    folder = Path(found.origin if found and found.origin else "").parent / "chat_templates"
    return {
        file.name.removesuffix("_training.jinja"): (
            file.with_name(file.name.replace("_training", "")).read_text("utf-8"),
            file.read_text("utf-8"),
        )
        for file in sorted(folder.glob("*_training.jinja"))
    }


TRL = trl_templates()
TALK = [says("user", "one two"), says("assistant", "three"), says("user", "four"), says("assistant", "five six")]


@pytest.mark.few(1)
@pytest.mark.parametrize("family", TRL)
def test_of_a_stock_template_that_is_learned_which_trl_marks(family: str) -> None:
    stock, training = TRL[family]
    tokenizer, notes = of_bytes(stock), DataNotes()
    # Some take parts only.
    talk = in_parts(TALK) if family in ("idefics3", "llava_next", "smolvlm") else TALK

    tokens, said = ChatTemplate(tokenizer, notes=notes).tokens_and_assistant(Chat("a:1", TALK))

    assert all(message["content"] in tokenizer.decode(tokens) for message in TALK)
    expected: Mapping[str, Any] = tokenizer.apply_chat_template(
        talk, chat_template=training, return_assistant_tokens_mask=True, return_dict=True
    )
    assert tokens == expected["input_ids"]
    assert said == [bool(one) for one in expected["assistant_masks"]]
    assert family in notes.templates[0]
    assert tokenizer.chat_template == stock


def test_a_template_that_differs_in_a_letter_is_another() -> None:
    assert TRL
    stock, _ = TRL["qwen3"]
    other, notes = stock + " ", DataNotes()

    with pytest.raises(Refused, match="differently than in the whole; give --tokenizer one whose template marks"):
        ChatTemplate(finetuning.tokenizer(other), notes=notes).tokens_and_assistant(Chat("a:1", TALK))
    assert not notes.templates


def test_without_trl_turns_are_told_apart_as_they_can_be_and_trl_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(templates, "find_spec", lambda _: None)
    templates.trained.cache_clear()
    try:
        assert learned(finetuning.CHATML, Chat("a:1", TALK)).startswith("three")
        with pytest.raises(Refused, match=r"\(pip install trl\), or omit --completions-only"):
            learned(TRL["qwen3"][0], Chat("a:1", TALK))
    finally:
        monkeypatch.undo()
        templates.trained.cache_clear()


def test_a_template_with_marks_is_its_own() -> None:
    notes = DataNotes()
    reader = Reader(finetuning.tokenizer(finetuning.MARKED), sequence=99, completions_only=True, notes=notes)

    assert reader.read([Chat("a:1", TALK)]).labels
    assert not notes.templates
