"""`roundpipe eval`: losses are those of the run and of transformers, scores those of lm-eval's own backend."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import finetuning
import pytest
import torch
from finetuning import json_lines, make_model, words
from roundpipe import Runtime, from_pretrained
from rp_cli.main import main
from transformers import AutoModelForCausalLM, AutoTokenizer

SETTINGS = ["--sequence", "32", "--batch", "4", "--steps", "4", "--lr", "1e-2", "--num-microbatch", "2"]
TEXTS = [words(number, 9 + number % 7) for number in range(24)]


@pytest.fixture(autouse=True)
def on_two_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROUNDPIPE_DEVICES", "cpu:2")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), "qwen3")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return json_lines(tmp_path / "data.jsonl", [{"text": text} for text in TEXTS])


def told(capsys: pytest.CaptureFixture[str], *command: str) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["eval", *command, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def plain_loss(folder: Path, texts: list[str], wrap: Any = lambda model: model) -> float:
    """The mean over all tokens but each text's first, as transformers computes it, text by text."""
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    plain: Any = wrap(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)).eval()
    total = count = 0.0
    for text in texts:
        ids = torch.tensor([[*tokenizer(text)["input_ids"], tokenizer.eos_token_id]])
        with torch.no_grad():
            total += float(plain(input_ids=ids, labels=ids).loss) * (ids.shape[1] - 1)
        count += ids.shape[1] - 1
    return total / count


@pytest.mark.few(1)
@pytest.mark.parametrize("more", [[], ["--no-packing"], ["--batch", "1"]])
def test_the_loss_is_that_of_transformers(
    more: list[str], model: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = told(capsys, str(model), "--data", str(data), "--sequence", "64", *more)

    assert found["loss"] == pytest.approx(plain_loss(model, TEXTS), rel=1e-5)
    assert found["perplexity"] == pytest.approx(torch.tensor(found["loss"]).exp().item(), rel=1e-6)
    assert found["learned_tokens"] == found["tokens"] - len(TEXTS)


@pytest.mark.later
@pytest.mark.parametrize("more", [["--held-out", "0.3"], ["--eval-data", "others", "--lora", "4"]])
@pytest.mark.usefixtures("measured_once")
def test_the_loss_of_a_run_is_the_last_that_it_told(
    more: list[str], model: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    others = json_lines(tmp_path / "others.jsonl", [{"text": words(number, 8)} for number in range(40, 50)])
    given = [str(others) if one == "others" else one for one in more]
    run = tmp_path / "run"
    command = ["--model", str(model), "--data", str(data), "--output", str(run), "--save-every", "1", *SETTINGS]
    assert main(["train", *command, *given]) == 0
    last = [line["held_out_loss"] for line in finetuning.lines(run) if "held_out_loss" in line][-1]

    whole = told(capsys, str(run))
    checkpoint = told(capsys, str(max((run / "checkpoints").glob("step-*"))))

    assert whole["loss"] == pytest.approx(last, rel=1e-5)
    assert checkpoint["data"] == whole["data"]
    data.write_text(data.read_text() + json.dumps({"text": words(99, 9)}) + "\n")
    assert main(["eval", str(run)]) == 0
    shown = capsys.readouterr()
    assert "are others than when the run began" in shown.err
    assert shown.out.startswith("held-out loss ")


def test_what_has_no_data_says_so(
    model: Path, data: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["eval", str(model)]) == 2
    assert f"--data must be given: {model} is no run of `roundpipe train`" in capsys.readouterr().err
    assert main(["eval", str(model), "--data", str(data), "--tasks", "arc_easy"]) == 2
    assert "--tasks and --data exclude each other" in capsys.readouterr().err
    assert main(["eval", str(model), "--limit", "3"]) == 2
    assert "--limit needs --tasks, to tell which" in capsys.readouterr().err
    for name in [name for name in sys.modules if name.partition(".")[0] == "lm_eval"] + ["lm_eval"]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "rp_cli.evaluating.harness", raising=False)
    assert main(["eval", str(model), "--tasks", "arc_easy"]) == 2
    assert "--tasks needs lm-eval: pip install lm-eval" in capsys.readouterr().err


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("family", "given", "words"),
    [
        ("gpt-oss", [], "--no-packing must be given: a GptOssForCausalLM does not keep packed documents apart"),
        ("bert", ["--no-packing"], "must be a language model, in which no token sees later ones"),
        ("gpt2", ["--sequence", "1025"], "--sequence must be at most 1024, the positions that the model has"),
    ],
)
def test_a_loss_that_would_be_another_is_refused(
    family: str, given: list[str], words: str, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(make_model(tmp_path / "model", family))

    assert main(["eval", folder, "--data", str(data), "--sequence", "64", *given]) == 2
    assert words in capsys.readouterr().err


# lm-eval


@pytest.fixture(scope="module")
def both(model: Path) -> Iterator[tuple[Any, Any]]:
    """Our model and lm-eval's own, of the same weights."""
    pytest.importorskip("lm_eval")
    from lm_eval.models.huggingface import HFLM
    from rp_cli.evaluating.harness import WrappedModel

    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    tokenizer.pad_token = tokenizer.eos_token
    plain: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    theirs = HFLM(pretrained=plain, tokenizer=tokenizer, batch_size=3, device="cpu", max_length=64)
    with Runtime("cpu:2") as runtime:
        wrapped: Any = from_pretrained(
            model, use_sequential_preset=True, dtype=torch.float32, runtime=runtime, trust_remote_code=False
        )
        wrapped.eval()

        class Short(WrappedModel):
            @property
            def max_length(self) -> int:
                return 64

        yield Short(wrapped, tokenizer, batch=3, is_shown=False), theirs


def requests(kind: str, arguments: list[tuple[Any, ...]]) -> list[Any]:
    from lm_eval.api.instance import Instance

    return [Instance(request_type=kind, doc={}, arguments=one, idx=at) for at, one in enumerate(arguments)]


@pytest.mark.later
def test_log_likelihoods_are_those_of_lm_evals_own_model(both: tuple[Any, Any]) -> None:
    ours, theirs = both
    asked = [(words(number, number % 9), " " + words(number + 3, 1 + number % 4)) for number in range(14)]
    # Longer than the model sees, with a space at its end, and one that the model would say itself.
    asked += [(words(5, 90), " " + words(2, 3)), ("the cat ", "sat"), ("", words(1, 3))]
    asked += [(words(7, 5), theirs.generate_until(requests("generate_until", [(words(7, 5), GREEDY)]))[0])]

    found = ours.loglikelihood(requests("loglikelihood", asked))
    wanted = theirs.loglikelihood(requests("loglikelihood", asked))

    assert [score for score, _ in found] == pytest.approx([score for score, _ in wanted], rel=1e-4, abs=1e-4)
    assert [is_greedy for _, is_greedy in found] == [is_greedy for _, is_greedy in wanted]
    assert found[-1][1]


def test_whole_texts_are_those_of_lm_evals_own_model(both: tuple[Any, Any]) -> None:
    ours, theirs = both
    # The second is longer than the model sees.
    asked = requests("loglikelihood_rolling", [(words(number, 10 + 60 * number),) for number in range(3)])

    assert ours.loglikelihood_rolling(asked) == pytest.approx(theirs.loglikelihood_rolling(asked), rel=1e-4)


GREEDY = {"until": ["\n\n"], "max_gen_toks": 8, "do_sample": False}


def test_texts_are_those_of_lm_evals_own_model(both: tuple[Any, Any]) -> None:
    ours, theirs = both
    first = theirs.generate_until(requests("generate_until", [(words(1, 4), GREEDY)]))[0]
    assert len(first) > 3
    # A stop word in the midst of what it would say; others; contexts of several lengths.
    how = [GREEDY, {**GREEDY, "until": [first[2:4]]}, {**GREEDY, "max_gen_toks": 5, "temperature": 0.0}]
    asked = [(words(number % 5, 4 + number % 3), how[number % 3]) for number in range(9)] + [(words(1, 4), how[1])]

    found = ours.generate_until(requests("generate_until", asked))

    assert found == theirs.generate_until(requests("generate_until", asked))
    assert len(set(found)) > 2
    assert found[-1] == first.partition(first[2:4])[0]


@pytest.mark.slow
def test_tasks_of_ones_own_are_scored_as_by_lm_evals_own_model(
    both: tuple[Any, Any], model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, theirs = both
    import lm_eval
    from lm_eval.tasks import TaskManager

    rows = [
        {"question": words(number, 5), "choices": [" the", " cat", " sat"], "answer": number % 3}
        for number in range(6)
    ]
    data = json_lines(tmp_path / "rows.jsonl", rows)
    (tmp_path / "mine.yaml").write_text(
        f"task: mine\ndataset_path: json\ndataset_kwargs:\n  data_files: {{test: {data}}}\ntest_split: test\n"
        "output_type: multiple_choice\ndoc_to_text: '{{question}}'\ndoc_to_choice: '{{choices}}'\n"
        "doc_to_target: '{{answer}}'\nmetric_list: [{metric: acc}]\n"
    )
    manager = TaskManager(include_path=str(tmp_path), include_defaults=False)
    wanted = lm_eval.simple_evaluate(theirs, tasks=["mine"], task_manager=manager)

    found = told(capsys, str(model), "--tasks", "mine", "--include-path", str(tmp_path), "--quiet")

    assert found["mine"]["acc"] == wanted["results"]["mine"]["acc,none"]
    assert main(["eval", str(model), "--tasks", "yours"]) == 2
    assert "--tasks yours: lm-eval has no such task" in capsys.readouterr().err
