"""What processors make of images, kept on disk: the same bits, within bounds, by any number of processes."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import vision
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from rp_data.images import store as stores
from rp_data.images.kept import KeptImages, joined, lazy_image
from rp_data.images.processor import Sight
from rp_data.images.store import LEDGER, Store
from rp_data.images.trying import KeptBytes, are_same
from rp_data.images.values import of_bytes, to_bytes
from rp_trainer.errors import Refused

MOST = 10_000


def key(number: int) -> str:
    return f"{number:064x}"


def value(number: int) -> bytes:
    return bytes([number % 256]) * (500 + number * 37 % 2000)


def nbytes(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() and path.name != LEDGER else 0
        except FileNotFoundError:
            continue
    return total


def opened(folder: Path, most: int = MOST) -> Store:
    return Store("--image-cache", folder, most)


# --- the store


@settings(max_examples=examples(100))
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 30)), max_size=60))
def test_what_was_used_last_stays_and_all_stay_within_the_bound(tmp_path_factory, steps):
    folder = tmp_path_factory.mktemp("store")
    store, used = opened(folder), dict[int, None]()

    for is_put, number in steps:
        if is_put:
            known = store.get(key(number)) is not None
            store.put(key(number), value(number))
        else:
            known = store.get(key(number)) is not None
        assert known <= (number in used)
        if is_put or known:
            used.pop(number, None)
            used[number] = None
        assert nbytes(folder) <= MOST

    room = 0
    for number in reversed(used):
        room += len(value(number)) + 32
        if room > 0.9 * MOST - 2600:
            break
        assert opened(folder).get(key(number)) == value(number)


@pytest.mark.parametrize("damage", ["cut", "changed", "emptied", "moved"])
def test_a_damaged_value_is_absent_and_made_anew(tmp_path, damage):
    store = opened(tmp_path)
    store.put(key(1), value(1))
    (path,) = (path for path in tmp_path.rglob("*") if path.is_file() and path.name != LEDGER)
    content = path.read_bytes()
    if damage == "moved":
        other = tmp_path / key(2)[:2] / key(2)
        path = path.rename(other)
    else:
        path.write_bytes(
            {"cut": content[:-1], "changed": content[:40] + b"?" + content[41:], "emptied": b""}[damage]
        )

    wanted = 2 if damage == "moved" else 1
    assert store.get(key(wanted)) is None
    assert not path.exists()
    store.put(key(wanted), value(wanted))
    assert store.get(key(wanted)) == value(wanted)


def test_what_a_killed_writer_leaves_counts_and_is_removed_an_hour_later(tmp_path):
    opened(tmp_path).put(key(1), bytes(2_000))
    left = tmp_path / "unfinished-1"
    left.write_bytes(bytes(9_000))
    # It was killed while it wrote the sum, too.
    (tmp_path / LEDGER).write_bytes(b"12 ?")

    store = opened(tmp_path)
    store.put(key(2), bytes(2_000))

    assert nbytes(tmp_path) == 9_000
    os.utime(left, (0, 0))
    store.put(key(2), bytes(2_000))
    assert not left.exists()
    assert store.get(key(2)) == bytes(2_000)


def test_what_another_is_about_to_write_counts(tmp_path, monkeypatch):
    first, second = opened(tmp_path), opened(tmp_path)
    for number in range(4):
        first.put(key(number), bytes(2_000))
    digest, waiting = stores._digest, [4, 5, 6]

    def between(one: str, value: Any) -> bytes:
        if waiting:
            second.put(key(waiting.pop()), bytes(1_900))
        return digest(one, value)

    monkeypatch.setattr(stores, "_digest", between)
    first.put(key(7), bytes(1_900))

    assert not waiting
    assert 7_500 < nbytes(tmp_path) <= MOST


def test_files_of_another_user_are_used_as_far_as_they_may_be(tmp_path, monkeypatch):
    store = opened(tmp_path)
    for number in (1, 2):
        store.put(key(number), value(number))
    damaged = tmp_path / key(2)[:2] / key(2)
    damaged.write_bytes(damaged.read_bytes()[:-1])
    utime, noted = os.utime, list[Path]()

    def of_owner(path: Path, times: Any = None, *, ns: Any = None) -> None:
        if times or ns:
            raise PermissionError(1, "Operation not permitted")
        noted.append(path)
        utime(path)

    def refused(*_: Any, **__: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "utime", of_owner)
    monkeypatch.setattr(Path, "unlink", refused)

    assert store.get(key(1)) == value(1)
    assert noted == [tmp_path / key(1)[:2] / key(1)]
    assert store.get(key(2)) is None
    monkeypatch.setattr(os, "utime", refused)
    assert store.get(key(1)) == value(1)


def test_folders_named_as_values_are_left_alone_and_count_as_absent(tmp_path):
    store = opened(tmp_path)
    strays = [tmp_path / key(1)[:2] / key(1), tmp_path / "unfinished-1"]
    for stray in strays:
        stray.mkdir(parents=True)
        os.utime(stray, (0, 0))

    for number in range(1, 20):
        store.put(key(number), value(number))

    assert opened(tmp_path, 3_000).get(key(1)) is None
    assert all(stray.is_dir() for stray in strays)
    assert 0 < nbytes(tmp_path) <= 3_000


def test_a_missing_ledger_is_made_anew_but_not_among_files_of_others(tmp_path):
    full, other = tmp_path / "full", tmp_path / "other"
    for number in range(3):
        opened(full).put(key(number), value(number))
    (full / LEDGER).unlink()

    assert opened(full).get(key(1)) == value(1)
    assert int((full / LEDGER).read_text()) == nbytes(full)
    # Backups have files by digests, too.
    (other / key(1)[:2]).mkdir(parents=True)
    (other / key(1)[:2] / key(1)).write_bytes(value(1))
    (tmp_path / "git" / "ab").mkdir(parents=True)
    (tmp_path / "git" / "ab" / "0123").touch()
    (tmp_path / "novel").mkdir()
    (tmp_path / "novel" / "unfinished-chapter").touch()
    for folder in (other, tmp_path / "git", tmp_path / "novel"):
        with pytest.raises(Refused, match="has other files in it"):
            opened(folder)
    (full / LEDGER).unlink()
    (full / "mine.txt").touch()
    with pytest.raises(Refused, match="has other files in it"):
        opened(full)


def test_a_folder_of_other_files_is_refused_and_a_lower_bound_removes(tmp_path):
    full = tmp_path / "full"
    for number in range(4):
        opened(full).put(key(number), bytes(2_000))
    (tmp_path / "mine.txt").touch()

    with pytest.raises(Refused, match=r"--image-cache .* has other files in it; name a new or empty folder"):
        opened(tmp_path)
    with pytest.raises(Refused, match="has room for"):
        opened(tmp_path / "large", 10**18)
    (tmp_path / "file").touch()
    with pytest.raises(Refused, match=r"cannot be used: .*; name another folder"):
        opened(tmp_path / "file")

    assert opened(full, 5_000).get(key(0)) is None
    assert nbytes(full) <= 5_000
    assert opened(full).get(key(3)) == bytes(2_000)


def test_a_disk_that_takes_no_more_ends_no_run(tmp_path, monkeypatch):
    store = opened(tmp_path)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "rename", full)
    with pytest.warns(UserWarning, match="keeps no more images: its disk is full"):
        store.put(key(1), value(1))
    store.put(key(2), value(2))

    assert store.get(key(1)) is None
    assert nbytes(tmp_path) == 0


def _use(folder: Path, seed: int) -> None:
    store, numbers = opened(folder), random.Random(seed)
    while True:
        number = numbers.randrange(40)
        found = store.get(key(number))
        assert found in (None, value(number))
        store.put(key(number), value(number))


@pytest.mark.later
def test_processes_that_are_killed_leave_whole_values_within_the_bound(tmp_path):
    forked = multiprocessing.get_context("fork")
    processes = [forked.Process(target=_use, args=(tmp_path, seed)) for seed in range(3)]
    for process in processes:
        process.start()
    deadline = time.monotonic() + 30

    for number in range(300):
        while nbytes(tmp_path) < MOST / 2 and time.monotonic() < deadline:
            pass
        # While one looks, another file may come in the place of one that was counted.
        assert nbytes(tmp_path) <= MOST + 3 * 2_600
        if number % 100 == 50:
            killed = processes.pop()
            os.kill(killed.pid or 0, signal.SIGKILL)
            killed.join()
            assert killed.exitcode == -signal.SIGKILL

    for process in processes:
        process.kill()
    left = opened(tmp_path)
    assert nbytes(tmp_path) <= MOST
    found = [left.get(key(number)) for number in range(40)]
    assert all(one in (None, value(number)) for number, one in enumerate(found))
    assert sum(one is not None for one in found) >= 2


# --- values


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64], ids=str)
@pytest.mark.parametrize("distinct", [1, 256, 257, 3 * 256, 32_769])
def test_values_come_back_to_the_last_bit(dtype, distinct):
    numbers = torch.Generator().manual_seed(distinct)
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    # All kinds of bits: numbers, infinities, and what is none.
    table = torch.randint(-(2**31), 2**31, (distinct,), generator=numbers).to(integers)
    chosen = torch.randint(min(1, distinct - 1), distinct, (3, 8, 12_001), generator=numbers)
    # One number is so rare that a look at every fourth one misses it.
    chosen[0, 0, 1] = 0
    drawn = table[chosen].view(dtype)
    made = {"pixels": drawn.transpose(0, 1), "sizes": [[1, 2.5], (None, "a")], "grid": torch.tensor([[1, 2, 3]])}

    content = to_bytes(made)

    assert content is not None
    found = of_bytes(content)
    assert found["sizes"] == made["sizes"]
    assert torch.equal(found["grid"], made["grid"])
    assert found["pixels"].dtype == dtype
    assert torch.equal(found["pixels"].contiguous().view(integers), made["pixels"].contiguous().view(integers))
    room = {True: 1, False: 2}[distinct <= 256] if dtype == torch.float32 and distinct < 1000 else 8
    assert len(content) <= drawn.numel() * room + 4 * distinct + 2_000
    assert to_bytes({"a": object()}) is None


# --- processors


def given_images(family: str, seen: list[str], samples: list[list[int]]) -> tuple[list[str], Any]:
    def image(sight: Sight, number: int) -> Any:
        def decode() -> Any:
            seen.append(str(number))
            return vision.picture(number, width=7 + 3 * number)

        return sight.image("a", f"{number:064x}", decode)

    return [f"a{vision.MARKS[family] * len(some)}" for some in samples], image


@pytest.mark.parametrize("family", vision.FAMILIES)
def test_what_is_kept_is_what_the_processor_makes_of_all_at_once(family, tmp_path):
    plain, seen = Sight(vision.processor(family)), list[str]()
    batches = [[[0], [1, 2], [3]], [[3], [1, 2], [0], [0]], [[4], [], [1, 2]]]

    for batch in batches:
        texts, image = given_images(family, seen, batch)
        # Another one each time, as another run has.
        kept = Sight(vision.processor(family), opened(tmp_path, 10**6))
        wanted = plain.processed(texts, [[image(plain, one) for one in some] for some in batch])
        found = kept.processed(texts, [[image(kept, one) for one in some] for some in batch])
        assert are_same(wanted, found)
        seen.clear()
        again = kept.processed(texts, [[image(kept, one) for one in some] for some in batch])
        assert are_same(wanted, again)
        assert not seen
        alone = kept.expanded("a", texts[2], [image(kept, one) for one in batch[2]])
        assert alone.tokens == plain.expanded("a", texts[2], [image(plain, one) for one in batch[2]]).tokens


def test_other_settings_and_other_images_are_made_anew(tmp_path):
    seen = list[str]()
    texts, image = given_images("qwen3-vl", seen, [[3]])
    first, other = vision.processor("qwen3-vl"), vision.processor("qwen3-vl")
    other.image_processor.size = {"shortest_edge": 64, "longest_edge": 64}
    found = []

    for processor in (first, other, first):
        sight = Sight(processor, opened(tmp_path, 10**6))
        sight.processed(texts, [[image(sight, 3)]])
        seen.clear()
        found.append(sight.processed(texts, [[image(sight, 3)]]))

    assert are_same(found[0], found[2])
    assert not are_same(found[0], found[1])
    sight.processed(texts, [[image(sight, 4)]])
    assert seen == ["4"]


def test_what_is_kept_is_told_apart_by_all_attributes_of_the_processor():
    store, found = KeptBytes(), []

    # It is none of those that are saved with the processor.
    for is_told in (False, True):
        own = transformers.Idefics3ImageProcessor(size={"longest_edge": 28}, return_row_col_info=is_told)
        image = lazy_image("a", key(1), lambda: vision.picture(1, width=30, height=20))
        found.append({*KeptImages(own, store)([[image]], return_tensors="pt")})

    assert found[1] - found[0] == {"rows", "cols"}
    own.learned = torch.nn.Linear(1, 1)
    with pytest.raises(Refused, match=r"--image-cache: .* an argument or attribute of a processor is a Linear"):
        KeptImages(own, store)


def test_a_processor_that_looks_at_all_images_is_refused(tmp_path):
    processor = vision.processor("llava")
    own = type(processor.image_processor)

    class Centred(own):
        def __call__(self, images: Any, **given: Any) -> Any:
            made = super().__call__(images, **given)
            made["pixel_values"] = made["pixel_values"] - made["pixel_values"].mean()
            return made

    processor.image_processor.__class__ = Centred

    with pytest.raises(Refused, match=r"--image-cache is for processors .* but the Centred does not; omit it"):
        Sight(processor, opened(tmp_path, 10**6))


def test_samples_without_images_have_entries_where_others_do():
    own = transformers.Idefics3ImageProcessor(size={"longest_edge": 28}, max_image_size={"longest_edge": 14})
    samples = [[1], [], [2, 3]]

    def image(number: int) -> Any:
        return lazy_image("a", f"{number:064x}", lambda: vision.picture(number, width=10 * number, height=20))

    kept = KeptImages(own, KeptBytes(), rows_for_none=True)

    for _ in range(2):
        found = kept([[image(one) for one in some] for some in samples], return_tensors="pt")
        plain = own(
            [[vision.picture(one, width=10 * one, height=20) for one in some] for some in samples],
            return_tensors="pt",
        )
        assert are_same(dict(plain), dict(found))


def test_lists_of_samples_without_images_are_empty():
    one = {"pixels": torch.ones(1, 2, 3), "rows": [[2, 1]]}

    found = joined([None, one, {"pixels": torch.ones(1, 1, 4), "rows": [[3]]}])

    assert found["pixels"].shape == (3, 2, 4)
    assert found["pixels"].sum(dim=(1, 2)).tolist() == [0, 6, 4]
    assert found["rows"] == [[], [2, 1], [3]]
