"""What would run or allocate without bound, or overflow, is refused at the call; what is legitimate is not."""

import json
import math
from collections.abc import Callable
from fractions import Fraction
from itertools import product
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rp_sched import (
    Assigner,
    Estimator,
    InvalidCost,
    LayerCost,
    Limits,
    Plan,
    PricedPlan,
    RoundRobin,
    Search,
    Task,
    balance,
    check_order,
    order,
    plan,
    simulate,
)
from rp_sched.cli import main
from rp_sched.planners.classic import CLASSIC
from rp_sched.planners.partition import least_cap
from rp_sched.problem.checks import shown
from rp_sched.report.render import gantt, svg

HUGE = 10**12
LAYER = LayerCost(1.0)
ONE = {"devices": 1, "microbatches": 1, "mode": "infer"}
WHOLE = Task("F", range(1), range(1), 0)
MANY = [range(at, at + 1) for at in range(4000)]

REFUSED: dict[str, Callable[[], object]] = {
    "plan: devices": lambda: plan([LAYER], **{**ONE, "devices": HUGE}),
    "plan: microbatches": lambda: plan([LAYER], **{**ONE, "microbatches": HUGE}),
    "plan: layers": lambda: plan([LAYER] * 5000, **ONE),
    "plan: layers times microbatches": lambda: plan([LAYER] * 4000, **{**ONE, "microbatches": 16_000}),
    "plan: more digits than Python writes": lambda: plan([LAYER], **{**ONE, "devices": 10**5000}),
    "search: devices": lambda: Search([LAYER], **{**ONE, "devices": HUGE}),
    "search: microbatches": lambda: Search([LAYER], **{**ONE, "microbatches": HUGE}),
    "order: devices": lambda: order(Plan((range(1),)), **{**ONE, "devices": HUGE}),
    "order: microbatches": lambda: order(Plan((range(1),)), **{**ONE, "microbatches": HUGE}),
    "order: tasks": lambda: order(Plan(MANY, forward_groups=MANY), devices=1, microbatches=4000, mode="infer"),
    "priced plan: tasks": lambda: PricedPlan(
        Plan(MANY, forward_groups=MANY), [LAYER] * 4000, microbatches=4000, mode="infer"
    ),
    "priced plan: calls": lambda: PricedPlan(Plan((range(1),)), [LAYER], microbatches=1, mode="infer").steady_ms(
        1, most_calls=HUGE
    ),
    "priced plan: devices": lambda: PricedPlan(Plan((range(1),)), [LAYER], microbatches=1, mode="infer").alone_ms(
        HUGE
    ),
    "check_order: microbatches": lambda: check_order([WHOLE], 1, HUGE, "infer"),
    "simulate: devices": lambda: simulate([[WHOLE]], [LAYER], **{**ONE, "devices": HUGE}),
    "simulate: microbatches": lambda: simulate([[WHOLE]], [LAYER], **{**ONE, "microbatches": HUGE}),
    "simulate: calls": lambda: simulate(
        [[Task("F", range(1), range(10_000), 0)]] * 1001, [LAYER], **{**ONE, "microbatches": 10_000}
    ),
    "assigner: devices": lambda: Assigner(HUGE),
    "estimator: layers": lambda: Estimator(HUGE),
    "balance: gaps": lambda: balance([1], HUGE),
    "gantt: width": lambda: gantt(simulate([[WHOLE]], [LAYER], **ONE), width=HUGE),
    **{
        f"{name}: microbatches": lambda schedule=schedule: schedule([range(1)], 1, HUGE)
        for name, schedule in CLASSIC.items()
    },
    **{
        f"{name}: tasks": lambda schedule=schedule: schedule(MANY, 1000, 16_000)
        for name, schedule in CLASSIC.items()
        if name != "1f1b"
    },
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("call", REFUSED.values(), ids=REFUSED.keys())
def test_what_would_have_no_bound_is_refused_with_the_most_that_may_be(call: Callable[[], object]):
    with pytest.raises(ValueError, match=r"must be at most \d+, since .*, but is "):
        call()


def test_two_hundred_layers_on_sixty_four_devices_are_legitimate():
    size = {"devices": 64, "microbatches": 1024, "mode": "fused"}
    made = plan([LAYER] * 200, **size, strategy="roundrobin")
    assert len(order(made, **size)) >= 64


@pytest.mark.slow
def test_a_thousand_calls_are_legitimate():
    tasks = [Task("FB", range(200), range(at, at + 16), at // 16) for at in range(0, 256, 16)]
    timeline = simulate([tasks] * 1000, [LAYER] * 200, devices=64, microbatches=256, mode="fused")
    assert len(timeline.launches) == 1000


@pytest.mark.timeout(100)
def test_a_search_of_few_layers_ends_however_many_microbatches_there_are():
    layer = LayerCost(7.4, 15.8, weight_bytes=10**8, kept_bytes=5 * 10**8)
    limits = Limits(device_memory_bytes=24 * 10**9, upload_gb_s=12, download_gb_s=12)
    search = Search([layer] * 8, devices=3, microbatches=1024, mode="fused", limits=limits)
    # Every plan of these, one by one, would take days.
    search.finish()


@pytest.mark.slow
@pytest.mark.timeout(100)
def test_a_search_for_fewer_devices_ends_however_many_there_are(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("rp_sched.planners.adaptive.ALL_STEPS", 10**6)
    size = {"devices": 1024, "microbatches": 8, "mode": "train"}
    # Plans for all smaller numbers of devices, one after the other, would take an hour.
    Search([LAYER, LAYER], **size, limits=Limits(upload_gb_s=1.0)).finish()


@pytest.mark.timeout(60)
def test_bisection_ends_between_neighbouring_numbers():
    least = math.ulp(0.0)
    assert least_cap(lambda cap: 1 if cap > least else 2, 1, least, 2 * least) == 2 * least
    assert plan([LayerCost(least)] * 3, devices=2, microbatches=1, mode="fused", strategy="roundrobin")


def test_a_picture_of_the_shortest_times_has_finite_numbers():
    played = simulate([[WHOLE]], [LayerCost(math.ulp(0.0))], **ONE)
    assert 'x="48.00"' in svg(played)
    assert "nan" not in svg(played)


@pytest.mark.parametrize("value", [1e308, 1.1e15, 10**400, Fraction(10**400), -(10**400)])
@pytest.mark.parametrize("name", ["forward_ms", "backward_ms"])
def test_times_whose_sums_would_not_be_finite_are_refused_where_they_are_given(name: str, value: float):
    with pytest.raises(InvalidCost, match=f"{name} must be a "):
        LayerCost(**{"forward_ms": 1.0, name: value})


def test_the_longest_times_still_have_finite_sums():
    longest = LayerCost(1e15, 1e15, weight_bytes=2**63 - 1, boundary_bytes=2**63 - 1)
    limits = Limits(hop_ms=1e15, upload_gb_s=1e-9, download_gb_s=1e-9)
    search = Search([longest] * 20, devices=3, microbatches=8, mode="train", limits=limits)
    assert 1e15 < search.best_ms < math.inf


@pytest.mark.parametrize("name", ["weight_bytes", "trainable_bytes", "boundary_bytes", "kept_bytes"])
def test_more_bytes_than_can_be_addressed_are_refused(name: str):
    with pytest.raises(InvalidCost, match=r"must be at most 9223372036854775807, since no machine .* 399 digits"):
        LayerCost(1.0, **{"weight_bytes": 10**399, name: 10**399})
    with pytest.raises(InvalidCost, match="host_memory_bytes must be at most 9223372036854775807"):
        Limits(host_memory_bytes=2**63)


def test_links_slower_than_a_byte_a_second_are_refused():
    with pytest.raises(InvalidCost, match="upload_gb_s must be a speed in GB/s of at least 1e-09"):
        Limits(upload_gb_s=1e-300)


def test_a_memory_limit_beyond_all_memory_is_none():
    found, without = (
        plan([LAYER] * 5, devices=2, microbatches=1, mode="fused", strategy=RoundRobin(model_memory_limit=limit))
        for limit in (1e308, None)
    )
    assert found == without


def test_a_value_is_shown_in_a_line_however_deep_and_long_it_is():
    deep: list[object] = []
    for _ in range(100_000):
        deep = [deep]
    assert all(len(shown(value)) < 400 for value in (deep, "x" * 10**6, 10**5000, list(range(10**5))))


# The command line, with any file and any numbers

SIZE = ("--devices", "2", "--microbatches", "4")
ODD_NUMBERS = ["1e308", "1e-320", "-0.0", "1" * 400, "1" * 5000, "-" + "9" * 30, "1e999", "NaN", "0", "3", "2.5"]


def status(capsys: pytest.CaptureFixture[str], *arguments: str) -> int:
    """The exit status: 0 with nothing on stderr, or 2 with one line there and nothing on stdout."""
    found = main(arguments)
    out, err = capsys.readouterr()
    assert (found, bool(out), err.count("\n")) in ((0, True, 0), (2, False, 1))
    assert len(err) < 2000
    return found


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "text", ["[" * 100_000, '{"layers":' * 20_000, '{"layers": ' + "[" * 900 + "]" * 900 + "}"]
)
def test_a_file_that_is_nested_deeply_is_one_line(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "costs.json"
    path.write_text(text)
    assert status(capsys, "plan", str(path), *SIZE) == 2


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("field", "number"),
    list(product(["forward_ms", "weight_bytes", "repeat", "hop_ms"], ["1e308", "1" * 400, "1" * 5000])),
)
def test_a_number_that_nothing_can_hold_is_one_line(
    field: str, number: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    path = tmp_path / "costs.json"
    layer, limits = (f'"{field}": {number}', "") if field != "hop_ms" else ("", f'"{field}": {number}')
    others = "" if field == "forward_ms" else '"forward_ms": 1' + (", " if layer else "")
    path.write_text(f'{{"layers": [{{{others}{layer}}}], "limits": {{{limits}}}}}')
    assert status(capsys, "plan", str(path), *SIZE) == 2


@pytest.mark.timeout(60)
@pytest.mark.parametrize("arguments", [["plan", "/dev/zero"], ["simulate", "costs", "--tasks", "/dev/zero"]])
def test_a_file_without_end_is_refused(arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "costs"
    path.write_text('{"layers": [{"forward_ms": 1}]}')
    given_ = [str(path) if word == "costs" else word for word in arguments]
    assert main([*given_, *SIZE]) == 2
    assert "/dev/zero: the file must have at most" in capsys.readouterr().err


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "arguments",
    [
        ["simulate", *SIZE, "--calls", "100000000"],
        ["simulate", *SIZE, "--calls", "1000000", "--schedule", "gpipe"],
        ["simulate", *SIZE, "--calls", "1000000", "--schedule", "roundrobin"],
        ["simulate", *SIZE, "--calls", "9" * 5000],
        ["simulate", "--devices", "2", "--microbatches", "100000000"],
        ["compare", "--devices", "100000000", "--microbatches", "2"],
        ["plan", *SIZE, "--width", "1000000000000"],
        ["plan", *SIZE, "--strategy", "roundrobin", "--upper-threshold", "nan"],
        ["plan", *SIZE, "--strategy", "roundrobin", "--min-stages", "0"],
    ],
)
def test_options_without_bound_are_one_line(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    path = tmp_path / "costs.json"
    path.write_text(json.dumps({"layers": [{"forward_ms": 1, "repeat": 6}]}))
    assert status(capsys, arguments[0], str(path), *arguments[1:]) == 2


class _Written(str):
    """JSON that is put in as it stands."""

    __slots__ = ()


numbers = st.sampled_from(ODD_NUMBERS).map(_Written)
values = st.recursive(
    numbers | st.none() | st.booleans() | st.text(max_size=3) | st.floats(),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)
LAYER_FIELDS = ("forward_ms", "backward_ms", "weight_bytes", "trainable_bytes", "boundary_bytes", "kept_bytes")
LIMIT_FIELDS = (
    "device_memory_bytes",
    "stage_bytes",
    "host_memory_bytes",
    "upload_gb_s",
    "hop_ms",
    "devices",
    "switches",
    "host",
)
layer_objects = st.fixed_dictionaries(
    {"forward_ms": numbers | values},
    optional=dict.fromkeys((*LAYER_FIELDS[1:], "writes_buffers", "repeat"), numbers | values),
)
limit_objects = st.fixed_dictionaries({}, optional=dict.fromkeys(LIMIT_FIELDS, numbers | values))
problems = st.fixed_dictionaries(
    {"layers": st.lists(layer_objects, min_size=1, max_size=3) | values},
    optional={"limits": limit_objects | values},
)


def written(value: object) -> str:
    """JSON, or nearly: numbers are put in as they are written, and NaN and infinity are what Python writes."""
    if isinstance(value, _Written):
        return str(value)
    if isinstance(value, list):
        return "[" + ", ".join(map(written, value)) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(name)}: {written(item)}" for name, item in value.items()) + "}"
    return json.dumps(value)


files = st.binary(max_size=40) | (values | problems).map(lambda value: written(value).encode())


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    content=files,
    command=st.sampled_from(["plan", "simulate", "compare"]),
    devices=st.sampled_from(["1", "3", "0", "-1", "1e3", "9" * 30]),
    microbatches=st.sampled_from(["1", "4", "x", "9" * 5000]),
)
def test_any_file_gives_a_result_or_one_line(
    content: bytes,
    command: str,
    devices: str,
    microbatches: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
):
    path = tmp_path / "costs.json"
    path.write_bytes(content)
    status(capsys, command, str(path), "--devices", devices, "--microbatches", microbatches)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lines=st.lists(
        st.text(max_size=12)
        | st.builds(
            "{}[{}:{}] m{}:{} @{}".format,
            st.sampled_from(["F", "FB", "B"]),
            *[st.sampled_from(["0", "1", "4", "9" * 18, "9" * 5000])] * 5,
        ),
        max_size=4,
    )
)
def test_any_list_of_tasks_gives_a_result_or_one_line(
    lines: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    costs, tasks = tmp_path / "costs.json", tmp_path / "tasks"
    costs.write_text('{"layers": [{"forward_ms": 1}]}')
    tasks.write_text("\n".join(lines), encoding="utf-8", errors="surrogatepass")
    status(capsys, "simulate", str(costs), "--tasks", str(tasks), *SIZE)
