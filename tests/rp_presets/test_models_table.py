"""docs/models.md says what becomes of the models."""

from pathlib import Path

import pytest
import transformers
from families import causal_families
from models_table import IS_NO_ROW, WITH_VIDEOS, line, seeing_line, table
from seeing import NO_IMAGES, NO_ROW, NOT_BUILT, TAKE_VIDEOS, seeing_families

DOCUMENT = Path(__file__).parents[2] / "docs/models.md"
FAMILIES = causal_families()
SAMPLE = [
    "GPT2LMHeadModel",
    "Gemma4ForCausalLM",
    "HrmTextForCausalLM",
    "XLNetLMHeadModel",
    "Gemma4AssistantForCausalLM",
]

SEEING = seeing_families()
SAMPLE_OF_SEEING = [
    "LlavaForConditionalGeneration",
    "MllamaForConditionalGeneration",
    "FastVlmForConditionalGeneration",
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
    assert named == [*FAMILIES, *SEEING]


@is_documented_version
@pytest.mark.parametrize("name", SAMPLE_OF_SEEING)
def test_a_sample_of_the_lines_of_models_that_read_images_is_true(name):
    assert f"\n{seeing_line(SEEING[name])}\n" in DOCUMENT.read_text()


@is_documented_version
def test_the_rows_that_read_images_are_those_that_are_tested():
    seeing = DOCUMENT.read_text().partition("## Models that read images")[2]
    rows = {text.split("`")[1] for text in seeing.splitlines() if "` | row |" in text}
    with_videos = {text.split("`")[1] for text in seeing.splitlines() if text.endswith(f"| row | {WITH_VIDEOS} |")}
    assert with_videos == {*TAKE_VIDEOS}
    assert rows == SEEING.keys() - {*NOT_BUILT, *NO_ROW, *NO_IMAGES}
    assert len(rows) >= 59


@is_documented_version
def test_what_is_no_row_is_a_family():
    assert IS_NO_ROW.keys() <= FAMILIES.keys()


@is_documented_version
@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_all_lines_are_true():
    assert table() == DOCUMENT.read_text()
