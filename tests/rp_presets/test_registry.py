"""What is converted, what is refused, and the examples of the package."""

import doctest
import importlib
import pkgutil
from pathlib import Path

import pytest
import rp_presets
from programs import TORCH, ended
from rp_presets import UnsupportedModel, to_sequential
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM, Qwen3Model

TINY = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
}


class OtherForward(Qwen3ForCausalLM):
    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs)


class OnlyRenamed(Qwen3ForCausalLM):
    pass


@pytest.mark.parametrize(
    "make_model",
    [
        lambda: LlamaForCausalLM(LlamaConfig(**TINY)),
        lambda: Qwen3Model(Qwen3Config(**TINY)),
        lambda: OtherForward(Qwen3Config(**TINY)),
        lambda: OnlyRenamed(Qwen3Config(**TINY)),
    ],
)
def test_no_class_needs_to_be_known(make_model):
    assert [type(layer).__name__ for layer in to_sequential(make_model())] == [
        "Prologue",
        "Layer",
        "Layer",
        "Epilogue",
    ]


def test_a_model_without_lists_of_layers_is_refused():
    with pytest.raises(UnsupportedModel, match=r"Linear has no list of layers \(nn\.ModuleList\)") as raised:
        to_sequential(nn.Linear(2, 2))
    assert isinstance(raised.value, NotImplementedError)


def test_what_is_no_module_is_refused():
    with pytest.raises(TypeError, match=r"torch\.nn\.Module, but is a str"):
        to_sequential("Qwen/Qwen3-8B")


def test_inputs_of_a_model_without_a_config_are_to_be_given():
    class Unknown(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(2, 2)])

    with pytest.raises(UnsupportedModel, match=r"Unknown has no config.*example_inputs"):
        to_sequential(Unknown())


@pytest.mark.slow
def test_importing_the_package_does_not_import_transformers():
    code = "import sys, rp_presets; sys.exit('transformers' in sys.modules)"
    assert ended(code, imports=TORCH) == (0, "", "")


MODULES = [module.name for module in pkgutil.walk_packages(rp_presets.__path__, "rp_presets.")]


@pytest.mark.parametrize("name", MODULES)
def test_every_example_in_a_docstring_runs(name):
    outcome = doctest.testmod(importlib.import_module(name))
    assert outcome.failed == 0


def test_the_modules_of_all_folders_are_found():
    assert {"rp_presets.convert", "rp_presets.observing.trace", "rp_presets.rows.trees"} <= set(MODULES)


def test_every_example_in_the_readme_runs():
    readme = Path(__file__).parents[2] / "packages/rp-presets/README.md"
    outcome = doctest.testfile(str(readme), module_relative=False)
    assert outcome.attempted > 0
    assert outcome.failed == 0
