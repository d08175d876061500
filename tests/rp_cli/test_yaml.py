"""What a `--config` file may not have: everything in YAML whose size or meaning is not what one sees."""

from __future__ import annotations

import json
import os
import resource
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from rp_cli.arguments import parse
from rp_cli.finetune.options import FineTuning
from rp_cli.main import main
from rp_cli.options.config_file import with_config
from rp_cli.options.declared import declared, read
from rp_trainer.errors import Refused

# Processor time for reading a file, on a slow machine that does other things, too.
MOST_S = 10.0


def expanding() -> str:
    """368 bytes that stand for 10^9 letters."""
    value = "&y0 [z,z,z,z,z,z,z,z,z,z]"
    for level in range(1, 9):
        value = f"&y{level} [{value}" + f",*y{level - 1}" * 9 + "]"
    return f"data: {value}\n"


HOSTILE: dict[str, tuple[str | bytes, str]] = {
    "expanding": (expanding(), "anchors are not read"),
    "alias": ("batch: *a", "aliases are not read"),
    "alias of a list": ("data: &a [x]\neval-data: *a", "anchors are not read"),
    "alias in a list": ("data: [*a, *a]", "aliases are not read"),
    "alias as key": ("*a : 1", "aliases are not read"),
    "itself": ("&a data: *a", "anchors are not read"),
    "anchor on all": ("&a\nbatch: 1", "anchors are not read"),
    "long anchor": ("batch: &" + "a" * 10_000 + " 1", "anchors are not read"),
    "merge": ("<<: {batch: 1}", "merge keys are not read"),
    "merge list": ("<<: [{batch: 1}, {batch: 2}]", "merge keys are not read"),
    "object": ("!!python/object/apply:os.system ['true']", "tags are not read"),
    "object inside": ("data: !!python/object/new:os.system ['true']", "tags are not read"),
    "name": ("data: !!python/name:os.system", "tags are not read"),
    "binary": ("data: !!binary aGVsbG8=", "tags are not read"),
    "set": ("!!set {a, b}", "tags are not read"),
    "ordered": ("!!omap [a: 1]", "tags are not read"),
    "text by tag": ("batch: !!str 5", "tags are not read"),
    "own tag": ("batch: !foo 5", "tags are not read"),
    "tagged key": ("!!str batch: 5", "tags are not read"),
    "deep lists": ("data: " + "[" * 100_000, "must be a number or text, or a list of those, but has a list"),
    "deep and whole": ("data: " + "[" * 50_000 + "]" * 50_000, "but has a list"),
    "deep names": ("data: " + "{a: " * 20_000, "but has names with values"),
    "deep blocks": ("\n".join("  " * level + "a:" for level in range(300)), "but has names with values"),
    "deep dashes": ("data: " + "\n" + "- " * 30_000, "but has a list"),
    "list inside": ("data: [[a]]", "but has a list"),
    "names inside": ("data: [{a: b}]", "but has names with values"),
    "names as value": ("batch: {a: b}", "but has names with values"),
    "list as key": ("[a, b]: 1", "must begin with the name of an option, but has a list"),
    "names as key": ("{a: b}: 1", "must begin with the name of an option, but has names with values"),
    "asked key": ("? [a]\n: 1", "must begin with the name of an option"),
    "too large": ("batch: 1 #" + "x" * 200_000, "must have at most"),
    "many names": ("\n".join(f"a{number}: 1" for number in range(20_000)), "must have at most"),
    "many names that are few bytes": ("\n".join(f"{number}: 1" for number in range(10_000)), "unknown option '0'"),
    "long name": ("a" * 100_000 + ": 1", "must have options and their values"),
    "long asked name": ("? " + "a" * 100_000 + "\n: 1", "unknown option 'aaa"),
    "long value": ("batch: [" + "a" * 100_000 + ", []]", "but has a list"),
    "long flag": ("compile: " + "a" * 100_000, "must be true or false, but is 'aaa"),
    "huge number": ("batch: 0x" + "f" * 100_000, "must be a number in decimal digits"),
    "sixties": ("batch: 1" + ":59" * 40_000, "must be a number in decimal digits"),
    "octal": ("batch: 010", "must be a number in decimal digits, but is '010'"),
    "twice": ("batch: 1\nbatch: 2", "has 'batch' twice"),
    "twice by dash": ("warm-up: 1\nwarm_up: 2", "has 'warm_up' twice"),
    "nothing": ("batch: ~", "must be a number or text, but is nothing"),
    "several": ("batch: 1\n---\nbatch: 2", "must be one YAML document, but has several"),
    "many documents": ("---\n" * 20_000, "must be one YAML document"),
    "directive": ("%TAG ! tag:a,2000:\n---\nbatch: !a 1", "tags are not read"),
    "list": ("- a", "must have options and their values, such as 'batch: 8', but has a list"),
    "text": ("batch", "must have options and their values, such as 'batch: 8', but has 'batch'"),
    "open": ("data: [", "must be YAML, but is not"),
    "quote": ("data: '" + "a\n" * 30_000, "must be YAML, but is not"),
    "tab": ("\tbatch: 1", "must be YAML, but is not"),
    "zero": (b"batch: \0", "must be YAML, but is not"),
    "escape": (b"batch: \x1b[2J", "must be YAML, but is not"),
    "latin": (b"data: \xe9", "must be YAML in UTF-8"),
    "sixteen": ("batch: 1".encode("utf-16"), "must be YAML in UTF-8"),
    "command": ("command: plan", "unknown option 'command'"),
    "config": ("config: other.yaml", "unknown option 'config'"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_yaml_that_is_not_plain_is_refused_in_one_short_line_at_once(case: str, tmp_path: Path) -> None:
    content, words = HOSTILE[case]
    path = tmp_path / "a.yaml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    given = parse(["train", "--model", "m", "--config", str(path)])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_utime

    with pytest.raises(Refused) as refused:
        with_config(given, declared(FineTuning))

    told = " ".join(str(refused.value).split())
    assert words in told
    assert len(told.replace(str(path), "")) < 500
    assert resource.getrusage(resource.RUSAGE_SELF).ru_utime - before < MOST_S


def test_an_empty_list_is_no_value(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("data: []\n")

    assert main(["train", "--config", str(path)]) == 2

    assert capsys.readouterr().err.endswith("a.yaml: data must be at least one value, but is an empty list\n")
    assert not jsonschema.Draft202012Validator(schema(capsys)).is_valid({"data": []})


PLAIN = """
num-microbatch: auto
lr: 0.001
lora: 8
lora-targets: [q_proj, v_proj]
data: a.jsonl
eval_data: [b.jsonl, c.jsonl]
save-every: 15min
betas: 0.9,0.99
report: [jsonl, tensorboard]
warm-up: 0.1
no-packing: true
output: run
model: m
"""


def schema(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    with pytest.raises(SystemExit) as ended:
        main(["train", "--schema"])
    assert not ended.value.code
    return json.loads(capsys.readouterr().out)


def test_the_schema_has_what_a_file_may_have(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    validator = jsonschema.Draft202012Validator(schema(capsys))
    path = tmp_path / "a.yaml"
    path.write_text(PLAIN)

    validator.validate(yaml.safe_load(PLAIN))

    options = declared(FineTuning)
    assert read(FineTuning, with_config(parse(["train", "--config", str(path)]), options)).lora == 8
    names = {one.name.replace("_", "-") for one in options.values()} - {"config"}
    assert {name.replace("_", "-") for name in validator.schema["properties"]} == names


@pytest.mark.parametrize(
    "line", ["batchsize: 2", "batch: 0", "batch: x", "lr: -1", "schedule: cosin", "sync: 1", "report: [csv]"]
)
def test_the_schema_refuses_what_the_command_refuses(
    line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(f"model: m\noutput: run\ndata: d\n{line}\n")

    assert not jsonschema.Draft202012Validator(schema(capsys)).is_valid(yaml.safe_load(line))
    with pytest.raises(Refused):
        read(FineTuning, with_config(parse(["train", "--config", str(path)]), declared(FineTuning)))


def test_there_are_fifty_hostile_files() -> None:
    assert len(HOSTILE) >= 50


@pytest.mark.parametrize(
    ("name", "flag", "is_on"), [("dora", "--no-dora", False), ("no_packing", "--packing", True)]
)
def test_a_flag_of_a_file_is_switched_off_on_the_command_line(
    name: str, flag: str, is_on: bool, tmp_path: Path
) -> None:
    path = tmp_path / "options.yaml"
    path.write_text(f"model: m\ndata: d\noutput: o\nlora: 8\n{name}: true\n")
    options, field = declared(FineTuning), {"no_packing": "packing"}.get(name, name)

    found = [
        getattr(read(FineTuning, with_config(parse(["train", "--config", str(path), *more]), options)), field)
        for more in ([], [flag])
    ]

    assert found == [not is_on, is_on]


@pytest.mark.parametrize("kind", ["pipe", "device", "link to a device", "folder"])
def test_a_config_that_is_no_file_is_refused_and_not_waited_for(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    match kind:
        case "pipe":
            os.mkfifo(path)
        case "device":
            path = Path("/dev/zero")
        case "link to a device":
            path.symlink_to("/dev/zero")
        case _:
            path.mkdir()

    with pytest.raises(Refused, match=r"--config .* (must be a file, but is a|cannot be read)"):
        with_config(parse(["train", "--config", str(path)]), declared(FineTuning))


def test_values_are_read_as_they_are_written(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(
        "\ufeff# a comment\nbatch: 1_000\nlr: 1e-3\nclip: 0.50\ndata: [2024-01-01, '7', \"a: b\"]\n"
        "eval-data:\n  - >\n    folded\nmodel: |\n  text\ncompile: On\nsync: no\n"
    )

    given = with_config(parse(["train", "--config", str(path)]), declared(FineTuning))

    assert (given.batch, given.lr, given.clip) == ("1000", "1e-3", "0.50")
    assert (given.data, given.eval_data, given.model) == (["2024-01-01", "7", "a: b"], ["folded\n"], "text\n")
    assert (given.compile, given.sync) == (True, False)


@pytest.mark.parametrize("content", ["", "# nothing\n", "---\n", "~\n", "{}\n"])
def test_a_file_without_options_changes_nothing(content: str, tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(content)
    given = parse(["train", "--config", str(path), "--batch", "3"])

    assert vars(with_config(given, declared(FineTuning))) == vars(given)
