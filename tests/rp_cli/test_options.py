"""What the command line accepts, and how it refuses the rest."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import programs
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from programs import COMMAND_LINE
from rp_cli.arguments import parse
from rp_cli.finetune.options import TINY, FineTuning
from rp_cli.main import main
from rp_cli.options.declared import Default, GivenOptions, OptionValues, declared, read
from rp_trainer.errors import Refused

# Everything here is over before a model would be made.
pytestmark = pytest.mark.usefixtures("no_model")

WRONG = {
    "no command": [],
    "an unknown command": ["tarin"],
    "an unknown option": ["train", "--stpes", "3"],
    "an option cut short": ["train", "--step", "3"],
    "an option without its value": ["train", "--steps"],
    "an option with dashes for a value": ["train", "--steps=--"],
    "data without a path": ["train", "--data"],
    "an empty path": ["train", "--data", ""],
    "a path that no system takes": ["train", "--data", "a\0b"],
    "an output in other bytes than UTF-8": ["train", "--output", os.fsdecode(b"\xff")],
    "a trillion steps": ["train", "--steps", str(10**12)],
    "steps of 400 digits": ["train", "--steps", "1" * 400],
    "a batch of 4,000 digits": ["train", "--batch", "9" * 4000, "--sequence", "9" * 4000],
    "a hundred million microbatches": ["train", "--num-microbatch", str(10**8), "--batch", str(10**8)],
    "CPU devices of 20 digits": ["train", "--devices", "cpu:99999999999999999999"],
    "devices of 5,000 digits": ["train", "--devices", "cuda:" + "9" * 5000],
    "text without end": ["train", "--data", "/dev/zero"],
    "steps that are no number": ["train", "--steps", "many"],
    "half a step": ["train", "--steps", "1.5"],
    "no step": ["train", "--steps", "0"],
    "a negative step": ["train", "--steps", "-3"],
    "an empty batch": ["train", "--batch", "0"],
    "a sequence of one byte": ["train", "--sequence", "1"],
    "no microbatch": ["train", "--num-microbatch", "0"],
    "fewer sequences than microbatches": ["train", "--batch", "3", "--num-microbatch", "4"],
    "a learning rate of zero": ["train", "--lr", "0"],
    "a negative learning rate": ["train", "--lr", "-0.1"],
    "an infinite learning rate": ["train", "--lr", "inf"],
    "a learning rate that is no number": ["train", "--lr", "nan"],
    "a learning rate in words": ["train", "--lr", "high"],
    "an unknown dtype": ["train", "--dtype", "int8"],
    "an unknown optimizer dtype": ["train", "--optim-dtype", "double"],
    "an unknown kind of optimizer state": ["train", "--optimizer-state", "4bit"],
    "an unknown kind of masters": ["train", "--master", "halved"],
    "halves of 16-bit masters": ["train", "--master", "split", "--optim-dtype", "bfloat16"],
    "a negative seed": ["train", "--seed", "-1"],
    "a seed too large for torch": ["train", "--seed", str(2**63)],
    "a missing path": ["train", "--data", "nowhere/at/all.txt"],
    "devices nobody can read": ["train", "--devices", "tpu:8"],
    "no CPU device": ["train", "--devices", "cpu:0"],
    "an empty device string": ["train", "--devices", ""],
    "a GPU that is not there": ["train", "--devices", "cuda:512", "--data", __file__],
    "a GPU named twice": ["train", "--devices", "cuda:0,0", "--data", __file__],
    "too little text for a batch": ["train", "--batch", "60000", "--data", __file__],
    "a report that is nowhere": ["train", "--report", "jsonl"],
    "checkpoints that are nowhere": ["train", "--keep", "3"],
    "checkpoints that are often nowhere": ["train", "--save-every", "15min"],
    "evaluations of nothing": ["train", "--held-out", "0", "--eval-every", "1"],
    "more tokens than positions": [
        "train",
        "--sequence",
        "100000",
        "--batch",
        "1",
        "--data",
        __file__,
    ],
}


@pytest.mark.parametrize("arguments", WRONG.values(), ids=WRONG.keys())
def test_what_is_given_wrongly_gets_one_line_and_exit_code_2(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2

    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("roundpipe: ")
    assert shown.err.count("\n") == 1


def test_a_folder_without_text_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tmp_path.joinpath("picture.bin").write_bytes(b"\0" * 100)

    assert main(["train", "--data", str(tmp_path)]) == 2
    assert "has no files that end with" in capsys.readouterr().err


def test_too_little_text_is_refused_with_the_count_that_was_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "short.txt"
    text.write_bytes(bytes(range(33, 127)))

    assert main(["train", "--data", str(text), "--sequence", "10"]) == 2
    assert "a step takes 16 sequences (--batch times --accumulation), but --data makes" in capsys.readouterr().err


def test_an_output_that_is_a_file_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    taken = tmp_path / "taken"
    taken.write_text("not a folder")

    assert main(["train", "--output", str(taken)]) == 2
    assert main(["train", "--output", str(taken / "below")]) == 2
    assert capsys.readouterr().err.count("\n") == 2


def test_an_output_folder_with_foreign_files_is_refused_and_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tmp_path.joinpath("options.json").write_text('{"theirs": 1}')

    assert main(["train", "--output", str(tmp_path)]) == 2
    assert "has other files in it" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["options.json"]
    assert tmp_path.joinpath("options.json").read_text() == '{"theirs": 1}'


@pytest.mark.timeout(60)
@pytest.mark.parametrize("content", [b"[" * 100_000, b'{"a":' * 100_000, b"\xff", b"1" * 5000])
def test_an_output_folder_whose_options_cannot_be_read_is_refused(
    tmp_path: Path, content: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    tmp_path.joinpath("options.json").write_bytes(content)

    assert main(["train", "--output", str(tmp_path)]) == 2
    assert "has other files in it" in capsys.readouterr().err


@pytest.mark.timeout(60)
def test_an_output_folder_whose_options_are_a_pipe_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    os.mkfifo(tmp_path / "options.json")

    assert main(["train", "--output", str(tmp_path)]) == 2
    assert "has other files in it" in capsys.readouterr().err


words = st.sampled_from(["0", "1", "8", "-3", "1e3", "1" * 400, "9" * 5000, "nan", "", "x"]) | st.text(max_size=4)


@pytest.mark.later
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    given_options=st.dictionaries(
        st.sampled_from(["--steps", "--batch", "--sequence", "--num-microbatch", "--lr", "--seed", "--devices"]),
        words,
    ),
    found=st.binary(max_size=20)
    | st.recursive(st.integers(), lambda inner: st.lists(inner)).map(repr).map(str.encode),
)
def test_any_options_and_any_folder_get_one_line(
    given_options: dict[str, str], found: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, text = tmp_path / "folder", tmp_path / "text"
    folder.mkdir(exist_ok=True)
    folder.joinpath("options.json").write_bytes(found)
    text.write_bytes(b"too short")
    flags = [f"{flag}={word}" for flag, word in given_options.items()]

    assert main(["train", *flags, "--data", str(text), "--output", str(folder)]) == 2

    shown = capsys.readouterr()
    assert (shown.out, shown.err.count("\n")) == ("", 1)


def test_a_device_that_is_not_there_is_told_as_such(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--devices", "cuda:512", "--data", __file__]) == 2
    assert "cuda" in capsys.readouterr().err.lower()


def test_the_devices_variable_is_read_like_the_option(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ROUNDPIPE_DEVICES", "abacus")

    assert main(["train"]) == 2
    assert "abacus" in capsys.readouterr().err


def test_data_takes_several_paths_and_may_be_repeated() -> None:
    given = parse(["train", "--data", "a", "b", "--steps", "3", "--data", "c"])

    options = read(FineTuning, given)

    assert options.data == (Path("a"), Path("b"), Path("c"))
    assert options.steps == 3


def test_two_parses_do_not_share_what_they_collect() -> None:
    assert parse(["train", "--data", "a"]).data == ["a"]
    assert parse(["train", "--data", "b"]).data == ["b"]
    assert "data" not in vars(parse(["train"]))


def test_the_defaults_pass_their_own_checks() -> None:
    options = read(FineTuning, GivenOptions())

    assert (options.model, options.data, options.output) == (TINY, None, None)
    assert (options.num_microbatch, options.batch, options.steps) == (4, 16, 250)
    assert options.sync


def test_what_suits_the_small_model_gives_way_to_what_is_given() -> None:
    options = read(FineTuning, GivenOptions(optimizer="lion", batch="3", epochs="2", eval_data=["a"]))

    assert (options.betas, options.num_microbatch, options.steps, options.held_out) == (None, None, None, 0)


# With the second, all options have what they need.
_EVALUATED = {"held_out": "0.1", "eval_every": "5", "early_stopping": "2"}
_FINE_TUNING = {"model": "m", "data": ["d"], "output": "o", "lora": "8", "image_cache": "c", **_EVALUATED}


@pytest.mark.parametrize("given", [{}, _FINE_TUNING])
def test_an_option_that_is_given_its_default_changes_nothing(given: dict[str, Any]) -> None:
    options, before = declared(FineTuning), read(FineTuning, GivenOptions(**given))
    others = OptionValues(options, GivenOptions(**given))
    named = {
        one.name: one.default.text(others) if isinstance(one.default, Default) else one.default
        for one in options.values()
        if one.name not in given and (given or not one.needs)
    }

    changed = {
        name: read(FineTuning, GivenOptions(**given, **{name: default}))
        for name, default in named.items()
        if default is not None
    }

    assert {"optimizer", "batch", "sequence", "lr"} < changed.keys()
    assert {name for name, options in changed.items() if options != before} == set()


@pytest.mark.parametrize("name", ["resume", "overwrite"])
def test_a_flag_that_is_off_excludes_nothing(name: str) -> None:
    given = {"model": "m", "data": ["d"], "output": "o", "resume": True, "overwrite": True, name: False}

    assert not getattr(read(FineTuning, GivenOptions(**given)), name)


def test_help_tells_what_suits_the_small_model(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["train", "--help"])

    told, small = " ".join(capsys.readouterr().out.split()), read(FineTuning, GivenOptions())
    for name, value in [("steps", "250"), ("num_microbatch", "4"), ("lr", "2e-3"), ("sequence", "64")]:
        assert f"; without --model {value})" in told
        assert getattr(small, name) == float(value)
    assert told.count("; without --model ") == 10


@pytest.mark.parametrize("option", [["--report", "tensorboard"], ["--keep", "9"], ["--save-every", "1"]])
def test_what_is_kept_needs_a_folder(option: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", *option]) == 2
    assert capsys.readouterr().err == f"roundpipe: {option[0]} needs --output, the folder to keep it in\n"


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (["--early-stopping", "3"], "--early-stopping needs --eval-every, to tell when to evaluate"),
        (["--early-stopping-threshold", "0.1"], "--early-stopping-threshold needs --early-stopping, the number"),
    ],
)
def test_early_stopping_needs_evaluations(given: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", *given]) == 2
    assert told in capsys.readouterr().err


def test_overwrite_needs_something_to_replace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--overwrite"]) == 2
    assert "--overwrite needs --output or --profile" in capsys.readouterr().err
    assert read(FineTuning, GivenOptions(overwrite=True, profile=str(tmp_path / "trace.json"))).overwrite


def test_a_refusal_names_the_option_and_what_was_found() -> None:
    with pytest.raises(Refused, match=r"--lr must be a finite number above 0, but is 'nan'"):
        read(FineTuning, GivenOptions(lr="nan"))


@pytest.mark.parametrize("arguments", [["--help"], ["train", "--help"], ["--version"]])
def test_help_and_version_end_well(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)

    assert ended.value.code == 0
    assert "roundpipe" in capsys.readouterr().out


def test_the_exit_code_of_the_process_is_that_of_main() -> None:
    command = "import sys; from rp_cli.main import main; sys.exit(main())"

    found = programs.ended(command, "train", "--lr", "0", imports=COMMAND_LINE)

    assert found == (2, "", "roundpipe: --lr must be a finite number above 0, but is '0'\n")
