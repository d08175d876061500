"""The gradient scaler against torch's, and behind an optimizer thread."""

from __future__ import annotations

import copy
import math
import pickle
import threading
from typing import Any

import pytest
import rp_optim
import torch
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from rp_optim import GradScaler, Master, OptimizerThread, ScalerMisuse, WrongThread, link

OPTIONS: dict[str, Any] = {
    "init_scale": 1024.0,
    "growth_factor": 4.0,
    "backoff_factor": 0.25,
    "growth_interval": 2,
}


def run(scaler: Any, grads: list[float], kind: Any = torch.optim.SGD) -> list[tuple[float, float]]:
    """Train one weight on gradients that are given; scale and weight after each step."""
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = kind([weight], lr=0.5)
    found = []
    for grad in grads:
        optimizer.zero_grad()
        scaler.scale((weight * grad).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        found.append((scaler.get_scale(), weight[1].item()))
    return found


@settings(max_examples=examples(40), deadline=None)
@given(st.lists(st.sampled_from([1.0, -0.5, math.inf, math.nan, 1e37]), min_size=1, max_size=12))
def test_it_is_torchs(grads: list[float]) -> None:
    mine = run(GradScaler(**OPTIONS), grads)
    assert mine == run(torch.amp.GradScaler("cpu", **OPTIONS), grads)
    assert mine == run(GradScaler(**OPTIONS), grads, kind=rp_optim.SGD)


def test_torchs_scaler_takes_our_optimizers() -> None:
    grads = [1.0, math.inf, 0.25]
    assert run(torch.amp.GradScaler("cpu", **OPTIONS), grads, kind=rp_optim.SGD) == run(
        GradScaler(**OPTIONS), grads
    )


def test_each_loads_the_others_state() -> None:
    mine, theirs = GradScaler(**OPTIONS), torch.amp.GradScaler("cpu", **OPTIONS)
    run(mine, [1.0, math.inf, 1.0])
    theirs.load_state_dict(mine.state_dict())
    assert theirs.state_dict() == mine.state_dict()
    again = GradScaler()
    again.load_state_dict(theirs.state_dict())
    assert (
        again.state_dict()
        == mine.state_dict()
        == {
            "scale": 256.0,
            "growth_factor": 4.0,
            "backoff_factor": 0.25,
            "growth_interval": 2,
            "_growth_tracker": 1,
        }
    )
    assert run(again, [1.0]) == run(theirs, [1.0])


def test_one_that_is_not_enabled_does_nothing() -> None:
    scaler = GradScaler(enabled=False)
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = rp_optim.SGD([weight], lr=0.5)
    loss = weight.sum()
    assert scaler.scale(loss) is loss
    weight.grad = torch.full((2,), 2.0)
    scaler.unscale_(optimizer)
    scaler.step(optimizer, lambda: None)
    scaler.update()
    assert torch.equal(weight, torch.zeros(2))
    assert (scaler.is_enabled(), scaler.get_scale(), scaler.state_dict()) == (False, 1.0, {})
    scaler.load_state_dict({})
    with pytest.raises(ScalerMisuse, match="the state is empty"):
        GradScaler().load_state_dict({})


def test_trees_of_outputs_are_scaled() -> None:
    scaler = GradScaler(init_scale=2.0)
    one = torch.ones(())
    assert scaler.scale([one, (one, [one])]) == [2 * one, (2 * one, [2 * one])]
    assert [value.item() for value in scaler.scale(iter([one, one]))] == [2.0, 2.0]
    assert scaler.scale(torch.ones(2, dtype=torch.float16)).dtype == torch.float16
    with pytest.raises(TypeError, match="but this is a float"):
        scaler.scale(1.0)


# Order


def stepped() -> tuple[GradScaler, torch.optim.Optimizer]:
    weight = torch.nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    return GradScaler(init_scale=2.0), rp_optim.SGD([weight], lr=0.5)


def test_unscale_is_once_and_before_step() -> None:
    scaler, optimizer = stepped()
    scaler.unscale_(optimizer)
    with pytest.raises(ScalerMisuse, match="unscale_ came after this optimizer was unscaled"):
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    assert torch.equal(optimizer.param_groups[0]["params"][0], torch.full((2,), 0.75))
    with pytest.raises(ScalerMisuse, match="after this optimizer was stepped"):
        scaler.unscale_(optimizer)
    with pytest.raises(ScalerMisuse, match="step was called for this optimizer already"):
        scaler.step(optimizer)
    scaler.update()
    scaler.step(optimizer)


def test_what_has_no_meaning_is_refused() -> None:
    scaler, optimizer = stepped()
    with pytest.raises(ScalerMisuse, match="update found no step"):
        scaler.update()
    for arguments, keywords in (((lambda: None,), {}), ((), {"closure": lambda: None})):
        with pytest.raises(ScalerMisuse, match="a closure"):
            scaler.step(optimizer, *arguments, **keywords)
    optimizer.zero_grad()
    with pytest.raises(ScalerMisuse, match="no parameter of this optimizer has a gradient"):
        scaler.step(optimizer)


def test_fp16_gradients_are_refused_and_linked_ones_are_not() -> None:
    weight = torch.nn.Parameter(torch.ones(2, dtype=torch.float16))
    weight.grad = torch.ones(2, dtype=torch.float16)
    with pytest.raises(ValueError, match="fp16 gradient would lose"):
        GradScaler().unscale_(torch.optim.SGD([weight]))
    master = Master(torch.ones(2))
    link(master, lambda: weight.grad)
    optimizer = rp_optim.SGD([master], lr=1.0)
    GradScaler(init_scale=2.0**16).step(optimizer)
    torch.testing.assert_close(master.data, torch.ones(2) - 2.0**-16, rtol=0, atol=0)


@pytest.mark.parametrize(
    "options", [{"growth_factor": 1.0}, {"backoff_factor": 1.0}, {"growth_interval": 0}], ids=str
)
def test_options_are_checked(options: dict[str, Any]) -> None:
    (name,) = options
    with pytest.raises(rp_optim.InvalidOption, match=f"GradScaler needs {name}"):
        GradScaler(**options)
    scaler = GradScaler()
    with pytest.raises(ValueError, match=name):
        getattr(scaler, f"set_{name}")(options[name])


def test_two_optimizers_share_a_scale() -> None:
    scaler, good = stepped()
    bad_weight = torch.nn.Parameter(torch.ones(2))
    bad_weight.grad = torch.tensor([1.0, math.inf])
    bad = rp_optim.SGD([bad_weight])
    scaler.step(good)
    scaler.step(bad)
    scaler.update()
    assert scaler.get_scale() == 1.0
    assert torch.equal(bad_weight, torch.ones(2))
    assert torch.equal(good.param_groups[0]["params"][0], torch.full((2,), 0.75))


@pytest.mark.pairwise
@pytest.mark.parametrize("where", ["first", "last"])
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.usefixtures("kernel")
def test_a_linked_step_is_taken_whole_or_not_at_all(dtype: torch.dtype, value: float, where: str) -> None:
    masters = [Master(torch.ones(70_001)) for _ in range(3)]
    grads = [torch.ones(70_001, dtype=dtype) for _ in masters]
    weights = [torch.full((70_001,), 9.0, dtype=dtype) for _ in masters]
    grads[0 if where == "first" else 2][-1] = value
    for master, grad, weight in zip(masters, grads, weights, strict=True):
        link(master, lambda grad=grad: grad, lambda weight=weight: weight)
    optimizer = rp_optim.AdamW(masters)
    scaler = GradScaler(init_scale=4.0)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0
    assert not optimizer.state
    assert all(torch.equal(master, torch.ones(70_001)) for master in masters)
    assert all(torch.equal(weight, torch.full_like(weight, 9.0)) for weight in weights)


def test_large_fp64_gradients_are_finite() -> None:
    weight = torch.nn.Parameter(torch.ones(2, dtype=torch.float64))
    weight.grad = torch.full((2,), 1e200, dtype=torch.float64)
    GradScaler().step(rp_optim.SGD([weight], lr=1e-200))
    assert (weight < 1).all()


# Behind a thread


@pytest.fixture
def thread() -> Any:
    found = OptimizerThread()
    yield found
    found.close()


class Loop:
    """A training loop whose steps run behind it, each held back until it is let go."""

    def __init__(self, thread: OptimizerThread, kind: Any = rp_optim.SGD) -> None:
        self.thread = thread
        self.scaler = GradScaler(init_scale=1024.0, growth_factor=2.0, growth_interval=1, thread=thread)
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.optimizer = kind([self.weight], lr=1.0)
        self.scales: list[float] = []
        self.moves: list[float] = []

    def call(self, gate: threading.Event, *, grad: float = 1.0, **update: Any) -> None:
        """One call, one step that waits for `gate`, one update."""
        self.scales.append(self.scaler.get_scale())
        scaled = self.scaler.scale(torch.tensor(grad)).reshape(1)

        def step() -> None:
            assert gate.wait(10)
            before = self.weight.item()
            self.weight.grad = scaled
            self.scaler.step(self.optimizer)
            self.moves.append(before - self.weight.item())

        self.thread.launch_optim_kernel(step)
        self.scaler.update(**update)


def opened() -> threading.Event:
    gate = threading.Event()
    gate.set()
    return gate


def test_a_loss_is_unscaled_with_its_own_scale_however_late_its_step(thread: OptimizerThread) -> None:
    loop = Loop(thread)
    gate = threading.Event()
    # Two calls are launched before any step: the second one's scale cannot be known from the first one's step.
    loop.call(gate)
    loop.call(gate)
    gate.set()
    for _ in range(3):
        loop.call(gate)
    thread.synchronize_optim()
    assert loop.scales == [1024.0, 1024.0, 2048.0, 4096.0, 8192.0]
    assert loop.moves == [1.0] * 5


@settings(max_examples=examples(25), deadline=None)
@given(st.lists(st.sampled_from([1.0, math.inf]), min_size=1, max_size=6), st.data())
def test_scales_do_not_depend_on_the_speed_of_the_machine(grads: list[float], data: st.DataObject) -> None:
    found = []
    waits = data.draw(st.lists(st.booleans(), min_size=len(grads), max_size=len(grads)))
    for pattern in (waits, [False] * len(grads)):
        thread = OptimizerThread()
        loop = Loop(thread)
        for grad, wait in zip(grads, pattern, strict=True):
            loop.call(opened(), grad=grad)
            if wait:
                thread.submit(lambda: None).result(timeout=10)
        thread.synchronize_optim()
        found.append((loop.scales, loop.moves))
        thread.close()
    assert found[0] == found[1]
    assert found[0][1] == [1.0 if grad == 1.0 else 0.0 for grad in grads]


def test_a_synchronous_update_counts_at_once(thread: OptimizerThread) -> None:
    loop = Loop(thread)
    for _ in range(3):
        loop.call(opened(), is_async=False)
    assert loop.scales == [1024.0, 2048.0, 4096.0]
    assert loop.moves == [1.0] * 3
    assert loop.scaler.get_scale() == 8192.0


def test_updates_of_both_kinds_mix(thread: OptimizerThread) -> None:
    loop = Loop(thread)
    for kind in (True, False, True, True, False, False, True, True):
        loop.call(opened(), is_async=kind)
    thread.synchronize_optim()
    assert loop.moves == [1.0] * 8
    assert loop.scales == [1024.0 * factor for factor in (1, 1, 4, 4, 8, 32, 64, 64)]


def test_a_new_scale_counts_for_the_next_loss_and_not_for_the_last(thread: OptimizerThread) -> None:
    loop = Loop(thread)
    gate = threading.Event()
    loop.call(gate)
    given = torch.tensor(16.0)
    loop.call(gate, new_scale=given)
    given.fill_(3.0)
    loop.call(gate)
    gate.set()
    loop.call(gate)
    thread.synchronize_optim()
    assert loop.scales == [1024.0, 1024.0, 16.0, 16.0]
    assert loop.moves == [1.0] * 4


def test_each_thread_sees_its_own_scale(thread: OptimizerThread) -> None:
    loop = Loop(thread)
    gate, seen = threading.Event(), []
    for _ in range(2):
        loop.call(gate)
        thread.launch_optim_kernel(lambda: seen.append(loop.scaler.get_scale()))
    assert loop.scaler.get_scale.__self__ is loop.scaler
    gate.set()
    assert loop.scaler.get_scale() == 2048.0
    thread.synchronize_optim()
    assert seen == [1024.0, 2048.0]


def test_settings_are_in_order_with_the_steps(thread: OptimizerThread) -> None:
    loop = Loop(thread)
    gate = threading.Event()
    loop.call(gate)
    loop.scaler.set_growth_factor(8.0)
    assert loop.scaler.get_growth_factor() == 8.0
    loop.call(gate)
    thread.launch_optim_kernel(loop.scaler.set_growth_factor, 16.0)
    thread.launch_optim_kernel(loop.scaler.set_backoff_factor, 0.125)
    thread.launch_optim_kernel(loop.scaler.set_growth_interval, 3)
    gate.set()
    assert loop.scaler.get_growth_factor(up_to_date=True) == 16.0
    assert loop.scaler.get_backoff_factor(up_to_date=True) == 0.125
    assert loop.scaler.get_growth_interval(up_to_date=True) == 3
    # As it was at the previous update, and as it was set here.
    assert loop.scaler.get_backoff_factor() == 0.5
    assert loop.scaler.get_growth_factor() == 8.0
    assert loop.scaler.state_dict()["scale"] == 1024.0 * 2 * 8
    loop.call(gate, is_async=False)
    assert loop.scaler.get_growth_factor() == 16.0


def test_the_training_loop_may_unscale_and_step(thread: OptimizerThread) -> None:
    loop = Loop(thread)
    loop.weight.grad = torch.tensor([1024.0])
    assert loop.scaler.unscale_(loop.optimizer) is None
    assert torch.equal(loop.weight.grad, torch.ones(1))
    assert loop.scaler.step(loop.optimizer) is None
    assert loop.weight.item() == -1.0
    loop.weight.grad = torch.tensor([1024.0])
    with pytest.raises(ScalerMisuse):
        loop.scaler.unscale_(loop.optimizer)


def test_a_step_returns_what_the_optimizer_returns_on_its_thread(thread: OptimizerThread) -> None:
    class Says(torch.optim.SGD):
        def step(self, closure: Any = None) -> str:
            super().step(closure)
            return "done"

    loop = Loop(thread, kind=Says)
    loop.weight.grad = torch.ones(1)
    assert thread.submit(loop.scaler.step, loop.optimizer).result(timeout=10) == "done"


def test_update_belongs_to_the_training_loop(thread: OptimizerThread) -> None:
    loop = Loop(thread)
    with pytest.raises(WrongThread, match="update was called in a step function"):
        thread.submit(loop.scaler.update).result(timeout=10)


def test_a_scaler_without_a_thread_is_refused_on_one(thread: OptimizerThread) -> None:
    scaler, optimizer = stepped()
    with pytest.raises(WrongThread, match=r"make it with GradScaler\(thread=...\)"):
        thread.submit(scaler.step, optimizer).result(timeout=10)


def test_a_scaler_of_another_thread_is_refused(thread: OptimizerThread) -> None:
    other = OptimizerThread()
    scaler, optimizer = GradScaler(thread=other), stepped()[1]
    with pytest.raises(WrongThread, match="not its own"):
        thread.submit(scaler.step, optimizer).result(timeout=10)
    other.close()


def test_an_update_without_a_step_is_told_and_holds_up_nobody(thread: OptimizerThread) -> None:
    loop = Loop(thread)
    loop.scaler.update()
    assert loop.scaler.get_scale() == 1024.0
    with pytest.raises(ScalerMisuse, match="update found no step"):
        thread.synchronize_optim()
    loop.call(opened(), is_async=False)
    assert loop.moves == [1.0]


def test_a_state_is_loaded_after_the_steps_under_way(thread: OptimizerThread) -> None:
    loop = Loop(thread)
    gate = opened()
    loop.call(gate)
    loop.scaler.set_growth_interval(5)
    saved = {**loop.scaler.state_dict(), "scale": 32.0}
    loop.scaler.load_state_dict(saved)
    for _ in range(3):
        loop.call(gate)
    thread.synchronize_optim()
    assert loop.scales[1:] == [32.0, 32.0, 32.0]
    assert loop.moves == [1.0] * 4
    assert loop.scaler.get_growth_interval() == 5


# Failures


def test_one_failed_step_costs_one_step(thread: OptimizerThread) -> None:
    for when in ("before", "after"):
        loop = Loop(thread)
        raised: list[str] = []

        def step(fail: bool, loop: Loop = loop, when: str = when) -> None:
            if fail and when == "before":
                raise KeyError("no luck")
            loop.weight.grad = torch.ones(1)
            loop.scaler.step(loop.optimizer)
            if fail:
                raise KeyError("no luck")

        for number in range(6):
            thread.launch_optim_kernel(step, number == 1)
            thread.submit(int).result(timeout=10)
            try:
                loop.scaler.update()
            except KeyError:
                raised.append(f"update {number}")
            thread.submit(int).result(timeout=10)
        thread.synchronize_optim()
        assert raised == ["update 1"]
        # Grown at each update that had a step to go by.
        assert loop.scaler.state_dict()["scale"] == 1024.0 * 2.0 ** (6 if when == "after" else 5)


def test_a_step_whose_failure_was_swallowed_is_one_failure(thread: OptimizerThread) -> None:
    loop = Loop(thread)
    loop.weight.grad = torch.ones(1)
    loop.optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(1, dtype=torch.float16))]})
    loop.optimizer.param_groups[1]["params"][0].grad = torch.ones(1, dtype=torch.float16)

    def step() -> None:
        with pytest.raises(ValueError, match="fp16 gradient would lose"):
            loop.scaler.step(loop.optimizer)

    thread.submit(step).result(timeout=10)
    loop.scaler.update(is_async=False)
    assert loop.scaler.get_scale() == 1024.0


def test_updates_without_steps_are_told_of_each_time(thread: OptimizerThread) -> None:
    loop = Loop(thread)
    for _ in range(3):
        loop.scaler.update()
        with pytest.raises(ScalerMisuse, match="update found no step"):
            thread.synchronize_optim()


def test_a_loaded_state_forgets_the_steps_before_it() -> None:
    scaler, optimizer = stepped()
    scaler.step(optimizer)
    scaler.load_state_dict(scaler.state_dict())
    scaler.step(optimizer)
    scaler.load_state_dict(scaler.state_dict())
    with pytest.raises(ScalerMisuse, match="update found no step"):
        scaler.update()


def test_a_new_scale_is_forgotten_by_a_loaded_state(thread: OptimizerThread) -> None:
    loop = Loop(thread)
    loop.call(opened(), new_scale=16.0)
    assert loop.scaler.get_scale() == 16.0
    loop.scaler.load_state_dict({**loop.scaler.state_dict(), "scale": 64.0})
    assert loop.scaler.get_scale() == 64.0


# Numbers at the edge


def test_a_new_scale_does_not_reset_the_count_of_good_steps() -> None:
    found = []
    for scaler in (GradScaler(**OPTIONS), torch.amp.GradScaler("cpu", **OPTIONS)):
        scaler.scale(torch.ones(1))
        run(scaler, [1.0])
        scaler.update(16.0)
        found.append((scaler.state_dict(), run(scaler, [1.0])))
    assert found[0] == found[1]
    assert found[0][1][0][0] == 64.0


def test_a_scale_does_not_grow_to_infinity() -> None:
    options = {**OPTIONS, "init_scale": 2.0**126, "growth_interval": 1}
    grads = [2.0**-120] * 4
    mine = run(GradScaler(**options), grads)
    assert mine == run(torch.amp.GradScaler("cpu", **options), grads)
    assert mine[-1][0] == 2.0**126


def test_a_scale_that_shrank_to_nothing_is_as_in_torch() -> None:
    grads = [math.nan] * 200 + [1.0]
    mine = run(GradScaler(), grads)
    torch.testing.assert_close(mine, run(torch.amp.GradScaler("cpu"), grads), equal_nan=True)
    assert mine[-2][0] == 0.0


def test_a_factor_that_is_not_finite_skips_the_step() -> None:
    master = Master(torch.ones(2))
    link(master, lambda: torch.ones(2))
    optimizer = rp_optim.SGD([master], lr=1.0)
    rp_optim.clip_grad_norm_([master], math.nan)
    scaler = GradScaler(init_scale=2.0)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 1.0
    assert torch.equal(master, torch.ones(2))


# Copies


def pickled(scaler: Any) -> Any:
    return pickle.loads(pickle.dumps(scaler))


COPIES = [copy.copy, copy.deepcopy, pickled]


@settings(max_examples=examples(40), deadline=None)
@given(
    st.lists(st.sampled_from([1.0, math.inf]), max_size=6),
    st.lists(st.sampled_from([1.0, math.inf]), max_size=6),
    st.sampled_from(COPIES),
)
def test_a_copy_goes_on_as_torchs_does_and_leaves_the_first_alone(
    before: list[float], after: list[float], copied: Any
) -> None:
    mine, theirs = GradScaler(**OPTIONS), torch.amp.GradScaler("cpu", **OPTIONS)
    run(mine, before)
    run(theirs, before)

    copy_of_mine, copy_of_theirs = copied(mine), copy.deepcopy(theirs)
    state = mine.state_dict()

    assert copy_of_mine.state_dict() == copy_of_theirs.state_dict() == state
    assert run(copy_of_mine, after) == run(copy_of_theirs, after)
    assert mine.state_dict() == state
    assert run(mine, after) == run(theirs, after)


@pytest.mark.parametrize("copied", COPIES)
def test_a_copy_of_a_scaler_that_is_not_enabled_is_not_either(copied: Any) -> None:
    found = copied(GradScaler(**OPTIONS, enabled=False))
    assert not found.is_enabled()
    assert found.get_scale() == 1.0
    assert found.get_growth_factor() == 4.0


@pytest.mark.parametrize("copied", COPIES)
def test_a_scaler_is_not_copied_between_step_and_update(copied: Any) -> None:
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer, scaler = torch.optim.SGD([weight], lr=0.5), GradScaler()
    scaler.scale(weight.sum()).backward()
    scaler.unscale_(optimizer)
    with pytest.raises(ScalerMisuse, match="after update"):
        copied(scaler)
    scaler.step(optimizer)
    scaler.update()
    assert copied(scaler).get_scale() == scaler.get_scale()


@pytest.mark.parametrize("copied", COPIES)
def test_a_copy_has_what_users_have_set_on_the_scaler(copied: Any) -> None:
    scaler = GradScaler()
    scaler.note = ["mine"]  # type: ignore[attr-defined]
    assert copied(scaler).note == ["mine"]


def test_a_copy_of_a_scaler_with_a_thread_uses_the_scale_of_the_same_update() -> None:
    thread = OptimizerThread()
    scaler = GradScaler(**OPTIONS, thread=thread)
    for grad in (math.inf, 1.0, 1.0):
        weight = torch.nn.Parameter(torch.ones(1))
        optimizer = torch.optim.SGD([weight], lr=0.5)
        weight.grad = torch.full((1,), grad)
        thread.launch_optim_kernel(scaler.step, optimizer)
        scaler.update()

    copies = [copied(scaler) for copied in COPIES]

    assert [one.get_scale() for one in copies] == [scaler.get_scale()] * 3
    assert [one.exact_state() for one in copies] == [scaler.exact_state()] * 3
    assert [one.state_dict() for one in copies] == [scaler.state_dict()] * 3
    assert copies[2].get_scale() != copies[2].state_dict()["scale"]
    thread.close()
