"""Profiles: what is recorded, in which rows, and that recording changes nothing."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import roundpipe
import torch
from hypothesis import given
from hypothesis import strategies as st
from plain import batch, mlp, plans, square_error, weights
from roundpipe import Busy, RoundPipe, RoundPipeError, RoundPipeRunConfig, Runtime
from roundpipe.optim import AdamW
from rp_optim import Disk
from rp_optim.disk.system import SYSTEM
from rp_sched import Plan
from rp_telemetry import tracing
from rp_telemetry.profiling import profile
from rp_telemetry.summary import summarize
from rp_telemetry.tables import readable_ms
from rp_telemetry.tracing import Span
from rp_transfer import CpuBackend
from torch import nn

MICROBATCHES = 3
# A device's clock ticks coarsely, and seconds since an event are kept in few digits.
TICK_S = 20e-6


def wrapped(runtime: Runtime, plan: str | None = None, **given: Any) -> RoundPipe:
    model = mlp()
    chosen = None if plan is None else plans(len(model), MICROBATCHES)[plan]
    config = RoundPipeRunConfig(num_microbatch=MICROBATCHES, execute_plan=chosen)
    return RoundPipe(model, runtime=runtime, name="m", model_run_config=config, **given)


def train(model: RoundPipe, steps: int, **how: Any) -> list[float]:
    optimizer = torch.optim.SGD(model.optim_parameters(), lr=1e-2)
    losses = []
    for step in range(steps):
        x, y = batch(9, seed=step)
        losses.append(model.forward_backward(input_args=(x,), label=y, loss_fn=square_error).item())
        model.step(lambda: (optimizer.step(), optimizer.zero_grad()), **how)
    model.synchronize()
    return losses


def of_kind(taken: profile, kind: str) -> list[Span]:
    return [span for span in taken.spans if span.kind == kind]


PLANS = ["planned", "all fused", "one layer a stage", "cut differently", "microbatches divided"]


@pytest.mark.parametrize("plan", PLANS)
def test_every_microbatch_of_every_task_is_in_its_devices_row(runtime: Runtime, tmp_path: Path, plan: str) -> None:
    model = wrapped(runtime, plan)
    with profile(tmp_path / "trace.json") as taken:
        train(model, 2)
    tasks = of_kind(taken, "task")
    assert {span.row for span in tasks} == {"compute"}
    assert {span.place for span in tasks} <= {lane.device.name for lane in runtime.lanes}
    # In each of the two calls every layer went backward for every microbatch, once.
    backward = [span.name for span in tasks if not span.name.startswith("F[")]
    layers = [name.partition("[")[2].partition("]")[0].split(":") for name in backward]
    found = sorted(
        (layer, name[-1]) for name, (a, b) in zip(backward, layers, strict=True) for layer in range(int(a), int(b))
    )
    assert found == sorted(2 * [(layer, str(m)) for layer in range(5) for m in range(MICROBATCHES)])


@pytest.mark.usefixtures("samples_first")
def test_bytes_are_those_of_weights_and_gradients(runtime: Runtime, tmp_path: Path) -> None:
    # Sizes that need no padding between tensors.
    layers = nn.Sequential(nn.Linear(4, 64), nn.Linear(64, 16))
    config = RoundPipeRunConfig(num_microbatch=MICROBATCHES, execute_plan=Plan(fused=range(2)))
    model = RoundPipe(layers, runtime=runtime, model_run_config=config)
    x, y = torch.ones(9, 4), torch.ones(9, 16)
    with profile(tmp_path / "trace.json") as taken:
        model.forward_backward(input_args=(x,), label=y, loss_fn=square_error)
    size = sum(parameter.nbytes for parameter in model.model.parameters())
    assert sum(span.nbytes for span in taken.spans if span.row == "weights_in") == size
    assert sum(span.nbytes for span in taken.spans if span.row == "gradients_out") == size
    arrived = [span for span in taken.spans if span.row == "activations_in" and span.kind == "upload"]
    assert sum(span.nbytes for span in arrived) == x.nbytes + y.nbytes
    summary = taken.summary
    assert sum(device.upload_bytes for device in summary.devices) == size + x.nbytes + y.nbytes


@pytest.mark.usefixtures("samples_first")
def test_the_caller_and_the_optimizer_have_rows_and_waits_say_what_for(runtime: Runtime, tmp_path: Path) -> None:
    model = wrapped(runtime)
    with profile(tmp_path / "trace.json") as taken:
        train(model, 2)
    calls = [span.name for span in of_kind(taken, "call")]
    assert calls == [*["forward_backward of m", "step of m"] * 2, "synchronize of m"]
    assert len(of_kind(taken, "step")) == 2
    # The first step publishes nothing, the second the first one's result, `synchronize` the second one's.
    assert len(of_kind(taken, "publication")) == 2
    waits = of_kind(taken, "wait")
    assert {"results", "gradients", "readers"} <= {span.reason for span in waits if span.place == "host"}
    assert {"weights", "activations", "stage before"} <= {span.reason for span in waits if span.place != "host"}
    assert all(span.name.startswith("wait for ") and span.reason for span in waits)
    assert all(not span.reason for span in taken.spans if span.kind != "wait")


def test_disks_have_rows_with_all_bytes_and_the_waits_for_them(two: Runtime, tmp_path: Path) -> None:
    moved = {"read": 0, "write": 0}

    def slow(kind: str) -> Callable[[int, memoryview, int], int]:
        def move(descriptor: int, memory: memoryview, offset: int) -> int:
            time.sleep(0.01)
            moved[kind] += len(memory)
            return int(getattr(SYSTEM, kind)(descriptor, memory, offset))

        return move

    disk = Disk(str(tmp_path), block_bytes=1, system=replace(SYSTEM, read=slow("read"), write=slow("write")))
    model = wrapped(two)
    optimizer = AdamW(model.optim_parameters(), lr=1e-2, state=disk)

    def step() -> None:
        x, y = batch(9, seed=0)
        model.forward_backward(input_args=(x,), label=y, loss_fn=square_error)
        model.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async=False)

    step()
    before = dict(moved)
    with profile(tmp_path / "trace.json") as taken:
        step()
        model.synchronize()
    disks = taken.summary.disks
    assert disks.read_bytes == sum(span.nbytes for span in of_kind(taken, "read")) > 0
    assert disks.write_bytes > 0
    # What was begun within may end after it.
    assert disks.read_bytes <= moved["read"] - before["read"]
    assert disks.read_s >= 0.01
    waits = [span for span in of_kind(taken, "wait") if span.row == "waits for disks"]
    assert {span.reason for span in waits} == {"disk"}
    assert disks.wait_s == pytest.approx(sum(span.seconds for span in waits))
    assert f"waited for {readable_ms(disks.wait_s)} ms" in str(taken.summary)
    rows = {
        event["args"]["name"]
        for event in json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
        if event["name"] == "thread_name"
    }
    assert {"disk reads", "disk writes", "waits for disks"} <= rows


def test_reads_beside_each_other_take_the_time_in_which_there_is_one() -> None:
    recorder = tracing.Recorder(keep=True, ranges=False)
    zero_s = time.perf_counter()
    for start_s, end_s in ((8.9, 9.0), (0.0, 10.0), (10.0, 11.0), (10.5, 12.0)):
        recorder.past(tracing.DISK_READS, "read", "read", zero_s + start_s, zero_s + end_s, 5)
    disks = summarize(recorder.finish()).disks
    assert disks.read_s == pytest.approx(12, abs=1e-3)
    assert disks.read_bytes == 20


@pytest.mark.parametrize("plan", PLANS)
def test_in_a_row_spans_lie_within_each_other_or_apart(runtime: Runtime, tmp_path: Path, plan: str) -> None:
    model = wrapped(runtime, plan)
    with profile(tmp_path / "trace.json") as taken:
        train(model, 2)
    rows: dict[tuple[str, str], list[Span]] = {}
    for span in taken.spans:
        assert span.end_s >= span.start_s > 0
        rows.setdefault((span.place, span.row), []).append(span)
    for spans in rows.values():
        for one, other in combinations(spans, 2):
            apart = one.end_s <= other.start_s + TICK_S or other.end_s <= one.start_s + TICK_S
            assert apart or _within(one, other) or _within(other, one), (one, other)


def _within(inner: Span, outer: Span) -> bool:
    return outer.start_s - TICK_S <= inner.start_s and inner.end_s <= outer.end_s + TICK_S


def test_the_file_holds_all_spans_in_the_trace_event_format(runtime: Runtime, tmp_path: Path) -> None:
    model = wrapped(runtime)
    with profile(tmp_path / "trace.json") as taken:
        train(model, 1)
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    complete = [event for event in events if event["ph"] == "X"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    rows = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    found = [
        (names[e["pid"]], rows[e["pid"], e["tid"]], e["name"], e["args"].get("waited_for", ""), e["ts"], e["dur"])
        for e in complete
    ]
    assert found == [
        (s.place, s.row, s.name, s.reason, pytest.approx(s.start_s * 1e6), pytest.approx(s.seconds * 1e6))
        for s in taken.spans
    ]
    device = next(iter(names.keys() - {0}))
    assert [rows[device, row] for row in range(5)] == [
        "compute",
        "weights_in",
        "activations_in",
        "results_out",
        "gradients_out",
    ]


def test_recording_changes_no_number(runtime: Runtime, tmp_path: Path) -> None:
    plain, recorded = wrapped(runtime, "cut differently"), wrapped(runtime, "cut differently")
    wanted = train(plain, 4)
    with profile(tmp_path / "trace.json"):
        found = train(recorded, 4)
    assert found == wanted
    for name, value in weights(plain.model).items():
        assert torch.equal(weights(recorded.model)[name], value), name


def test_compute_and_idle_time_together_are_the_whole_time(runtime: Runtime, tmp_path: Path) -> None:
    model = wrapped(runtime, "one layer a stage")
    with profile(tmp_path / "trace.json") as taken:
        train(model, 3)
    summary = taken.summary
    assert (summary.num_calls, summary.num_steps) == (3, 3)
    for device in summary.devices:
        whole = device.compute_s + sum(device.idle_s.values())
        assert whole == pytest.approx(summary.seconds, rel=1e-3, abs=1e-3)
        assert device.compute_s > 0
    printed = str(summary)
    assert "idle: weights" in printed
    assert all(device.name in printed for device in summary.devices)
    assert 0 < summary.optimizer_s < summary.seconds


@pytest.mark.usefixtures("samples_first")
def test_forward_and_its_backward_are_two_calls(runtime: Runtime, tmp_path: Path) -> None:
    model = wrapped(runtime)
    with profile(tmp_path / "trace.json") as taken:
        model(batch(6)[0]).sum().backward()
    assert [span.name for span in of_kind(taken, "call")] == ["forward of m", "backward of m"]
    assert {name.partition("[")[0] for name in (span.name for span in of_kind(taken, "task"))} == {"F", "B"}


def test_a_backward_after_the_profile_is_not_recorded_and_works(two: Runtime, tmp_path: Path) -> None:
    model = wrapped(two)
    with profile(tmp_path / "trace.json") as taken:
        loss = model(batch(6)[0]).sum()
    before = len(taken.spans)
    loss.backward()
    model.synchronize()
    assert len(taken.spans) == before
    assert all(parameter.grad is not None for parameter in model.model.parameters())


class Raises(nn.Module):
    """Raises for one microbatch, forward."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.armed = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.armed:
            raise ValueError("as arranged")
        return x


def test_an_error_within_arrives_and_what_came_before_it_is_written(runtime: Runtime, tmp_path: Path) -> None:
    layer = Raises()
    config = RoundPipeRunConfig(num_microbatch=2, execute_plan=Plan([range(1), range(1, 2)], None, []))
    model = RoundPipe(nn.Sequential(nn.Linear(4, 4), layer), runtime=runtime, model_run_config=config)
    with (
        pytest.raises(ValueError, match="as arranged"),
        profile(tmp_path / "trace.json") as taken,
        torch.no_grad(),
    ):
        model(torch.ones(4, 4))
    assert any("F[0:1]" in span.name for span in of_kind(taken, "task"))
    assert not any("F[1:2]" in span.name for span in of_kind(taken, "task"))
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    layer.armed = False
    with profile(tmp_path / "again.json") as again, torch.no_grad():
        model(torch.ones(4, 4))
    assert any("F[1:2]" in span.name for span in of_kind(again, "task"))


def test_a_failing_step_function_is_recorded_up_to_there(two: Runtime, tmp_path: Path) -> None:
    model = wrapped(two)

    def fail() -> None:
        raise ValueError("as arranged")

    with profile(tmp_path / "trace.json") as taken:
        x, y = batch(6)
        model.forward_backward(input_args=(x,), label=y, loss_fn=square_error)
        with pytest.raises(ValueError, match="as arranged"):
            model.step(fail, is_async=False)
    assert of_kind(taken, "task")
    assert not of_kind(taken, "step")


def test_profiles_do_not_nest(tmp_path: Path) -> None:
    first = tmp_path / "first.json"
    with (
        profile(first),
        pytest.raises(Busy, match=r"already active, for .*first\.json"),
        profile(tmp_path / "second.json"),
    ):
        pytest.fail("the second one began")
    assert not (tmp_path / "second.json").exists()
    assert tracing.current() is tracing.SILENT


def test_another_thread_cannot_begin_a_second_one(tmp_path: Path) -> None:
    found: list[BaseException] = []

    def begin() -> None:
        try:
            with profile(tmp_path / "second.json"):
                pass
        except BaseException as error:
            found.append(error)

    with profile(tmp_path / "first.json"):
        thread = threading.Thread(target=begin)
        thread.start()
        thread.join(10)
    assert [type(error) for error in found] == [Busy]


@pytest.mark.usefixtures("samples_first")
def test_calls_of_several_threads_and_runtimes_are_recorded(tmp_path: Path) -> None:
    def work(name: str, runtime: Runtime) -> None:
        model = RoundPipe(mlp(), runtime=runtime, name=name)
        for _ in range(3):
            with torch.no_grad():
                model(batch(6)[0])

    with Runtime("cpu:1") as one, Runtime("cpu:2") as two, profile(tmp_path / "trace.json") as taken:
        threads = [threading.Thread(target=work, args=pair) for pair in (("a", one), ("b", two))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    names = sorted(span.name for span in of_kind(taken, "call"))
    assert names == ["forward of a"] * 3 + ["forward of b"] * 3


class Part:
    """Part of a span's name, which counts how often it is put into words."""

    times = 0

    def __str__(self) -> str:
        self.times += 1
        return "layer {7}"


def test_a_name_is_put_together_only_where_it_is_recorded() -> None:
    device, part = CpuBackend(1).devices[0], Part()
    recorder = tracing.Recorder(keep=True, ranges=False)
    for tracer, times in ((tracing.SILENT, 0), (recorder, 2)):
        with tracer.on_stream(device, device.compute, "layer", "forward of {}", part):
            pass
        with tracer.waiting(device, "weights", "weights of {} to arrive", part):
            pass
        assert part.times == times
    names = [span.name for span in recorder.finish()]
    assert names == ["forward of layer {7}", "wait for weights of layer {7} to arrive"]


def test_the_end_waits_for_copies_that_nobody_has_waited_for() -> None:
    device = CpuBackend(1).devices[0]
    source, there = torch.ones(4), device.empty((4,), torch.float32, stream=device.weights_in)
    tracer = tracing.Recorder(keep=True, ranges=False)
    for _ in range(2):
        with tracer.on_stream(device, device.weights_in, "upload", "weights", nbytes=16):
            device.weights_in.copy(there, source)
    first, second = tracer.finish()
    assert 0 < first.start_s <= first.end_s <= second.start_s <= second.end_s
    assert torch.equal(there, source)


def test_it_ends_though_another_thread_goes_on(two: Runtime, tmp_path: Path) -> None:
    ended, over = threading.Event(), threading.Event()

    def work() -> None:
        model = RoundPipe(mlp(), runtime=two)
        while not over.is_set():
            with torch.no_grad():
                model(batch(6)[0])
            ended.set()

    thread = threading.Thread(target=work)
    thread.start()
    try:
        assert ended.wait(60)
        with profile(tmp_path / "trace.json") as taken:
            # The first call that ends may have begun before.
            for _ in range(2):
                ended.clear()
                assert ended.wait(60)
    finally:
        over.set()
        thread.join(60)
    assert of_kind(taken, "call")


@pytest.mark.usefixtures("samples_first")
def test_a_runtime_that_closes_within_leaves_its_spans(tmp_path: Path) -> None:
    with profile(tmp_path / "trace.json") as taken:
        for _ in range(2):
            with Runtime("cpu:2") as runtime:
                train(wrapped(runtime, "all fused"), 1)
    spans = of_kind(taken, "task")
    assert len(spans) == 2 * MICROBATCHES
    # The second runtime's devices have the same names, and began later.
    assert spans[MICROBATCHES].start_s > spans[MICROBATCHES - 1].end_s


def test_a_file_that_cannot_be_written_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), profile(tmp_path / "no such folder" / "trace.json"):
        pytest.fail("it began")
    assert tracing.current() is tracing.SILENT


def test_there_is_no_summary_before_the_end_and_no_second_use(tmp_path: Path) -> None:
    with profile(tmp_path / "trace.json") as taken, pytest.raises(RoundPipeError, match="has not ended yet"):
        _ = taken.summary
    assert taken.summary.num_calls == 0
    with pytest.raises(RoundPipeError, match="entered only once"), taken:
        pytest.fail("it began")


def test_it_is_a_name_of_the_package() -> None:
    assert roundpipe.profile is profile


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is CUDA")
def test_ranges_without_cuda_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="needs CUDA"):
        profile(tmp_path / "trace.json", nvtx=True)
    monkeypatch.setenv("ROUNDPIPE_NVTX", "1")
    assert not tracing.ranges_wanted()


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("variable", ["ROUNDPIPE_NVTX", "NSYS_PROFILING_SESSION_ID"])
def test_ranges_are_shown_when_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.setenv(variable, "7")
    assert tracing.ranges_wanted()
    shown: list[str] = []
    push: Callable[[str], int] = torch.cuda.nvtx.range_push
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", lambda name: (shown.append(name), push(name))[1])
    with Runtime("cuda") as runtime, profile(tmp_path / "trace.json", nvtx=True):
        train(wrapped(runtime), 1)
    assert {"forward_backward of m", "step of m", "backward"} <= set(shown)


# The arithmetic of summaries, against counting ticks

_EDGES = st.tuples(st.integers(0, 12), st.integers(0, 12)).map(sorted)


@st.composite
def spans_of_one_device(draw: st.DrawFn) -> list[Span]:
    def some(row: str, place: str, kind: Any, reason: str = "") -> Iterator[Span]:
        for start, end in draw(st.lists(_EDGES, max_size=4)):
            yield Span(place, row, kind, kind, float(start), float(end), 0, reason)

    return [
        *some("compute", "cpu:0", "task"),
        *some("compute", "cpu:0", "wait", "weights"),
        *some("weights_in", "cpu:0", "upload"),
        *some("caller", "host", "call"),
        *some("optimizer", "host", "step"),
        *some("optimizer", "host", "wait", "gradients"),
    ]


@given(spans_of_one_device())
def test_a_summary_adds_up_as_counting_ticks_does(spans: list[Span]) -> None:
    found = summarize(spans)

    def ticks(**wanted: str) -> set[int]:
        chosen = [s for s in spans if all(getattr(s, name) == value for name, value in wanted.items())]
        return {tick for span in chosen for tick in range(int(span.start_s), int(span.end_s))}

    first = int(min((span.start_s for span in spans), default=0))
    everything = set(range(first, int(max((span.end_s for span in spans), default=0))))
    tasks, waits = ticks(kind="task"), ticks(row="compute", kind="wait")
    assert found.seconds == len(everything)
    assert found.optimizer_wait_s == len(ticks(row="optimizer", kind="wait"))
    assert found.optimizer_s == len(ticks(row="optimizer") - ticks(row="optimizer", kind="wait"))
    for device in found.devices:
        assert device.compute_s == len(tasks - waits)
        assert device.upload_s == len(ticks(kind="upload"))
        calls = ticks(kind="call")
        left = everything - tasks - waits
        wanted = {"weights": len(waits), "launch": len(left & calls), "between calls": len(left - calls)}
        assert dict(device.idle_s) == {reason: count for reason, count in wanted.items() if count}
