"""The `profile` context manager: records all calls made inside it as a trace file and a summary."""

from __future__ import annotations

import json
import os
from contextlib import ExitStack
from io import TextIOWrapper
from pathlib import Path
from types import TracebackType

import torch
from rp_errors import RoundPipeError

from rp_telemetry import tracing
from rp_telemetry.summary import ProfileSummary, summarize
from rp_telemetry.trace_file import trace_events
from rp_telemetry.tracing import Recorder, Span


class profile:  # noqa: N801 - used like a function
    """Record the calls made inside the context, of all models and threads, and write them to a file at its end.

    Args:
        path: the file, in the Trace Event Format, for Perfetto (ui.perfetto.dev) and ``chrome://tracing``. It has
            a row for each stream of each device, one for the caller and one for the optimizer's thread; with
            several machines also for gradients and weights in transfer. Each wait names what it waits for. An
            existing file is replaced.
        nvtx: also emit the spans as NVTX ranges. Under Nsight Systems and with ``ROUNDPIPE_NVTX=1`` these are
            emitted always, with or without a profile.

    >>> import tempfile
    >>> from roundpipe import RoundPipe, Runtime
    >>> with tempfile.TemporaryDirectory() as folder, Runtime("cpu:1") as runtime:
    ...     model = RoundPipe(torch.nn.Linear(2, 2), runtime=runtime)
    ...     with profile(f"{folder}/trace.json") as taken:
    ...         _ = model(torch.ones(4, 2))
    ...     taken.summary.num_calls
    1

    The exit waits until all work launched inside has ended. If the body raises, the spans recorded so far are
    still written. Recording costs two timed events per span, a few microseconds each; without a profile the cost
    is an attribute test.

    Raises `Busy` if another profile is active, `OSError` on entry if the file cannot be written, and `ValueError`
    for `nvtx` without CUDA.
    """

    def __init__(self, path: str | os.PathLike[str], *, nvtx: bool = False) -> None:
        if nvtx and not torch.cuda.is_available():
            raise ValueError("nvtx=True needs CUDA, but no CUDA device is available; omit nvtx")
        self.path = Path(path)
        self._nvtx = nvtx
        self._tracer: Recorder | None = None
        self._spans: list[Span] | None = None
        self._file: TextIOWrapper | None = None

    @property
    def summary(self) -> ProfileSummary:
        """How long devices computed, copied and waited; print it. Raises `RoundPipeError` before the end."""
        return summarize(self.spans)

    @property
    def spans(self) -> tuple[Span, ...]:
        """All recorded spans, ordered by start. Raises `RoundPipeError` before the end."""
        if self._spans is None:
            raise RoundPipeError("the profile has not ended yet; read it after its with statement")
        return tuple(self._spans)

    def __enter__(self) -> profile:
        if self._tracer is not None or self._spans is not None:
            raise RoundPipeError("a profile can be entered only once; create another one")
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
            # Only at the end: until then a runtime that closes must let its devices' times be read.
            stack.callback(tracing.switch_off)
            tracing.stop_launches()
            self._spans = self._tracer.finish()
            json.dump(trace_events(self._spans), self._file)
        self._tracer = None
