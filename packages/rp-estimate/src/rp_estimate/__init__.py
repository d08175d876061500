"""What training a model takes and how long a step lasts, foretold from its config, before weights are read.

`request` says what is asked, `cases` what that describes, `foretold` is the plan for it, `advice` tries what would
help, and `answer` is all this as text or JSON. `meta` counts a model's operations on the meta device, `machine`
has cards, hosts, disks and networks, by name or measured.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from rp_estimate.images import ImageSizes
from rp_estimate.machine.calibration import Calibration
from rp_estimate.machine.cards import CARDS, Card, card_named
from rp_estimate.machine.drive import Drive
from rp_estimate.machine.network import Network
from rp_estimate.request import Request

if TYPE_CHECKING:
    from rp_estimate.advice import Change, changes
    from rp_estimate.answer.line import as_json
    from rp_estimate.answer.summary import as_summary
    from rp_estimate.answer.text import as_text
    from rp_estimate.calibrating import calibrate
    from rp_estimate.cases import case_of, machine_of, workload_of
    from rp_estimate.foretold import Case, Foretold, Planned, foretell
    from rp_estimate.machine.hardware import Machine, measured
    from rp_estimate.workload import TrainingSetup, Workload

__version__ = "0.1.0"

# Imported when they are first asked for: what describes a request needs no torch.
_WHERE = {
    "Case": "foretold",
    "Change": "advice",
    "Foretold": "foretold",
    "Machine": "machine.hardware",
    "Planned": "foretold",
    "TrainingSetup": "workload",
    "Workload": "workload",
    "as_json": "answer.line",
    "as_summary": "answer.summary",
    "as_text": "answer.text",
    "calibrate": "calibrating",
    "case_of": "cases",
    "changes": "advice",
    "foretell": "foretold",
    "machine_of": "cases",
    "measured": "machine.hardware",
    "workload_of": "cases",
}

__all__ = [
    "CARDS",
    "Calibration",
    "Card",
    "Case",
    "Change",
    "Drive",
    "Foretold",
    "ImageSizes",
    "Machine",
    "Network",
    "Planned",
    "Request",
    "TrainingSetup",
    "Workload",
    "as_json",
    "as_summary",
    "as_text",
    "calibrate",
    "card_named",
    "case_of",
    "changes",
    "foretell",
    "machine_of",
    "measured",
    "workload_of",
]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_WHERE[name]}"), name)
