"""What `roundpipe train --model` refuses: one line and exit code 2, before a model or a file is made."""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import finetuning
import pytest
import torch
from rp_cli.finetune import run
from rp_cli.main import main
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification

pytestmark = pytest.mark.usefixtures("measured_once")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with models, and data of all kinds; an earlier run in ``run``, another's files in ``theirs``."""
    here = tmp_path_factory.mktemp("place")
    finetuning.make_model(here / "model")
    finetuning.make_model(here / "bare", weights=False, template=None)
    finetuning.make_model(here / "unstable", weights=False, template=finetuning.UNSTABLE)
    for name in ("pickled", "adapter", "tokenless", "small", "blank"):
        (here / name).mkdir()
    config = json.loads((here / "model" / "config.json").read_text())
    for name in ("pickled", "tokenless"):
        (here / name / "config.json").write_text(json.dumps(config))
    (here / "pickled" / "pytorch_model.bin").write_bytes(b"")
    (here / "adapter" / "adapter_config.json").write_text("{}")
    finetuning.make_model(here / "small", weights=False)
    (here / "small" / "config.json").write_text(json.dumps({**config, "vocab_size": 20}))
    finetuning.make_model(here / "short", "gpt2", weights=False)
    short = json.loads((here / "short" / "config.json").read_text())
    (here / "short" / "config.json").write_text(json.dumps({**short, "n_positions": 16}))
    finetuning.json_lines(here / "texts.jsonl", finetuning.texts())
    finetuning.json_lines(here / "chats.jsonl", finetuning.chats())
    finetuning.json_lines(here / "questions.jsonl", [{"messages": [{"role": "user", "content": "one"}]}])
    finetuning.json_lines(here / "names.jsonl", [*finetuning.texts(2), {"txt": "one"}])
    finetuning.json_lines(here / "numbers.jsonl", [{"prompt": 1, "completion": "one"}])
    finetuning.json_lines(here / "lists.jsonl", [{"prompt": [], "completion": "one"}])
    finetuning.json_lines(here / "hollow.jsonl", [{"prompt": "one", "completion": ""}])
    finetuning.json_lines(here / "roles.jsonl", [{"messages": [{"content": "one"}]}])
    parts = {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "video", "url": "cat.mp4"}]}
    finetuning.json_lines(here / "parts.jsonl", [{"messages": [parts]}])
    finetuning.json_lines(here / "null.jsonl", [{"messages": [{"role": "user", "content": None}]}])
    (here / "half.jsonl").write_text('{"text": "one \\ud83d\\ude00"}\n{"text": "one \\uD83D"}\n')
    finetuning.json_lines(here / "silent.jsonl", [{"messages": []}])
    (here / "array.jsonl").write_text('[{"text": "one"},\n{"text": "two"}]')
    (here / "torn.json").write_text('[{"text": "one"},\n{"text": "two"')
    (here / "mixed.json").write_text('[{"text": "one"}, "two"]')
    (here / "spoken.jsonl").write_text('{"conversations": [{"from": "narrator", "value": "one"}]}')
    finetuning.json_lines(here / "chosen.jsonl", [{"prompt": "one", "chosen": "two", "rejected": "three"}])
    finetuning.json_lines(here / "long.jsonl", [{"prompt": "the cat " * n, "completion": "sat"} for n in (20, 30)])
    (here / "ragged.csv").write_text("text,id\none,1\ntwo\n")
    (here / "twice.csv").write_text("text,text\none,two\n")
    (here / "latin.csv").write_bytes(b"text\n\xe9\n")
    (here / "open.csv").write_bytes(b'text\n"one\n')
    (here / "cut.jsonl.gz").write_bytes(gzip.compress(b'{"text": "one"}\n' * 99)[:-9])
    (here / "none.jsonl.gz").write_bytes(b'{"text": "one"}')
    (here / "broken.jsonl").write_text('{"text": "one"}\n{"text": ')
    (here / "latin.jsonl").write_bytes(b'{"text": "\xe9"}')
    (here / "latin.txt").write_bytes(b"\xe9")
    (here / "binary.txt").write_bytes(b"\0")
    (here / "nothing.jsonl").write_text("\n\n")
    (here / "table.parquet").write_bytes(b"PAR1")
    (here / "empty.txt").write_text("")
    (here / "unknown.yaml").write_text("batchsize: 2\n")
    (here / "foreign.yaml").write_text("learningrate: 1e-3\n")
    (here / "kinds.yaml").write_text("sync: 'yes'\n")
    (here / "list.yaml").write_text("- a\n")
    (here / "broken.yaml").write_text("a: [\n")
    (here / "twice.yaml").write_text("eval-every: 2\neval_every: 3\n")
    finetuning.make_model(here / "earlier" / "model", weights=False)
    (here / "earlier" / "options.json").write_text('{"roundpipe_version": "0"}')
    finetuning.json_lines(here / "earlier" / "metrics.jsonl", [{"step": 1}])
    (here / "corpus").mkdir()
    finetuning.json_lines(here / "corpus" / "texts.jsonl", finetuning.texts())
    (here / "theirs").mkdir()
    (here / "theirs" / "thesis.tex").write_text("")
    return here


GOOD = ["--sequence", "24", "--batch", "2", "--devices", "cpu:1"]
# Options after the usual ones, and a part of what is said.
WRONG = {
    "no output": (["--model", "model", "--data", "texts.jsonl"], "--output must be given"),
    "no data": (["--model", "model", "--output", "new"], "--data must be given"),
    "no such model": (["--model", "nowhere"], "there is no nowhere"),
    "an adapter": (["--model", "adapter"], "name the model that it was trained for"),
    "pickled weights": (["--model", "pickled", "--tokenizer", "model"], "pytorch_model.bin, which is not read"),
    "no tokenizer": (["--model", "tokenless"], "no tokenizer in tokenless"),
    "a tokenizer of another model": (["--model", "small"], "but the model has 20"),
    "more positions than the model has": (["--model", "short"], "--sequence must be at most 16"),
    "no data file": (["--data", "no.jsonl"], "no.jsonl does not exist"),
    "a folder without data": (["--data", "blank"], "has no files that end with"),
    "no samples": (["--data", "nothing.jsonl"], "has no samples"),
    "an empty text": (["--data", "empty.txt"], "empty.txt has nothing to learn"),
    "a binary file": (["--data", "binary.txt"], "holds zero bytes"),
    "a text in Latin-1": (["--data", "latin.txt"], "must be in UTF-8"),
    "a line in Latin-1": (["--data", "latin.jsonl"], "latin.jsonl:1 must be in UTF-8"),
    "a broken line": (["--data", "broken.jsonl"], "broken.jsonl:2 must be one JSON object"),
    "a list of objects": (
        ["--data", "array.jsonl"],
        "write one object a line, or a list of objects into a file named .json",
    ),
    "a list that is cut": (["--data", "torn.json"], "torn.json must be a list of JSON objects, but is not"),
    "a list of other things": (
        ["--data", "mixed.json"],
        "mixed.json, object 2 must be a JSON object, but is a str",
    ),
    "an unknown speaker": (["--data", "spoken.jsonl"], "'from' must be one of human, user, gpt"),
    "pairs to choose of": (["--data", "chosen.jsonl"], "which trainers learn from"),
    "all cut away": (
        ["--data", "long.jsonl", "--completions-only"],
        "what is learned begins after 24 tokens in all 2 samples, where they are cut; --sequence 43 leaves "
        "something of one of them, --sequence 63 of all",
    ),
    "a row with too few fields": (["--data", "ragged.csv"], "ragged.csv:3 must have 2 fields"),
    "a column twice": (["--data", "twice.csv"], "must name each column once in its first line"),
    "a table in Latin-1": (["--data", "latin.csv"], "latin.csv must be in UTF-8"),
    "an open quote": (["--data", "open.csv"], "open.csv cannot be read as a table: unexpected end of data"),
    "a compressed file that is cut": (["--data", "cut.jsonl.gz"], "cut.jsonl.gz is damaged"),
    "a compressed file that is none": (["--data", "none.jsonl.gz"], "none.jsonl.gz cannot be read (Not a gzip"),
    "nothing but bad rows": (["--data", "numbers.jsonl", "--skip-bad-rows"], "1 bad rows, --data numbers.jsonl:1"),
    "unknown names": (["--data", "names.jsonl"], "names.jsonl:3 must have 'messages', 'prompt'"),
    "a file of weights": (
        ["--model", "pickled/pytorch_model.bin", "--data", "texts.jsonl"],
        "--model pickled/pytorch_model.bin is a file of weights; name the folder that it is in",
    ),
    "a prompt that is a number": (["--data", "numbers.jsonl"], "'prompt' must be text, but is a int"),
    "a prompt that is a list": (["--data", "lists.jsonl"], "write conversations as 'messages'"),
    "messages without roles": (["--data", "roles.jsonl"], "each message must have a 'role'"),
    "contents in parts": (["--data", "parts.jsonl"], "parts.jsonl:1 has videos, but --model model reads none"),
    "no content": (["--data", "null.jsonl"], "each message must have a 'role' and a 'content'"),
    "half of a character": (["--data", "half.jsonl"], "half.jsonl:2 must be text, but has half of a surrogate"),
    "no messages": (["--data", "silent.jsonl"], "a list of at least one message"),
    "no completion": (["--data", "hollow.jsonl"], "hollow.jsonl:1 has nothing to learn: its completion is empty"),
    "nothing said": (["--data", "questions.jsonl", "--completions-only"], "the assistant says nothing"),
    "completions of texts": (["--completions-only"], "is text without a completion"),
    "no chat template": (["--model", "bare", "--data", "chats.jsonl"], "no chat template"),
    "a template that changes what was said": (
        ["--model", "unstable", "--data", "chats.jsonl", "--completions-only"],
        "it is unknown which tokens are the assistant's",
    ),
    "Parquet that is none": (["--data", "table.parquet"], "table.parquet"),
    "too little data": (["--batch", "400"], "a step takes 400 sequences"),
    "all held out": (["--data", "hold.jsonl", "--held-out", "0.9"], "does not exist"),
    "held out twice": (["--held-out", "0.1", "--eval-data", "texts.jsonl"], "exclude each other"),
    "evaluation of nothing": (["--eval-every", "2"], "--eval-every needs"),
    "a weight for each of two": (
        ["--data-weights", "1", "2"],
        "a number for each of --data, which are 1, but are 2",
    ),
    "a weight of nothing": (["--data-weights", "0"], "--data-weights must be a finite number above 0"),
    "epochs and steps": (["--epochs", "2", "--steps", "2"], "exclude each other"),
    "resume and overwrite": (["--resume", "--overwrite"], "exclude each other"),
    "targets without adapters": (["--lora-targets", "q_proj"], "--lora-targets needs --lora"),
    "targets that are nowhere": (["--lora", "2", "--lora-targets", "w_proj"], "no layers named w_proj"),
    "a mistyped option": (["--squence", "8"], "unknown argument '--squence'; the nearest option is --sequence"),
    "an option of earlier versions": (["--seq-len", "8"], "the nearest option is --sequence"),
    "another option of earlier versions": (["--batch-size", "8"], "the nearest option is --batch"),
    "fewer sequences than microbatches": (["--num-microbatch", "3"], "'auto' or a whole number"),
    "scaled losses": (["--dtype", "float16"], "use bfloat16"),
    "betas of SGD": (["--optimizer", "sgd", "--betas", "0.9,0.9"], "has none"),
    "one beta": (["--betas", "0.9"], "must be two numbers"),
    "a beta of one": (["--betas", "0.9,1"], "from 0 to 0.999999"),
    "an unknown optimizer": (["--optimizer", "adamax"], "must be one of adamw"),
    "an unknown schedule": (["--schedule", "linear"], "must be one of cosine, constant"),
    "a save every moment": (["--save-every", "1s"], "minutes such as 15min"),
    "a warm-up of a step and a half": (["--warm-up", "1.5"], "a number of steps, or a part"),
    "an unknown report": (["--report", "csv"], "must be one of jsonl, tensorboard, wandb, trackio, mlflow"),
    "others' files": (["--output", "theirs"], "has other files in it"),
    "others' files to overwrite": (["--output", "theirs", "--overwrite"], "has other files in it"),
    "a model that would be overwritten": (
        ["--model", "earlier/model", "--output", "earlier", "--overwrite"],
        "--overwrite would remove --model earlier/model",
    ),
    "a tokenizer that would be overwritten": (
        ["--tokenizer", "earlier/../earlier/model", "--output", "earlier", "--overwrite"],
        "--overwrite would remove --tokenizer",
    ),
    "data that would be overwritten": (
        ["--data", "earlier/metrics.jsonl", "--output", "earlier", "--overwrite"],
        "--overwrite would remove --data earlier/metrics.jsonl",
    ),
    "output among the data": (
        ["--data", "corpus", "--output", "corpus/run"],
        "--output corpus/run is in --data corpus, all of whose files are read",
    ),
    "output among the data to evaluate": (
        ["--eval-data", "corpus", "--output", "corpus/run"],
        "--output corpus/run is in --eval-data corpus",
    ),
    "no such config": (["--config", "no.yaml"], "no.yaml cannot be read"),
    "an unknown name in the config": (
        ["--config", "unknown.yaml"],
        "'batchsize'; the nearest one is 'batch'",
    ),
    "a name in the config that is near no other": (
        ["--config", "foreign.yaml"],
        "'learningrate'; `roundpipe train --help` lists them",
    ),
    "an option that is near no other": (
        ["--per-device-train-batch-size", "4"],
        "unknown argument '--per-device-train-batch-size'; `roundpipe train --help` shows the usage",
    ),
    "a flag in words": (["--config", "kinds.yaml"], "sync must be true or false, but is 'yes'"),
    "a config that is a list": (["--config", "list.yaml"], "must have options and their values"),
    "a broken config": (["--config", "broken.yaml"], "must be YAML"),
    "a name twice": (["--config", "twice.yaml"], "'eval_every' twice"),
}


@pytest.fixture
def untouched(place: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder, in which nothing may change, and where no model may be loaded."""

    def refuse(*_: object) -> NoReturn:
        pytest.fail("a model was about to be made")

    monkeypatch.setattr(run, "wrapped", refuse)
    monkeypatch.chdir(place)
    before = sorted(place.rglob("*"))
    yield place
    assert sorted(place.rglob("*")) == before


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.usefixtures("untouched")
def test_what_cannot_be_used_is_refused_in_one_line(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    given, told = WRONG[name]
    usual = (
        []
        if name in ("no output", "no data")
        else ["--model", "model", "--data", "texts.jsonl", "--output", "new"]
    )
    # A later value replaces an earlier one, but files are added.
    usual = usual[:2] + usual[4:] if "--data" in given else usual

    assert main(["train", *usual, *GOOD, *given]) == 2

    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("roundpipe: ")
    assert shown.err.count("\n") == 1
    assert told in shown.err


@pytest.mark.parametrize(
    ("package", "given"),
    [
        ("peft", ["--lora", "2"]),
        ("torch.utils.tensorboard", ["--report", "tensorboard"]),
        ("wandb", ["--report", "jsonl", "wandb"]),
        ("trackio", ["--report", "trackio"]),
        ("mlflow", ["--report", "mlflow"]),
        ("datasets", ["--data", "table.parquet"]),
    ],
)
@pytest.mark.usefixtures("untouched")
def test_what_is_not_installed_is_told_with_the_command_that_mends_it(
    package: str, given: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, package, None)

    assert main(["train", "--model", "model", "--data", "texts.jsonl", "--output", "new", *GOOD, *given]) == 2

    assert f"pip install {package.rpartition('.')[2]}" in capsys.readouterr().err


@pytest.mark.later
def test_a_model_that_mixes_packed_documents_needs_them_unpacked(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = finetuning.make_model(tmp_path / "mamba", "mamba")
    settings = ["--data", str(place / "texts.jsonl"), "--output", str(tmp_path / "run"), *GOOD, "--steps", "1"]

    assert main(["train", "--model", str(folder), *settings]) == 2
    assert "--no-packing must be given: a MambaForCausalLM does not keep" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()

    assert main(["train", "--model", str(folder), *settings, "--no-packing"]) == 0


@pytest.mark.few(1)
@pytest.mark.parametrize("packing", [[], ["--no-packing"]])
def test_a_model_whose_tokens_see_later_ones_is_refused(
    place: Path, tmp_path: Path, packing: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = finetuning.make_model(tmp_path / "bert", "bert")
    given = ["--data", str(place / "texts.jsonl"), "--output", str(tmp_path / "run"), *GOOD, *packing]

    assert main(["train", "--model", str(folder), *given, "--steps", "1"]) == 2

    told = capsys.readouterr().err
    assert "no token sees later ones, but a BertLMHeadModel shows them" in told
    assert told.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_a_checkpoint_that_lacks_weights_of_a_language_model_is_refused(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = finetuning.make_model(tmp_path / "classifier")
    config = finetuning.CONFIGS["llama"]()
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    given = ["--data", str(place / "texts.jsonl"), "--output", str(tmp_path / "run"), *GOOD]

    assert main(["train", "--model", str(folder), *given, "--steps", "1"]) == 2

    told = capsys.readouterr().err
    assert "must have all weights of a LlamaForCausalLM, but lacks lm_head.weight; name" in told
    assert told.count("\n") == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.later
def test_weights_of_a_checkpoint_that_are_not_used_are_told(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = finetuning.make_model(tmp_path / "more")
    weights = load_file(folder / "model.safetensors")
    more = {f"speaker.{number}.weight": torch.zeros(2) for number in range(5)}
    save_file({**weights, **more}, folder / "model.safetensors", metadata={"format": "pt"})
    given = ["--data", str(place / "texts.jsonl"), "--output", str(tmp_path / "run"), *GOOD]

    assert main(["train", "--model", str(folder), *given, "--steps", "1"]) == 0

    told = capsys.readouterr().out
    assert "not used: speaker.0.weight, speaker.1.weight, speaker.2.weight and 2 more of" in told


def test_without_a_model_a_run_to_go_on_with_needs_a_folder(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--resume"]) == 2
    assert "--resume needs --output, the folder of the run to go on with" in capsys.readouterr().err
    assert main(["train", "--data", "no.txt"]) == 2
    assert "--data no.txt does not exist" in capsys.readouterr().err
