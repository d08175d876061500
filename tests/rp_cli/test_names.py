"""Models and data sets are given by their names on the hub: downloaded once, found in the cache, and never run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import datasets
import finetuning
import pytest
from hub_server import COMMIT, Hub, cached, serving
from huggingface_hub import constants
from rp_cli.main import main
from rp_estimate.machine.cards import CARDS
from rp_sources import data_named, fetched_split
from rp_trainer.errors import Refused

pytestmark = pytest.mark.usefixtures("measured_once")

SIZES = ["--sequence", "24", "--batch", "2", "--devices", "cpu:1"]
CODE = "raise SystemExit('code of a stranger ran')\n"


@pytest.fixture(scope="module")
def repositories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    here = tmp_path_factory.mktemp("hub")
    model = finetuning.make_model(here / "model")
    (model / "modeling_llama.py").write_text(CODE)
    (model / "pytorch_model.bin").write_bytes(b"pickled")
    bare = finetuning.make_model(here / "bare", weights=False)
    for name in ("texts", "script", "table"):
        (here / name).mkdir()
    finetuning.json_lines(here / "texts" / "train.jsonl", finetuning.texts())
    finetuning.json_lines(here / "texts" / "test.jsonl", finetuning.texts(6))
    (here / "script" / "script.py").write_text(CODE)
    (here / "table" / "train.csv").write_text("prompt,completion\n1+1,nan\nNA,null\n,\n")
    return {
        "models/tiny/llama": model,
        "models/tiny/bare": bare,
        "datasets/tiny/texts": here / "texts",
        "datasets/tiny/script": here / "script",
        "datasets/tiny/table": here / "table",
    }


@pytest.fixture(autouse=True)
def _apart(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Work in an empty folder, with empty caches, and with a hub that nobody serves."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache" / "hub"))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache" / "datasets"))
    _at(monkeypatch, "http://127.0.0.1:9")


def _at(monkeypatch: pytest.MonkeyPatch, endpoint: str) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    monkeypatch.setattr(
        constants, "HUGGINGFACE_CO_URL_TEMPLATE", endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    )
    monkeypatch.setattr(datasets.config, "HF_ENDPOINT", endpoint)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, repositories: dict[str, Path]) -> Iterator[Hub]:
    with serving(repositories) as hub:
        _at(monkeypatch, hub.endpoint)
        yield hub


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch, repositories: dict[str, Path], tmp_path: Path) -> None:
    """Go offline, with the model in the cache."""
    cached(tmp_path / "cache" / "hub", "models/tiny/llama", repositories["models/tiny/llama"])
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


def train(*options: str) -> int:
    return main(["train", *SIZES, *options])


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main([*arguments]) == 2
    return capsys.readouterr().err.splitlines()[-1]


def losses(folder: str) -> list[float]:
    return [line["loss"] for line in finetuning.lines(Path(folder)) if "loss" in line]


@pytest.mark.later
@pytest.mark.usefixtures("hub")
def test_a_run_of_names_is_that_of_their_files(repositories: dict[str, Path]) -> None:
    files = [str(repositories["datasets/tiny/texts"] / "train.jsonl")]

    assert train("--model", "tiny/llama", "--data", "tiny/texts", "--output", "named") == 0
    assert train("--model", str(repositories["models/tiny/llama"]), "--data", *files, "--output", "local") == 0

    assert losses("named") == losses("local")


@pytest.mark.later
@pytest.mark.usefixtures("hub")
def test_the_split_that_is_named_is_read_and_texts_stand_beside_it(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    finetuning.json_lines(tmp_path / "more.jsonl", finetuning.texts(3))

    assert train("--model", "tiny/llama", "--data", "tiny/texts:test", "more.jsonl", "--output", "run") == 0

    shown = capsys.readouterr().out
    assert "data: 9 samples" in shown
    assert f"tiny/llama of the hub, commit {COMMIT[:12]}" in shown


@pytest.mark.slow
def test_code_and_pickles_are_never_downloaded_and_weights_last(hub: Hub) -> None:
    assert train("--model", "tiny/llama", "--data", "tiny/texts", "--output", "run") == 0

    assert not {"modeling_llama.py", "pytorch_model.bin"} & set(hub.asked)
    assert hub.asked[-1] == "model.safetensors"


def test_a_plan_reads_the_configuration_alone(hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", "tiny/llama", "--gpu", CARDS[0].name]) == 0

    assert hub.asked == ["config.json"]
    assert capsys.readouterr().out.startswith("LlamaForCausalLM")


def test_what_does_not_fit_is_refused_before_weights_are_downloaded(
    hub: Hub, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--model", "tiny/llama", "--data", "tiny/texts", "--output", "run", "--sequence", "99999")
    said = refused(capsys, "train", *options, "--batch", "1")

    assert "--sequence must be at most" in said
    assert "tokenizer.json" in hub.asked
    assert "model.safetensors" not in hub.asked


@pytest.mark.few(1)
@pytest.mark.usefixtures("hub")
@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--model", "tiny/lama"], "--model tiny/lama is neither a path here nor a model on the hub"),
        (["--model", "tiny/bare"], "--model tiny/bare has no safetensors files on the hub"),
        (["--data", "tiny/nothing"], "--data tiny/nothing is neither a path here nor a data set on the hub"),
        (["--data", "tiny/texts:dev"], "Should be one of ['train', 'test']"),
        (["--data", "tiny/texts:long:test"], "not found. Available: ['default']"),
        (["--data", "tiny/script"], "--data tiny/script cannot be read"),
    ],
)
def test_what_the_hub_has_not_is_said_in_a_line(
    capsys: pytest.CaptureFixture[str], options: list[str], said: str
) -> None:
    usual = ["--model", "tiny/llama", "--data", "tiny/texts", "--output", "run", *SIZES]

    assert said in refused(capsys, "train", *usual, *options[-2:])


@pytest.mark.usefixtures("hub")
def test_versions_of_datasets_that_run_code_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(datasets, "__version__", "3.6.0")

    said = refused(capsys, "train", "--model", "tiny/llama", "--data", "tiny/texts", "--output", "run")

    assert "needs datasets 4 or newer, but 3.6.0 is installed, which runs code of data sets" in said


@pytest.mark.slow
@pytest.mark.usefixtures("offline")
def test_offline_the_cache_is_used(tmp_path: Path) -> None:
    finetuning.json_lines(tmp_path / "texts.jsonl", finetuning.texts())

    assert main(["plan", "--model", "tiny/llama", "--gpu", CARDS[0].name]) == 0
    assert train("--model", "tiny/llama", "--data", "texts.jsonl", "--output", "run") == 0

    assert losses("run")


@pytest.mark.usefixtures("offline")
@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (["train", "--model", "tiny/bare", "--data", "a.txt", "--output", "run"], "--model tiny/bare"),
        (["plan", "--model", "tiny/bare", "--gpu", CARDS[0].name], "--model tiny/bare"),
        (["train", "--model", "tiny/llama", "--data", "tiny/texts", "--output", "run"], "--data tiny/texts"),
    ],
)
def test_without_network_and_cache_a_line_tells_what_to_do(
    capsys: pytest.CaptureFixture[str], arguments: list[str], name: str
) -> None:
    said = refused(capsys, *arguments)

    assert said.startswith(f"roundpipe: {name}: there is no such path here, the hub cannot be reached")
    assert "`hf download tiny/" in said


def test_a_hub_that_does_not_answer_is_not_asked_again_for_data(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def wait(seconds: float) -> NoReturn:
        pytest.fail(f"waits for {seconds} s to ask again")

    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", wait)

    model = finetuning.make_model(Path("model"))
    said = refused(capsys, "train", "--model", str(model), "--data", "tiny/texts", "--output", "run")

    assert said.startswith("roundpipe: --data tiny/texts: there is no such path here, the hub cannot be reached")
    assert not constants.HF_HUB_OFFLINE


def test_what_is_here_is_a_path_and_asks_no_hub(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def ask(*_: object, **__: object) -> NoReturn:
        pytest.fail("the hub was asked")

    monkeypatch.setattr("huggingface_hub.snapshot_download", ask)
    finetuning.make_model(tmp_path / "tiny" / "llama", weights=False)

    assert main(["plan", "--model", "tiny/llama", "--gpu", CARDS[0].name]) == 0
    assert "there is no models/config.json" in refused(capsys, "plan", "--model", "models/config.json")


@pytest.mark.usefixtures("hub")
def test_words_such_as_nan_in_csv_stay_words_also_in_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    name = data_named(Path("tiny/table:train"))
    assert name is not None

    def read() -> dict[str, list[str | None]]:
        (file,) = fetched_split("--data", name)
        return datasets.Dataset.from_file(str(file))[:]

    datasets.load_dataset("tiny/table")
    with monkeypatch.context() as offline:
        offline.setattr(constants, "HF_HUB_OFFLINE", True)
        offline.setattr(datasets.config, "HF_HUB_OFFLINE", True)
        with pytest.raises(Refused, match="tiny/table was read into the cache by another program"):
            read()
    wanted = {"prompt": ["1+1", "NA", None], "completion": ["nan", "null", None]}
    assert read() == wanted
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    assert read() == wanted
