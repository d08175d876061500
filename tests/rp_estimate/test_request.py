"""A request that does not go together is refused where it is made; one that does is what the command asks."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rp_adapters import Adapters
from rp_cli.main import main
from rp_estimate import Calibration, Network, Request, as_json, card_named, case_of, changes, foretell
from rp_trainer.errors import Refused
from transformers import Qwen3Config

CALIBRATION = Calibration(
    gpu="H100",
    devices=1,
    memory_bytes=1,
    link_gb_s=1.0,
    tflops=1.0,
    ram_bytes=1,
    ram_gb_s=1.0,
    utilisation=0.5,
    torch="2",
)
WRONG: dict[str, dict[str, Any]] = {
    "master must be one of": {"master": "halves"},
    "sequence must be at least 1": {"sequence": 0},
    "give one of them": {"card": card_named("H100"), "calibration": CALIBRATION},
    "switches must add up": {"switches": (4, 4), "devices": 4},
    "none without adapters": {"pack": "nf4"},
    "needs disk_bytes": {"frozen": "disk", "adapters": Adapters(rank=8)},
    "is for one machine": {"step_in_backward": True, "network": Network.named(2, "100Gb")},
    "at least the number of machines": {"batch": 1, "network": Network.named(2, "100Gb")},
}


@pytest.mark.parametrize(("words", "given"), WRONG.items())
def test_what_does_not_go_together_is_refused_when_it_is_made(words: str, given: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=words):
        Request(model=Path("config.json"), **given)


def test_an_optimizer_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="--optimizer must be one of adam"):
        case_of(Request(model=tmp_path, card=card_named("H100"), optimizer="adamm"))


def test_a_request_is_answered_as_the_command_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    Qwen3Config(**sizes, head_dim=16, num_hidden_layers=2, vocab_size=160).save_pretrained(tmp_path)
    request = Request(
        model=tmp_path / "config.json",
        card=card_named("RTX 4090"),
        devices=2,
        ram_bytes=64 * 10**9,
        batch=8,
        sequence=64,
    )

    answer = foretell(case_of(request))

    machine = ["--gpu", "RTX 4090", "--devices", "2", "--ram", "64GB", "--json"]
    assert main(["plan", "--model", str(tmp_path), "--batch", "8", "--sequence", "64", *machine]) == 0
    assert json.loads(as_json(answer, changes(request, answer))) == json.loads(capsys.readouterr().out)


def test_a_calibrated_card_of_the_table_has_the_tables_memory(tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    Qwen3Config(**sizes, head_dim=16, num_hidden_layers=2, vocab_size=160).save_pretrained(tmp_path)
    line = replace(CALIBRATION, gpu="NVIDIA L4", memory_bytes=24 << 30, ram_bytes=64 * 10**9)
    request = Request(model=tmp_path / "config.json", calibration=line, batch=8, sequence=64)
    assert case_of(request).machine.card.memory_gb_s == 300
