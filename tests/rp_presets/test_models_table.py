"""docs/models.md says what becomes of the models."""

from pathlib import Path

import pytest
import transformers
from families import causal_families
from models_table import IS_NO_ROW, line, table

DOCUMENT = Path(__file__).parents[2] / "docs/models.md"
FAMILIES = causal_families()
SAMPLE = [
    "GPT2LMHeadModel",
    "Gemma4ForCausalLM",
    "HrmTextForCausalLM",
    "XLNetLMHeadModel",
    "Gemma4AssistantForCausalLM",
]

is_documented_version = pytest.mark.skipif(
    f"transformers {transformers.__version__}\n" not in DOCUMENT.read_text(),
    reason="docs/models.md is about another version of transformers",
)


@is_documented_version
@pytest.mark.parametrize("name", SAMPLE)
def test_a_sample_of_the_lines_is_true(name):
    assert f"\n{line(FAMILIES[name])}\n" in DOCUMENT.read_text()


@is_documented_version
def test_every_class_has_a_line():
    named = [text.split("`")[1] for text in DOCUMENT.read_text().splitlines() if text.startswith("| `")]
    assert named == list(FAMILIES)


@is_documented_version
def test_what_is_no_row_is_a_family():
    assert IS_NO_ROW.keys() <= FAMILIES.keys()


@is_documented_version
@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_all_lines_are_true():
    assert table() == DOCUMENT.read_text()
