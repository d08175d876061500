"""What is printed commands no terminal, whoever has written it."""

from __future__ import annotations

import io
import json
import logging
import sys
from pathlib import Path

import finetuning
import pytest
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from rp_cli.main import main
from rp_strangers.visible import Visible, visible, visible_output
from tqdm import tqdm

# Clears the screen, sets the window's title, turns the order of letters; the same in C1; and ends a line for some.
EVIL = "\x1b[2J\x1b]0;owned\x07\u202eabc\u2066\x9b31m\x00\x08\x7f\u2028"


def is_harmless(text: str) -> bool:
    return all(one.isprintable() or one in "\n\t\u200c\u200d" for one in text)


@given(text=st.text())
@settings(max_examples=examples(200), deadline=None)
def test_a_text_made_visible_has_nothing_that_a_terminal_obeys(text: str) -> None:
    shown = visible(text)

    assert all(one.isprintable() or one in "\n\t\u200c\u200d" or ord(one) > 0x9F for one in shown)
    assert not any(one in shown for one in "\x1b\r\x07\x08\x7f\x9b\u202e\u2066\u2028")
    assert visible(shown) == shown


def test_letters_of_all_scripts_stay_as_they_are() -> None:
    text = "naïve Ελλάδα עברית العربية हिन्दी 漢字 🙂 می‌خواهم\n\tx"

    assert visible(text) == text


def test_progress_bars_overwrite_their_line_and_others_are_written_above() -> None:
    stream = io.StringIO()

    with tqdm(total=2, file=Visible(stream), desc="train", ascii=True) as bar:
        bar.set_postfix_str(f"loss {EVIL}")
        bar.update()

    written = stream.getvalue()
    assert written.startswith("\rtrain")
    assert "\x1b" not in written
    assert "\\x1b[2J" in written


def test_a_carriage_return_inside_a_line_hides_nothing() -> None:
    stream = io.StringIO()

    Visible(stream).write("roundpipe: refused\rroundpipe: all is well\n")

    assert stream.getvalue() == "roundpipe: refused\\rroundpipe: all is well\n"


def test_messages_of_loggers_are_visible_and_streams_are_what_they_were_afterwards(
    capsys: pytest.CaptureFixture[str],
) -> None:
    before = sys.stdout, sys.stderr

    with visible_output():
        handler = logging.StreamHandler()
        logger = logging.getLogger("of a test")
        logger.addHandler(handler)
        logger.warning("logged %s", EVIL)
        logger.removeHandler(handler)
        print("printed", EVIL)  # noqa: T201 - as the command does
        sys.stdout.writelines([EVIL])

    told = capsys.readouterr()
    assert (sys.stdout, sys.stderr) == before
    assert is_harmless(told.out)
    assert is_harmless(told.err)
    assert "logged \\x1b[2J" in told.err


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


NAME = EVIL.replace("\x00", "").replace("/", "")
ARGUMENTS: dict[str, list[str]] = {
    "an option": ["train", f"--{NAME}"],
    "a value": ["train", "--steps", NAME],
    "a path": ["train", "--data", NAME],
    "a model": ["plan", "--model", NAME],
    "a config": ["train", "--config", "named.yaml"],
    "a folder's name": ["train", "--model", NAME, "--data", "texts.jsonl", "--output", "o"],
    "a template's error": ["train", "--model", "raising", "--data", "chats.jsonl", "--output", "o"],
    "names in data": ["train", "--model", "raising", "--data", "named.jsonl", "--output", "o"],
    "a role in data": ["train", "--model", "raising", "--data", "roles.jsonl", "--output", "o"],
    "a class": ["plan", "--model", "classed.json"],
    "a file's name": ["train", "--model", "raising", "--data", f"{NAME}.jsonl", "--output", "o"],
}


@pytest.mark.few(1)
@pytest.mark.parametrize("case", ARGUMENTS)
def test_whatever_is_refused_is_told_without_a_control_character(
    case: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    raising = finetuning.make_model(place / "raising", weights=False)
    (raising / "chat_template.jinja").write_text("{{ raise_exception(messages[0]['content']) }}")
    finetuning.json_lines(place / "texts.jsonl", finetuning.texts())
    finetuning.json_lines(place / "chats.jsonl", [{"messages": [{"role": "user", "content": EVIL}]}])
    finetuning.json_lines(place / "named.jsonl", [{EVIL: 1}])
    finetuning.json_lines(place / "roles.jsonl", [{"messages": [{EVIL: EVIL}]}])
    finetuning.json_lines(place / f"{NAME}.jsonl", [{"a": 1}])
    (place / "named.yaml").write_text(json.dumps({EVIL: 1}))
    (place / "classed.json").write_text(json.dumps({"model_type": EVIL}))

    code = main(ARGUMENTS[case])

    told = capsys.readouterr()
    assert code == 2
    assert is_harmless(told.out + told.err)
    assert told.err.count("\n") == 1
