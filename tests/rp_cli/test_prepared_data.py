"""Documents on the disk: they are those in memory, in the same order, and what was changed is refused."""

from __future__ import annotations

import json
import shutil
from array import array
from collections.abc import Callable
from pathlib import Path

import finetuning
import pytest
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from rp_cli.main import main
from rp_data import gathered, mapped
from rp_data.batching.batches import Sequences
from rp_data.documents import Counts, Document, Documents, held_out, table_of
from rp_data.gathered import Gathered, InFile
from rp_data.mapped import DocumentWriter, Mapped
from rp_trainer.errors import Refused


def document(tokens: list[int], learned: list[bool]) -> Document:
    return Document(array("i", tokens), bytes(learned[: len(tokens)]))


DOCUMENTS = st.lists(
    st.builds(
        document, st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=9), st.lists(st.booleans(), min_size=9)
    ),
    max_size=30,
)


@settings(max_examples=examples(60), deadline=None)
@given(made=DOCUMENTS, batch_bytes=st.integers(1, 200), most_bytes=st.integers(0, 9000), cuts=st.integers(1, 9))
def test_documents_on_the_disk_are_those_in_memory(
    made: list[Document], batch_bytes: int, most_bytes: int, cuts: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mapped, "_BATCH_BYTES", batch_bytes)
        kept = Gathered(most_bytes=most_bytes)
        for at in range(0, len(made), cuts):
            kept.add(made[at : at + cuts])
        table = kept.table()

    assert list(table) == made
    ours, theirs = table_of(table), table_of(made)
    for column in ("lengths", "labels", "digests"):
        assert list(getattr(ours, column)) == list(getattr(theirs, column))
    assert Documents(table, Counts()).digest() == Documents(made, Counts()).digest()


@settings(max_examples=examples(30), deadline=None)
@given(made=DOCUMENTS.filter(lambda made: len({one.digest for one in made}) > 2), packing=st.booleans())
def test_order_and_held_out_documents_do_not_depend_on_where_they_are(made: list[Document], packing: bool) -> None:
    kept = Gathered(most_bytes=0)
    kept.add(made)

    parts = [held_out(Documents(each, Counts()), 0.3) for each in (kept.table(), made)]

    for ours, theirs in zip(*parts, strict=True):
        assert list(ours.all) == list(theirs.all)
        assert (ours.tokens, ours.labels, ours.digest()) == (theirs.tokens, theirs.labels, theirs.digest())
        rows = [Sequences(one, size=9, packing=packing, seed=3) for one in (ours, theirs)]
        assert rows[0].in_epoch == rows[1].in_epoch
        assert [rows[0].at(row) for row in range(rows[0].in_epoch * 2)] == [
            rows[1].at(row) for row in range(rows[1].in_epoch * 2)
        ]


def test_little_data_stays_in_memory_and_much_is_gone_from_it(tmp_path: Path) -> None:
    made = [document([number], [True]) for number in range(9)]
    few, many = Gathered(tmp_path), Gathered(tmp_path, most_bytes=0)
    few.add(made)
    many.add(made)

    assert isinstance(few.table(), list)
    assert isinstance(many.table(), Mapped)
    # The file has no name.
    assert not list(tmp_path.iterdir())


def test_a_file_that_was_changed_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.arrow"
    writer = InFile(path)
    writer.add([document([1, 2, 3], [True] * 3)])
    table = writer.table()
    assert isinstance(table, Mapped)
    assert table.check() == 3
    content = path.read_bytes()

    at = content.index(array("i", [1, 2, 3]).tobytes())
    (tmp_path / "b.arrow").write_bytes(content[:at] + b"\4" + content[at + 1 :])
    (tmp_path / "c.arrow").write_bytes(content[: len(content) // 2])

    with pytest.raises(Refused, match="a document is not what it was; prepare the data again"):
        Mapped(tmp_path / "b.arrow").check()
    with pytest.raises(Refused, match=r"c\.arrow is damaged"):
        Mapped(tmp_path / "c.arrow")


def test_without_pyarrow_documents_stay_in_memory_and_files_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(gathered, "find_spec", lambda _: None)
    monkeypatch.setattr(mapped.importlib, "import_module", missing)
    kept = Gathered(most_bytes=0)
    kept.add([document([1], [True])])

    assert len(kept.table()) == 1
    with pytest.raises(Refused, match="which needs pyarrow: pip install datasets"):
        DocumentWriter(tmp_path / "a.arrow")


PREPARE = ["prepare", "--model", "model", "--data", "a.jsonl", "--sequence", "48", "--completions-only"]
TRAIN = [
    "train",
    "--model",
    "model",
    "--sequence",
    "48",
    "--completions-only",
    "--batch",
    "2",
    "--devices",
    "cpu:1",
]
TRAIN += ["--steps", "2", "--held-out", "0.2"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    finetuning.make_model(folder / "model")
    finetuning.make_model(folder / "other", template=finetuning.MARKED)
    finetuning.json_lines(folder / "a.jsonl", finetuning.chats(12))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert main([*PREPARE, "--output", "kept"]) == 0
    return folder


@pytest.fixture
def place(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(whole, tmp_path / "place")
    monkeypatch.chdir(tmp_path / "place")
    return tmp_path / "place"


@pytest.mark.later
@pytest.mark.usefixtures("measured_once", "place")
def test_a_run_with_prepared_data_is_that_with_the_data_itself(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*TRAIN, "--data", "a.jsonl", "--output", "plain"]) == 0
    assert main([*TRAIN, "--data", "kept", "--output", "run"]) == 0
    # Too much for memory.
    monkeypatch.setattr(gathered, "_PART", 0)
    assert main([*TRAIN, "--data", "a.jsonl", "--output", "mapped"]) == 0

    runs = [finetuning.lines(Path(name)) for name in ("plain", "run", "mapped")]
    losses = [[line.get("loss", line.get("held_out_loss")) for line in run] for run in runs]
    assert losses[0] == losses[1] == losses[2]
    digests = {
        json.loads(Path(name, "options.json").read_text())["data_digest"] for name in ("plain", "run", "mapped")
    }
    assert len(digests) == 1
    # Either resumes the other.
    capsys.readouterr()
    assert main([*TRAIN, "--data", "kept", "--output", "plain", "--resume"]) == 0
    assert "is finished" in capsys.readouterr().out


def changed(name: str, value: object) -> Callable[[], None]:
    def change() -> None:
        facts = json.loads(Path("kept/prepared.json").read_text())
        Path("kept/prepared.json").write_text(json.dumps({**facts, name: value}))

    return change


REFUSED: dict[str, tuple[list[str], str]] = {
    "another sequence": (
        [*TRAIN, "--data", "kept", "--sequence", "64"],
        "with --sequence 48, but this is --sequence 64",
    ),
    "another model": ([*TRAIN, "--data", "kept", "--model", "other"], "was prepared with another tokenizer"),
    "more beside": ([*TRAIN, "--data", "kept", "a.jsonl"], "kept is prepared data, which is named alone"),
    "prepared twice": (["prepare", "--model", "model", "--data", "kept"], "kept is prepared already; give it to"),
    "there already": ([*PREPARE, "--output", "kept"], "kept has prepared data; replace it by --overwrite"),
    "others' files": ([*PREPARE, "--output", "model"], "model has other files in it"),
    "nothing named": (["prepare", "--model", "model", "--data", "a.jsonl"], "--output must be given"),
}


@pytest.mark.usefixtures("measured_once", "place", "no_model")
@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    given, told = REFUSED[name]
    given = given if "--output" in given or name == "nothing named" else [*given, "--output", "new"]

    assert main(given) == 2
    assert told in capsys.readouterr().err


@pytest.mark.usefixtures("measured_once", "place", "no_model")
@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("format", 1, "was prepared by another version"),
        ("completions_only", False, "with --completions-only False, but this is --completions-only True"),
        ("counts", {"lines": 1}, "has no facts that can be used"),
        ("images", "many", "has no facts that can be used"),
    ],
)
def test_facts_that_do_not_fit_are_refused(
    name: str, value: object, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    changed(name, value)()

    assert main([*TRAIN, "--data", "kept", "--output", "new"]) == 2
    assert told in capsys.readouterr().err


@pytest.mark.usefixtures("place")
def test_prepared_data_is_replaced_where_asked(capsys: pytest.CaptureFixture[str]) -> None:
    before = Path("kept/documents.arrow").read_bytes()

    assert main([*PREPARE, "--output", "kept", "--overwrite"]) == 0

    assert Path("kept/documents.arrow").read_bytes() == before
    assert "data: 12 samples, " in capsys.readouterr().out
