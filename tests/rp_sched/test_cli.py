"""The command line plans, plays and compares, and a mistake is one line that names the field."""

import json
import os
import re
import signal
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from rp_sched import Task, check_order
from rp_sched.cli import main
from rp_sched.report.schedules import NAMES

LAYER = {"forward_ms": 2.0, "backward_ms": 4.0, "weight_bytes": 1e9, "boundary_bytes": 10}
PROBLEM = {"layers": [{**LAYER, "repeat": 6}, {"forward_ms": 5.0}], "limits": {"stage_bytes": 4e9, "hop_ms": 0.5}}
SIZE = ("--devices", "2", "--microbatches", "4")


@pytest.fixture
def costs(tmp_path: Path) -> str:
    path = tmp_path / "costs.json"
    path.write_text(json.dumps(PROBLEM))
    return str(path)


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(arguments) == 0
    found = capsys.readouterr()
    assert found.err == ""
    return found.out


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(arguments) == 2
    found = capsys.readouterr()
    assert found.out == ""
    assert found.err.endswith("\n")
    assert found.err.count("\n") == 1
    return found.err


@pytest.mark.parametrize("strategy", ["adaptive", "roundrobin"])
def test_plan_prints_a_summary_first_and_tasks_when_asked(
    costs: str, strategy: str, capsys: pytest.CaptureFixture[str]
):
    lines = run(capsys, "plan", costs, *SIZE, "--strategy", strategy).splitlines()
    assert lines[0] == "7 layers, 4 microbatches, 2 devices, of which 2 are used"
    assert re.search(r"follow each other: \S+ ms a call \(\d\.\d+ of ideal\); alone: ", lines[1])
    assert re.match(r"bound by \w+; busy, ms a call: ", lines[2])
    assert re.fullmatch(r"memory, bytes: \d+ on a device at most, \d+ on the host .*", lines[3])
    assert lines[4].startswith("Plan(")
    assert [line[:8] for line in lines[-3:-1]] == ["device 0", "device 1"]
    assert not tasks_in(lines)
    shown = run(capsys, "plan", costs, *SIZE, "--strategy", strategy, "--show-tasks").splitlines()
    check_order(tasks_in(shown), 7, 4, "fused", devices=2)
    assert [line for line in shown if line in lines] == lines


def tasks_in(lines: list[str]) -> list[Task]:
    return [Task.parse(line) for line in lines if line.startswith(("F[", "FB[", "B["))]


def test_hardware_words_replace_those_of_the_file(costs: str, capsys: pytest.CaptureFixture[str]):
    words = ("--link", "0.000001", "--switches", "2")
    bound = [
        run(capsys, "plan", costs, *SIZE, *given).splitlines()[2].split(";")[0] for given in ((), words[:2], words)
    ]
    assert bound == ["bound by device", "bound by link", "bound by switch"]
    slow = run(capsys, "simulate", costs, *SIZE, "--ram-gb-s", "0.000001")
    assert "bound by host memory" in slow
    assert "device_memory_bytes (4)" in refusal(capsys, "plan", costs, *SIZE, "--device-memory", "8B")
    assert "Limits.host_memory_bytes is 9" in refusal(capsys, "plan", costs, *SIZE, "--ram", "9B")


@pytest.mark.parametrize(
    "words",
    [
        ("--link", "fast"),
        ("--link", "0"),
        ("--link=--",),
        ("--ram", "64G"),
        ("--ram", "64"),
        ("--device-memory", "24"),
        ("--ram", "0"),
        ("--ram-gb-s", "-1"),
        ("--device-memory", "much"),
        ("--switches", "4,4"),
        ("--switches", "1,one"),
        ("--switches", "9" * 4000),
        ("--switches", "2"),
    ],
)
def test_hardware_that_cannot_be_is_refused_in_one_line(
    words: tuple[str, ...], costs: str, capsys: pytest.CaptureFixture[str]
):
    refusal(capsys, "plan", costs, *SIZE, *words)


def test_a_size_without_a_unit_is_refused_with_the_way_to_write_it(costs: str, capsys: pytest.CaptureFixture[str]):
    assert "such as 64GB (10^9 bytes)" in refusal(capsys, "plan", costs, *SIZE, "--ram", "64")
    run(capsys, "plan", costs, *SIZE, "--ram", "64000000000")


def test_the_knobs_reach_the_published_strategy(costs: str, capsys: pytest.CaptureFixture[str]):
    knobs = ("--mode", "infer", "--strategy", "roundrobin", "--upper-threshold", "4.0")
    limited = run(capsys, "plan", costs, *SIZE, *knobs, "--model-memory-limit", "4.5")
    few, many = (run(capsys, "plan", costs, *SIZE, *knobs, "--min-stages", count) for count in ("1", "7"))
    assert [out.splitlines()[4].count("F[") for out in (limited, few, many)] == [3, 2, 7]
    assert "--min-stages is for --strategy roundrobin" in refusal(
        capsys, "plan", costs, *SIZE, "--min-stages", "3"
    )


@pytest.mark.parametrize("name", NAMES)
def test_every_schedule_can_be_played(costs: str, name: str, capsys: pytest.CaptureFixture[str]):
    lines = run(capsys, "simulate", costs, *SIZE, "--schedule", name, "--calls", "2", "--width", "40").splitlines()
    assert lines[0].startswith("2 calls: ")
    assert sum(line.startswith("device ") and ": busy" in line for line in lines) == 2
    chart = [line for line in lines if re.fullmatch(r"device \d  [fFbBxX.]{40}", line)]
    assert len(chart) == 2


def test_tasks_of_a_file_are_played(costs: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    tasks = tmp_path / "tasks"
    tasks.write_text("F[0:3] m0:4 @0\n\nFB[3:7] m0:4 @1\nB[0:3] m0:4 @0\n")
    assert run(capsys, "simulate", costs, *SIZE, "--tasks", str(tasks)).startswith("1 calls: ")
    tasks.write_text("F[0:3] m0:4 @0\nFB[3:7] m0:4\n")
    assert "line 2: a task must be written like" in refusal(
        capsys, "simulate", costs, *SIZE, "--tasks", str(tasks)
    )
    tasks.write_text("F[0:3] m0:4 @0\n")
    assert "never runs forward" in refusal(capsys, "simulate", costs, *SIZE, "--tasks", str(tasks))


def test_compare_has_a_line_for_every_schedule(costs: str, capsys: pytest.CaptureFixture[str]):
    lines = run(capsys, "compare", costs, *SIZE).splitlines()
    assert [line.split()[0] for line in lines] == ["schedule", *NAMES]
    steady = {line.split()[0]: float(line.split()[2]) for line in lines[1:]}
    assert steady["adaptive"] == min(steady.values())


def test_a_schedule_that_cannot_run_says_why_in_its_line(costs: str, capsys: pytest.CaptureFixture[str]):
    lines = run(capsys, "compare", costs, "--devices", "2", "--microbatches", "3").splitlines()
    assert any(line.startswith("interleaved-1f1b: ") and "multiples of devices" in line for line in lines)


def test_a_trace_has_every_microbatch_where_and_when_it_ran(
    costs: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    path = tmp_path / "trace.json"
    run(capsys, "simulate", costs, *SIZE, "--schedule", "gpipe", "--trace", str(path))
    events = json.loads(path.read_text())["traceEvents"]
    computed = [event for event in events if event["ph"] == "X" and event["tid"] == 0]
    assert len(computed) == 12
    assert {event["pid"] for event in computed} == {0, 1}
    assert all(event["ts"] >= 0 and event["dur"] > 0 for event in computed)
    assert {event["name"] for event in events if event["ph"] == "M"} == {"process_name", "thread_name"}


def test_a_picture_is_svg_with_a_box_for_every_task(
    costs: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    path = tmp_path / "picture.svg"
    run(capsys, "simulate", costs, *SIZE, "--schedule", "looped-bfs", "--svg", str(path))
    root = ElementTree.fromstring(path.read_text())
    titles = {
        title.text.partition(",")[0] for title in root.iter("{http://www.w3.org/2000/svg}title") if title.text
    }
    assert len(titles) == 7


@pytest.mark.parametrize(
    ("problem", "words"),
    [
        ("{", "Expecting property name"),
        ("[]", "the file must be an object"),
        ("{}", "layers must be a list of layers, but there is none"),
        ('{"layers": []}', "layers must be a list of at least one layer"),
        ('{"layers": [3]}', r"layers\[0\] must be an object, but is 3"),
        ('{"layers": [{}]}', r"layers\[0\]: forward_ms must be given"),
        ('{"layers": [{"forward_ms": 1}, {"forward_ms": -1}]}', r"layers\[1\]: forward_ms must be a finite time"),
        ('{"layers": [{"forward_ms": NaN}]}', r"layers\[0\]: forward_ms must be a finite time"),
        ('{"layers": [{"forward_ms": "1"}]}', r"layers\[0\]: forward_ms must be a number"),
        (
            '{"layers": [{"forward_ms": 1, "weight_bytes": 1.5}]}',
            r"layers\[0\]: weight_bytes must be a whole number",
        ),
        ('{"layers": [{"forward_ms": 1, "weigth_bytes": 1}]}', r"layers\[0\]: unknown field 'weigth_bytes'"),
        ('{"layers": [{"forward_ms": 1, "repeat": 0}]}', r"layers\[0\]: repeat must be at least 1"),
        ('{"layers": [{"forward_ms": 1}], "limits": 3}', "limits must be an object"),
        ('{"layers": [{"forward_ms": 1}], "limits": {"hop_ms": -1}}', "limits: hop_ms must be a finite time"),
        ('{"layers": [{"forward_ms": 1}], "limits": {"upload_gb_s": 0}}', "limits: upload_gb_s must be a finite"),
        ('{"layers": [{"forward_ms": 1}], "more": 3}', "unknown field 'more'"),
        (
            '{"layers": [{"forward_ms": 1, "weight_bytes": 9}], "limits": {"device_memory_bytes": 8}}',
            "layer 0 needs 27 bytes on a device",
        ),
    ],
)
def test_a_bad_file_is_one_line_that_names_the_field(
    problem: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    path = tmp_path / "costs.json"
    path.write_text(problem)
    assert re.search(words, refusal(capsys, "plan", str(path), *SIZE))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--devices", "0", "--microbatches", "4"], "argument --devices: must be a whole number, at least 1"),
        (["--devices", "2", "--microbatches", "x"], "argument --microbatches: must be a whole number"),
        (["--devices", "2"], "the following arguments are required: --microbatches"),
        ([*SIZE, "--mode", "eval"], "argument --mode: invalid choice: 'eval'"),
        ([*SIZE, "--trace", "/"], "/"),
    ],
)
def test_a_bad_argument_is_one_line_that_names_it(
    costs: str, arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
):
    assert words in refusal(capsys, "plan", costs, *arguments)


def test_two_dashes_are_no_value_or_a_file_like_any_other(
    costs: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    # Newer versions of Python take them as a value.
    monkeypatch.chdir(tmp_path)
    status = main(["plan", costs, *SIZE, "--trace=--"])
    error = capsys.readouterr().err
    written = (tmp_path / "--").exists()
    assert (status, error.count("\n"), written) in {(0, 0, True), (2, 1, False)}
    assert written or "argument --trace: " in error


def test_a_classic_schedule_is_refused_in_other_modes(costs: str, capsys: pytest.CaptureFixture[str]):
    words = refusal(capsys, "simulate", costs, *SIZE, "--mode", "infer", "--schedule", "gpipe")
    assert "--schedule gpipe is for --mode fused only" in words


def test_a_file_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str]):
    assert "no-such-file.json" in refusal(capsys, "plan", "no-such-file.json", *SIZE)


def test_the_module_runs_as_a_program(costs: str):
    ran = [
        subprocess.run(
            [sys.executable, "-m", "rp_sched", "plan", costs, "--devices", devices, "--microbatches", "4"],
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        for devices in ("2", "0")
    ]
    assert [found.returncode for found in ran] == [0, 2]
    assert ran[0].stdout.startswith("7 layers")
    assert (ran[1].stderr.count("\n"), ran[1].stdout) == (1, "")


def test_an_output_that_takes_no_more_is_one_line(costs: str):
    with Path("/dev/full").open("w") as full:
        ran = subprocess.run(
            [sys.executable, "-m", "rp_sched", "plan", costs, *SIZE],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            timeout=60,
        )
    assert ran.returncode == 2
    assert re.fullmatch(r"rp-sched: .*No space left on device.*\n", ran.stderr)


def test_ctrl_c_is_one_line(tmp_path: Path):
    pipe = tmp_path / "costs"
    os.mkfifo(pipe)
    program = subprocess.Popen(
        [sys.executable, "-m", "rp_sched", "plan", str(pipe), *SIZE], stderr=subprocess.PIPE, text=True
    )
    with program, pipe.open("w"):
        # The program has opened the pipe, and waits for what it holds.
        program.send_signal(signal.SIGINT)
        _, err = program.communicate(timeout=60)
    assert (program.returncode, err) == (130, "rp-sched: interrupted\n")


def test_costs_without_an_end_are_refused_once_they_are_too_large(capsys: pytest.CaptureFixture[str]) -> None:
    assert "the file must have at most" in refusal(capsys, "plan", "/dev/zero", *SIZE)
