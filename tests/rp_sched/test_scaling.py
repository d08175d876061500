"""The simulator reproduces measured runs, and the tables of benchmarks/results/scaling.md are what it computes."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import scaling

# Its lines take most of the time of all tables.
LONGEST = "This engine on H200s"


@pytest.mark.parametrize(
    "run",
    [*scaling.MEASURED[:3], scaling.MEASURED[6]],
    ids=lambda run: f"{run.gpus} GPUs, M={run.microbatches} {run.commit}",
)
def test_measured_runs_are_reproduced_within_five_percent(run: scaling.Run):
    assert run.simulated == pytest.approx(run.measured, rel=0.05)


@pytest.mark.parametrize("model", scaling.CARDS, ids=lambda model: model.name)
def test_the_published_round_robin_is_reproduced_within_five_percent(model: scaling.Published):
    found = scaling.roundrobin_efficiency(model, microbatches=8)
    assert found == pytest.approx(scaling.PUBLISHED[model.name], rel=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("model", scaling.CARDS, ids=lambda model: model.name)
def test_eight_cards_are_worth_nearly_eight_as_layers_are_launched_now(model: scaling.Published):
    efficiency, _ = scaling.card_efficiency(model, scaling.NOW)
    assert efficiency >= 0.95


@pytest.mark.slow
@pytest.mark.parametrize("model", scaling.CARDS[1:], ids=lambda model: model.name)
def test_eight_cards_are_worth_nearly_eight(model: scaling.Published):
    efficiency, _ = scaling.card_efficiency(model, scaling.FROM_PYTHON)
    assert efficiency >= 0.95


@pytest.mark.slow
def test_eight_h200s_are_worth_more_than_seven_at_a_quarter_of_the_launching():
    efficiency, bound = scaling.h200_efficiency(scaling.LLAMA_8B, 512, (2, 4), 8, scaling.A_QUARTER)
    assert efficiency >= 0.9
    assert bound == "device"


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "title",
    [pytest.param(title, marks=pytest.mark.nightly if title == LONGEST else ()) for title in scaling.TABLES],
)
def test_a_table_of_the_document_is_what_is_computed_now(title: str):
    assert scaling.table(title) in scaling.written()
