"""The text that is trained on, and the text held out."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from roundpipe.cli.errors import Refused
from roundpipe.cli.training import data
from roundpipe.cli.training.data import (
    HELD_OUT_MOST,
    Corpus,
    Text,
    check_size,
    held_out_starts,
    hold_out,
    read_corpus,
    training_starts,
)
from roundpipe.cli.training.windows import Windows


def _texts(sizes: list[int]) -> list[Text]:
    """Texts of these sizes, each of one byte that no other has; digests are in another order than the texts."""
    return [Text(f"{index * 7919 % 251:03d}", bytes([index]) * size) for index, size in enumerate(sizes)]


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=40))
def test_no_byte_is_both_trained_on_and_held_out_and_none_is_lost(sizes: list[int]) -> None:
    texts = _texts(sizes)

    corpus = hold_out(texts)

    assert sorted(corpus.training + corpus.held_out) == sorted(b"".join(text.content for text in texts))
    assert len(corpus.held_out) <= HELD_OUT_MOST * sum(sizes)


@given(st.lists(st.integers(1, 1000), min_size=40, max_size=60), st.randoms())
def test_many_files_are_held_out_whole_whatever_order_they_come_in(sizes: list[int], order: object) -> None:
    texts = _texts(sizes)
    corpus = hold_out(texts)

    assert set(corpus.training).isdisjoint(corpus.held_out)
    order.shuffle(texts)  # type: ignore[attr-defined]
    assert set(hold_out(texts).held_out) == set(corpus.held_out)


def test_of_a_single_file_the_end_is_held_out() -> None:
    content = bytes(range(100))

    assert hold_out([Text("a", content)]) == Corpus(content[:90], content[90:])


def test_the_standard_library_splits_the_same_way_twice_and_is_large_enough() -> None:
    first, second = read_corpus(None), read_corpus(None)

    assert first == second
    assert len(first.training) > 4_000_000
    assert 0.04 < len(first.held_out) / (len(first.training) + len(first.held_out)) < 0.11


def test_a_file_given_twice_or_copied_counts_once(tmp_path: Path) -> None:
    for name in ("one.txt", "copy.txt"):
        tmp_path.joinpath(name).write_bytes(b"the same words " * 10)

    corpus = read_corpus([tmp_path, tmp_path / "one.txt"])

    assert corpus.training + corpus.held_out == b"the same words " * 10


def test_a_folder_gives_its_text_files_in_order_of_path(tmp_path: Path) -> None:
    for path, content in {
        "b/c.txt": b"third",
        "a.txt": b"first",
        "b/b.md": b"second",
        ".hidden/x.txt": b"no",
        "b/.x": b"no",
        "image": b"\0no",
        "empty": b"",
    }.items():
        tmp_path.joinpath(path).parent.mkdir(exist_ok=True)
        tmp_path.joinpath(path).write_bytes(content)

    corpus = read_corpus([tmp_path])

    assert corpus.training + corpus.held_out == b"firstsecondthird"


def test_a_pipe_is_passed_over_in_a_folder_and_refused_by_name(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    tmp_path.joinpath("text").write_bytes(b"some words")

    assert read_corpus([tmp_path]).training == b"some word"
    with pytest.raises(Refused, match="must be a file or a folder"):
        read_corpus([tmp_path / "pipe"])


def test_a_named_binary_file_is_refused(tmp_path: Path) -> None:
    tmp_path.joinpath("image").write_bytes(b"a\0b")

    with pytest.raises(Refused, match="must be text"):
        read_corpus([tmp_path / "image"])


def test_more_text_than_memory_should_hold_is_refused_while_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data, "MOST_TEXT_BYTES", 100)
    for name in "abc":
        tmp_path.joinpath(name).write_text(name * 40)

    corpus = read_corpus([tmp_path / "a", tmp_path / "b", tmp_path / "a"])
    assert len(corpus.training + corpus.held_out) == 80
    with pytest.raises(Refused, match="the text must have at most 100 bytes"):
        read_corpus([tmp_path])


@pytest.mark.timeout(60)
def test_a_file_larger_than_memory_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "sparse"
    with path.open("wb") as file:
        file.write(b"x" * 2**20)
        file.truncate(2**43)

    with pytest.raises(Refused, match="must be text"):
        read_corpus([path])


def test_text_that_fills_one_batch_exactly_is_enough() -> None:
    check_size(Corpus(b"x" * 9, b"y" * 5), batch_size=2, seq_len=4)
    with pytest.raises(Refused, match="takes 9 bytes of text, but there are 8"):
        check_size(Corpus(b"x" * 8, b"y" * 5), batch_size=2, seq_len=4)
    with pytest.raises(Refused, match="takes 5 bytes of held-out text, but there are 4"):
        check_size(Corpus(b"x" * 9, b"y" * 4), batch_size=2, seq_len=4)


def test_the_sequences_of_a_step_depend_on_seed_and_step_alone() -> None:
    def starts(seed: int, step: int) -> list[int]:
        return training_starts(10**6, seed=seed, step=step, batch_size=4, seq_len=16)

    in_order = [starts(0, step) for step in range(5)]

    assert [starts(0, step) for step in reversed(range(5))] == in_order[::-1]
    assert len({tuple(part) for part in (*in_order, starts(1, 0), starts(10, 0))}) == 7


@given(st.integers(3, 10**5), st.integers(0, 10**4), st.data())
def test_every_window_lies_within_the_text(text_bytes: int, step: int, draw: st.DataObject) -> None:
    seq_len = draw.draw(st.integers(2, text_bytes - 1))
    count = draw.draw(st.integers(1, 50))

    starts = [
        *training_starts(text_bytes, seed=1, step=step, batch_size=count, seq_len=seq_len),
        *held_out_starts(text_bytes, count=count, seq_len=seq_len),
    ]

    assert all(0 <= start < text_bytes - seq_len for start in starts)


def test_labels_are_the_inputs_one_byte_later() -> None:
    inputs, labels = Windows(bytes(range(20)), seq_len=5).at([0, 14])

    assert inputs.tolist() == [[0, 1, 2, 3, 4], [14, 15, 16, 17, 18]]
    assert (labels == inputs + 1).all()
