"""`roundpipe plan` answers from a config alone whether training fits, how fast it is, and what would help."""

from __future__ import annotations

import io
import itertools
import json
import shlex
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from rp_cli.arguments import parse
from rp_cli.main import main
from rp_cli.options.declared import read
from rp_cli.planning.options import PlanOptions
from rp_estimate import foretold
from rp_estimate.machine.cards import Card
from rp_estimate.machine.hardware import Machine
from rp_sched.simulation.clock import Clock
from rp_trainer.errors import Refused
from sometimes import one_in

pytestmark = pytest.mark.usefixtures("no_model")

TINY = {
    "model_type": "qwen3",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
}
# Qwen3-32B's: 64 layers, and a head of its own.
QWEN3_32B = TINY | {
    "vocab_size": 151936,
    "hidden_size": 5120,
    "intermediate_size": 25600,
    "num_hidden_layers": 64,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "tie_word_embeddings": False,
}
QWEN3_8B = QWEN3_32B | {
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
}
LLAMA_70B = TINY | {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "tie_word_embeddings": False,
}
GPT_2 = {"model_type": "gpt2", "n_embd": 64, "n_layer": 3, "n_head": 4, "vocab_size": 512}
MIXTURE = TINY | {
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
}
SMALL = ("--gpu", "memory=2GB,link=10,tflops=1", "--batch", "8", "--sequence", "64", "--ram", "4GB")

Write = Callable[[Mapping[str, object]], str]


@pytest.fixture
def config(tmp_path: Path) -> Write:
    """Write a config.json; return its path."""

    def write(content: Mapping[str, object]) -> str:
        (tmp_path / "config.json").write_text(json.dumps(content))
        return str(tmp_path / "config.json")

    return write


def told(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["plan", *arguments]) == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    return shown.out


def found(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    return json.loads(told(capsys, *arguments, "--json"))


@pytest.mark.slow
def test_32b_on_eight_cards_is_told_what_it_needs_and_what_fits(
    config: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    machine = ("--gpu", "RTX 4090", "--devices", "8", "--switches", "4,4", "--ram", "512GB")
    shown = told(capsys, "--model", config(QWEN3_32B), *machine, "--batch", "8")
    assert "DOES NOT FIT: host memory is short by" in shown
    assert "full fine-tuning with whole masters needs 16 bytes a parameter, 524 GB and more before act" in shown
    fitting = shown.split("what would fit\n")[1].splitlines()
    assert fitting[0].startswith("  --lora 16: ")
    assert any(line.startswith("  --ram ") for line in fitting)
    assert len(shown.splitlines()) < 40


def test_a_small_model_is_told_all_on_one_screen(config: Write, capsys: pytest.CaptureFixture[str]) -> None:
    lines = told(capsys, "--model", config(TINY), *SMALL, "--devices", "2").splitlines()
    assert lines[0] == (
        "Qwen3ForCausalLM: 0.181 million parameters, 4 layers; full fine-tuning, adamw, fp32 masters"
    )
    assert lines[2:5] == ["a step: 8 sequences of 64 tokens", "", "fits"]
    starts = ["host memory", "device memory", "num_microbatch", "launch", "a step", "bound by", "stages"]
    assert [line.split("  ")[0] for line in lines[5:12]] == starts
    assert lines[-1].startswith("assumed: ")
    assert lines[-1].endswith("GB is 10^9 bytes.")
    assert len(lines) < 40


TABLE = {
    # name: config, options; fits, short of, bound by
    "it fits": (TINY, (), True, None, "GIL"),
    "one large microbatch computes for longer than launching takes": (
        TINY,
        ("--sequence", "2048", "--num-microbatch", "1"),
        True,
        None,
        "device",
    ),
    "a slow link": (TINY, ("--link", "0.00001"), True, None, "link"),
    "slow host memory": (TINY, ("--ram-gb-s", "0.0001"), True, None, "host memory"),
    "host memory is short": (TINY, ("--ram", "2MB"), False, "host", "GIL"),
    "device memory is short": (
        TINY,
        ("--gpu", "memory=601MB,link=10,tflops=1", "--sequence", "4096"),
        False,
        "device",
        None,
    ),
    "layers with transposed weights": (GPT_2, ("--lora", "4"), True, None, "GIL"),
    "a mixture of experts": (MIXTURE, (), True, None, "GIL"),
}


@pytest.mark.parametrize("case", TABLE)
def test_the_table_of_answers(case: str, config: Write, capsys: pytest.CaptureFixture[str]) -> None:
    content, options, fits, short, bound_by = TABLE[case]
    answer = found(capsys, "--model", config(content), *SMALL, *options)
    plan = answer["plan"]
    assert answer["fits"] is fits
    assert (answer["short"] or {"memory": None})["memory"] == short
    assert (plan and plan["bound_by"]) == bound_by


def test_switches_are_a_bound_of_their_own(config: Write, capsys: pytest.CaptureFixture[str]) -> None:
    slow = ("--devices", "4", "--switches", "4", "--link", "0.00001")
    assert found(capsys, "--model", config(TINY), *SMALL, *slow)["plan"]["bound_by"] == "switch"


SCHEMA: dict[str, Any] = {
    "fits": bool,
    "short": dict,
    "model": {
        "name": str,
        "named_by_config": str,
        "parameters": int,
        "trained_parameters": int,
        "layers": int,
        "optimizer": str,
        "optimizer_state": str,
        "step_in_backward": bool,
        "compute": str,
        "chooses_compute": bool,
        "launch": str,
        "chooses_launch": bool,
        "master": str,
        "expanded_bytes": int,
    },
    "machine": {
        "gpu": str,
        "devices": int,
        "device_memory_bytes": int,
        "link_gb_s": float,
        "bf16_tflops": float,
        "fp8_tflops": type(None),
        "device_memory_gb_s": float,
        "ram_bytes": int,
        "switches": list,
        "is_measured": bool,
    },
    "network": {
        "machines": int,
        "gb_s": float,
        "is_measured": bool,
        "sent_bytes_a_step": int,
        "step_s": float,
    },
    "batch": int,
    "sequence": int,
    "images": str,
    "host_bytes": dict.fromkeys(
        (
            *(
                "weights",
                "second_blocks",
                "codes_of_weights",
                "buffers",
                "gradients",
                "masters",
                "optimizer_state",
            ),
            *("activations_and_pool", "total", "kept_free"),
        ),
        int,
    ),
    "disk": type(None),
    "frozen": type(None),
    "plan": {
        "num_microbatch": int,
        "sequences_a_microbatch": int,
        "stages": list,
        "devices_used": int,
        "device_bytes": int,
        "graph_bytes": int,
        "step_s": float,
        "tokens_per_s": float,
        "bound_by": str,
        "busy_s": dict,
    },
    "changes": list,
    "assumed": {
        "utilisation": float,
        "launch_ms": float,
        "replay_launch_ms": float,
        "gil_ms_per_gb": float,
        "ram_gb_s": float,
        "network_share_of_its_name": float,
        "layers_are_compiled": bool,
        "operations_are_counted": bool,
    },
}


def check(value: Any, schema: Any) -> None:
    if isinstance(schema, dict):
        assert value.keys() == schema.keys()
        for name, inner in schema.items():
            check(value[name], inner)
    else:
        assert isinstance(value, schema)


@pytest.mark.later
def test_the_json_has_its_schema(config: Write, capsys: pytest.CaptureFixture[str]) -> None:
    several = ("--machines", "2", "--network", "1Gb")
    answer = found(capsys, "--model", config(TINY), *SMALL, "--ram", "1MB", "--num-microbatch", "2", *several)
    check(answer, SCHEMA)
    assert answer["plan"]["num_microbatch"] == 2
    assert {"kind", "layers", "tasks"} == answer["plan"]["stages"][0].keys()
    assert {"option", "fits", "host_bytes", "step_s", "tokens_per_s"} == answer["changes"][0].keys()
    assert answer["short"].keys() == {"memory", "bytes"}


@pytest.mark.slow
def test_what_would_fit_does_fit(config: Write, capsys: pytest.CaptureFixture[str]) -> None:
    path = config(TINY)
    answer = found(capsys, "--model", path, *SMALL, "--ram", "2MB")
    options = [change["option"] for change in answer["changes"]]
    assert len(options) > 1
    for option in options:
        again = found(capsys, "--model", path, *SMALL, "--ram", "2MB", *option.split())
        assert again["fits"], option


@pytest.mark.later
def test_where_no_option_is_enough_several_are_proposed_together(
    config: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ("--model", config(QWEN3_8B), "--gpu", "RTX 4090", "--ram", "64GB")
    answer = found(capsys, *given)
    changes = {change["option"]: change for change in answer["changes"]}
    several = {option: change for option, change in changes.items() if option.count("--") > 1}

    assert "--master split --step-in-backward --optimizer-state 8bit" in several
    assert not {"--master split", "--step-in-backward", "--optimizer-state 8bit"} & changes.keys()
    # None changes the optimizer where the same fits without.
    assert next(iter(several)).count("--optimizer ") == 0
    for option, change in several.items():
        then = found(capsys, *given, *option.split())
        assert then["fits"], option
        assert then["host_bytes"]["total"] == change["host_bytes"]


@pytest.mark.slow
def test_plans_that_differ_in_host_memory_only_are_searched_for_once(
    config: Write, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    searches: list[Any] = []
    search = foretold.fastest_count

    def counted(*given: Any, **more: Any) -> Any:
        searches.append(given)
        return search(*given, **more)

    monkeypatch.setattr(foretold, "fastest_count", counted)
    # A size that no other test has.
    answer = found(capsys, "--model", config(LARGER | {"intermediate_size": 1920}), *SMALL, "--ram", "150MB")

    assert len(answer["changes"]) >= 3
    # As it is; masters in halves; moments that move fewer bytes; adapters.
    assert len(searches) <= 4


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", ["32B", pytest.param("8B", marks=pytest.mark.nightly), pytest.param("70B", marks=pytest.mark.nightly)]
)
def test_dense_models_are_planned_with_few_simulations(
    case: str, config: Write, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    content, ram = {"8B": (QWEN3_8B, "64GB"), "32B": (QWEN3_32B, "512GB"), "70B": (LLAMA_70B, "256GB")}[case]
    events, run = itertools.count(1), Clock.run

    def counted(*given: Any) -> Any:
        next(events)
        return run(*given)

    monkeypatch.setattr(Clock, "run", counted)

    found(capsys, "--model", config(content), "--gpu", "RTX 4090", "--devices", "8", "--ram", ram)

    # It was 130,000 to 301,000: five to seven seconds of a processor. Of every plan there may be millions.
    assert 0 < next(events) - 1 < 500_000


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("options", "ram_gb_s"),
    [
        (("--gpu", "RTX 4090"), 60),
        (("--gpu", "RTX 3090", "--devices", "2", "--ram", "128GB"), 60),
        (("--gpu", "RTX 5090", "--devices", "4"), 165),
        (("--gpu", "RTX 4090", "--ram", "512GB"), 165),
        (("--gpu", "RTX 6000 Ada"), 165),
        (("--gpu", "RTX A6000"), 165),
        (("--gpu", "RTX 4090", "--ram-gb-s", "90"), 90),
    ],
)
def test_a_consumer_board_has_two_channels(
    options: tuple[str, ...], ram_gb_s: float, config: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    assumed = found(capsys, "--model", config(TINY), "--batch", "1", "--sequence", "64", *options)["assumed"]

    assert assumed["ram_gb_s"] == ram_gb_s


@pytest.mark.later
def test_a_terminal_is_told_what_is_tried_and_is_left_clean(
    config: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)

    assert main(["plan", "--model", config(TINY), *SMALL, "--ram", "2MB"]) == 0

    shown = terminal.getvalue()
    assert "\rtrying --master split ... " in shown
    assert not shown.rsplit("\r", 2)[1].strip()
    assert shown.endswith(" \r")


@pytest.mark.later
def test_smaller_moments_are_proposed_counted_and_told(config: Write, capsys: pytest.CaptureFixture[str]) -> None:
    machine = (*SMALL, "--num-microbatch", "2", "--model", config(TINY))
    changes = found(capsys, *machine, "--ram", "2.5MB")["changes"]
    assert any(change["option"].startswith("--optimizer-state ") for change in changes)
    whole, half, byte = (found(capsys, *machine, "--optimizer-state", kind) for kind in ("fp32", "bf16", "8bit"))
    # Beside the moments a counter for each tensor.
    states = [answer["host_bytes"]["optimizer_state"] for answer in (whole, half, byte)]
    trained = whole["model"]["trained_parameters"]
    assert states == pytest.approx([8 * trained, 4 * trained, 2.125 * trained], rel=0.01)
    assert byte["model"]["optimizer_state"] == "8bit"
    # A step with bf16 moves less. One with 8 bits does, too, but then computes for as long.
    busy = [answer["plan"]["busy_s"]["optimizer"] for answer in (whole, half, byte)]
    assert busy[1] < busy[0] == pytest.approx(busy[2], rel=0.01)
    assert "adamw with 8bit state, fp32 masters" in told(capsys, *machine, "--optimizer-state", "8bit")


@pytest.mark.later
def test_state_on_disk_is_proposed_counted_and_told(config: Write, capsys: pytest.CaptureFixture[str]) -> None:
    wide = QWEN3_8B | {"hidden_size": 1024, "intermediate_size": 8192, "num_hidden_layers": 4}
    machine = (
        "--batch",
        "4",
        "--sequence",
        "64",
        "--num-microbatch",
        "2",
        "--model",
        config(wide),
        "--gpu",
        "H200",
    )
    disk = ("--ram", "64GB", "--disk", "2TB", "--disk-gb-s", "7/6", "--disk-tbw", "1200")

    options = [change["option"] for change in found(capsys, *machine, "--ram", "6.6GB")["changes"]]
    there = found(capsys, *machine, *disk)
    said = told(capsys, *machine, *disk)
    full = told(capsys, *machine, "--disk", "1GB")
    halves = found(capsys, *machine, *disk, "--master", "split")
    masters = found(capsys, *machine, *disk, "--master", "disk")
    refused = main(["plan", *machine, "--master", "disk"])

    assert "--disk 1TB" in options
    # The blocks of the largest weight, the embedding, and as many bytes again.
    assert there["host_bytes"]["optimizer_state"] == pytest.approx(2 * 8 * 1024 * 151936, rel=0.01)
    on_disk, plan = there["disk"], there["plan"]
    state = on_disk["written_bytes_a_step"]
    assert state == pytest.approx(8 * there["model"]["trained_parameters"], rel=0.01)
    assert on_disk["step_s"] == pytest.approx(state / 7e9 + state / 6e9)
    assert plan["busy_s"]["disk"] == on_disk["step_s"]
    # Synchronous steps wait for it.
    assert plan["step_s"] > on_disk["step_s"]
    assert on_disk["written_tb_a_day"] == pytest.approx(state / 1e12 * 86400 / plan["step_s"])
    assert on_disk["rated_life_days"] == pytest.approx(1200 / on_disk["written_tb_a_day"])
    assert "GB written a step" in said
    assert "days of its rated 1200 TB" in said
    assert "bound by  the disk" in said
    assert "DOES NOT FIT: the disk is short by" in full
    trained = there["model"]["trained_parameters"]
    assert masters["disk"]["written_bytes_a_step"] == pytest.approx(10 * trained, rel=0.01)
    # The block of the embedding's halves, and six others.
    assert halves["host_bytes"]["masters"] == 2 * trained
    assert masters["host_bytes"]["masters"] == pytest.approx(2 * 1024 * 151936 + 6 * (64 << 20), rel=0.01)
    assert refused == 2
    assert "name it with --disk" in capsys.readouterr().err


@pytest.mark.later
def test_frozen_weights_on_disk_are_proposed_counted_and_told(
    config: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    wide = QWEN3_8B | {"hidden_size": 1024, "intermediate_size": 8192, "num_hidden_layers": 4}
    machine = ("--batch", "4", "--sequence", "64", "--model", config(wide), "--gpu", "H200", "--lora", "4")
    disk = ("--disk", "2TB", "--disk-gb-s", "0.5/6")

    small = ("--gpu", "memory=1.5GB,link=25,tflops=165", *machine[:-4], *machine[-2:])
    staged = found(capsys, *small, *disk, "--frozen", "disk")
    short = found(capsys, *machine, "--ram", "900MB")["changes"]
    before, there = found(capsys, *machine), found(capsys, *machine, *disk, "--frozen", "disk")
    said = told(capsys, *machine, *disk, "--frozen", "disk")
    full = told(capsys, *machine, "--disk", "0.5GB", "--frozen", "disk")
    refused = [
        main(["plan", *machine, "--frozen", "disk"]),
        main(["plan", *machine[:-2], *disk, "--frozen", "disk"]),
    ]

    assert "--disk 1TB --frozen disk" in [change["option"] for change in short]
    frozen, plan = there["frozen"], there["plan"]
    assert frozen["bytes"] == pytest.approx(
        2 * (before["model"]["parameters"] - before["model"]["trained_parameters"]), rel=1e-3
    )
    saved = before["host_bytes"]["total"] - there["host_bytes"]["total"]
    # Less the ring.
    assert saved == pytest.approx(frozen["bytes"] - (128 << 20), rel=0.05)
    # One task runs all layers, so each is read once, and before anything else can be done.
    assert [stage["layers"] for stage in plan["stages"]] == [[0, 6]]
    assert frozen["read_bytes_a_step"] == frozen["bytes"]
    assert frozen["step_s"] == pytest.approx(frozen["bytes"] / 0.5e9)
    assert frozen["before_anything_runs_s"] == frozen["step_s"]
    assert plan["step_s"] > frozen["step_s"] + plan["busy_s"]["device"]
    assert plan["bound_by"] == "disk"
    assert "read 1 times a step at 0.5 GB/s: " in said
    assert "before anything runs; that wears nothing" in said
    # In several stages, later ones are read meanwhile.
    frozen, plan = staged["frozen"], staged["plan"]
    assert len(plan["stages"]) > 1
    assert 0 < frozen["before_anything_runs_s"] < frozen["step_s"] / 2
    assert frozen["read_bytes_a_step"] > frozen["bytes"]
    assert frozen["hidden_from_batch"] > 4
    # Until the first one is there, nothing runs.
    least = frozen["step_s"] + staged["disk"]["step_s"]
    assert least < plan["step_s"] < 1.02 * least
    assert "DOES NOT FIT: the disk is short by" in full
    assert refused == [2, 2]
    errors = capsys.readouterr().err
    assert "name it with --disk" in errors
    assert "without adapters no weights are frozen" in errors


@pytest.mark.slow
def test_masters_in_halves_are_proposed_counted_and_told(
    config: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    machine = (*SMALL, "--num-microbatch", "2", "--model", config(TINY))
    options = [change["option"] for change in found(capsys, *machine, "--ram", "2.7MB")["changes"]]
    assert "--master split" in options
    whole, split = (found(capsys, *machine, "--master", kind) for kind in ("whole", "split"))
    trained = whole["model"]["trained_parameters"]
    assert [answer["host_bytes"]["masters"] for answer in (whole, split)] == [4 * trained, 2 * trained]
    assert split["model"]["master"] == "split"
    # With synchronous steps there are no second blocks.
    assert split["host_bytes"]["second_blocks"] == 0
    assert split["plan"]["busy_s"]["optimizer"] < whole["plan"]["busy_s"]["optimizer"]
    assert "adamw, fp32 masters in halves" in told(capsys, *machine, "--master", "split")


@pytest.mark.later
def test_masters_in_halves_of_several_machines_are_proposed_and_counted(
    config: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    machine = (*SMALL, "--num-microbatch", "2", "--model", config(TINY), "--machines", "2", "--network", "100Gb")
    options = [change["option"] for change in found(capsys, *machine, "--ram", "2.1MB")["changes"]]
    assert "--master split" in options
    whole, split = (found(capsys, *machine, "--master", kind) for kind in ("whole", "split"))
    assert whole["host_bytes"]["masters"] == 2 * split["host_bytes"]["masters"]
    # Each has those of what it owns: the larger share is told.
    trained = whole["model"]["trained_parameters"]
    assert trained <= split["host_bytes"]["masters"] < 1.2 * trained
    assert split["host_bytes"]["second_blocks"] == 0
    assert split["plan"]["busy_s"]["optimizer"] < whole["plan"]["busy_s"]["optimizer"]


def test_other_masters_are_not_planned_for(config: Write, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *SMALL, "--model", config(TINY), "--master", "halved"]) == 2
    assert "--master must be one of whole, split, disk, but is 'halved'" in capsys.readouterr().err


@pytest.mark.later
def test_muon_has_half_of_the_state_for_hidden_matrices_and_takes_longer(
    config: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    machine = (*SMALL, "--num-microbatch", "2", "--model", config(TINY))
    adamw, muon = (found(capsys, *machine, "--optimizer", name) for name in ("adamw", "muon"))
    states = [answer["host_bytes"]["optimizer_state"] for answer in (adamw, muon)]
    shapes = [found for layer in range(TINY["num_hidden_layers"]) for found in hidden_shapes(TINY)]
    hidden = sum(rows * cols for rows, cols in shapes)
    # Beside the moments a counter for each tensor that AdamW updates.
    assert states[0] - states[1] == 4 * hidden + 4 * len(shapes)
    busy = [answer["plan"]["busy_s"]["optimizer"] for answer in (adamw, muon)]
    assert busy[1] > 1.5 * busy[0]


def hidden_shapes(config: dict[str, Any]) -> list[tuple[int, int]]:
    """Of the matrices of one layer."""
    width, inner, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    head = config.get("head_dim", width // heads)
    groups = config["num_key_value_heads"]
    return [
        (heads * head, width),
        (groups * head, width),
        (groups * head, width),
        (width, heads * head),
        *[(inner, width)] * 3,
    ]


@pytest.mark.later
def test_less_ram_than_is_proposed_does_not_fit(config: Write, capsys: pytest.CaptureFixture[str]) -> None:
    path = config(TINY | {"hidden_size": 4096, "intermediate_size": 16384})
    machine = ("--gpu", "RTX 4090", "--batch", "2", "--sequence", "64")
    options = [
        change["option"].split()
        for change in found(capsys, "--model", path, *machine, "--ram", "5GB")["changes"]
        if change["option"].startswith("--ram")
    ]
    (flag, size), *_ = options
    less = f"{int(size.removesuffix('GB')) - 1}GB"
    assert found(capsys, "--model", path, *machine, flag, size)["fits"]
    assert not found(capsys, "--model", path, *machine, flag, less)["fits"]


LARGER = TINY | {"hidden_size": 512, "intermediate_size": 2048}
CARD = "memory=2GB,link=10,tflops=1"
# Where something is short, or could be faster: config, and options that are each given once.
SUGGESTING: dict[str, tuple[Mapping[str, object], dict[str, str]]] = {
    "short of RAM": (LARGER, {"--gpu": CARD, "--ram": "200MB", "--batch": "8", "--sequence": "256"}),
    "adapters short of RAM": (LARGER, {"--gpu": CARD, "--ram": "32MB", "--sequence": "64", "--lora": "4"}),
    "short of device memory": (
        LARGER,
        {"--gpu": "memory=610MB,link=1,tflops=1", "--ram": "8GB", "--batch": "2", "--link": "0.01"},
    ),
    "microbatches that are given": (
        TINY,
        {"--gpu": CARD, "--ram": "4GB", "--batch": "8", "--sequence": "2048", "--num-microbatch": "5"},
    ),
    "switches of two sizes": (
        TINY,
        {"--gpu": CARD, "--ram": "4GB", "--sequence": "4096", "--devices": "3", "--switches": "2,1"},
    ),
    "several machines": (
        LARGER,
        {"--gpu": CARD, "--ram": "200MB", "--sequence": "256", "--machines": "2", "--network": "1Gb"},
    ),
}


@pytest.mark.few(1)
@pytest.mark.parametrize("case", one_in(4, SUGGESTING))
def test_what_is_suggested_keeps_what_it_promises(
    case: str, config: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    content, options = SUGGESTING[case]
    given = {"--model": config(content), **options}
    suggested = found(capsys, *(word for pair in given.items() for word in pair))["changes"]
    assert suggested
    for change in suggested:
        words = shlex.split(change["option"])
        if words == ["--machines", "1"]:
            words += ["--network", ""]
        flags = [word for word in words if word == "--step-in-backward"]
        pairs = [word for word in words if word not in flags]
        changed = given | dict(zip(pairs[::2], pairs[1::2], strict=True))
        applied = [word for flag, value in changed.items() if value for word in (flag, value)]
        then = found(capsys, *applied, *flags)
        assert then["fits"], change
        assert then["host_bytes"]["total"] == change["host_bytes"], change
        assert then["plan"]["step_s"] == pytest.approx(change["step_s"]), change


@pytest.mark.later
@pytest.mark.parametrize("memory", one_in(3, [600 * 10**6, 1, 650 * 10**6]))
def test_with_what_is_short_on_a_device_it_fits(
    memory: int, config: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--model", config(LARGER), "--batch", "2", "--ram", "64GB")
    short = found(capsys, *options, "--gpu", f"memory={memory}B,link=1,tflops=1")["short"]
    assert short["memory"] == "device"
    enough = memory + short["bytes"]
    assert found(capsys, *options, "--gpu", f"memory={enough}B,link=1,tflops=1")["fits"]
    less = found(capsys, *options, "--gpu", f"memory={enough - 10**4}B,link=1,tflops=1")["short"]
    assert less["memory"] == "device"


@pytest.mark.slow
def test_a_config_of_another_class_is_told(config: Write, capsys: pytest.CaptureFixture[str]) -> None:
    line = "the config names Qwen3ForSequenceClassification: this is its language model, for which"
    other = TINY | {"architectures": ["Qwen3ForSequenceClassification"]}
    assert line in told(capsys, "--model", config(other), *SMALL)
    assert found(capsys, "--model", config(other), *SMALL)["model"]["named_by_config"] == other["architectures"][0]
    own = TINY | {"architectures": ["Qwen3ForCausalLM"]}
    assert "the config names" not in told(capsys, "--model", config(own), *SMALL)


def test_without_ram_it_is_told_how_much_there_must_be(config: Write, capsys: pytest.CaptureFixture[str]) -> None:
    assert "fits the devices; the host must have " in told(capsys, "--model", config(TINY), *SMALL[:6])


def test_twice_the_devices_are_told_if_they_pay(config: Write, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--model", config(TINY), *SMALL, "--sequence", "4096")
    one = found(capsys, *arguments)
    (change,) = [change for change in one["changes"] if change["option"] == "--devices 2"]
    two = found(capsys, *arguments, "--devices", "2")["plan"]["tokens_per_s"]
    assert change["tokens_per_s"] == pytest.approx(two, rel=0.05)
    assert two > 1.5 * one["plan"]["tokens_per_s"]


FOUR = ("--machines", "4", "--network", "100Mb")


@pytest.mark.few(1)
@pytest.mark.parametrize("count", [1, 2])
def test_a_measured_machine_has_no_more_devices_than_are_there(
    count: int, config: Write, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    card = Card("here", 2 * 10**9, 10.0, 1.0)
    monkeypatch.setattr("rp_estimate.cases._here", lambda _: Machine(card, 1, None, 165.0, is_measured=True))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    arguments = ("--model", config(TINY), *SMALL[2:], "--sequence", "4096")
    suggested = [change["option"] for change in found(capsys, *arguments, *FOUR)["changes"]]
    assert suggested.count("--devices 2") == count - 1
    assert "--machines 8" in suggested


def test_four_machines_hold_and_send_what_the_arithmetic_says(
    config: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    answer = found(capsys, "--model", config(TINY), *SMALL, *FOUR)
    parameters, host, network = answer["model"]["parameters"], answer["host_bytes"], answer["network"]
    assert parameters == 512 * 64 + 4 * (64 * (64 + 64 + 3 * 128 + 64) + 2 * 64 + 2 * 16) + 64
    # 2 + 2 bytes a parameter, 2 for second blocks, and a quarter of 4 for sums, 4 for masters and 8 for moments;
    # owners have whole parameters, so shares are not quite equal.
    share = parameters / 4
    assert host["weights"] == host["second_blocks"] == pytest.approx(2 * parameters, rel=0.01)
    assert host["gradients"] == pytest.approx(2 * parameters + 4 * share, rel=0.02)
    assert host["masters"] == pytest.approx(4 * share, rel=0.02)
    assert host["optimizer_state"] == pytest.approx(8 * share, rel=0.02)
    # 2 * (n - 1) / n * 2 bytes a parameter each way, at nine tenths of 100 * 10^6 bits a second.
    assert network["sent_bytes_a_step"] == pytest.approx(2 * 3 / 4 * 2 * parameters, rel=0.05)
    assert network["gb_s"] == pytest.approx(0.9 * 0.1 / 8)
    assert network["step_s"] == pytest.approx(network["sent_bytes_a_step"] / (0.9 * 100e6 / 8))
    assert answer["plan"]["bound_by"] == "network"
    assert answer["plan"]["step_s"] == answer["plan"]["busy_s"]["network"] == network["step_s"]
    assert answer["plan"]["tokens_per_s"] == pytest.approx(8 * 64 / network["step_s"])
    assert answer["plan"]["num_microbatch"] in (4, 8)


def test_a_bounding_network_is_told_with_the_nearest_that_pays(
    config: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = told(capsys, "--model", config(TINY), *SMALL, *FOUR)
    assert "4 machines like this; network 0.0112 GB/s from each and as much to it (100Mb)" in shown
    assert "host memory of each machine  " in shown
    assert "bound by  the network; busy in a step: network " in shown
    assert "assumed: a network carries 90% of its name" in shown
    paying = [line.split(":")[0].strip() for line in shown.split("what would pay\n")[1].splitlines()]
    assert "--network 10Gb" in paying
    assert "--batch 16" in paying
    # One machine has no network.
    assert "--machines 1" in paying


@pytest.mark.slow
def test_a_fast_network_bounds_nothing_and_more_machines_need_less_memory_each(
    config: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    path = config(TINY)
    fast = found(capsys, "--model", path, *SMALL, "--machines", "4", "--network", "11GB")
    assert fast["plan"]["bound_by"] == "GIL"
    assert fast["network"]["step_s"] < fast["plan"]["step_s"]
    short = ("--model", path, *SMALL, "--network", "11GB", "--ram", "1.9MB")
    assert not found(capsys, *short, "--machines", "2")["fits"]
    assert "--machines 4" in [change["option"] for change in found(capsys, *short, "--machines", "2")["changes"]]
    assert found(capsys, *short, "--machines", "4")["fits"]


WRONG = {
    "machines without a network": ["--machines", "2"],
    "a network of one machine": ["--network", "100Gb"],
    "a network in no unit": ["--machines", "2", "--network", "100"],
    "a network in words": ["--machines", "2", "--network", "fast"],
    "no machine": ["--machines", "0", "--network", "1Gb"],
    "more machines than sequences": ["--machines", "33", "--network", "1Gb"],
    "fewer microbatches than machines": ["--machines", "4", "--network", "1Gb", "--num-microbatch", "2"],
    "no model": [],
    "a model that is nowhere": ["--model", "nowhere/config.json"],
    "an empty path": ["--model", ""],
    "a path that no system takes": ["--model", "a\0b"],
    "an unknown card": ["--gpu", "RTX 9999"],
    "a card without its link": ["--gpu", "memory=24GB,tflops=165"],
    "a card with two links": ["--gpu", "memory=24GB,link=1,link=2,tflops=165"],
    "a card with memory in no unit": ["--gpu", "memory=24G,link=25,tflops=165"],
    "a card that is infinitely fast": ["--gpu", "memory=24GB,link=25,tflops=inf"],
    "no device": ["--devices", "0"],
    "too many devices": ["--devices", "9999"],
    "devices that are no number": ["--devices", "cuda:0"],
    "RAM in words": ["--ram", "much"],
    "no RAM": ["--ram", "0"],
    "RAM without a unit": ["--ram", "64"],
    "a card whose FP8 is no rate like the other": ["--gpu", "memory=24GB,link=25,tflops=165,fp8=1000"],
    "a card with memory without a unit": ["--gpu", "memory=24,link=25,tflops=165"],
    "more RAM than there is": ["--ram", "99999999999999TiB"],
    "RAM that stands still": ["--ram-gb-s", "0"],
    "a link that is no number": ["--link", "fast"],
    "a negative link": ["--link", "-1"],
    "switches that do not add up": ["--devices", "8", "--switches", "4,3"],
    "a switch of none": ["--devices", "4", "--switches", "4,0"],
    "switches in words": ["--switches", "two"],
    "an empty batch": ["--batch", "0"],
    "half a sequence": ["--sequence", "1.5"],
    "a sequence without end": ["--sequence", "9" * 4000],
    "adapters of rank 0": ["--lora", "0"],
    "an unknown optimizer": ["--optimizer", "adamww"],
    "an unknown kind of state": ["--optimizer-state", "4bit"],
    "no microbatch": ["--num-microbatch", "0"],
    "more microbatches than sequences": ["--batch", "4", "--num-microbatch", "5"],
    "microbatches in words": ["--num-microbatch", "some"],
    "more than all TFLOP/s": ["--utilisation", "1.5"],
    "an option cut short": ["--seq", "3"],
    "an option with dashes for a value": ["--gpu=--"],
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_option_is_refused_in_one_line(
    case: str, config: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    model = [] if case == "no model" else ["--model", config(TINY)]
    assert refused(capsys, *model, *SMALL[:2], *WRONG[case])


@pytest.mark.later
def test_products_in_fp8_are_priced_by_the_cards_rate(config: Write, capsys: pytest.CaptureFixture[str]) -> None:
    # Products that take longer than anything else; one microbatch, so that all have the same plan.
    model = ("--model", config(TINY | {"hidden_size": 1024, "intermediate_size": 4096, "dtype": "bfloat16"}))
    gpu = "memory=20GB,link=1000,tflops=0.1,fp8=0.2"
    usual = (*model, "--batch", "4", "--num-microbatch", "1", "--sequence", "512", "--ram", "9GB", "--gpu")

    seconds = {
        words: found(capsys, *usual, words, "--compute", kind)["plan"]["busy_s"]["device"]
        for words, kind in (
            (gpu, "bf16"),
            (gpu.replace("0.2", "0.4") + ",bandwidth=1000", "fp8"),
            (gpu + ",bandwidth=1000", "fp8"),
            (gpu + " ", "fp8"),
            (gpu + ",bandwidth=0.1", "fp8"),
        )
    }
    shown = found(capsys, *usual, gpu, "--compute", "fp8")

    bf16, fourfold, free_casts, twice, dear_casts = seconds.values()
    # 1 / (1 + 0.68 * 1) and 1 / (1 + 0.68 * 3) of the linear layers' part.
    assert (bf16 - fourfold) / (bf16 - free_casts) == pytest.approx((1 - 1 / 3.04) / (1 - 1 / 1.68), rel=1e-3)
    # Half of the card's rate is reached in all, 0.75 of it by products, which are most of the work.
    assert 1 - (1 - 1 / 1.68) * 0.5 / 0.75 < free_casts / bf16 < 0.8
    # Casts take memory's time: 6.11 GB/s are assumed for each 10^12 operations a second.
    assert (dear_casts - free_casts) / (twice - free_casts) == pytest.approx(0.611 / 0.1, rel=1e-2)
    assert shown["machine"]["fp8_tflops"] == 0.2
    assert shown["machine"]["device_memory_gb_s"] == pytest.approx(0.611, rel=1e-2)
    assert shown["model"]["compute"] == "fp8"
    # FP8 of the same rate, and none, gain nothing.
    chosen = {
        words: found(capsys, *usual, words, "--compute", "auto")
        for words in (gpu, gpu.replace("fp8=0.2", "fp8=0.1"), gpu.replace(",fp8=0.2", ""))
    }
    assert [each["model"]["compute"] for each in chosen.values()] == ["fp8", "bf16", "bf16"]
    assert all(each["model"]["chooses_compute"] for each in chosen.values())
    assert [each["plan"]["busy_s"]["device"] for each in chosen.values()] == [twice, bf16, bf16]
    assert ", products in fp8, as is faster by the card's rates" in told(capsys, *usual, gpu, "--compute", "auto")
    # Without room for codes on the host, beside second blocks there or without these, weights travel in bf16.
    least = usual[: usual.index("--ram")]
    rams = ["9GB"]
    for _ in range(2):
        tight = found(capsys, *least, "--gpu", gpu, "--compute", "auto", "--ram", rams[-1])
        rams.append(f"{tight['host_bytes']['total'] / 1e9 - 1e-3:.4f}GB")
    tight = found(capsys, *least, "--gpu", gpu, "--compute", "auto", "--ram", rams[-1])
    assert tight["model"]["compute"] == "fp8-cast"
    assert tight["fits"]
    sums = ("RTX 4090", "H100")
    rates = [
        [
            found(capsys, *usual, card, "--compute", kind)["plan"]["busy_s"]["device"]
            for kind in ("bf16", "fp16-sums")
        ]
        for card in sums
    ]
    assert [bf16 / fp16 for bf16, fp16 in rates] == pytest.approx([2, 1])


def test_ram_without_a_unit_is_refused_with_the_way_to_write_it(
    config: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "--ram: a size must have a unit, such as '64GB'" in refused(
        capsys, "--model", config(TINY), *SMALL[:2], "--ram", "64"
    )


REFUSED_WITH = {
    "FP8 on a card that has none": (
        TINY | {"dtype": "bfloat16"},
        ["--gpu", "RTX 3090", "--compute", "fp8"],
        "--compute fp8: RTX 3090 has no products in FP8, or their rate is not known; omit it, or describe the GPU",
    ),
    "more positions than the model has": (GPT_2, ["--sequence", "2048"], "--sequence must be at most 1024, the"),
    "more microbatches than sequences": (
        TINY,
        ["--batch", "4", "--num-microbatch", "5"],
        "at least 1 and at most 4, the --batch, but is '5'",
    ),
    "an option in another spelling": (
        TINY,
        ["--utilization", "0.4"],
        "unknown argument '--utilization'; the nearest option is --utilisation",
    ),
    "no language model": (
        {"model_type": "t5"},
        [],
        "no language model can be created from it: Unrecognized config",
    ),
}


@pytest.mark.later
@pytest.mark.parametrize("case", REFUSED_WITH)
def test_what_is_wrong_is_told_in_a_line_that_one_reads(
    case: str, config: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    content, options, words = REFUSED_WITH[case]
    shown = refused(capsys, "--model", config(content), "--gpu", "H100", *options)
    assert words in shown
    assert len(shown) < 600


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["plan", *arguments]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.count("\n") == 1
    return shown.err


NO_MODEL = {
    "no JSON": "{",
    "a list": "[]",
    "no kind": "{}",
    "an unknown kind": '{"model_type": "no-such-model"}',
    "no language model": '{"model_type": "vit"}',
    "quantized weights": json.dumps(TINY | {"quantization_config": {"quant_method": "fp8"}}),
    "a billion layers": json.dumps(TINY | {"num_hidden_layers": 10**9}),
    "layers that are no number": json.dumps(TINY | {"num_hidden_layers": "many"}),
    "heads that do not divide": json.dumps(TINY | {"hidden_size": -1}),
}


@pytest.mark.parametrize("case", NO_MODEL)
def test_a_config_that_is_none_is_refused_in_one_line(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(NO_MODEL[case])
    assert "--model" in refused(capsys, "--model", str(tmp_path), "--gpu", "H100")


def test_this_machine_without_a_gpu_is_refused(
    config: Write, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "--gpu must be given, such as --gpu 'RTX 4090'" in refused(capsys, "--model", config(TINY))


def test_more_gpus_than_this_machine_has_are_refused(
    config: Write, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert "--devices must be at most 2 here" in refused(capsys, "--model", config(TINY), "--devices", "3")


def test_a_folder_is_read_like_its_config(config: Write) -> None:
    path = config(TINY)
    options = [
        read(PlanOptions, parse(["plan", "--model", given, *SMALL])) for given in (path, str(Path(path).parent))
    ]
    assert options[0] == options[1]


def test_endless_files_are_no_models() -> None:
    with pytest.raises(Refused):
        read(PlanOptions, parse(["plan", "--model", "/dev/zero", *SMALL]))
