"""The examples run: tiny, on two CPU devices; each does what its first line says."""

from __future__ import annotations

import importlib.util
import sys
from importlib.metadata import version
from pathlib import Path
from types import ModuleType

import pytest
import torch
from packaging.version import Version
from pages import ROOT

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
TRAINING = [
    "full_finetuning", "lora", "resnet", "encoder_decoder", "distillation", "own_schedule", "optimizer_alone"
]  # fmt: skip
WITH_TRL = ["sft", "dpo", "kto"]
NEEDS_KERNEL = pytest.mark.skipif(
    Version(version("trl")) < Version("1.16") and not torch.cuda.is_available(),
    reason="TRL before 1.16 computes losses by a Triton kernel",
)

pytestmark = [pytest.mark.filterwarnings("ignore:.*parts were requested"), pytest.mark.usefixtures("default")]


def example(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    found = importlib.util.spec_from_file_location(f"example_{name}", ROOT / f"examples/{name}.py")
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    found.loader.exec_module(module)
    return module


@pytest.mark.slow
@pytest.mark.parametrize("name", TRAINING)
def test_an_example_that_trains_has_falling_losses(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    losses = example(name, monkeypatch).main(["--tiny"])
    assert sum(losses[-3:]) / 3 < 0.98 * losses[0]


@pytest.mark.slow
@NEEDS_KERNEL
@pytest.mark.parametrize("name", WITH_TRL)
def test_an_example_of_trls_has_falling_losses(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    losses = example(name, monkeypatch).main(["--tiny"])
    assert sum(losses[-3:]) / 3 < 0.95 * losses[0]


@pytest.mark.slow
@NEEDS_KERNEL
def test_the_example_of_reinforcement_has_rising_rewards(monkeypatch: pytest.MonkeyPatch) -> None:
    rewards = example("grpo", monkeypatch).main(["--tiny"])
    assert sum(rewards[-3:]) / 3 > 2 * sum(rewards[:3]) / 3


@pytest.mark.slow
def test_the_splitter_has_the_loss_of_the_whole_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    merged, whole = example("splitter_alone", monkeypatch).main(["--tiny"])
    assert merged == pytest.approx(whole)


def test_the_transfer_layer_has_the_result_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    (difference,) = example("transfer_alone", monkeypatch).main(["--tiny"])
    assert difference < 1e-5


def test_the_transfer_layer_notices_a_forgotten_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match=r"matrix 0 on .* is not ordered after copy"):
        example("transfer_alone", monkeypatch).main(["--tiny", "--forget"])


def test_the_planner_is_at_least_as_fast_as_round_robin(monkeypatch: pytest.MonkeyPatch) -> None:
    best, published = example("planner_alone", monkeypatch).main(["--tiny"])
    assert 0 < best <= published


def test_a_taken_apart_model_runs_on_the_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    # What is left on the host would train as well.
    import roundpipe

    module = example("encoder_decoder", monkeypatch)
    model = roundpipe.wrap_model_to_roundpipe(
        module.Translator(32, 2, 6), use_sequential_preset=False, lower_threshold=8 * 1024
    )
    assert isinstance(model, roundpipe.AutoRoundPipe)
    assert len(model.parts) >= 4


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_is_short_and_is_run_here(path: Path) -> None:
    assert len(path.read_text().splitlines()) < 100
    assert f'"{path.stem}"' in Path(__file__).read_text()
