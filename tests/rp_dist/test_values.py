"""What arrives is bounded before it is parsed, what is sent fits the same bounds; no message has other fields."""

from __future__ import annotations

import json
import math
import time

import pytest
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from rp_dist import InvalidTransfer
from rp_dist.links.values import MOST_BYTES, MOST_DEPTH, MOST_DIGITS, decode, encode
from rp_dist.messages import parsed

SMALL = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
VALUES = st.recursive(SMALL, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=30)


@settings(max_examples=examples(200), deadline=None)
@given(VALUES)
def test_any_value_of_json_comes_back_as_it_is(value: object) -> None:
    assert decode(encode(value)) == value


def test_numbers_that_are_not_finite_come_back_since_losses_may_be_so() -> None:
    found = decode(encode([math.nan, math.inf, -math.inf]))

    assert math.isnan(found[0])
    assert found[1:] == [math.inf, -math.inf]


def nested(depth: int) -> object:
    value: object = 0
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    "value", ["]" * 400 + "[" * 400, '\\"[' * 200, ["[{" * 100] * 50, [[]] * 5000, "7" * 5000]
)
def test_brackets_and_digits_in_texts_and_beside_each_other_are_not_counted(value: object) -> None:
    assert decode(encode(value)) == value


def test_what_is_as_deep_and_as_long_as_allowed_comes_back() -> None:
    value = [nested(MOST_DEPTH - 1), 10**MOST_DIGITS - 1]

    assert decode(encode(value)) == value


HOSTILE = {
    "deep": b"[" * 60_000,
    "deep and whole": b"[" * 60_000 + b"]" * 60_000,
    "deep objects": b'{"a":' * 60_000,
    "deep behind a text without an end": b'"' + b'\\"[' * 300_000,
    "a huge number": b"9" * 1_000_000,
    "a huge number in a list": b'["x", ' + b"9" * 1_000_000 + b"]",
    "a huge fraction": b"0." + b"1" * 1_000_000,
    "a huge exponent": b"1e" + b"9" * 1_000_000,
    "too long": b" " * (MOST_BYTES + 1),
    "no text": b"\xff\xfe\x00",
    "no JSON": b"{]",
    "empty": b"",
    "in UTF-16": "[1]".encode("utf-16"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_bytes_that_would_exhaust_a_parser_are_refused_at_once(name: str) -> None:
    begin = time.process_time()

    with pytest.raises(ValueError, match=r".+"):
        decode(HOSTILE[name])

    assert time.process_time() - begin < 2.0


@pytest.mark.parametrize(
    "value",
    [nested(MOST_DEPTH + 1), nested(100_000), 10**MOST_DIGITS, "x" * MOST_BYTES, {1, 2}, object()],
    ids=["deep", "deeper", "a long number", "long", "a set", "an object"],
)
def test_what_the_other_side_would_refuse_is_refused_where_it_is_sent(value: object) -> None:
    with pytest.raises(InvalidTransfer, match="a value must be what JSON can hold"):
        encode(value)


NO_MESSAGES = [
    None, 0, "hello", [], {}, [[]], [{}], ["what"], ["bye", 1], ["say"], ["say", "0", 1], ["say", 1.0, 1],
    ["say", True, 1], ["say", math.nan, 1], ["say", 1 << 60, 1], [["say"], 0, 0], ["lost", -1, "x"],
    ["lost", 1 << 40, "x"], ["lost", 0, "x" * 20_000], ["lost", 0, None], ["refused", 3], ["roster", []],
    ["roster", {"1": 0}], ["roster", {"one": ["a", 1]}], ["roster", {"1": ["a", 1 << 16]}],
    ["roster", {"9" * 5000: ["a", 1]}], ["put", 1, "x"], ["put", "x", None], ["welcome", True], ["welcome", "0"],
    ["hello", 1, 2, "", 1], ["hello", 1.0, 2, "", 1, ""], ["hello", True, 2, "", 1, ""],
    ["hello", 1, 10**400, "", 1, ""], ["hello", 1, 0, "", 1, ""], ["hello", 1, 2, "evil.example", 1, ""],
    ["hello", 1, 2, "", -1, ""], ["hello", 1, 2, "", 1 << 16, ""], ["hello", 1, 2, "", 1, "x" * 1000],
    ["hello", math.nan, 2, "", 1, ""],
]  # fmt: skip


@pytest.mark.parametrize("found", NO_MESSAGES, ids=lambda found: json.dumps(found)[:30])
def test_a_value_that_is_no_message_is_refused(found: object) -> None:
    with pytest.raises(ValueError, match="not a"):
        parsed(found)


@settings(max_examples=examples(300), deadline=None)
@given(st.lists(st.sampled_from(["hello", "welcome", "say", "lost", "put", "roster", "bye"]) | SMALL, max_size=7))
def test_any_value_is_a_message_or_is_refused_as_none(found: list[object]) -> None:
    try:
        message = parsed(found)
    except ValueError:
        return

    assert type(message).__name__.lower() == found[0]
