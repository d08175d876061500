"""Presets reach the core by their entry point; without them everything but models of transformers works."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import rp_presets
import torch
from roundpipe import RoundPipe, Runtime, from_pretrained, save_checkpoint, wrap_model_to_roundpipe
from roundpipe.models import presets as found_by
from roundpipe.models.presets import Presets, presets
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

SIZES = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2}


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if no presets were installed."""
    monkeypatch.setattr(found_by, "presets", lambda: None)


def llama() -> nn.Module:
    return LlamaForCausalLM(LlamaConfig(**SIZES, num_attention_heads=2))


def test_the_entry_point_leads_to_rp_presets_which_has_all_that_is_asked_for() -> None:
    assert presets() is rp_presets
    asked = {name for name in [*vars(Presets), *Presets.__annotations__] if name[0] != "_"}
    assert len(asked) == 8
    assert all(hasattr(rp_presets, name) for name in asked)


@pytest.mark.slow
def test_importing_the_core_and_wrapping_a_row_imports_neither_presets_nor_transformers() -> None:
    program = """
import sys, torch
from torch import nn
from roundpipe import RoundPipe, Runtime
with Runtime("cpu:1") as runtime:
    model = RoundPipe(nn.Sequential(nn.Linear(4, 4)), runtime=runtime)
    model.forward_backward((torch.ones(2, 4),), loss_fn=lambda outputs, _: outputs.sum())
print(sorted({"rp_presets", "transformers"} & sys.modules.keys()))
"""

    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout

    assert told == "[]\n"


@pytest.mark.usefixtures("without")
def test_without_presets_a_model_of_transformers_is_refused_with_what_to_install(
    two: Runtime, tmp_path: Path
) -> None:
    words = r"install rp-presets: pip install 'rp-core\[hf\]'"

    with pytest.raises(ImportError, match=f"to wrap a LlamaForCausalLM .*{words}"):
        wrap_model_to_roundpipe(llama(), runtime=two)
    with pytest.raises(ImportError, match=f"to load a checkpoint of transformers, {words}"):
        from_pretrained(tmp_path, runtime=two)
    with pytest.raises(ImportError, match=words):
        wrap_model_to_roundpipe(nn.Linear(2, 2), use_sequential_preset=True, runtime=two)


@pytest.mark.usefixtures("without")
def test_without_presets_it_can_be_taken_apart_but_not_saved_in_a_layout_of_others(
    two: Runtime, tmp_path: Path
) -> None:
    model = wrap_model_to_roundpipe(llama(), use_sequential_preset=False, lower_threshold=1, runtime=two)

    with pytest.raises(ImportError, match="to save a LlamaForCausalLM, install rp-presets"):
        save_checkpoint(tmp_path / "saved", model)

    assert not (tmp_path / "saved").exists()


@pytest.mark.usefixtures("without")
def test_without_presets_other_models_are_wrapped_and_saved(two: Runtime, tmp_path: Path) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(self.first(x))

    apart = wrap_model_to_roundpipe(Two(), lower_threshold=1, runtime=two)
    row = RoundPipe(nn.Sequential(nn.Linear(2, 2)), runtime=two)

    assert apart(torch.ones(2, 2)).shape == (2, 2)
    assert save_checkpoint(tmp_path / "saved", row).path.exists()


def test_a_python_that_has_only_the_sources_finds_them_by_written_metadata(tmp_path: Path) -> None:
    script = Path(__file__).parents[2] / "scripts" / "source-metadata"
    subprocess.run([sys.executable, script, tmp_path], check=True, capture_output=True)
    program = f"""
from importlib.metadata import distributions
found = (point for one in distributions(path=[{str(tmp_path)!r}]) for point in one.entry_points)
print(*sorted((point.group, point.name, point.value) for point in found))
"""

    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout

    presets = ("roundpipe.presets", "transformers", "rp_presets")
    machines = ("rp_engine.peers", "machines", "rp_machines:open_peers")
    assert told == f"{presets} {machines}\n"
