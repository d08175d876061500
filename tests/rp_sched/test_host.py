"""What devices share, in simulation and price: the GIL, host memory, switches, additions, the optimizer, disks."""

import statistics
from dataclasses import replace

import pytest
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from machines import cases
from problems import MODES, calls, layers, models, plans
from rp_sched import (
    Assigner,
    Device,
    Host,
    InvalidCost,
    LayerCost,
    Limits,
    Plan,
    PricedPlan,
    Search,
    Switch,
    Task,
    plan,
    simulate,
    simulated_ms,
)
from rp_sched.planners.adaptive import ALL_STEPS
from rp_sched.planners.local_search import MOST_STEPS
from rp_sched.problem.files import parse
from rp_sched.simulation.clock import Clock
from rp_sched.simulation.fluid import Activity, Fluid, divided

patient = settings(max_examples=examples(80), deadline=None)
few = settings(max_examples=examples(30), deadline=None)
ALMOST = 1 + 1e-9
WHOLE = [Task.parse("FB[0:1] m0:1 @0"), Task.parse("FB[0:1] m1:2 @1")]
TWO = {"devices": 2, "microbatches": 2, "mode": "fused"}
# A byte a ms.
SLOW = 1e-6


def played(tasks: list[Task], cost: LayerCost, limits: Limits, count: int = 1):
    return simulate([tasks] * count, [cost], limits=limits, **TWO)  # type: ignore[arg-type]


def reasons(timeline) -> set[str]:
    return {idle.reason for idle in timeline.idle}


# Dividing a resource

shares = st.lists(st.sampled_from([0.1, 0.25, 0.5, 0.9, 1.0]), min_size=1, max_size=3)


@patient
@given(st.lists(shares, min_size=1, max_size=6))
def test_no_resource_is_used_beyond_its_capacity(drawn: list[list[float]]):
    activities = [Activity(1.0, list(enumerate(each))) for each in drawn]
    rates = divided(activities)
    for resource in range(3):
        used = [share * rates[one] for one in activities for at, share in one.shares if at == resource]
        assert sum(used) <= 1 + 1e-6
    assert all(0 < rate <= 1 for rate in rates.values())


@patient
@given(st.lists(st.sampled_from([0.1, 0.25, 0.5, 0.9, 1.0]), min_size=1, max_size=8))
def test_one_resource_is_used_whole_if_it_is_wanted_and_in_equal_parts(drawn: list[float]):
    activities = [Activity(1.0, [(0, share)]) for share in drawn]
    rates = divided(activities)
    used = {one: share * rates[one] for one, share in zip(activities, drawn, strict=True)}
    assert sum(used.values()) == pytest.approx(min(1.0, sum(drawn)))
    limited = [used[one] for one in activities if rates[one] < 1 - 1e-9]
    assert limited == pytest.approx([max(used.values())] * len(limited))


@patient
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 9)), min_size=1, max_size=8))
def test_one_resource_does_its_work_without_a_pause(drawn: list[tuple[int, int]]):
    fluid = Fluid()
    begins = [fluid.add(begin) for begin, _ in drawn]
    works = [fluid.add(ms, [(0, 1.0)], [(at, 0.0)]) for at, (_, ms) in zip(begins, drawn, strict=True)]
    fluid.run()
    # The time when a queue would be empty does not depend on the order in which it is served.
    free = 0.0
    for begin, ms in sorted(drawn):
        free = max(free, begin) + ms
    assert max(work.ended_ms for work in works) == pytest.approx(free)


# Terms one by one, with numbers that can be checked by hand


def test_devices_behind_one_switch_share_it():
    cost, link = LayerCost(1.0, weight_bytes=6), {"upload_gb_s": SLOW}
    alone = played(WHOLE, cost, Limits(**link))
    shared = played(WHOLE, cost, Limits(**link, switches=(Switch(devices=(0, 1), upload_gb_s=SLOW),)))
    assert [span.fetched_ms for span in alone.spans] == [6.0, 6.0]
    assert [span.fetched_ms for span in shared.spans] == [12.0, 12.0]
    assert shared.bottleneck == "switch"


def test_uploads_and_downloads_share_host_memory():
    cost = LayerCost(1.0, 1.0, weight_bytes=6)
    found = played(WHOLE, cost, Limits(host=Host(memory_gb_s=SLOW, optimizer_bytes=0, double_buffer=True)))
    # Two uploads of 6 bytes until 12, 2 ms of computing, then two downloads.
    assert [(span.fetched_ms, span.left_ms) for span in found.spans] == [(12.0, 26.0)] * 2
    assert found.resource_ms["host memory"] == 24


def test_uploads_of_what_is_on_disk_share_the_disk():
    cost, limits = LayerCost(1.0, weight_bytes=6, disk_bytes=4, trainable_bytes=0), Limits(upload_gb_s=SLOW)
    slow, fast = (played(WHOLE, cost, replace(limits, host=Host(disk_gb_s=rate))) for rate in (SLOW / 2, 2 * SLOW))
    # Each reads 4 bytes, which take 2 ms each, and together use the disk without a pause.
    assert [span.fetched_ms for span in slow.spans] == [16.0, 16.0]
    assert slow.bottleneck == "disk"
    # Where the disk is faster than the links, these bound.
    assert [span.fetched_ms for span in fast.spans] == [6.0, 6.0]
    assert fast.resource_ms["disk"] == 4.0


def test_what_lies_on_disk_is_read_by_fewer_tasks():
    costs = [LayerCost(10.0, weight_bytes=10**9, trainable_bytes=0, disk_bytes=10**9)] * 16
    how = {"devices": 4, "microbatches": 16, "mode": "fused"}
    linked = Limits(device_memory_bytes=6 * 10**9, upload_gb_s=50, download_gb_s=50)
    disk = replace(linked, host=Host(disk_gb_s=6))
    quick, sparing = (plan(costs, limits=limits, **how) for limits in (linked, disk))  # type: ignore[arg-type]

    def read(found: Plan) -> int:
        return PricedPlan(found, costs, mode="fused", microbatches=16, limits=disk).work.disk_bytes

    assert read(sparing) < read(quick)
    assert PricedPlan(sparing, costs, mode="fused", microbatches=16, limits=disk).bottleneck(4) == "disk"


def test_a_plan_promises_that_devices_read_one_disk_after_another():
    costs = [LayerCost(1.0, weight_bytes=10**8, disk_bytes=10**8, trainable_bytes=0)] * 2
    limits = Limits(host=Host(disk_gb_s=1))
    priced = PricedPlan(Plan((range(1), range(1, 2))), costs, mode="infer", microbatches=1, limits=limits)
    # The second device begins to compute once both layers are read, which takes 100 ms each.
    assert priced.alone_ms(2) == 201


def test_plans_of_many_devices_that_read_one_disk_are_fast_as_simulated():
    costs = [LayerCost(10.0, weight_bytes=4 * 10**8, trainable_bytes=0, disk_bytes=4 * 10**8)] * 36
    limits = Limits(device_memory_bytes=8 * 10**9, upload_gb_s=25, download_gb_s=25, host=Host(disk_gb_s=5))
    found = plan(costs, devices=4, microbatches=16, mode="fused", limits=limits)
    priced = PricedPlan(found, costs, mode="fused", microbatches=16, limits=limits)
    # One that takes each device to have the disk to itself takes 7,050 ms.
    assert simulated_ms(priced, 4) < 6500


def test_launching_takes_turns_of_the_gil():
    cost = LayerCost(2.0, 2.0, forward_launch_ms=1.0, backward_launch_ms=2.0)
    found = played(WHOLE, cost, Limits())
    # Each takes 4 ms of computing and 3 of the GIL: together 6 of the GIL.
    assert [span.end_ms for span in found.spans] == pytest.approx([6.0, 6.0])
    assert found.busy_ms == (4.0, 4.0)
    assert reasons(found) == {"GIL"}
    assert found.bottleneck == "GIL"


def test_recomputation_is_launched_again():
    costs = [LayerCost(1.0, forward_launch_ms=1.0, backward_launch_ms=2.0, recompute_launch_ms=4.0)] * 2
    priced = PricedPlan(
        Plan((range(1),), range(1, 2), (range(1),)), costs, mode="fused", microbatches=3, limits=Limits()
    )
    assert priced.loads_ms(1)["GIL"] == 3 * (1 + (1 + 2) + (4 + 2))


def test_porters_hold_the_gil_for_each_byte():
    cost = LayerCost(1.0, weight_bytes=5)
    found = played(WHOLE, cost, Limits(host=Host(gil_ms_per_gb=1e9)))
    # 5 bytes up and 5 down, for two tasks.
    assert found.resource_ms["GIL"] == 20


@pytest.mark.parametrize(
    ("buffers", "tasks", "sent", "added", "traffic", "copies"),
    [
        # 6 bytes for each task. One buffer: fp32 from two tasks on, and 4 times an added byte in host memory.
        (None, 2, 12, 0, 12, 2),
        (None, 4, 24, 0, 24, 2),
        (1, 1, 6, 0, 6, 1),
        (1, 2, 24, 12, 12 + 4 * 12, 2),
        (1, 4, 48, 36, 12 + 4 * 36, 2),
        # Two: in 16 bits, and 6 times.
        (2, 2, 12, 0, 12, 2),
        (2, 3, 18, 6, 12 + 6 * 6, 2),
        (2, 4, 24, 12, 12 + 6 * 12, 2),
        (3, 4, 24, 6, 18 + 6 * 6, 3),
    ],
)
def test_gradients_are_added_from_one_more_task_than_there_are_buffers(
    buffers: int | None, tasks: int, sent: int, added: int, traffic: int, copies: int
):
    host = Host(memory_gb_s=1e3 * SLOW, gradient_buffers=buffers, add_gb_s=SLOW / 2, add_threads=4)
    limits = Limits(download_gb_s=SLOW, host=replace(host, optimizer_bytes=0.0, double_buffer=True))
    groups = tuple(range(m, m + 1) for m in range(tasks)) if tasks > 1 else ()
    plan = Plan(fused=range(1), groups=groups, in_turn=False)
    cost = LayerCost(1.0, weight_bytes=6)
    priced = PricedPlan(plan, [cost], mode="fused", microbatches=tasks, limits=limits)
    # The weights come to each device; the optimizer reads what is beyond one 16-bit gradient.
    others = 6 * tasks + 6 * (copies - 1) * (buffers is not None)
    order = [Task.parse(f"FB[0:1] m{m}:{m + 1} @0") for m in range(tasks)]
    played = simulate([order], [cost], devices=1, microbatches=tasks, mode="fused", limits=limits)
    for found in (priced.loads_ms(1), played.resource_ms):
        assert found["link"] == sent
        assert found.get("additions", 0.0) == added / 2
        assert found["host memory"] == pytest.approx((traffic + others) / 1e3)
    assert host.gradient_copies(tasks) == copies


def test_the_optimizer_reads_what_is_there():
    cost = LayerCost(1.0, weight_bytes=6)
    for buffers, traffic in ((1, 3 * (28 + 2)), (2, 3 * (28 + 2)), (None, 3 * 28)):
        host = Host(optimizer_gb_s=SLOW, gradient_buffers=buffers, double_buffer=True)
        assert played(WHOLE, cost, Limits(host=host)).resource_ms["optimizer"] == pytest.approx(traffic)
    once = Plan(fused=range(1), in_turn=False)
    for double_buffer, traffic in ((True, 3 * 28), (False, 3 * 34)):
        limits = Limits(host=Host(optimizer_gb_s=SLOW, double_buffer=double_buffer))
        priced = PricedPlan(once, [cost], mode="fused", microbatches=2, limits=limits)
        assert priced.loads_ms(1)["optimizer"] == pytest.approx(traffic)


def test_a_call_reads_the_weights_of_the_step_after_the_call_before_the_last():
    cost = LayerCost(1.0, 1.0, weight_bytes=2)
    limits = Limits(host=Host(optimizer_gb_s=28 * SLOW / 100, double_buffer=True))
    one = [Task.parse("FB[0:1] m0:2 @0")]
    found = played(one, cost, limits, count=4)
    # A step takes 100 ms; the second call waits for none, the third for that of the first.
    starts = [span.start_ms for span in found.spans]
    assert starts == pytest.approx([0.0, 4.0, 104.0, 204.0])
    assert "optimizer" in reasons(found)


def test_a_backward_pass_waits_for_gradients_to_leave_if_there_is_no_room():
    cost = LayerCost(1.0, 2.0, weight_bytes=5)
    one = [Task.parse("FB[0:1] m0:2 @0")]
    waits, free = (played(one, cost, Limits(download_gb_s=SLOW, leaving_bytes=room), count=2) for room in (9, 10))
    assert [span.end_ms for span in free.spans] == [6.0, 12.0]
    # The forward pass until 7, the gradients until 11, then the backward pass, and the second microbatch.
    assert [span.end_ms for span in waits.spans] == [6.0, 16.0]
    assert "memory" in reasons(waits)


def test_devices_may_differ_in_speed_and_memory():
    limits = Limits(device_memory_bytes=40, devices=(Device(), Device(speed=0.5, memory_bytes=30)))
    found = played(WHOLE, LayerCost(1.0, 2.0, weight_bytes=2), limits)
    assert [span.end_ms for span in found.spans] == [3.0, 6.0]
    assert limits.stage_limit_bytes == 15
    assert limits.first(1).stage_limit_bytes == 20
    costs = [LayerCost(1.0, 2.0, weight_bytes=2)]
    with pytest.raises(InvalidCost, match="must describe all 3 devices or none, but describes 2"):
        plan(costs, devices=3, microbatches=2, mode="fused", limits=limits)


def test_a_slow_device_gets_less_and_a_useless_one_nothing():
    costs, how = [LayerCost(1.0, 2.0)] * 4, {"microbatches": 12, "mode": "fused"}
    limits = Limits(devices=(Device(), Device(), Device(speed=0.5)))
    search = Search(costs, devices=3, limits=limits, **how)
    assert search.finish().steady_ms(3) == pytest.approx(12 * 12 / 2.5, rel=0.05)
    slow = Limits(devices=(Device(), Device(), Device(speed=0.001)))
    priced = Search(costs, devices=3, limits=slow, **how).finish()
    assert {task.device for task in Assigner(3).assign(priced)} == {0, 1}


def test_an_unknown_word_of_the_host_is_refused():
    with pytest.raises(InvalidCost, match="behind one switch at most"):
        Limits(switches=(Switch(devices=(0, 1)), Switch(devices=(1,))))
    with pytest.raises(InvalidCost, match="different devices"):
        Switch(devices=(1, 1))
    with pytest.raises(TypeError, match="host must be made of Host"):
        Limits(host=3)  # type: ignore[arg-type]
    with pytest.raises(InvalidCost, match="gradient_buffers must be at least 1"):
        Host(gradient_buffers=0)


# What holds for any problem


@st.composite
def launching(draw: st.DrawFn, most: int = 4) -> list[LayerCost]:
    return [
        replace(
            cost,
            forward_launch_ms=draw(st.integers(0, 4)),
            backward_launch_ms=draw(st.integers(0, 4)),
            disk_bytes=draw(st.integers(0, cost.weight_bytes)),
        )
        for cost in draw(st.lists(layers(), min_size=1, max_size=most))
    ]


rates = st.sampled_from([None, 0.5e-6, 1e-6, 3e-6])


@st.composite
def hosts(draw: st.DrawFn) -> Host:
    return Host(
        memory_gb_s=draw(rates),
        gil_ms_per_gb=draw(st.sampled_from([0, 1e8, 1e9])),
        add_gb_s=draw(rates),
        gradient_buffers=draw(st.sampled_from([None, 1, 2])),
        optimizer_gb_s=draw(rates),
        optimizer_bytes=draw(st.sampled_from([0, 4, 28])),
        disk_gb_s=draw(rates),
    )


@st.composite
def machines(draw: st.DrawFn) -> Limits:
    return Limits(
        upload_gb_s=draw(rates),
        download_gb_s=draw(rates),
        hop_ms=draw(st.integers(0, 2)),
        leaving_bytes=draw(st.sampled_from([None, 0, 4])),
        switches=draw(st.sampled_from([(), (Switch(devices=(0, 2), upload_gb_s=1e-6, download_gb_s=1e-6),)])),
        host=draw(hosts()),
    )


def more(limits: Limits, name: str) -> Limits:
    """The machine with more of one resource."""
    value = getattr(limits.host if hasattr(limits.host, name) else limits, name)
    if name == "leaving_bytes":
        return replace(limits, leaving_bytes=None if value is None else value + 3)
    if name == "switches":
        return replace(limits, switches=tuple(replace(one, upload_gb_s=2e-6) for one in value))
    if name == "gil_ms_per_gb":
        return replace(limits, host=replace(limits.host, gil_ms_per_gb=value / 2))
    faster = None if value is None else 2 * value
    if hasattr(limits, name):
        return replace(limits, **{name: faster})
    return replace(limits, host=replace(limits.host, **{name: faster}))


RESOURCES = (
    *("upload_gb_s", "download_gb_s", "leaving_bytes", "switches"),
    *("memory_gb_s", "gil_ms_per_gb", "add_gb_s", "optimizer_gb_s", "disk_gb_s"),
)


def priced_ms(priced: PricedPlan, devices: int, calls: int = 4) -> float:
    """Until the last of several calls has ended."""
    clock, launched, ended = Clock.idle(devices), 0.0, 0.0
    for _ in range(calls):
        priced.play(clock)
        ended = launched + clock.over_ms
        launched += clock.next_call()
    return max(ended, calls * priced.load_bound_ms(devices))


def test_a_faster_link_of_one_device_makes_no_plan_dearer():
    costs = [LayerCost(0.0, backward_ms=0.0, boundary_bytes=nbytes) for nbytes in (0, 0, 1, 0)]
    shared = Switch(devices=(0, 2), upload_gb_s=SLOW, download_gb_s=SLOW)
    limits = Limits(download_gb_s=3 * SLOW, switches=(shared,))
    chosen = Plan((range(3),), range(3, 4), (range(3),), in_turn=True)
    found = [
        priced_ms(PricedPlan(chosen, costs, limits=each, mode="fused", microbatches=1), 2)
        for each in (limits, more(limits, "download_gb_s"))
    ]
    assert found[1] <= found[0] * ALMOST


@patient
@given(launching(), machines(), st.integers(1, 3), st.sampled_from(MODES), st.data())
def test_more_of_a_resource_never_makes_a_plan_dearer(
    costs: list[LayerCost], limits: Limits, devices: int, mode: str, data: st.DataObject
):
    # Devices in turn: where the first free one is taken, more of a resource may lead to a worse choice (Graham).
    how = {"mode": mode, "microbatches": data.draw(st.integers(1, 3))}
    chosen = replace(data.draw(plans(len(costs), how["microbatches"], mode)), in_turn=True, devices=None)  # type: ignore[arg-type]
    before = priced_ms(PricedPlan(chosen, costs, limits=limits, **how), devices)  # type: ignore[arg-type]
    for name in RESOURCES:
        richer = PricedPlan(chosen, costs, limits=more(limits, name), **how)  # type: ignore[arg-type]
        assert priced_ms(richer, devices) <= before * ALMOST, name
    cheaper = [replace(cost, forward_launch_ms=0, backward_launch_ms=0, recompute_launch_ms=0) for cost in costs]
    assert priced_ms(PricedPlan(chosen, cheaper, limits=limits, **how), devices) <= before * ALMOST  # type: ignore[arg-type]


def times(timeline) -> list[object]:
    return [(span.microbatches, span.fetch_ms, span.fetched_ms, span.left_ms) for span in timeline.spans]


@patient
@given(models(), st.sampled_from(MODES), rates, st.data())
def test_terms_that_cost_nothing_change_nothing(
    costs: list[LayerCost], mode: str, speed: float | None, data: st.DataObject
):
    microbatches = data.draw(st.integers(1, 3))
    listed = [data.draw(calls(len(costs), microbatches, mode)) for _ in range(3)]
    plain = Limits(upload_gb_s=speed, download_gb_s=speed, hop_ms=1)
    free = replace(
        plain,
        devices=(Device(),) * 3,
        switches=(Switch(devices=(0, 1, 2)),),
        host=Host(gradient_buffers=9, add_threads=3),
    )
    how = {"devices": 3, "microbatches": microbatches, "mode": mode}
    before, after = (simulate(listed, costs, limits=limits, **how) for limits in (plain, free))  # type: ignore[arg-type]
    assert times(before) == times(after)
    assert before.idle == after.idle


@patient
@given(launching(), machines(), st.sampled_from(MODES), st.data())
def test_work_is_conserved_and_bounds_the_time(
    costs: list[LayerCost], limits: Limits, mode: str, data: st.DataObject
):
    microbatches = data.draw(st.integers(1, 3))
    chosen = data.draw(plans(len(costs), microbatches, mode))
    priced = PricedPlan(chosen, costs, mode=mode, microbatches=microbatches, limits=limits)  # type: ignore[arg-type]
    listed = [[Task(job.kind, job.layers, job.microbatches, 0) for job in priced.jobs]] * 3
    how = {"devices": 1, "microbatches": microbatches, "mode": mode}
    timeline = simulate(listed, costs, limits=limits, **how)  # type: ignore[arg-type]
    loads = priced.loads_ms(1)
    # On one device nothing is spread, and each resource has the work of three calls; links have two directions.
    for resource in ("device", "GIL", "host memory", "additions", "optimizer", "disk"):
        assert timeline.resource_ms.get(resource, 0.0) == pytest.approx(3 * loads[resource], abs=1e-6)
    for resource, ms in timeline.resource_ms.items():
        # After the end there may be steps of two calls, and bytes of activations that links account for.
        last_ms = 0.0 if resource in ("device", "additions") else 2 * ms / 3
        assert timeline.makespan_ms >= (ms - last_ms) / ALMOST - 1e-6
    assert timeline.busy_ms[0] + timeline.idle_ms[0] == pytest.approx(timeline.makespan_ms)
    assert sum(timeline.idle_ms_by_reason.values()) == pytest.approx(timeline.idle_ms[0], abs=1e-6)


@pytest.mark.parametrize("faster", [1, 2, 4, 8])
def test_a_tie_of_two_devices_is_not_broken_by_rounding(faster: int):
    launches = {"backward_launch_ms": 0, "recompute_launch_ms": 0}
    costs = [
        LayerCost(0.0, backward_ms=8 / faster, boundary_bytes=1, forward_launch_ms=3 / faster, **launches),
        LayerCost(5 / faster, backward_ms=0, boundary_bytes=1, forward_launch_ms=0, **launches),
        LayerCost(0.0, backward_ms=0, forward_launch_ms=2 / faster, **launches),
    ]
    host = Host(gil_ms_per_gb=1e9 / faster, optimizer_bytes=0.0, launch_gil_share=1.0)
    limits = Limits(download_gb_s=3 * SLOW * faster, host=host)
    chosen = Plan((range(1), range(1, 3)), None, (range(2, 3), range(1, 2), range(1)), in_turn=False)
    taken = simulated_ms(PricedPlan(chosen, costs, mode="train", microbatches=1, limits=limits), 2, calls=3)
    assert taken * faster == pytest.approx(16.5, abs=1e-3)


@patient
@given(launching(), machines(), st.integers(1, 3), st.sampled_from(MODES), st.data())
def test_a_machine_twice_as_fast_takes_half_the_time(
    costs: list[LayerCost], limits: Limits, devices: int, mode: str, data: st.DataObject
):
    microbatches = data.draw(st.integers(1, 3))
    chosen = data.draw(plans(len(costs), microbatches, mode))
    fast = limits
    for name in RESOURCES[:2] + RESOURCES[4:]:
        fast = more(fast, name)
    switches = tuple(replace(one, upload_gb_s=2e-6, download_gb_s=2e-6) for one in limits.switches)
    fast = replace(fast, hop_ms=limits.hop_ms / 2, switches=switches)
    taken = ("forward_ms", "backward_ms", "forward_launch_ms", "backward_launch_ms", "recompute_launch_ms")
    halves = [replace(cost, **{name: getattr(cost, name) / 2 for name in taken}) for cost in costs]
    before, after = (
        simulated_ms(PricedPlan(chosen, each, mode=mode, microbatches=microbatches, limits=how), devices, calls=3)  # type: ignore[arg-type]
        for each, how in ((costs, limits), (halves, fast))
    )
    assert 2 * after == pytest.approx(before, rel=1e-6, abs=1e-6)


# The price and the simulation


@pytest.mark.slow
def test_the_price_of_a_plan_tracks_its_simulation():
    errors = sorted(
        abs(case.priced_plan.steady_ms(case.devices) / simulated_ms(case.priced_plan, case.devices, calls=12) - 1)
        for case in cases(seed=1, count=60)
    )
    assert statistics.median(errors) < 0.005
    assert errors[int(0.8 * len(errors))] < 0.03
    assert errors[int(0.9 * len(errors))] < 0.08


@few
@given(launching(most=6), machines(), st.integers(1, 3), st.integers(1, 4))
def test_a_plan_is_never_slower_than_round_robin_in_full_simulation(
    costs: list[LayerCost], limits: Limits, devices: int, microbatches: int
):
    how = {"microbatches": microbatches, "mode": "fused", "limits": limits}
    ours, published = (
        PricedPlan(plan(costs, devices=devices, strategy=strategy, **how), costs, **how)  # type: ignore[arg-type]
        for strategy in ("adaptive", "roundrobin")
    )
    assert simulated_ms(ours, devices) <= simulated_ms(published, devices) * ALMOST


def test_undivided_stages_win_where_additions_are_dear():
    costs = [LayerCost(10.0, weight_bytes=10**9)] * 16
    how = {"devices": 8, "microbatches": 16, "mode": "fused"}
    free = Limits(device_memory_bytes=10**12, upload_gb_s=50, download_gb_s=50)
    dear = replace(free, host=Host(memory_gb_s=100, add_gb_s=1, gradient_buffers=1))
    assert plan(costs, limits=free, **how).tasks_a_stage == 8  # type: ignore[arg-type]
    assert plan(costs, limits=dear, **how).tasks_a_stage == 1  # type: ignore[arg-type]


@pytest.mark.few(1)
@pytest.mark.parametrize(("count", "devices", "microbatches"), [(94, 8, 16), (200, 64, 16), (200, 64, 128)])
def test_planning_takes_a_bounded_number_of_steps(count: int, devices: int, microbatches: int):
    costs = [
        LayerCost(10 + layer % 7, weight_bytes=10**9, boundary_bytes=10**7, forward_launch_ms=0.3)
        for layer in range(count)
    ]
    limits = Limits(
        device_memory_bytes=40 * 10**9,
        upload_gb_s=25,
        download_gb_s=25,
        host=Host(memory_gb_s=300, gil_ms_per_gb=5, gradient_buffers=1, add_gb_s=25, optimizer_gb_s=200),
    )
    search = Search(costs, devices=devices, microbatches=microbatches, mode="fused", limits=limits)
    search.finish()
    assert search.steps <= ALL_STEPS + 3 * MOST_STEPS


# Costs files


def test_a_costs_file_has_the_same_words():
    text = """{"layers": [{"forward_ms": 1, "forward_launch_ms": 0.5}], "limits": {
        "devices": [{"speed": 0.5, "memory_bytes": 7e9}, {}],
        "switches": [{"devices": [0, 1], "upload_gb_s": 25}],
        "host": {"memory_gb_s": 220, "gradient_buffers": 2, "double_buffer": true}}}"""
    problem = parse(text)
    assert problem.costs == (LayerCost(1.0, forward_launch_ms=0.5),)
    assert problem.limits == Limits(
        devices=(Device(speed=0.5, memory_bytes=7 * 10**9), Device()),
        switches=(Switch(devices=(0, 1), upload_gb_s=25),),
        host=Host(memory_gb_s=220, gradient_buffers=2, double_buffer=True),
    )


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ('"host": {"memory": 1}', "limits.host: unknown field 'memory'; the fields are add_gb_s, "),
        ('"host": []', r"limits.host must be an object, but is \[\] instead"),
        ('"devices": {}', r"limits.devices must be a list of objects, but is \{\} instead"),
        (
            '"devices": [{}, {"speed": 0}]',
            r"limits.devices\[1\]: speed must be a finite relative speed, above zero",
        ),
        ('"switches": [{"upload_gb_s": 1}]', r"limits.switches\[0\]: .*devices"),
        ('"switches": [{"devices": 3}]', r"limits.switches\[0\]: "),
    ],
)
def test_an_error_in_a_costs_file_names_the_place(limits: str, message: str):
    with pytest.raises(InvalidCost, match=message):
        parse(f'{{"layers": [{{"forward_ms": 1}}], "limits": {{{limits}}}}}')


@patient
@given(models(), st.sampled_from(MODES), rates, rates, st.sampled_from([None, 0, 4]), st.integers(1, 3), st.data())
def test_the_price_is_the_simulated_time_where_nothing_is_shared(
    costs: list[LayerCost],
    mode: str,
    upload: float | None,
    download: float | None,
    leaving: int | None,
    devices: int,
    data: st.DataObject,
):
    each = [Device(speed=data.draw(st.sampled_from([0.5, 1.0, 2.0]))) for _ in range(devices)]
    limits = Limits(upload_gb_s=upload, download_gb_s=download, leaving_bytes=leaving, devices=tuple(each))
    how = {"mode": mode, "microbatches": data.draw(st.integers(1, 3)), "limits": limits}
    chosen = data.draw(plans(len(costs), how["microbatches"], mode))  # type: ignore[arg-type]
    priced, clock, assigner = PricedPlan(chosen, costs, **how), Clock.idle(devices), Assigner(devices)  # type: ignore[arg-type]
    launches = [0.0]
    for _ in range(3):
        priced.play(clock)
        launches.append(launches[-1] + clock.next_call())
    dealt = [assigner.assign(priced) for _ in range(4)]
    timeline = simulate(dealt, costs, devices=devices, **how)  # type: ignore[arg-type]
    assert timeline.launches == pytest.approx(launches)


# The part of launching that holds the GIL


@pytest.mark.parametrize("share", [0.0, 0.25, 0.5, 1.0])
def test_launching_slows_other_devices_by_the_part_that_holds_the_gil(share: float):
    launched = [LayerCost(1.0, 1.0, forward_launch_ms=10.0, backward_launch_ms=10.0)]
    whole = Plan(fused=range(1), groups=tuple(range(m, m + 1) for m in range(4)), in_turn=False)
    limits = Limits(host=Host(launch_gil_share=share))
    priced = PricedPlan(whole, launched, mode="fused", microbatches=4, limits=limits)
    assert priced.loads_ms(4)["GIL"] == 4 * 20 * share
    # Each device launches for 20 ms, however much of that holds the GIL.
    wanted = max(20.0, 80 * share)
    assert priced.steady_ms(4) == pytest.approx(wanted)
    assert simulated_ms(priced, 4, calls=20) == pytest.approx(wanted)


@pytest.mark.parametrize("share", [-0.1, 1.1, float("nan")])
def test_a_part_of_launching_is_from_0_to_1(share: float):
    with pytest.raises(InvalidCost, match="launch_gil_share must be a number from 0 to 1"):
        Host(launch_gil_share=share)
