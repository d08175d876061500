"""Spans of work on streams and threads, profiles of them, and measured times of layers, launches and transfers.

`tracing` records spans where a profile wants them, `profiling`, `summary` and `trace_file` make a profile of them;
`layer_times` is what a planner takes measured calls from, and `measurements` what is known of devices and links.
"""

from rp_errors import count_as_inside

from rp_telemetry.layer_times import LayerTimes, ModelTimer
from rp_telemetry.measurements import Measurements, Rates
from rp_telemetry.profiling import profile
from rp_telemetry.summary import DeviceSummary, ProfileSummary, summarize
from rp_telemetry.tracing import SILENT, Followed, Recorder, Span, Tracer, current

__version__ = "0.1.0"

count_as_inside("rp_telemetry")

__all__ = [
    "SILENT",
    "DeviceSummary",
    "Followed",
    "LayerTimes",
    "Measurements",
    "ModelTimer",
    "ProfileSummary",
    "Rates",
    "Recorder",
    "Span",
    "Tracer",
    "current",
    "profile",
    "summarize",
]
