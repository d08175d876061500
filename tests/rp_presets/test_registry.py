"""Which models find a preset, and what the others are told."""

import doctest
import importlib
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest
import rp_presets
from rp_presets import UnsupportedModel, supported, to_sequential
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM, Qwen3Model

TINY = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
}


class OtherForward(Qwen3ForCausalLM):
    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs)


class OnlyRenamed(Qwen3ForCausalLM):
    pass


def test_every_supported_type_is_listed_in_order():
    assert supported() == ("qwen3",)


@pytest.mark.parametrize(
    ("make_model", "names"),
    [
        (lambda: LlamaForCausalLM(LlamaConfig(**TINY)), ["'llama'", "LlamaForCausalLM"]),
        (lambda: Qwen3Model(Qwen3Config(**TINY)), ["'qwen3'", "Qwen3Model"]),
        (lambda: OtherForward(Qwen3Config(**TINY)), ["'qwen3'", "OtherForward"]),
        (lambda: nn.Linear(2, 2), ["Linear"]),
    ],
)
def test_an_unsupported_model_is_told_its_type_its_class_and_what_is_supported(make_model, names):
    with pytest.raises(UnsupportedModel) as raised:
        to_sequential(make_model())
    for name in [*names, "qwen3 (Qwen3ForCausalLM)"]:
        assert name in str(raised.value)
    assert isinstance(raised.value, NotImplementedError)


def test_a_subclass_with_the_same_forward_is_converted():
    assert len(to_sequential(OnlyRenamed(Qwen3Config(**TINY)))) == 3


def test_what_is_no_module_is_refused():
    with pytest.raises(TypeError, match=r"torch\.nn\.Module, but is a str"):
        to_sequential("Qwen/Qwen3-8B")


def test_importing_the_package_does_not_import_transformers():
    code = "import sys, rp_presets; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


@pytest.mark.parametrize("name", [module.name for module in pkgutil.iter_modules(rp_presets.__path__)])
def test_every_example_in_a_docstring_runs(name):
    outcome = doctest.testmod(importlib.import_module(f"rp_presets.{name}"))
    assert outcome.failed == 0


def test_every_example_in_the_readme_runs():
    readme = Path(__file__).parents[2] / "packages/rp-presets/README.md"
    outcome = doctest.testfile(str(readme), module_relative=False)
    assert outcome.attempted > 0
    assert outcome.failed == 0
