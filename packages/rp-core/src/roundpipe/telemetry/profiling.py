"""Profiles: what the calls within a ``with`` did and when, as a file for a trace viewer and a summary."""

from __future__ import annotations

import json
import os
from contextlib import ExitStack
from io import TextIOWrapper
from pathlib import Path
from types import TracebackType

import torch

from roundpipe.errors import RoundPipeError
from roundpipe.telemetry import tracing
from roundpipe.telemetry.summary import ProfileSummary, summarize
from roundpipe.telemetry.trace_file import trace_events
from roundpipe.telemetry.tracing import Recorder, Span


class profile:  # noqa: N801 - used as a function is
    """Record the calls made within, of all models and threads, and write them to a file at the end.

    Args:
        path: the file, in the Trace Event Format: Perfetto (ui.perfetto.dev) and ``chrome://tracing`` open it. It
            has a row for each stream of each device, one for the caller and one for the optimizer's thread; a
            wait says what was waited for. Replaced if it exists.
        nvtx: show the same as NVTX ranges, too. Under Nsight Systems, and where the environment has
            ``ROUNDPIPE_NVTX=1``, they are shown anyway, with or without a profile.

    >>> import tempfile
    >>> from roundpipe import RoundPipe, Runtime
    >>> with tempfile.TemporaryDirectory() as folder, Runtime("cpu:1") as runtime:
    ...     model = RoundPipe(torch.nn.Linear(2, 2), runtime=runtime)
    ...     with profile(f"{folder}/trace.json") as taken:
    ...         _ = model(torch.ones(4, 2))
    ...     taken.summary.num_calls
    1

    The end waits until everything that was launched within is over. If something is raised within, what was
    recorded until then is written all the same. Recording puts two timed events around everything it records, a
    few microseconds each; without a profile the engine tests an attribute in their place.

    Raises `Busy` if a profile is being taken already, `OSError` at once for a file that cannot be written, and
    `ValueError` for `nvtx` where there is no CUDA.
    """

    def __init__(self, path: str | os.PathLike[str], *, nvtx: bool = False) -> None:
        if nvtx and not torch.cuda.is_available():
            raise ValueError("nvtx=True needs CUDA, and there is none here; leave it out")
        self.path = Path(path)
        self._nvtx = nvtx
        self._tracer: Recorder | None = None
        self._spans: list[Span] | None = None
        self._file: TextIOWrapper | None = None

    @property
    def summary(self) -> ProfileSummary:
        """How long devices computed, copied and waited; to be printed. Raises `RoundPipeError` before the end."""
        return summarize(self.spans)

    @property
    def spans(self) -> tuple[Span, ...]:
        """All that was recorded, in the order of its start. Raises `RoundPipeError` before the end."""
        if self._spans is None:
            raise RoundPipeError("the profile has not ended yet; ask after its with statement")
        return tuple(self._spans)

    def __enter__(self) -> profile:
        if self._tracer is not None or self._spans is not None:
            raise RoundPipeError("a profile is taken once; make another one")
        self._tracer = tracing.switch_on(str(self.path), ranges=self._nvtx)
        try:
            self._file = self.path.open("w", encoding="utf-8")
        except BaseException:
            self._tracer = None
            tracing.switch_off()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._tracer is not None
        assert self._file is not None
        with ExitStack() as stack:
            stack.enter_context(self._file)
            # Until then a runtime that closes has its devices' clocks asked.
            stack.callback(tracing.switch_off)
            tracing.stop_launches()
            self._spans = self._tracer.finish()
            json.dump(trace_events(self._spans), self._file)
        self._tracer = None
