"""What a training says while it runs, and of it afterwards: a line on the terminal, trackers, a page with charts.

Each is a report as `rp_trainer.finetuning.reports` has them. `terminal`, which fits texts to the screen, needs no
torch; the rest is imported when it is first asked for.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from rp_reports.terminal import say, wrapped

if TYPE_CHECKING:
    from rp_reports.page import Page
    from rp_reports.progress import Progress
    from rp_reports.trackers import Tracked, check_trackers

__version__ = "0.1.0"

_WHERE = {"Page": "page", "Progress": "progress", "Tracked": "trackers", "check_trackers": "trackers"}

__all__ = ["Page", "Progress", "Tracked", "check_trackers", "say", "wrapped"]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_WHERE[name]}"), name)
